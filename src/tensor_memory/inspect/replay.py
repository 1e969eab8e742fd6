"""Compute once more what a call of the memory did, from the same inputs, by the reference.

Fused scans never expose their gates or the states between steps. A memory depends on its state and
its tokens alone, so the reference finds the same values from them.

Letters: B batch, N tokens, K tokens per chunk, S chunks, d width, C channels, n axes, Q reads and
M writes per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tensor_memory.chunking import Assignment, assign
from tensor_memory.ops.scan import reference
from tensor_memory.state import MemoryState
from tensor_memory.tensor import TensorMemory


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call of a memory, with the defaults filled in."""

    x: Tensor  # (B, N, d), N > 0
    state: MemoryState
    mask: Tensor  # (B, N)
    reset: Tensor | None  # (B, N)
    flush: Tensor | bool | int
    tokens: int  # N of the call; 0 where a masked token stands in, to give a flush its place

    @classmethod
    def of(
        cls,
        memory: TensorMemory,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        flush: Tensor | bool | int = False,
    ) -> CallArguments:
        """From what `TensorMemory.forward` was given."""
        B, N, d = x.shape
        if state is None:
            state = memory.empty_state(x)
        if N == 0:
            x, mask, reset = x.new_zeros(B, 1, d), x.new_zeros(B, 1, dtype=torch.bool), None
            flush = flush is True
        elif mask is None:
            mask = x.new_ones(B, N, dtype=torch.bool)
        return cls(x, state, mask, reset, flush, tokens=N)

    def rows(self, count: int) -> CallArguments:
        """The first `count` rows alone."""
        if count == self.x.shape[0]:
            return self
        reset = None if self.reset is None else self.reset[:count]
        flush = self.flush[:count] if isinstance(self.flush, Tensor) else self.flush
        state = self.state.select(range(count))
        return CallArguments(self.x[:count], state, self.mask[:count], reset, flush, self.tokens)

    def assign(self, chunk_size: int) -> Assignment:
        """Which chunk each token belongs to."""
        return assign(self.state.fill, self.mask, self.reset, self.flush, chunk_size)


@dataclass(frozen=True)
class SteeredChunks:
    """What decides the chunks of a call, with the state: the inputs of the recurrence."""

    read_at: Tensor  # (B, S, Q, n), NaN in slots that hold no token
    write_at: Tensor  # (B, S, M, n)
    spread: Tensor | None  # (B, S, M)
    content: Tensor  # (B, S, M, C)
    writes: Tensor  # (B, S)
    resets: Tensor  # (B, S)


def steer_chunks(memory: TensorMemory, call: CallArguments) -> SteeredChunks:
    """Where the chunks of a call read and write, how widely and what."""
    config, state, x = memory.config, call.state, call.x
    place = call.assign(config.chunk_size)
    B, K, S = len(x), config.chunk_size, place.steps
    filled = torch.arange(S * K + 1, device=x.device) < state.fill[:, None]
    filled = filled.scatter(1, place.slot, True)[:, : S * K].reshape(B, S, K)

    read_at, write_at, spread, content = memory.steer(place.chunks(state.tokens, x))
    dtype = state.hidden.dtype  # float32 or better
    asked = filled[:, :, :1] if config.reads == "chunk" else filled  # (B, S, 1 or K)
    asked = asked.repeat_interleave(config.read_heads, dim=2)  # (B, S, Q)
    return SteeredChunks(
        read_at=_where(asked, read_at.to(dtype)),
        write_at=write_at.to(dtype),
        spread=None if spread is None else spread.to(dtype),
        content=content.to(dtype),
        writes=place.writes,
        resets=place.resets,
    )


