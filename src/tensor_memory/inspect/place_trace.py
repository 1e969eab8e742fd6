"""Where the reads of a recorded place memory came from: back through its history, call by call.

Letters: R reads asked for, W writes told of each, H heads, C channels, V voxels, L tokens of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tensor_memory.config import PlaceConfig, is_int
from tensor_memory.inspect.history import Arrays
from tensor_memory.inspect.place_history import Events, PlaceHistory, moved
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.shares import block_length, reads_at_once, step_back


@dataclass(frozen=True, eq=False, repr=False)
class RecordedTrace(Arrays):
    """Where reads came from, in float64: shares · contents + `others` + `rest` = `read`."""

    share: Tensor
    """(R, W, H) of a write in a read; 0 of one that came after."""

    position: Tensor
    """(R, W, H) the write's position in its row's stream."""

    row: Tensor
    """(R, W, H) the row it was in: another than the read's where beam search moved rows."""

    call: Tensor
    """(R, W, H) the number of its call."""

    rest: Tensor
    """(R, H, C) what came from states that the history does not explain: one given by the caller,
    or one that a forgotten beginning left."""

    others: Tensor
    """(R, H, C) what came from writes that are not told, as fewer than all were asked for."""

    read: Tensor
    """(R, H, C) what was read, before the norm."""

    history: PlaceHistory

    def content(self, read: int) -> Tensor:
        """(W, H, C) what the writes told of one read had written, v."""
        history, heads = self.history, torch.arange(self.share.shape[2])
        at = self.position[read] - history.first[self.row[read]]
        return history.content[at, self.row[read], heads].double()


def trace_history(
    history: PlaceHistory,
    config: PlaceConfig,
    reads: Sequence[int] | Tensor,
    row: int,
    top: int | None,
) -> RecordedTrace:
    """The shares of all writes, or of the `top` largest of each head, in reads of one row."""
    at = history.asked_for(reads, row, "positions", "token positions")
    if top is not None and (not is_int(top) or top < 1):
        raise ValueError(f"top: expected a number of writes, at least 1, or None, got {top!r}")
    R, H, C = len(at), config.heads, config.channels
    first, stop = int(history.first[row]), int(at.max()) + 1
    if top is None:
        writes = _AllWrites(R, H, first, row, history.call[: stop - first, row])
    else:
        writes = _LargestWrites(R, H, min(top, stop - first))
    rest, read = (torch.zeros(R, H, C, dtype=torch.float64) for _ in range(2))
    events = Events(history)
    for which in torch.arange(R).split(reads_at_once(H * config.voxels)):
        for start, rows, block, share, left in _followed(history, config, events, at[which], row):
            read[which] += torch.einsum("rlh,rlhc->rhc", share, block.content)
            rest[which] += left
            call = history.call[start - first : start - first + share.shape[1], rows].t()
            writes.add(which, start, share, rows, call)
    trace = RecordedTrace(*writes.columns(), rest, torch.zeros_like(rest), read + rest, history)
    if top is None:
        return trace
    told = [torch.einsum("wh,whc->hc", trace.share[r], trace.content(r)) for r in range(R)]
    return replace(trace, others=read - torch.stack(told))


def _followed(
    history: PlaceHistory, config: PlaceConfig, events: Events, reads: Tensor, row: int
) -> Iterator[tuple[int, Tensor, PlaceInputs, Tensor, Tensor]]:
    """Reads (R,) of one row back to their beginnings, block by block.

    -> the block's first position, the rows (R,) that it was in for each read, its inputs, the
    shares (R, L, H), and what a state that entered before it gave, (R, H, C).
    """
    R, first = len(reads), int(history.first[row])
    rows = torch.full((R,), row)
    a = torch.zeros(R, config.heads, 1, config.voxels, dtype=torch.float64)
    for start, stop in _blocks(history, events, row, int(reads.max()) + 1, a.numel()):
        block = _inputs(history, config, slice(start - first, stop - first), rows)
        share, a = step_back(block, a, (reads - start)[:, None])
        rest = torch.zeros(R, config.heads, config.channels, dtype=torch.float64)
        before = rows.clone()
        begun = (reads >= start).nonzero().flatten().tolist()
        for r in begun if start in events.positions else ():
            at = start, int(rows[r])
            if at in events.entries:
                rest[r] = (a[r] @ events.entries[at])[:, 0]
                a[r] = 0
            for empty, steps in reversed(events.moves.get(at, [])):
                a[r] = moved(a[r], config, [-step for step in steps], empty)
            before[r] = events.joins.get(at, at[1])
        yield start, rows, block, share[:, 0], rest
        rows = before


