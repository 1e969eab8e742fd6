"""Where the reads of a recorded `TensorMemory` came from: its writes are left out one by one.

What a write gave to a read is what the read loses when that one chunk is not written. Gates are not
linear, so what all writes gave, one by one, does not sum to the read: the difference is told apart.

Letters: T chunks kept, W writes, R reads asked for, Q reads per chunk, C channels, K writes told of
each read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig
from tensor_memory.inspect.chunk_history import PER_CHUNK, ChunkHistory, run_chunks
from tensor_memory.inspect.history import Arrays
from tensor_memory.inspect.place_lives import WriteLives

AT_ONCE = 64
"""Writes that are left out at once, each in a state of its own."""


@dataclass(frozen=True, eq=False, repr=False)
class ChunkTrace(Arrays):
    """Where reads came from, in float64: effects + `rest` + `joint` = `read`."""

    effect: Tensor
    """(R, W, Q, C) what a read loses when one chunk is not written."""

    chunk: Tensor
    """(W,) int64: the number of that chunk."""

    rest: Tensor
    """(R, Q, C) what it loses without the state that the history begins with."""

    joint: Tensor
    """(R, Q, C) what is not additive: no write alone accounts for it."""

    read: Tensor
    """(R, Q, C) what was read, before W_out; 0 where no token read."""


@dataclass(frozen=True, eq=False)
class _Step:
    """One chunk, computed again without some of the writes."""

    t: int
    left_out: Tensor  # (W,) their indices; empty where the state at the beginning was left out
    read: Tensor  # (Q, C)
    effect: Tensor  # (W, Q, C)
    gap: Tensor  # (W,) ‖h − h without the write‖ after the chunk, over the grid


def _left_out(history: ChunkHistory, row: int, stop: int) -> Iterator[_Step]:
    """Every chunk up to `stop`, again and again, with `AT_ONCE` writes left out at a time."""
    arrays = {name: getattr(history, name) for name in PER_CHUNK}
    values = {name: array[:stop, row] for name, array in arrays.items() if array is not None}
    weights = {name: getattr(history, name) for name in ("taps", "mix", "bias")}
    entry = history.state(row)
    shape = (2, 1, *history.entry_state.shape[2:])
    whole = torch.zeros(shape) if entry is None else entry[:, None]
    whole = whole.double()

    def run(start: int, state: Tensor, left_out: Tensor) -> Iterator[tuple[_Step, Tensor]]:
        """From a chunk on, the states (2, 1 + W, C, *grid): the first is that of all writes."""
        for t in range(start, stop):
            here = {name: array[t : t + 1] for name, array in values.items()}
            written = values["writes"][t].expand(state.shape[1], 1).clone()
            if len(left_out):
                written[1:, 0] &= left_out != t
            reads, hidden, cell = run_chunks(here, weights, (state[0], state[1]), written)
            state = torch.stack([hidden, cell])
            gap = (hidden[:1] - hidden[1:]).flatten(1).norm(dim=1)
            read = reads[:, 0]  # (1 + W, Q, C)
            yield _Step(t, left_out, read[0], read[:1] - read[1:], gap), state

    if entry is not None:
        nothing = torch.zeros(0, dtype=torch.long)
        for step, _ in run(0, torch.cat([whole, torch.zeros_like(whole)], 1), nothing):
            yield step
    for start in range(0, stop, AT_ONCE):
        end = min(start + AT_ONCE, stop)
        left_out = start + values["writes"][start:end].nonzero().flatten()
        states = whole.expand(2, 1 + len(left_out), *whole.shape[2:])
        for step, state in run(start, states, left_out):
            yield step
            if step.t == end - 1:
                whole = state[:, :1]


def trace_chunks(history: ChunkHistory, chunks: Sequence[int] | Tensor, row: int) -> ChunkTrace:
    """Where the reads of some chunks of a row came from."""
    first = int(history.first[row])
    at = (history.asked_for(chunks, row, "chunks", "chunk numbers") - first).tolist()
    stop = max(at) + 1
    wanted = {t: index for index, t in enumerate(at)}
    writes = history.writes[:stop, row].nonzero().flatten()
    number = {w: index for index, w in enumerate(writes.tolist())}
    size = (history.read_at.shape[2], history.content.shape[3])
    effect = torch.zeros(len(at), len(writes), *size, dtype=torch.float64)
    rest, read = (torch.zeros(len(at), *size, dtype=torch.float64) for _ in range(2))
    for step in _left_out(history, row, stop):
        if step.t not in wanted:
            continue
        r = wanted[step.t]
        read[r] = step.read
        if len(step.left_out):
            effect[r, [number[w] for w in step.left_out.tolist()]] = step.effect
        elif len(step.effect):
            rest[r] = step.effect[0]
    joint = read - effect.sum(1) - rest
    same = torch.tensor([wanted[t] for t in at])  # a chunk may be asked twice
    return ChunkTrace(effect[same], first + writes, rest[same], joint[same], read[same])


def follow_chunks(history: ChunkHistory, row: int, top: int) -> WriteLives:
    """What each write of a row gave to each read, as parts, and how it faded.

    A part is ⟨effect, r⟩ / ‖r‖² over all reads of a chunk.
    """
    T = int(history.count[row])
    part = torch.zeros(T, T, dtype=torch.float64)  # of the write in the column
    rest, known = torch.zeros(T, dtype=torch.float64), torch.zeros(T, dtype=torch.bool)
    gap = torch.zeros(T, T, dtype=torch.float64)
    for step in _left_out(history, row, T):
        size = step.read.square().sum()
        parts = (step.effect * step.read).sum((1, 2)) / size if size > 0 else 0
        known[step.t] = bool(size > 0)
        if len(step.left_out):
            part[step.t, step.left_out] = parts
            gap[step.t, step.left_out] = step.gap
        elif len(step.effect):
            rest[step.t] = parts
    k = min(top, T)
    best = part.abs().topk(k, dim=1).indices
    told = part.gather(1, best)
    joint = torch.where(known, 1 - part.sum(1) - rest, 0)
    half, left = _fading(gap)
    first = int(history.first[row])
    nobody = torch.full((T, 1), -1)
    return WriteLives(
        position=torch.where(told != 0, first + best, -1)[..., None],
        share=told[..., None],
        part=told[..., None],
        others=(part.sum(1) - told.sum(1))[:, None],
        rest=rest[:, None],
        joint=joint[:, None],
        half=torch.where(half >= 0, first + half, -1)[:, None],
        left=left[:, None],
        taker=nobody,
        taken=torch.full((T, 1), float("nan"), dtype=torch.float64),
        first=first,
    )


def _fading(gap: Tensor) -> tuple[Tensor, Tensor]:
    """When half of each write's gap (T, T) was gone, -1 where never, and what was left of it."""
    T, born = len(gap), gap.diagonal()
    if not T:
        return born.long(), born
    gone = torch.ones(T, T, dtype=torch.bool).tril(-1) & (gap < born / 2)
    half = torch.where(gone.any(0), gone.int().argmax(0), -1)
    return half, torch.where(born > 0, gap[-1] / born, float("nan"))


def follow_cost(history: ChunkHistory, config: MemoryConfig, row: int) -> int:
    """Multiplications that `follow_chunks` takes, about."""
    chunks, C = int(history.count[row]), config.channels
    return chunks * chunks * 4 * C * C * config.voxels
