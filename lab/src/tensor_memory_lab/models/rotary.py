"""Rotary positions (Su et al., 2021): what is at place p is turned by angles that grow with p.

The product of a query and a key then depends on their distance alone, so that no table of places
has to be learned.

Letters: N tokens, e width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLOWEST = 10_000.0
"""The pair that turns slowest takes about so many tokens for a radian."""


def turns_for(x: Tensor) -> Tensor:
    """By how much pairs of x (..., N, e) at places 0 to N - 1 are turned: (N, e / 2), complex."""
    N, e = x.shape[-2:]
    exact = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    rates = SLOWEST ** (-torch.arange(0, e, 2, **exact) / e)
    angle = torch.arange(N, **exact)[:, None] * rates
    return torch.polar(torch.ones_like(angle), angle)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """x (..., N, e), its neighbouring features taken as pairs, turned by (N, e / 2).

    >>> x = torch.ones(3, 4)
    >>> torch.equal(turned(x, turns_for(x))[0], x[0])  # place 0 stays as it is
    True
    """
    pairs = torch.view_as_complex(x.to(turns.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
