"""The inputs of a place memory's recurrence, as they were: enough to compute it all again.

A row's state goes on from token to token but at three kinds of events, each before a token: the
state is replaced by one from elsewhere (an entry), its voxels roll (`PlaceState.moved`), or it is
taken over from another row (beam search).

Letters: T positions kept, B rows, H heads, n axes, C channels, E events of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensor_memory.config import PlaceConfig
from tensor_memory.inspect.history import History
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.place_state import rolled


@dataclass(frozen=True, eq=False, repr=False)
class PlaceHistory(History):
    """What went into one layer's recurrence. Index t of row b is its position `first[b]` + t.

    Of a stream longer than `record` keeps the beginning is forgotten, and the state that it left
    is an entry: what can be said about the rest stays exact.
    """

    write_at: Tensor
    """(T, B, H, n) p, in the type it was computed in, as all floats here."""

    read_at: Tensor | None
    """(T, B, H, n) q; None where the memory reads where it writes."""

    content: Tensor
    """(T, B, H, C) v."""

    rate: Tensor
    """(T, B, H) β; 0 where a token is masked."""

    log_keep: Tensor
    """(T, B, H) log α; 0 where a token is masked."""

    width: Tensor | None
    """(T, B, H) of the Gaussian in voxels; None with the linear kernel."""

    reset: Tensor
    """(T, B) bool: the row was emptied before this token."""

    present: Tensor
    """(T, B) bool: there is a token, and it is not masked."""

    call: Tensor
    """(T, B) int64: the number of the call in its row's stream."""

    first: Tensor
    """(B,) int64: the position of index 0."""

    count: Tensor
    """(B,) int64: positions of the row that are kept."""

    moves: Tensor
    """(E, 3 + n) int64: position, row, whether what comes in is empty, voxels per grid axis."""

    joins: Tensor
    """(E, 3) int64: position, row, the row that it goes on from."""

    entry_at: Tensor
    """(E, 2) int64: position and row."""

    entry_state: Tensor
    """(E, H, *grid, C) the state before that token."""

    def check(self, config: PlaceConfig) -> None:
        """Raise unless this can be a history of that memory: files come from anywhere."""
        (T, B), E = self.present.shape, len(self.entry_at)
        whole: dict[str, torch.dtype] = {"reset": torch.bool, "present": torch.bool}
        whole |= dict.fromkeys(
            ("call", "first", "count", "moves", "joins", "entry_at"), torch.int64
        )
        shapes = {name: (T, B, *shape) for name, shape in _token_shapes(config).items()}
        shapes |= dict.fromkeys(("reset", "present", "call"), (T, B))
        shapes |= {"first": (B,), "count": (B,), "moves": (len(self.moves), 3 + config.axes)}
        shapes |= {"joins": (len(self.joins), 3), "entry_at": (E, 2)}
        shapes |= {"entry_state": (E, config.heads, *config.grid, config.channels)}
        self.check_arrays(shapes, whole)
        rows = [self.moves[:, 1], self.joins[:, 1], self.joins[:, 2], self.entry_at[:, 1]]
        self.check_indices([*((row, B) for row in rows), (self.count, T + 1)], "tokens")
        row, source = self.joins[:, 1], self.joins[:, 2]
        if any(not torch.equal(of[row], of[source]) for of in (self.first, self.count)):
            raise ValueError("history: it joins rows of different lengths")


class Events:
    """What happened to states before tokens, by position and row."""

    def __init__(self, history: PlaceHistory) -> None:
        self.entries: dict[tuple[int, int], Tensor] = {}  # (H, V, C) float64
        for at, state in zip(history.entry_at.tolist(), history.entry_state, strict=True):
            self.entries[at[0], at[1]] = state.double().flatten(1, -2)
        self.joins = {(at, row): source for at, row, source in history.joins.tolist()}
        self.moves: dict[tuple[int, int], list[tuple[bool, list[int]]]] = {}
        for at, row, empty, *steps in history.moves.tolist():
            self.moves.setdefault((at, row), []).append((bool(empty), steps))
        self.positions = {at for at, _ in (*self.entries, *self.joins, *self.moves)}


