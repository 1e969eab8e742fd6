"""Tokens scored: all of a window, or single ones from what stands before them alone.

A model that sees the future can only be caught by taking the future away: the same tokens are
scored once in their whole windows and once as the last token of a window that ends with them.
For a causal model the two agree.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tensor_memory_lab.tasks import Batch, Outputs, Sums

PLACES = 16
"""Tokens of a window that are scored so."""

WINDOW, PREFIX = "test@window", "test@prefix"
"""Splits: the same tokens in their whole windows, and from what is before them alone."""


def places(length: int) -> list[int]:
    """The scored places of a window, one drawn from each of 16 equal parts: never at a chunk's
    border by rule.

    >>> places(4), len(places(512)), max(places(512)) < 512
    ([0, 1, 2, 3], 16, True)
    """
    count = min(PLACES, length)
    draw = torch.Generator().manual_seed(length)
    edges = [length * part // count for part in range(count + 1)]
    return [
        int(torch.randint(first, last, (), generator=draw))
        for first, last in itertools.pairwise(edges)
    ]


def scored_at_places(batch: Batch) -> Batch:
    """The batch with the tokens at `places` alone scored, in their whole windows."""
    chosen = torch.zeros_like(batch["scored"])
    chosen[:, places(chosen.shape[1])] = True
    return batch | {"scored": batch["scored"] & chosen}


def cut_after(batch: Batch, place: int) -> Batch:
    """The batch up to and with a place, where it scores its last token: nothing later exists."""
    cut = {name: x[:, : place + 1] if x.ndim > 1 else x for name, x in batch.items()}
    last = torch.zeros_like(cut["scored"])
    last[:, -1] = True
    return cut | {"scored": cut["scored"] & last}


def mean_loss(outputs: Outputs, batch: Batch) -> Tensor:
    """Mean negative log-likelihood over scored tokens, in nats."""
    scored = batch["scored"]
    return (outputs["nll"] * scored).sum() / scored.sum()


def loss_sums(outputs: Outputs, batch: Batch) -> Sums:
    """The same as a sum and a count, in float64: WikiText-2 has 245,569 terms."""
    scored = batch["scored"]
    return {"loss": ((outputs["nll"].double() * scored).sum(), scored.sum())}