def replay_chunks(
    memory: TensorMemory, call: CallArguments, chunks: SteeredChunks, inverse_norm: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Compute every chunk of a call in turn: the arrays of a `LayerRecording` it decides.

    One value per row, (B, ...). Rows that do not write at a step have NaN in what only a write
    has; so have the reads of slots that hold no token. `inverse_norm` (B, S, K) is 1 / ‖x‖ of
    every slot's token, NaN where it is unknown.
    """
    config, state = memory.config, call.state
    write_at, spread, content = chunks.write_at, chunks.spread, chunks.content
    asked, read_at = ~chunks.read_at.isnan().any(-1), chunks.read_at.nan_to_num()
    B, dtype = len(write_at), state.hidden.dtype
    taps = memory.taps.to(dtype) if config.mixing == "factorized" else None
    mix, bias = memory.mix.weight.to(dtype), memory.mix.bias.to(dtype)

    hidden, cell = state.hidden, state.cell
    per_row = (-1,) + (1,) * (hidden.ndim - 1)
    for s in range(write_at.shape[1]):
        with torch.autocast(hidden.device.type, enabled=False):
            keep = ~chunks.resets[:, s].reshape(per_row)
            hidden, cell = hidden.where(keep, 0), cell.where(keep, 0)
            reads = reference.sample(hidden, read_at[:, s])  # (B, Q, C)
            if s == 0 and config.reads == "chunk":
                begun = (state.fill > 0)[:, None, None]
                reads = state.readout.unflatten(-1, reads.shape[1:]).where(begun, reads)
            if spread is None:
                mask = reference.nearest_mask(write_at[:, s], config.grid)
            else:
                mask = reference.gaussian_mask(write_at[:, s], spread[:, s], config.grid)
            volume = torch.cat([reference.write_volume(content[:, s], mask), hidden], dim=1)
            gates = reference.gates(volume, taps, mix, bias)
            new_hidden, new_cell = reference.gated_update(gates, cell)
            writes = chunks.writes[:, s]
            write = writes.reshape(per_row)
            hidden, cell = new_hidden.where(write, hidden), new_cell.where(write, cell)
        values = {
            "write_at": write_at[:, s],
            "content_norm": content[:, s].norm(dim=-1),
            "gates": _mean_gates(gates),
            **({} if spread is None else {"spread": spread[:, s]}),
        }
        values = {name: _where(writes, value) for name, value in values.items()}
        yield values | {
            "read_at": _where(asked[:, s], read_at[:, s]),
            "readout": _where(asked[:, s], reads),
            "hidden_norm": hidden.norm(dim=1),
            "use": _use(memory, reads, inverse_norm[:B, s]),
            "written": writes,
        }


def replay_unfinished(
    memory: TensorMemory, state: MemoryState, inverse_norm: Tensor
) -> dict[str, Tensor]:
    """The unfinished chunk of every row of `state`: as `replay_chunks`, nothing written."""
    B, grid = state.batch_size, memory.config.grid
    config, hidden = memory.config, state.hidden
    read_at = memory.read_coordinates(state.tokens[:, None])[:, 0].to(hidden.dtype)  # (B, Q, n)
    slots = 1 if config.reads == "chunk" else config.chunk_size
    asked = torch.arange(slots, device=hidden.device) < state.fill[:, None]  # (B, 1 or K)
    asked = asked.repeat_interleave(config.read_heads, dim=1)
    if config.reads == "chunk":
        reads = state.readout.unflatten(-1, (config.read_heads, config.channels))
    else:
        reads = reference.sample(hidden, read_at)
    nowhere = hidden.new_full((B, config.write_heads), float("nan"))
    values = {
        "read_at": _where(asked, read_at),
        "readout": _where(asked, reads),
        "hidden_norm": hidden.norm(dim=1),
        "use": _use(memory, reads, inverse_norm),
        "write_at": nowhere[..., None].expand(-1, -1, len(grid)),
        "content_norm": nowhere,
        "gates": nowhere[:, :1].expand(-1, 3),
        "written": torch.zeros(B, dtype=torch.bool),
    }
    return values if config.write == "nearest" else values | {"spread": nowhere}


def _mean_gates(gates: Tensor) -> Tensor:
    """(B, 4C, *grid) -> (B, 3): i, f and o, averaged over channels and voxels."""
    i, f, o, _ = gates.chunk(4, dim=1)
    return torch.stack([gate.sigmoid().flatten(1).mean(1) for gate in (i, f, o)], dim=1)


def _use(memory: TensorMemory, reads: Tensor, inverse_norm: Tensor) -> Tensor:
    """‖m‖ / ‖x‖, averaged over tokens: (B, Q, C) and (B, K) -> (B,), on the CPU."""
    heads = memory.config.read_heads
    reads = reads.unflatten(1, (-1, heads)).flatten(2)  # (B, 1 or K, R·C)
    m = memory.output(reads.to(memory.output.weight.dtype))
    return (m.double().norm(dim=-1).cpu() * inverse_norm).nanmean(1)


def _where(true: Tensor, values: Tensor) -> Tensor:
    """`values` where `true`, which has their first dimensions, and NaN elsewhere."""
    missing = ~true.reshape(*true.shape, *[1] * (values.ndim - true.ndim))
    return values.masked_fill(missing, torch.nan)
