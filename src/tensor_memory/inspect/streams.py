"""Which calls continue each other, and how far each layer has come in the rows of a recording.

A call without a state, or with an empty one, starts new rows. A call with the state another call
returned goes on in its rows, also after `detach`, and after `select` moved them: a row is a place
in the batch, and takes along how far it had come. Any other state starts new rows.

Letters: B rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from threading import get_ident

import torch
from torch import Tensor

from tensor_memory.state import MemoryState


@dataclass
class LayerProgress:
    """How far one layer has come in one stream; all tensors on the CPU."""

    position: int  # places of the stream seen so far, masked ones included
    done: Tensor  # (B,) chunks finished: written, or dropped by a new document
    fill: Tensor  # (B,) tokens of the unfinished chunk
    start: Tensor  # (B,) position of its first token
    stop: Tensor  # (B,) position after its last
    inverse_norm: Tensor  # (B, K) 1 / ‖x‖ of its tokens, NaN in slots without one, or one unseen
    last: MemoryState | None = None
    autocast: torch.dtype | None = None  # what the last call multiplied in, where autocast was on

    @classmethod
    def begin(cls, state: MemoryState) -> LayerProgress:
        """Before the first call: tokens that wait in `state` come at the first positions."""
        fill = state.fill.cpu()
        none = torch.zeros_like(fill)
        position = int(fill.max())
        unseen = torch.full(state.tokens.shape[:2], torch.nan, dtype=torch.double)
        return cls(position, none, fill, position - fill, none + position, unseen)

    def select(self, rows: Tensor) -> LayerProgress:
        """As far as these rows had come."""
        names = ("done", "fill", "start", "stop", "inverse_norm")
        last = None if self.last is None else self.last.select(rows)
        return replace(self, **{name: getattr(self, name)[rows] for name in names}, last=last)


@dataclass
class Stream:
    """Rows of the recording that go on from call to call."""

    thread: int
    number: int
    first_row: int
    batch: int
    kept: int
    """Rows that are recorded: the first of them, up to the bound of the recording."""

    layers: dict[int, LayerProgress] = field(default_factory=dict)


class Streams:
    """All streams of a recording; the nth that one layer starts is the nth of every layer.

    Counted for each thread, which goes through the layers by itself.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows, self.rows, self.left_out = max_rows, 0, 0
        self._streams: dict[tuple[int, int], Stream] = {}  # by thread and number
        self._started: dict[tuple[int, int], int] = {}  # by thread and layer

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def find(self, layer: int, state: MemoryState | None, given: MemoryState) -> Stream:
        """The stream that a call of `layer` belongs to: `state` as passed, `given` as used."""
        if state is None:
            return self._start(layer, LayerProgress.begin(given))
        for stream in self:
            for other, progress in stream.layers.items():
                last = progress.last
                if last is not None and _is_same(last, state):
                    if other != layer and layer not in stream.layers:  # threaded through depth
                        self._join(layer, stream, LayerProgress.begin(given))
                    return stream
        for stream in reversed(list(self)):
            progress = stream.layers.get(layer)
            rows = None if progress is None else _rows_of(state, progress.last)
            if progress is not None and rows is not None:
                moved = progress.select(rows)
                if stream.batch != len(rows):
                    return self._start(layer, moved)
                stream.layers[layer] = moved
                return stream
        return self._start(layer, LayerProgress.begin(given))

    def _start(self, layer: int, progress: LayerProgress) -> Stream:
        thread, batch = get_ident(), len(progress.done)
        number = self._started.get((thread, layer), 0)
        stream = self._streams.get((thread, number))
        if stream is None or stream.batch != batch or layer in stream.layers:
            taken = max((n for other, n in self._streams if other == thread), default=-1)
            stream = self._create(thread, max(taken + 1, number), batch)
        self._join(layer, stream, progress)
        return stream

    def _join(self, layer: int, stream: Stream, progress: LayerProgress) -> None:
        stream.layers[layer] = progress
        who = (stream.thread, layer)
        self._started[who] = max(self._started.get(who, 0), stream.number + 1)

    def _create(self, thread: int, number: int, batch: int) -> Stream:
        kept = min(batch, self.max_rows - self.rows)
        if not kept:  # of those that are not recorded only a thread's latest is followed
            self._streams = {
                at: stream for at, stream in self._streams.items() if stream.kept or at[0] != thread
            }
        stream = Stream(thread, number, self.rows, batch, kept)
        self._streams[thread, number] = stream
        self.rows += kept
        self.left_out += batch - kept
        return stream


def _is_same(one: MemoryState, other: MemoryState) -> bool:
    """Whether two states are views of one: every token changes the buffer or the grid."""
    pairs = ((one.cell, other.cell), (one.tokens, other.tokens))
    return all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def _rows_of(state: MemoryState, last: MemoryState | None) -> Tensor | None:
    """(B,) the row of `last` that each row of `state` is; None where it is another memory.

    A row that was emptied since keeps its place; a state that is empty altogether has none.
    """
    if last is None or last.cell.shape[1:] != state.cell.shape[1:]:
        return None
    if last.tokens.dtype != state.tokens.dtype or last.cell.device != state.cell.device:
        last = last.to(state.cell.device, state.tokens.dtype)
    rows, empty = [], 0
    for b in range(state.batch_size):
        own = b if b < last.batch_size else 0
        order = [own, *(other for other in range(last.batch_size) if other != own)]
        same = next((other for other in order if _same_row(state, b, last, other)), None)
        if same is None:
            if bool(state.cell[b].any()) or bool(state.fill[b]) or b >= last.batch_size:
                return None
            same, empty = b, empty + 1
        rows.append(same)
    return None if empty == len(rows) else torch.tensor(rows)


def _same_row(one: MemoryState, a: int, other: MemoryState, b: int) -> bool:
    return all(
        torch.equal(getattr(one, name)[a], getattr(other, name)[b])
        for name in ("fill", "cell", "tokens")
    )
