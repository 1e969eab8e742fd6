"""Which token has which readout, where all rows stand at the same place in their chunks.

Letters: B batch, N tokens, d width, U units: chunks, or tokens where every token reads.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Placing(NamedTuple):
    """N tokens are frames of `frame`, each padded to `units` units of `repeat` tokens.

    The first token of a frame stands at place `waiting` of its first unit.

    >>> import torch
    >>> m = torch.arange(4.0).reshape(1, 4, 1)
    >>> Placing(repeat=2, frame=3, units=2, waiting=0).expand(m).flatten().tolist()
    [0.0, 0.0, 1.0, 2.0, 2.0, 3.0]
    """

    repeat: int
    frame: int
    units: int
    waiting: int

    def expand(self, m: Tensor) -> Tensor:
        """A readout for every token: (B, U, d) -> (B, N, d)."""
        if self.repeat > 1:
            m = m[:, :, None].expand(-1, -1, self.repeat, -1).flatten(1, 2)
        m = m.unflatten(1, (-1, self.units * self.repeat))
        return m[:, :, self.waiting : self.waiting + self.frame].flatten(1, 2)
