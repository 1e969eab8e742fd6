"""Which calls continue each other, and how far each layer has come in the rows of a recording.

A call without a state, or with an empty one, starts new rows. A call with the state another call
returned goes on in its rows, also after `detach`, and after `select` moved them: a row is a place
in the batch, and takes along how far it had come. A state of places may also have been `moved` or
`quantized`, in any order. Any other state starts new rows.

Letters: B rows of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident

import torch
from torch import Tensor

from tensor_memory.build import AnyState
from tensor_memory.place_state import PlaceState
from tensor_memory.state import MemoryState


@dataclass
class LayerProgress:
    """How far one layer of chunks has come in one stream; all tensors on the CPU."""

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
class PlaceProgress:
    """How far one layer of a place memory has come in one stream."""

    position: int  # places of the stream seen so far, masked ones included
    done: Tensor  # (B,) tokens seen, masked ones not counted
    calls: int = 0
    last: PlaceState | None = None
    follows: bool = False  # whether the state to come is `last`, rows selected or emptied
    source: Tensor | None = None  # (B,) the row before the next token that each row goes on from
    moves: list[tuple[Tensor, bool]] = field(default_factory=list)  # before it: steps, emptied
    foreign: bool = True  # whether the state before it is of elsewhere

    @classmethod
    def begin(cls, state: PlaceState) -> PlaceProgress:
        """Before the first call."""
        return cls(0, torch.zeros(state.batch_size, dtype=torch.long))

    def select(self, rows: Tensor) -> PlaceProgress:
        """As far as these rows had come."""
        return replace(
            self,
            done=self.done[rows],
            last=None if self.last is None else self.last.select(rows),
            follows=True,
            source=rows if self.source is None else self.source[rows],
            moves=[(steps[rows], empty) for steps, empty in self.moves],
        )

    def expect(self, state: PlaceState) -> None:
        """The state of the next call: `last`, or one that this layer has not left."""
        if self.last is not None and not self.follows and not _is_same(self.last, state):
            self.foreign, self.source, self.moves = True, None, []
        self.follows = False

    def move(self, after: PlaceState, steps: Tensor, empty: bool) -> None:
        """`last` moved: the next call is expected to go on from `after`."""
        self.last = after.detach()
        self.moves.append((steps.cpu().long().flip(1), empty))  # coordinate 0 is the last axis


Progress = LayerProgress | PlaceProgress


def _begin(state: AnyState) -> Progress:
    kind = PlaceProgress if isinstance(state, PlaceState) else LayerProgress
    return kind.begin(state)  # type: ignore[arg-type]


@dataclass
class Stream:
    """Rows of the recording that go on from call to call."""

    thread: int
    number: int
    first_row: int
    batch: int
    kept: int
    """Rows that are recorded: the first of them, up to the bound of the recording."""

    layers: dict[int, Progress] = field(default_factory=dict)


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

    def find(self, layer: int, state: AnyState | None, given: AnyState) -> Stream:
        """The stream that a call of `layer` belongs to: `state` as passed, `given` as used."""
        if state is None:
            return self._start(layer, _begin(given))
        for stream in self:
            for other, progress in stream.layers.items():
                last = progress.last
                if last is not None and _is_same(last, state):
                    if other != layer and layer not in stream.layers:  # threaded through depth
                        self._join(layer, stream, _begin(given))
                    return stream
        found = self._find_rows(state, layer)
        if found is None:
            return self._start(layer, _begin(given))
        stream, _, rows = found
        chosen = stream.layers[layer].select(rows)
        if stream.batch != len(rows):
            return self._start(layer, chosen)
        stream.layers[layer] = chosen
        return stream

    def move(self, before: PlaceState, after: PlaceState, steps: Tensor, empty: bool) -> None:
        """A state moved: where calls led to it, the next one may go on from `after`."""
        layers = [progress for stream in self for progress in stream.layers.values()]
        places = [progress for progress in layers if isinstance(progress, PlaceProgress)]
        same = [p for p in places if p.last is not None and _is_same(p.last, before)]
        for progress in same:
            progress.move(after, steps, empty)
        found = None if same else self._find_rows(before)
        if found is None:
            return
        stream, layer, rows = found
        progress = stream.layers[layer]
        if isinstance(progress, PlaceProgress) and stream.batch == len(rows):
            stream.layers[layer] = chosen = replace(progress.select(rows), follows=False)
            chosen.move(after, steps, empty)

    def _find_rows(
        self, state: AnyState, layer: int | None = None
    ) -> tuple[Stream, int, Tensor] | None:
        """The latest stream with rows that `state` comes from, of a layer or of any, and which."""
        for stream in reversed(list(self)):
            layers = [number for number in stream.layers if layer in (None, number)]
            for number in layers:
                rows = _rows_of(state, stream.layers[number].last)
                if rows is not None:
                    return stream, number, rows
            if layers and not any(part.any() for part in _held(state)):
                return None  # older rows that ended empty too are others
        return None

    def _start(self, layer: int, progress: Progress) -> Stream:
        thread, batch = get_ident(), len(progress.done)
        number = self._started.get((thread, layer), 0)
        stream = self._streams.get((thread, number))
        if stream is None or stream.batch != batch or layer in stream.layers:
            taken = max((n for other, n in self._streams if other == thread), default=-1)
            stream = self._create(thread, max(taken + 1, number), batch)
        self._join(layer, stream, progress)
        return stream

    def _join(self, layer: int, stream: Stream, progress: Progress) -> None:
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


def _parts(state: AnyState) -> tuple[Tensor, ...]:
    """The tensors that tell a state from others, the grid's first."""
    if isinstance(state, PlaceState):
        scale = () if state.scale is None else (state.scale,)
        return state.values, state.origin, *scale
    return state.cell, state.fill, state.tokens


