"""Every write of a place memory followed forward: what it gave to each read, and how it faded.

The state is Σ_w u_w v_wᵀ plus what was there before the first token. A write begins as u = β φ(p).
Each later token s does u ← α_s (u − β_s φ_s (φ_s·u)); under the linear rule only α_s is there. A
read at q gets φ(q)·u_w of the content v_w. One pass gives the shares in all reads, where
`trace_history` goes back from each.

Letters: T positions kept, H heads, V voxels, C channels, K writes told of each read.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tensor_memory.config import PlaceConfig
from tensor_memory.inspect.place_history import Events, PlaceHistory, moved
from tensor_memory.ops.places.addresses import factors
from tensor_memory.ops.products import outer

BLOCK = 64
"""Tokens that act at once."""

LEAST = 1e-6
"""A write that took less of another than this took nothing."""


@dataclass(frozen=True, eq=False)
class WriteLives:
    """One row of a layer. A part of a read is ⟨what came from there, r⟩ / ‖r‖².

    The parts of all writes, of the rest and of what is not additive sum to 1. A part is below 0
    where a write worked against the read.
    """

    position: Tensor
    """(T, K, H) the writes with the largest parts, the largest first; -1 where there are fewer."""

    share: Tensor
    """(T, K, H) float64: the factor of the write's content in the read, as `trace` gives it."""

    part: Tensor
    """(T, K, H) float64."""

    others: Tensor
    """(T, H) float64: the part of all writes that are not told."""

    rest: Tensor
    """(T, H) float64: the part of states that the history does not explain."""

    joint: Tensor
    """(T, H) float64: the part that is not additive: no write alone accounts for it."""

    half: Tensor
    """(T, H) the position at which less than half of the write was left; -1 where none."""

    left: Tensor
    """(T, H) float64: ‖u‖ at the end of the row by ‖u‖ at its beginning."""

    taker: Tensor
    """(T, H) the position of the write that took most of it; -1 where none took any."""

    taken: Tensor
    """(T, H) float64: how much that one took, by ‖u‖ at its beginning."""

    first: int
    """The position of index 0."""


def follow_writes(history: PlaceHistory, config: PlaceConfig, row: int, top: int) -> WriteLives:
    """All writes of one row whose state no other row was given, in float64.

    A stretch of up to `BLOCK` tokens is one step. With g the sums of log α since its beginning,
    φ_s·u before token s is x_s = e^{g_s} φ_s·u₀ − Σ_{r<s} e^{g_s − g_r} β_r x_r φ_r·φ_s. That is
    a triangular system for all writes at once.
    """
    H, C = config.heads, config.channels
    first, T = int(history.first[row]), int(history.count[row])
    content = history.content[:T, row].double().transpose(0, 1)  # (H, T, C)
    rate, log_keep = (
        array[:T, row].double().mT for array in (history.rate, history.log_keep)
    )  # (H, T)
    write = _addresses(history.write_at, history, config, row, T)  # (H, T, V)
    read_at = history.read_at
    read = write if read_at is None else _addresses(read_at, history, config, row, T)
    events = Events(history)
    # The first C rows are the columns of a state from elsewhere, the others are the writes.
    u = torch.zeros(H, C + T, config.voxels, dtype=torch.float64)
    told = _Told(T, H, min(top, T), first)
    lives = _Lives(T, H, first)
    empty = history.reset[:T, row].tolist()
    changed = {at for at, of in (*events.entries, *events.moves) if of == row}
    begins = [t for t in range(T) if t == 0 or empty[t] or first + t in changed]
    for begin, end in pairwise([*begins, T]):
        at = first + begin, row
        if at in events.entries:
            u.zero_()
            u[:, :C] = events.entries[at].mT
        for fills, steps in events.moves.get(at, ()):
            u = moved(u, config, steps, fills)
        if empty[begin]:
            u.zero_()
        for start in range(begin, end, BLOCK):
            cut = slice(start, min(start + BLOCK, end))
            lives.norm[:, :start] = u[:, C : C + start].norm(dim=-1)
            x, gave = _step(
                u, cut, C, write[:, cut], read[:, cut], rate[:, cut], log_keep[:, cut], config.rule
            )
            told.add(cut, gave, content[:, : cut.stop])
            lives.add(cut, x[:, C:], rate[:, cut], log_keep[:, cut].exp())
    return told.with_lives(lives)


def _step(
    u: Tensor,
    cut: slice,
    rows: int,
    write: Tensor,
    read: Tensor,
    rate: Tensor,
    log_keep: Tensor,
    rule: str,
) -> tuple[Tensor, Tensor]:
    """Let L tokens act on u (H, rows + T, V), in place.

    -> φ_s·u before token s, and what each read got of each u: both (H, rows + cut.stop, L).
    """
    g = log_keep.cumsum(1)  # (H, L)
    old, L = rows + cut.start, rate.shape[1]
    decay = (g[:, :, None] - g[:, None]).tril().exp().tril()  # (H, s, r): from token r to s
    of_write = decay * (write @ write.mT) * rate[:, None]
    of_read = decay * (read @ write.mT) * rate[:, None]
    since = g.exp()[:, None]
    x = torch.zeros(u.shape[0], old + L, L, dtype=u.dtype)
    gave = torch.zeros_like(x)
    gave[:, :old] = since * (u[:, :old] @ read.mT)
    gave[:, old:] = of_read.mT
    if rule == "delta":
        x[:, :old] = since * (u[:, :old] @ write.mT)
        x[:, old:] = of_write.tril(-1).mT
        x = torch.linalg.solve_triangular(
            of_write.tril(-1), x.mT, upper=False, unitriangular=True
        ).mT
        gave -= x @ of_read.mT
    to_end = (g[:, -1:] - g).exp() * rate
    u[:, :old] *= g[:, -1].exp()[:, None, None]
    u[:, old : old + L] = to_end[..., None] * write
    if rule == "delta":
        u[:, : old + L] -= (x * to_end[:, None]) @ write
    return x, gave


