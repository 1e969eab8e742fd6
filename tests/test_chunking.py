"""The place of every token, against the same thing said one token at a time."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memories import SEEDS, make_marks
from tensor_memory.chunking import assign


@dataclass
class Row:
    """One row, token by token: chunks as lists of positions; the waiting tokens have none."""

    chunks: list[list[int | None]] = field(default_factory=list)
    open: bool = False
    written: set[int] = field(default_factory=set)
    reset_before: set[int] = field(default_factory=set)

    def close(self, *, write: bool) -> None:
        if self.open and write:
            self.written.add(len(self.chunks) - 1)
        self.open = False


def walk(fill: int, mask, reset, flush, chunk_size: int) -> Row:
    row = Row([[None] * fill], open=True) if fill else Row()
    for t in range(len(mask)):
        if reset[t]:
            row.close(write=False)
            row.reset_before.add(len(row.chunks))
        if mask[t]:
            if not row.open:
                row.chunks.append([])
                row.open = True
            row.chunks[-1].append(t)
            if len(row.chunks[-1]) == chunk_size:
                row.close(write=True)
        if flush[t]:
            row.close(write=True)
    return row


def assert_as_walked(fill, mask, reset, flush, chunk_size) -> None:
    B, N = mask.shape
    got = assign(fill, mask, reset, flush, chunk_size)
    no = torch.zeros(B, N, dtype=torch.bool)
    ends = flush if isinstance(flush, torch.Tensor) else no.clone()
    if flush is True:
        ends[:, -1] = True
    elif isinstance(flush, int):
        ends |= (torch.arange(N) + 1) % (flush or N + 1) == 0
    for b in range(B):
        row = walk(int(fill[b]), mask[b], no[b] if reset is None else reset[b], ends[b], chunk_size)
        assert got.steps >= len(row.chunks)
        slots = [got.steps * chunk_size] * N
        for chunk, positions in enumerate(row.chunks):
            for place, t in enumerate(positions):
                if t is not None:
                    slots[t] = chunk * chunk_size + place
        assert got.slot[b].tolist() == slots
        assert set(got.writes[b].nonzero().flatten().tolist()) == row.written
        resets = set(got.resets[b].nonzero().flatten().tolist())
        if got.reset_after[b]:
            resets.add(got.steps)
        assert resets == row.reset_before
        assert got.fill[b] == (len(row.chunks[-1]) if row.open else 0)
        assert got.last[b] == max(len(row.chunks) - 1, 0)


@settings(max_examples=10 * settings.default.max_examples)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 12),
    chunk_size=st.integers(1, 5),
    masked=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    resetting=st.sampled_from([None, 0.1, 0.5]),
    flushing=st.sampled_from([False, True, 0.1, 0.5, 1, 3, 4, 20]),
    seed=SEEDS,
)
def test_tokens_are_placed_as_by_hand(rows, length, chunk_size, masked, resetting, flushing, seed):
    generator = torch.Generator().manual_seed(seed)
    fill = torch.randint(0, chunk_size, (rows,), generator=generator)
    mask = ~make_marks(rows, length, masked, seed)
    reset = None if resetting is None else make_marks(rows, length, resetting, seed + 1)
    marked = isinstance(flushing, float)
    flush = make_marks(rows, length, flushing, seed + 2) if marked else flushing
    assert_as_walked(fill, mask, reset, flush, chunk_size)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_every_short_sequence_of_events_is_placed_as_by_hand(chunk_size):
    """All 8 combinations of token, reset and flush at three positions, from every fill."""
    events = torch.cartesian_prod(*[torch.arange(8)] * 3)  # (512, 3), one row per sequence
    mask, reset, flush = (events & 1).bool(), (events & 2).bool(), (events & 4).bool()
    for waiting in range(chunk_size):
        fill = torch.full((len(events),), waiting)
        assert_as_walked(fill, mask, reset, flush, chunk_size)


def test_no_rows_are_placed_nowhere():
    mask = torch.ones(0, 4, dtype=torch.bool)
    got = assign(torch.zeros(0, dtype=torch.long), mask, mask, mask, 2)
    assert got.slot.shape == (0, 4)
    assert got.writes.shape == (0, got.steps)
