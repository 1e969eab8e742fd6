"""What training draws for data of known size: the order of rows, and numbers for each of them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tensor_memory.experiments.tasks.synthetic import generator


def epoch_rows(count: int, seed: int, start: int, stop: int) -> Tensor:
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
    return torch.cat(parts)


def drawn(*shape: int, random: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Numbers in [0, 1) drawn on the CPU, so that every device gets the same, and sent on.

    From pinned memory where they go to a GPU: it then need not be waited for.
    """
    pinned = torch.device(device).type == "cuda"
    return torch.rand(*shape, generator=random, pin_memory=pinned).to(device, non_blocking=True)


@functools.lru_cache(maxsize=4)
def _shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "epoch", epoch))
