"""The place memory's recurrence, token by token: one function per equation.

Letters: B batch, N tokens, H heads, n axes, V voxels, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.ops.places.addresses import factors
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.products import outer


def scan(inputs: PlaceInputs) -> tuple[Tensor, Tensor]:
    """Every token in turn: reset, keep, write, read. -> reads (B, N, H, C), state."""
    state = inputs.state.flatten(2, -2)  # (B, H, V, C)
    wrote, read = address(inputs, inputs.write_at), address(inputs, inputs.asked_at)
    reads = []
    for t in range(inputs.content.shape[1]):
        if inputs.resets is not None:
            state = torch.where(inputs.resets[:, t, None, None, None], 0, state)
        state = kept(state, inputs.log_keep[:, t])
        value = inputs.content[:, t]
        if inputs.rule == "delta":
            value = value - read_at(state, wrote[:, t])  # what the place holds is taken out
        state = written(state, wrote[:, t], value, inputs.rate[:, t])
        reads.append(read_at(state, read[:, t]))
    empty = inputs.content.new_zeros(inputs.content.shape)
    return torch.stack(reads, 1) if reads else empty, state.view(inputs.state.shape)


def address(inputs: PlaceInputs, places: Tensor) -> Tensor:
    """φ: places (B, N, H, n) -> (B, N, H, V)."""
    return outer(factors(places, inputs.grid, inputs.width, inputs.wrap))


def kept(state: Tensor, log_keep: Tensor) -> Tensor:
    """α S: state (B, H, V, C), log α (B, H)."""
    return log_keep.exp()[..., None, None] * state


def written(state: Tensor, at: Tensor, value: Tensor, rate: Tensor) -> Tensor:
    """S + β φ vᵀ: state (B, H, V, C), φ (B, H, V), v (B, H, C), β (B, H)."""
    return state + rate[..., None, None] * at[..., None] * value[..., None, :]


def read_at(state: Tensor, at: Tensor) -> Tensor:
    """φᵀ S: state (B, H, V, C), φ (B, H, V) -> (B, H, C)."""
    return (at[..., None] * state).sum(-2)
