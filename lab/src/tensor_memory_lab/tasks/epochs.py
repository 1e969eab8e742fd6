"""What training draws for data of known size: the order of rows, and numbers for each of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tensor_memory_lab.tasks.synthetic import generator

CPU = torch.device("cpu")


def epoch_rows(
    count: int, seed: int, start: int, stop: int, *, device: torch.device = CPU
) -> Tensor:
    """Rows number `start` to `stop` of an endless stream that shuffles `count` rows every epoch.

    >>> epoch_rows(4, 0, 0, 4).sort().values, epoch_rows(4, 0, 2, 7).shape
    (tensor([0, 1, 2, 3]), torch.Size([5]))
    """
    parts = []
    while start < stop:
        epoch, first = divmod(start, count)
        last = min(count, first + stop - start)
        parts.append(_shuffled(count, seed, epoch)[first:last])
        start += last - first
    return sent(torch.cat(parts), device)


def drawn(*shape: int, random: torch.Generator, device: torch.device) -> Tensor:
    """Numbers in [0, 1), drawn on the CPU, so that every device gets the same, and sent on."""
    return sent(torch.rand(*shape, generator=random), device)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device; from pinned memory to a GPU, which then need not be waited for."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@functools.lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "epoch", epoch))
