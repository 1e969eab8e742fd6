"""The inputs of a `TensorMemory`'s recurrence, as they were: enough to compute it all again.

A row's history begins with its first chunk, or where its state came from elsewhere. It then begins
with that state. Where beam search moves a row, it takes its history along.

Letters: T chunks kept, B rows, n axes, C channels, Q reads and M writes per chunk, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig
from tensor_memory.inspect.history import History
from tensor_memory.inspect.replay import SteeredChunks
from tensor_memory.ops.scan.memory_scan import memory_scan
from tensor_memory.tensor import TensorMemory

PER_CHUNK = ("read_at", "write_at", "spread", "content", "writes", "resets")


@dataclass(frozen=True, eq=False, repr=False)
class ChunkHistory(History):
    """What went into one layer's recurrence. Index t of row b is its chunk `first[b]` + t."""

    read_at: Tensor
    """(T, B, Q, n), in the type it was computed in, as all floats here; NaN where no token read."""

    write_at: Tensor
    """(T, B, M, n)."""

    spread: Tensor | None
    """(T, B, M) σ; None where the nearest voxel alone is written."""

    content: Tensor
    """(T, B, M, C)."""

    writes: Tensor
    """(T, B) bool: false where the chunk read and was never written."""

    resets: Tensor
    """(T, B) bool: the row was emptied before this chunk."""

    first: Tensor
    """(B,) int64: the number of the chunk at index 0."""

    count: Tensor
    """(B,) int64: chunks of the row that are kept."""

    entry_row: Tensor
    """(E,) int64: rows that began with a state."""

    entry_state: Tensor
    """(E, 2, C, *grid) hidden and cell that they began with."""

    taps: Tensor | None
    """(n, 2C, 3) the filters; None where channels are mixed pointwise only."""

    mix: Tensor
    """(4C, 2C)."""

    bias: Tensor
    """(4C)."""

    def select(self, rows: slice) -> ChunkHistory:
        """Some rows alone, which are counted anew."""
        kept = range(len(self.first))[rows]
        cut = {name: array[:, rows] for name, array in self.arrays().items() if name in PER_CHUNK}
        stays = torch.tensor([row in kept for row in self.entry_row.tolist()], dtype=torch.bool)
        number = [kept.index(row) for row in self.entry_row.tolist() if row in kept]
        return replace(
            self,
            **cut,
            first=self.first[rows],
            count=self.count[rows],
            entry_row=torch.tensor(number, dtype=torch.long),
            entry_state=self.entry_state[stays],
        )

    def state(self, row: int) -> Tensor | None:
        """(2, C, *grid) hidden and cell that a row began with; None where it was empty."""
        found = (self.entry_row == row).nonzero()
        return self.entry_state[int(found[0])] if len(found) else None

    def check(self, config: MemoryConfig) -> None:
        """Raise unless this can be a history of that memory: files come from anywhere."""
        (T, B), C, E = self.writes.shape, config.channels, len(self.entry_row)
        shapes = {name: (T, B, *array.shape[1:]) for name, array in _empty(config).items()}
        shapes |= {"first": (B,), "count": (B,), "entry_row": (E,)}
        shapes |= {"entry_state": (E, 2, C, *config.grid), "mix": (4 * C, 2 * C), "bias": (4 * C,)}
        if config.mixing == "factorized":
            shapes["taps"] = (config.axes, 2 * C, 3)
        whole: dict[str, torch.dtype] = {"writes": torch.bool, "resets": torch.bool}
        whole |= dict.fromkeys(("first", "count", "entry_row"), torch.int64)
        self.check_arrays(shapes, whole)
        self.check_indices([(self.count, T + 1), (self.entry_row, B)], "chunks")


@dataclass
class _Row:
    """The history of one row while it grows."""

    first: int
    entry: Tensor | None  # (2, C, *grid)
    left: Tensor  # (2, C, *grid) the state after the last call
    parts: list[dict[str, Tensor]] = field(default_factory=list)  # (S, ...) each
    count: int = 0
    emptied: bool = False  # before the next chunk


