"""A warning for a memory that is trained over more chunks than its start keeps anything for."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig

LARGEST_BIAS = 1.0
"""A start with this forget bias was measured to lose every write; one with 3 keeps it for 128
chunks and more, since the hidden state feeds it back."""

HALF_LIVES = 64
"""After so many, less than 1e-12 of a write was measured to arrive at the paper's bias of 0."""

_checked: set[MemoryConfig] = set()


class ForgettingWarning(UserWarning):
    """The memory's start forgets long before the input ends, so nothing is learned across it."""


def half_life(forget_bias: float) -> float:
    """Chunks after which half of a write is left: a forget gate at σ(bias) keeps that much each.

    >>> half_life(0.0), round(half_life(5.0))
    (1.0, 103)
    """
    return math.log(2) / math.log1p(math.exp(-forget_bias))


def warn_of_forgetting(config: MemoryConfig, bias: Tensor, tokens: int) -> None:
    """Warn, once per config, where a memory at its start is to learn from many chunks at once.

    Args:
        config: what the memory is.
        bias: (4C,) of the gates, in the order i, f, o, g. One that is no longer what the memory
            started from was trained or loaded, and is left alone.
        tokens: N of the call.
    """
    chunks = tokens // config.chunk_size
    if config.forget_bias > LARGEST_BIAS or chunks <= HALF_LIVES * half_life(config.forget_bias):
        return
    if config in _checked or bias.is_meta:
        return
    if bias.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a graph cannot wait for the GPU, and reading the bias does
    _checked.add(config)  # trained or not: a memory that is trained on is not read at every step
    C = config.channels
    if bool((bias[C : 2 * C] != config.forget_bias).any()):
        return
    warnings.warn(
        f"a new memory with forget_bias={config.forget_bias:g} is trained over {chunks} chunks: "
        f"half of a write is lost every {half_life(config.forget_bias):.1f} chunks, so nothing is "
        "learned from one end of the input to the other; start from MemoryConfig.long_gap(), "
        "raise forget_bias, or use longer chunks",
        ForgettingWarning,
        stacklevel=2,
    )