class _Told:
    """The largest parts of every read."""

    def __init__(self, tokens: int, heads: int, count: int, first: int) -> None:
        size = (tokens, count, heads)
        self.first, self.position = first, torch.full(size, -1)
        self.share, self.part = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        self.others, self.rest = (torch.zeros(tokens, heads, dtype=torch.float64) for _ in range(2))

    def add(self, cut: slice, gave: Tensor, content: Tensor) -> None:
        """L reads: gave (H, C + W, L), content (H, W, C) of the writes so far."""
        C = content.shape[2]
        gave_state, gave = gave[:, :C], gave[:, C:]
        r = gave.mT @ content + gave_state.mT  # (H, L, C)
        size = r.square().sum(-1)[:, None]  # (H, 1, L)
        parts = torch.where(size > 0, gave * (content @ r.mT) / size, 0)
        k = min(self.part.shape[1], parts.shape[1])
        best = parts.abs().topk(k, dim=1).indices  # (H, k, L)
        share, part = (of.gather(1, best).permute(2, 1, 0) for of in (gave, parts))
        self.share[cut, :k], self.part[cut, :k] = share, part
        # Of the first reads fewer writes exist than are told.
        known = best.permute(2, 1, 0) <= torch.arange(cut.start, cut.stop)[:, None, None]
        self.position[cut, :k] = torch.where(known, self.first + best.permute(2, 1, 0), -1)
        total = parts.sum(1).mT  # (L, H)
        self.others[cut] = total - part.sum(1)
        self.rest[cut] = torch.where(size[:, 0] > 0, 1 - total.mT, 0).mT

    def with_lives(self, lives: _Lives) -> WriteLives:
        """Both."""
        return WriteLives(
            self.position,
            self.share,
            self.part,
            self.others,
            self.rest,
            torch.zeros_like(self.rest),  # a linear state is the sum of its writes
            lives.half.mT,
            torch.where(lives.born > 0, lives.norm / lives.born, 0).mT,
            lives.taker.mT,
            lives.taken.mT,
            self.first,
        )


class _Lives:
    """How each write fades, token by token."""

    def __init__(self, tokens: int, heads: int, first: int) -> None:
        size = (heads, tokens)
        self.first = first
        self.norm, self.born, self.taken = (
            torch.zeros(size, dtype=torch.float64) for _ in range(3)
        )
        self.half, self.taker = (torch.full(size, -1) for _ in range(2))

    def add(self, cut: slice, x: Tensor, rate: Tensor, keep: Tensor) -> None:
        """L tokens: x (H, W, L) is φ_s·u of each write before token s, rate and keep (H, L)."""
        for index, t in enumerate(range(cut.start, cut.stop)):
            b, k, lived = rate[:, index, None], keep[:, index, None], slice(0, t)
            # φ has length 1, so ‖u‖² falls by (2 − β) β (φ·u)².
            fell = (x[:, :t, index].square() * b * (2 - b)).clamp(min=0)
            self.norm[:, lived] = ((self.norm[:, lived] * k).square() - fell).clamp(min=0).sqrt()
            born = self.born[:, lived]
            took = torch.where(born > 0, fell.sqrt() / born, 0)
            more = took > self.taken[:, lived].clamp(min=LEAST)
            self.taken[:, lived] = torch.where(more, took, self.taken[:, lived])
            self.taker[:, lived].masked_fill_(more, self.first + t)
            faded = (self.norm[:, lived] < born / 2) & (self.half[:, lived] < 0)
            self.half[:, lived].masked_fill_(faded, self.first + t)
            self.norm[:, t] = self.born[:, t] = rate[:, index]


def _addresses(
    places: Tensor, history: PlaceHistory, config: PlaceConfig, row: int, tokens: int
) -> Tensor:
    """(H, T, V) float64: the addresses of places (T, B, H, n), each with the width it had."""
    assert isinstance(config.wrap, tuple)
    places = places[None, :tokens, row].double()
    if history.width is None:
        return outer(factors(places, config.grid, None, config.wrap))[0].transpose(0, 1)
    width = history.width[:tokens, row].double()
    widths, lengths = torch.unique_consecutive(width, dim=0, return_counts=True)
    found = [
        outer(factors(stretch, config.grid, its_width, config.wrap))[0]
        for stretch, its_width in zip(places.split(lengths.tolist(), dim=1), widths, strict=True)
    ]
    return torch.cat(found).transpose(0, 1)
