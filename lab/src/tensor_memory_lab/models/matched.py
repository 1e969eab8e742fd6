"""Sizes at which methods are compared: the memory's bytes, its weights, and an MLP of as many."""

from __future__ import annotations

import torch

from tensor_memory import MemoryConfig, TensorMemory

FLOAT_BYTES = 4  # what is carried is float32


def memory_bytes(memory: MemoryConfig, layers: int) -> int:
    """Bytes of hidden and cell of one row over the layers that hold a memory.

    >>> memory_bytes(MemoryConfig(), 8)  # the paper's language model: 1 MiB
    1048576
    """
    return FLOAT_BYTES * layers * memory.state_values


def side_parameters(dim: int, memory: MemoryConfig, layers: int) -> int:
    """Weights that a shared memory, its norms and its gates add.

    >>> side_parameters(384, MemoryConfig(), 8)
    2400457
    """
    with torch.device("meta"):
        shared = TensorMemory(dim, memory)
    return sum(p.numel() for p in shared.parameters()) + layers * (2 * dim + 1)


def wide_ratio(dim: int, layers: int, ratio: float, extra: int) -> float:
    """MLP ratio at which as many weights are added as `extra`, rounded to what products like.

    >>> 384 * wide_ratio(384, 8, 4.0, 2_400_457)  # 1536 wide before
    1928.0
    """
    hidden, per_unit = round(dim * ratio), layers * (2 * dim + 1)
    unit = 8 if 8 * per_unit < extra / 8 else 1  # coarse only where the error stays far below 1 %
    return (hidden + unit * round(extra / per_unit / unit)) / dim