def _held(state: AnyState) -> tuple[Tensor, ...]:
    """Those of them that are zero where a row is empty."""
    return _parts(state)[: 1 if isinstance(state, PlaceState) else 2]


def _is_same(one: AnyState, other: AnyState) -> bool:
    """Whether two states are views of one: every token changes the buffer or the grid."""
    if type(one) is not type(other) or len(_parts(one)) != len(_parts(other)):
        return False
    pairs = list(zip(_parts(one), _parts(other), strict=True))
    ends = (pairs[0], pairs[-1])  # in between are counts, which many states share
    return all(a.data_ptr() == b.data_ptr() for a, b in ends)


def _rows_of(state: AnyState, last: AnyState | None) -> Tensor | None:
    """(B,) the row of `last` that each row of `state` is; None where it is another memory.

    A row that was emptied since keeps its place; a state that is empty altogether has none.
    """
    if type(last) is not type(state) or last is None:
        return None
    if isinstance(state, PlaceState) and isinstance(last, PlaceState):
        kind = state.values.dtype
        if kind != last.values.dtype:  # rounds as the caller's `quantized` did
            last = last.dequantized() if state.scale is None else last.quantized(kind)
    parts, lasts = _parts(state), _parts(last)
    if len(parts) != len(lasts):
        return None
    if any(a.shape[1:] != b.shape[1:] for a, b in zip(parts, lasts, strict=True)):
        return None
    lasts = [b.to(a.device, a.dtype) for a, b in zip(parts, lasts, strict=True)]
    rows, empty = [], 0
    for b in range(state.batch_size):
        own = b if b < last.batch_size else 0
        order = [own, *(other for other in range(last.batch_size) if other != own)]
        same = next((other for other in order if _same_row(parts, b, lasts, other)), None)
        if same is None:
            if any(bool(part[b].any()) for part in _held(state)) or b >= last.batch_size:
                return None
            same, empty = b, empty + 1
        rows.append(same)
    return None if empty == len(rows) else torch.tensor(rows)


def _same_row(one: Sequence[Tensor], a: int, other: Sequence[Tensor], b: int) -> bool:
    return all(torch.equal(p[a], q[b]) for p, q in zip(one, other, strict=True))
