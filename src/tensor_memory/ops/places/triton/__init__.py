"""The fused place memory, `backend="triton"`: what it serves, and its two directions.

`dense.py` multiplies whole addresses, which `addresses.py` makes; `segments.py` is its forward on
small grids in bfloat16; `visits.py` (rule "linear") and `sparse.py` (rule "delta") touch the
corners of a place alone; `token.py` takes one token through a whole layer; `plan.py` says how they
are launched.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from tensor_memory.ops.launch import blocks
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton import dense, segments, sparse, visits
from tensor_memory.ops.places.triton.plan import LENGTH, MOST_PROGRAMS, make_plan

MOST_CHANNELS = 64
"""C that a program can hold on chip beside its chunk."""
MOST_VOXELS = {"linear": 4096, "delta": 256}
"""V that whole addresses are made of, by rule."""
SPARSE_FROM = {"linear": 256, "delta": 257}
"""V from which on corners are faster than whole addresses, or alone can serve, by rule."""
SPARSE_AXES = 3
"""Most axes that corners are taken of."""


def why_not(inputs: PlaceInputs) -> str | None:
    """The reason these kernels cannot serve, or None where they can."""
    V, C, most = math.prod(inputs.grid), inputs.content.shape[-1], MOST_VOXELS[inputs.rule]
    if inputs.dtype != torch.float32:
        return f"it computes in float32, got {inputs.dtype}"
    if C > MOST_CHANNELS:
        return f"it holds up to {MOST_CHANNELS} channels on chip, got {C}"
    if most < V and _way(inputs) is dense:
        return (
            f"with rule '{inputs.rule}' it takes up to {most} voxels, got {V}; more with kernel "
            f"'linear' and up to {SPARSE_AXES} axes"
        )
    if torch.compiler.is_compiling():  # where sizes may be symbols: a limit would be a guard
        return None
    B, N, H, _ = inputs.content.shape
    tokens = _tokens_per_program(inputs)
    if max(B * H, blocks(N, tokens), blocks(V, visits.VOXELS)) > MOST_PROGRAMS:
        return (
            f"it takes up to {MOST_PROGRAMS:,} rows × heads, {MOST_PROGRAMS * tokens:,} tokens in "
            f"a call and {MOST_PROGRAMS * visits.VOXELS:,} voxels, got {B} × {H}, {N} and {V}"
        )
    return None


def _way(inputs: PlaceInputs) -> ModuleType:
    few = inputs.width is None and len(inputs.grid) <= SPARSE_AXES
    if few and math.prod(inputs.grid) >= SPARSE_FROM[inputs.rule]:
        return visits if inputs.rule == "linear" else sparse
    return dense


def _tokens_per_program(inputs: PlaceInputs) -> int:
    """Of the kernel whose programs for the tokens lie along the second axis of its grid."""
    way = _way(inputs)
    if way is dense:
        return make_plan(inputs, inputs.dtype)["T"]
    return LENGTH if way is sparse else visits.PIECE // visits.visits_per_token(inputs)


def forward(
    inputs: PlaceInputs, *, keep: bool, products: torch.dtype, fresh: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what `backward` needs.

    `fresh`: the state before is empty, and its tensor holds anything.
    """
    way, plan = _way(inputs), make_plan(inputs, products)
    if not fresh:
        inputs = _emptied(inputs)
    if way is dense and segments.serves(inputs, plan):
        way = segments
    if fresh and way in (segments, dense) and inputs.rule == "linear":
        return way.forward(inputs, plan, keep=keep, fresh=True)
    if fresh:
        inputs.state.zero_()
    return way.forward(inputs, plan, keep=keep)


def backward(
    grad_reads: Tensor,
    grad_state: Tensor | None,
    inputs: PlaceInputs,
    kept: list[Tensor],
    *,
    products: torch.dtype,
    in_parts: bool = False,
) -> PlaceInputs:
    """The gradients in the places of the inputs; `in_parts` leaves the width's (programs, H)."""
    way = _way(inputs)
    if way is not dense:  # which looks at no state but those it kept
        inputs = _emptied(inputs)
    found = way.backward(grad_reads, grad_state, inputs, kept, make_plan(inputs, products))
    if in_parts or found.width is None:
        return found
    return found._replace(width=found.width.sum(0))


def _emptied(inputs: PlaceInputs) -> PlaceInputs:
    """Rows that begin with a reset, empty: a decay of 0 alone would keep a NaN."""
    if inputs.resets is None:
        return inputs
    begins = inputs.resets[:, 0].view(-1, *[1] * (inputs.state.ndim - 1))
    return inputs._replace(state=inputs.state.masked_fill(begins, 0))


def empty_kept(inputs: PlaceInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    return _way(inputs).empty_kept(inputs, products)