def moved(values: Tensor, config: PlaceConfig, steps: Sequence[int], empty: bool) -> Tensor:
    """Voxels (H, X, V) as they are after the state moved so many along each axis of the grid."""
    assert isinstance(config.wrap, tuple)
    grid = values.unflatten(-1, config.grid)[None]
    for axis, (step, wraps) in enumerate(zip(steps, config.wrap, strict=True)):
        grid = rolled(grid, axis + 3, torch.tensor([step]), empty=empty or not wraps)
    return grid[0].flatten(2)


class HistoryStore:
    """A history that grows with every call, and forgets its beginning where a bound is met."""

    def __init__(self, config: PlaceConfig, max_tokens: int) -> None:
        self.config, self.max_tokens = config, max_tokens
        self.cut = max(max_tokens // 2, 1)
        """Positions between the states that are saved to begin from."""
        shapes = _token_shapes(config).items()
        self._arrays = {name: torch.zeros(0, 0, *shape) for name, shape in shapes}
        self._arrays |= {name: torch.zeros(0, 0).bool() for name in ("reset", "present")}
        self._arrays["call"] = torch.zeros(0, 0, dtype=torch.long)
        self._first = torch.zeros(0, dtype=torch.long)
        self._count = torch.zeros(0, dtype=torch.long)
        self._moves: list[tuple[int, ...]] = []
        self._joins: list[tuple[int, ...]] = []
        self._entries: list[tuple[int, int, Tensor]] = []
        self._saved: dict[int, dict[int, Tensor]] = {}  # by a stream's first row and position

    def has(self, row: int) -> bool:
        """Whether anything of that row is kept."""
        return row < len(self._count) and bool(self._count[row])

    def enter(self, rows: Tensor, position: int, state: Tensor) -> None:
        """These rows (P,) go on from a state of elsewhere, (P, H, *grid, C)."""
        for row, values in zip(rows.tolist(), state.cpu(), strict=True):
            self._entries.append((position, row, values.clone()))

    def move(self, rows: Tensor, position: int, steps: Tensor, empty: bool) -> None:
        """The voxels of these rows (P,) roll by steps (P, n), in grid order."""
        for row, step in zip(rows.tolist(), steps.tolist(), strict=True):
            if any(step):
                self._moves.append((position, row, int(empty), *step))

    def join(self, rows: Tensor, position: int, source: Tensor) -> None:
        """These rows (P,) go on from the states of other rows (P,)."""
        for row, other in zip(rows.tolist(), source.tolist(), strict=True):
            if row != other:
                self._joins.append((position, row, other))

    def put(
        self, rows: Tensor, position: int, inputs: PlaceInputs, present: Tensor, call: int
    ) -> None:
        """Keep a call's tokens: rows (B,) of one stream, inputs of these rows, present (B, N)."""
        B, N = present.shape
        values = {
            "write_at": inputs.write_at,
            "content": inputs.content,
            "rate": inputs.rate,
            "log_keep": inputs.log_keep,
            "reset": torch.zeros_like(present) if inputs.resets is None else inputs.resets,
            "present": present,
            "call": torch.full((B, N), call),
        }
        if "read_at" in self._arrays:
            values["read_at"] = inputs.asked_at
        if inputs.width is not None:
            values["width"] = inputs.width.expand(B, N, -1)
        self._add_rows(int(rows.max()) + 1)
        if not self._count[rows[0]]:
            self._first[rows] = position
        start = position - int(self._first[rows[0]])
        for name, value in values.items():
            array = self._reserve(name, start + N, value.dtype)
            array[start : start + N, rows] = value.transpose(0, 1).cpu().to(array.dtype)
        self._count[rows] = start + N

    def empty(self, rows: Tensor, position: int) -> None:
        """These rows (P,) were emptied before the token at that position, which is kept."""
        self._arrays["reset"][position - self._first[rows], rows] = True

    def save(self, rows: Tensor, position: int, state: Tensor) -> None:
        """The state (B, H, *grid, C) of a stream's rows (B,) before the token at that position.

        Called at every multiple of `cut`, and again where a call begins there.
        """
        saved = self._saved.setdefault(int(rows[0]), {})
        saved[position] = state.cpu().clone()
        for earlier in [p for p in saved if p < position - self.cut]:
            del saved[earlier]

    def bound(self, rows: Tensor) -> None:
        """Forget the beginning of a stream's rows (B,) where they have become too long."""
        if self._count[rows[0]] > self.max_tokens:
            saved = self._saved[int(rows[0])]
            self._forget(rows, min(saved), saved[min(saved)])

    def _forget(self, rows: Tensor, position: int, state: Tensor) -> None:
        """Forget what these rows did before a position, at which they had this state."""
        gone = position - int(self._first[rows[0]])
        for array in self._arrays.values():
            stay = array[gone:, rows]  # a copy
            array[: len(stay), rows] = stay
            array[len(stay) :, rows] = torch.zeros((), dtype=array.dtype)
        self._first[rows] = position
        self._count[rows] -= gone
        forgotten = set(rows.tolist())

        def stays(event: Sequence[Any]) -> bool:
            return event[1] not in forgotten or event[0] > position

        self._moves = [event for event in self._moves if stays(event)]
        self._joins = [event for event in self._joins if stays(event)]
        self._entries = [event for event in self._entries if stays(event)]
        filled = state.flatten(1).any(1)
        self.enter(rows[filled], position, state[filled])

    def _add_rows(self, rows: int) -> None:
        more = torch.zeros(max(rows - len(self._first), 0), dtype=torch.long)
        self._first, self._count = (torch.cat([of, more]) for of in (self._first, self._count))

    def _reserve(self, name: str, tokens: int, dtype: torch.dtype) -> Tensor:
        """An array with room for so many tokens and for all rows, in a type that loses nothing."""
        array, rows = self._arrays[name], len(self._first)
        dtype = torch.promote_types(array.dtype, dtype)
        T, B = array.shape[:2]
        if tokens > T or rows > B or dtype != array.dtype:
            # Twice what there was: a stream of single tokens is copied a few times, not each time.
            T = max(tokens, 2 * T) if tokens > T else T
            grown = torch.zeros(T, max(rows, B), *array.shape[2:], dtype=dtype)
            grown[: array.shape[0], :B] = array
            self._arrays[name] = grown
        return self._arrays[name]

    def finish(self, rows: int) -> PlaceHistory:
        """The history of so many rows."""
        config = self.config
        self._add_rows(rows)
        T = int(self._count[:rows].max()) if rows else 0
        arrays = {
            name: self._reserve(name, T, array.dtype)[:T, :rows].clone()
            for name, array in self._arrays.items()
        }
        dtype = arrays["content"].dtype
        states = [state.to(dtype) for _, _, state in self._entries]
        shape = (0, config.heads, *config.grid, config.channels)
        return PlaceHistory(
            **{"read_at": None, "width": None, **arrays},
            first=self._first[:rows].clone(),
            count=self._count[:rows].clone(),
            moves=_table(self._moves, 3 + config.axes),
            joins=_table(self._joins, 3),
            entry_at=_table([(position, row) for position, row, _ in self._entries], 2),
            entry_state=torch.stack(states) if states else torch.zeros(shape, dtype=dtype),
        )


def _token_shapes(config: PlaceConfig) -> dict[str, tuple[int, ...]]:
    """The floats of a token by name, and their shapes."""
    H, n = config.heads, config.axes
    shapes = {"write_at": (H, n), "content": (H, config.channels), "rate": (H,), "log_keep": (H,)}
    shapes |= {} if config.share_places else {"read_at": (H, n)}
    return shapes | ({} if config.kernel == "linear" else {"width": (H,)})


def _table(events: Sequence[tuple[int, ...]], columns: int) -> Tensor:
    return torch.tensor(events, dtype=torch.long).reshape(-1, columns)