def _blocks(
    history: PlaceHistory, events: Events, row: int, stop: int, address_size: int
) -> Iterator[tuple[int, int]]:
    """Stretches of positions from the last to the first; events and new widths begin one."""
    first, L = int(history.first[row]), block_length(address_size)
    edges = {at for at in events.positions if first < at < stop}
    if history.width is not None:
        width = history.width[: stop - first, row]
        changes = (width[1:] != width[:-1]).any(1).nonzero().flatten() + 1
        edges |= {first + at for at in changes.tolist()}
    for begin, end in reversed([*pairwise(sorted({first, *edges, stop}))]):
        for at in reversed(range(begin, end, L)):
            yield at, min(at + L, end)


def _inputs(history: PlaceHistory, config: PlaceConfig, cut: slice, rows: Tensor) -> PlaceInputs:
    """The inputs of a stretch of the history, a row for each read, without a state."""
    assert isinstance(config.wrap, tuple)

    def of_reads(array: Tensor) -> Tensor:
        return array[cut][:, rows].transpose(0, 1).double()

    width = None if history.width is None else history.width[cut.start, rows[0]].double()
    nothing = torch.empty(len(rows), config.heads, *config.grid, 0, dtype=torch.float64)
    return PlaceInputs(
        write_at=of_reads(history.write_at),
        read_at=None if history.read_at is None else of_reads(history.read_at),
        content=of_reads(history.content),
        rate=of_reads(history.rate),
        log_keep=of_reads(history.log_keep),
        width=width,
        state=nothing,
        resets=history.reset[cut][:, rows].t(),
        rule=config.rule,
        wrap=config.wrap,
    )


class _AllWrites:
    """Every write from the first position to the last, and its share in each read."""

    def __init__(self, reads: int, heads: int, first: int, row: int, call: Tensor) -> None:
        """From a first position on, of the row that read, in calls (W,)."""
        self.first = first
        self.share = torch.zeros(reads, len(call), heads, dtype=torch.float64)
        self.row, self.call = torch.full((reads, len(call)), row), call.repeat(reads, 1)

    def add(self, which: Tensor, start: int, share: Tensor, rows: Tensor, call: Tensor) -> None:
        """A block of L writes in some reads: shares (R, L, H), rows (R,), calls (R, L)."""
        cut = slice(start - self.first, start - self.first + share.shape[1])
        self.share[which, cut] = share
        self.row[which, cut], self.call[which, cut] = rows[:, None].expand_as(call), call

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Shares, positions, rows and calls, each (R, W, H)."""
        position = self.first + torch.arange(self.row.shape[1])
        others = (position.expand_as(self.row), self.row, self.call)
        position, row, call = (column[..., None].expand_as(self.share) for column in others)
        return self.share, position, row, call


class _LargestWrites:
    """Of each head the writes with the largest shares in each read, the largest first."""

    def __init__(self, reads: int, heads: int, count: int) -> None:
        self.count, size = count, (reads, count, heads)
        self.size = torch.full(size, -1.0, dtype=torch.float64)  # below that of any write
        self.share = torch.zeros(size, dtype=torch.float64)
        self.position, self.row, self.call = (torch.zeros(size).long() for _ in range(3))

    def add(self, which: Tensor, start: int, share: Tensor, rows: Tensor, call: Tensor) -> None:
        """A block of L writes in some reads: shares (R, L, H), rows (R,), calls (R, L)."""
        position = (start + torch.arange(share.shape[1])).expand_as(call)
        others = (position, rows[:, None].expand_as(call), call)
        block = [share, *(column[..., None].expand_as(share) for column in others)]
        mine = [column[which] for column in self.columns()]
        both = [torch.cat(pair, dim=1) for pair in zip(mine, block, strict=True)]
        size, best = torch.cat([self.size[which], share.abs()], dim=1).topk(self.count, dim=1)
        self.size[which] = size
        for column, values in zip(self.columns(), both, strict=True):
            column[which] = values.gather(1, best)

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Shares, positions, rows and calls, each (R, W, H)."""
        return self.share, self.position, self.row, self.call