class ChunkHistoryStore:
    """Histories that grow with every call, and forget their beginning where a bound is met."""

    def __init__(self, memory: TensorMemory, max_tokens: int) -> None:
        self.memory = memory
        self.max_chunks = max(2, max_tokens // memory.config.chunk_size)
        self._rows: dict[int, _Row] = {}
        self._weights = self._weights_now()

    def _weights_now(self) -> dict[str, Any]:
        memory = self.memory
        factorized = memory.config.mixing == "factorized"
        weights = {"mix": memory.mix.weight, "bias": memory.mix.bias}
        found = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
        return {"taps": memory.taps.detach().cpu().clone() if factorized else None, **found}

    def begin(self, first_row: int, number: Sequence[int], given: Tensor) -> None:
        """A call is to begin with chunks (B,) of a stream's rows and states (B, 2, C, *grid).

        A row goes on where it was left, or where another row of its stream was left.
        """
        now, before = self._weights_now(), self._weights
        same = all(
            one is None or (other is not None and torch.equal(one, other))
            for one, other in zip(now.values(), before.values(), strict=True)
        )
        self._weights = now
        if not same:
            # Chunks of other weights cannot be computed again with these: all rows begin anew.
            self._rows.clear()
        stream = range(first_row, first_row + len(number))
        known = {row: self._rows[row] for row in stream if row in self._rows}
        for row, chunk, state in zip(stream, number, given.cpu(), strict=True):
            order = [row, *(other for other in known if other != row)]
            ends = (known[at] for at in order if at in known)
            goes_on = [end for end in ends if end.first + end.count == chunk]
            if not state.any():
                found = next((end for end in goes_on if end is known.get(row)), None)
                self._rows[row] = _Row(chunk, None, state) if found is None else found
                self._rows[row].emptied = True
                continue
            found = next((end for end in goes_on if torch.equal(end.left, state)), None)
            if found is None:
                self._rows[row] = _Row(chunk, state.clone(), state)
            elif found is not known.get(row):
                self._rows[row] = replace(found, parts=[*found.parts])

    def put(self, row: int, values: dict[str, Tensor]) -> None:
        """Keep the next chunks of a row, (S, ...) each."""
        own, chunks = self._rows[row], len(values["writes"])
        if not chunks:
            return
        kept = {name: value.cpu().clone() for name, value in values.items()}
        kept["resets"][0] |= own.emptied
        own.parts.append(kept)
        own.count, own.emptied = own.count + chunks, False
        if own.count > self.max_chunks:
            self._forget(own)

    def put_unwritten(self, row: int, read_at: Tensor, state: Tensor) -> None:
        """Keep a chunk that read the state (2, C, *grid) at (Q, n) and was never written."""
        own = self._rows.get(row)
        if own is None or not torch.equal(own.left, state.cpu()):
            self._rows.pop(row, None)  # rows have moved since: what was kept is another's
            return
        own.emptied |= not bool(state.any())  # a reset in this call may be in no written chunk
        values = {
            name: value.new_zeros(1, *value.shape[1:])
            for name, value in _empty(self.memory.config).items()
        }
        self.put(row, values | {"read_at": read_at[None]})

    def leave(self, first_row: int, states: Tensor) -> None:
        """The call is over, and left states (B, 2, C, *grid)."""
        for row, state in enumerate(states.cpu(), first_row):
            self._rows[row].left = state.clone()

    def _forget(self, row: _Row) -> None:
        """Forget all but the last half of what may be kept, and begin with the state before it."""
        values = _joined(row.parts)
        gone = row.count - self.max_chunks // 2
        old, new = (
            {name: value[part] for name, value in values.items()}
            for part in (slice(gone), slice(gone, None))
        )
        _, hidden, cell = run_chunks(old, self._weights, _states(row.entry, self.memory.config))
        row.entry = torch.stack([hidden[0], cell[0]])
        row.parts, row.first, row.count = [new], row.first + gone, row.count - gone

    def finish(self, rows: int) -> ChunkHistory:
        """The history of so many rows."""
        none = _Row(0, None, torch.zeros(0))
        made = [self._rows.get(row, none) for row in range(rows)]
        T, config = max((row.count for row in made), default=0), self.memory.config
        arrays: dict[str, Any] = _padded([row.parts for row in made], T, _empty(config))
        entries = [row for row, own in enumerate(made) if own.entry is not None]
        states = [own.entry for own in made if own.entry is not None]
        none_shape = (0, 2, config.channels, *config.grid)
        return ChunkHistory(
            **{"spread": None, **arrays},
            first=torch.tensor([row.first for row in made], dtype=torch.long),
            count=torch.tensor([row.count for row in made], dtype=torch.long),
            entry_row=torch.tensor(entries, dtype=torch.long),
            entry_state=torch.stack(states) if states else torch.zeros(none_shape),
            **self._weights,
        )


def steered_arrays(chunks: SteeredChunks, row: int, cut: slice) -> dict[str, Tensor]:
    """Some chunks of one row, as `ChunkHistoryStore.put` takes them."""
    values = {name: getattr(chunks, name) for name in PER_CHUNK}
    return {name: value[row, cut] for name, value in values.items() if value is not None}


def run_chunks(
    values: dict[str, Tensor],
    weights: dict[str, Any],
    state: tuple[Tensor, Tensor],
    writes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute S chunks again, in float64, for W states: hidden and cell (W, C, *grid).

    `writes` (W, S) says which of them are written, by default those that were. -> reads
    (W, S, Q, C), 0 where no token read; hidden; cell.
    """
    W = len(state[0])

    def of_states(name: str) -> Any:
        found = values.get(name)
        return None if found is None else found.double().expand(W, *found.shape)

    read_at = of_states("read_at")
    asked = ~read_at.isnan().any(-1, keepdim=True)
    taps, mix, bias = (weights[name] for name in ("taps", "mix", "bias"))
    reads, hidden, cell = memory_scan(
        read_at.nan_to_num(),
        of_states("write_at"),
        of_states("spread"),
        of_states("content"),
        None if taps is None else taps.double(),
        mix.double(),
        bias.double(),
        *state,
        writes=values["writes"].expand(W, -1) if writes is None else writes,
        resets=values["resets"].expand(W, -1),
        backend="torch",
    )
    assert reads is not None
    return reads * asked, hidden, cell


def _states(entry: Tensor | None, config: MemoryConfig) -> tuple[Tensor, Tensor]:
    if entry is None:
        entry = torch.zeros(2, config.channels, *config.grid)
    return entry[0][None].double(), entry[1][None].double()


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _empty(config: MemoryConfig) -> dict[str, Tensor]:
    """No chunks, with the shapes that chunks have."""
    n, M = config.axes, config.write_heads
    Q = config.read_heads * (config.chunk_size if config.reads == "token" else 1)
    shapes = {"read_at": (Q, n), "write_at": (M, n), "content": (M, config.channels)}
    shapes |= {} if config.write == "nearest" else {"spread": (M,)}
    flags = {name: torch.zeros(0, dtype=torch.bool) for name in ("writes", "resets")}
    return {name: torch.zeros(0, *shape) for name, shape in shapes.items()} | flags


def _padded(
    rows: list[list[dict[str, Tensor]]], chunks: int, empty: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Rows of several lengths as arrays (T, B, ...)."""
    found = [_joined(parts) if parts else empty for parts in rows] or [empty]
    arrays = {}
    for name in empty:
        ends = (chunks - len(row[name]) for row in found)
        filled = [
            torch.cat([row[name], row[name].new_zeros(end, *row[name].shape[1:])])
            for row, end in zip(found, ends, strict=True)
        ]
        arrays[name] = torch.stack(filled, dim=1)[:, : len(rows)]
    return arrays
