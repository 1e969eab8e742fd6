"""The fused place memory, `backend="triton"`: what it serves, and its two directions.

`addresses.py` has the kernels between places and addresses, `chunks.py` those of the recurrence.

Letters: B batch, N tokens, H heads, S chunks, V voxels, C channels.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, bind, or_else
from tensor_memory.ops.places.addresses import voxels
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton import chunks
from tensor_memory.ops.places.triton.addresses import addresses_backward, write_addresses

MOST_VOXELS = 256
"""V that a program can hold on chip beside its chunk."""
MOST_CHANNELS = 64
WARPS = 2


class Kept(NamedTuple):
    """What a backward needs beside the inputs."""

    phi: Tensor
    """(B, N, H, V) addresses of the writes."""
    before: Tensor
    """(B, H, S, V, C) the state before each chunk."""
    psi: Tensor | None = None
    """Addresses of the reads, where they have places of their own."""
    written: Tensor | None = None
    """(B, N, H, C) u; rule "delta" alone."""
    solved: Tensor | None = None
    """(B, N, H, L) the inverse of each chunk's system; rule "delta" alone."""

    @classmethod
    def empty(cls, inputs: PlaceInputs, products: torch.dtype) -> Kept:
        """Uninitialised."""
        B, N, H, C = inputs.content.shape
        V, delta = voxels(inputs.grid), inputs.rule == "delta"
        new = inputs.content.new_empty
        low = partial(new, dtype=torch.bfloat16 if products == torch.bfloat16 else torch.float32)
        return cls(
            low((B, N, H, V)),
            low((B, H, triton.cdiv(N, chunks.L), V, C)),
            None if inputs.read_at is None else low((B, N, H, V)),
            new(B, N, H, C) if delta else None,
            new(B, N, H, chunks.L) if delta else None,
        )

    @classmethod
    def of(cls, tensors: list[Tensor], inputs: PlaceInputs) -> Kept:
        """The other way of `tensors`."""
        phi, before, *rest = tensors
        psi = None if inputs.read_at is None else rest.pop(0)
        return cls(phi, before, psi, *rest)

    @property
    def tensors(self) -> list[Tensor]:
        """Those there are."""
        return [tensor for tensor in self if tensor is not None]


def why_not(inputs: PlaceInputs) -> str | None:
    """The reason these kernels cannot serve, or None where they can."""
    V, C = voxels(inputs.grid), inputs.content.shape[-1]
    if inputs.dtype != torch.float32:
        return f"it computes in float32, got {inputs.dtype}"
    if V > MOST_VOXELS:
        return f"it holds up to {MOST_VOXELS} voxels on chip, got {V}"
    if C > MOST_CHANNELS:
        return f"it holds up to {MOST_CHANNELS} channels on chip, got {C}"
    return None


def forward(
    inputs: PlaceInputs, *, keep: bool, products: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Reads, the state after, and with `keep` what `backward` needs."""
    N, plan = inputs.content.shape[1], _plan(inputs, products)
    kept = Kept.empty(inputs, products)
    phi, before, psi, written, solved = kept
    write_addresses(inputs, phi, psi)
    after, reads = torch.empty_like(inputs.state), inputs.empty_reads()
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    marks = or_else(inputs.resets, phi)
    if written is None or solved is None:
        bound(chunks.state_kernel, plan, _tiles(plan), BACKWARD=False, HAS_START=True)(
            _tile_grid(inputs, plan),
            (phi, content, rate, log_keep, marks, inputs.state, before, after),
            (N,),
        )
    else:
        bound(chunks.solve_kernel, plan)(
            _chunk_grid(inputs), (phi, rate, log_keep, marks, solved), (N,)
        )
        bound(chunks.delta_state_kernel, plan, _columns(plan))(
            _column_grid(inputs, plan),
            (phi, content, rate, log_keep, marks, solved, inputs.state, written, before, after),
            (N,),
        )
    bound(chunks.read_kernel, plan)(
        _chunk_grid(inputs),
        (phi, or_else(psi, phi), or_else(written, content), rate, log_keep, marks, before, reads),
        (N,),
    )
    return reads, after, kept.tensors if keep else []


def backward(
    grad_reads: Tensor,
    grad_state: Tensor | None,
    inputs: PlaceInputs,
    kept: list[Tensor],
    *,
    products: torch.dtype,
) -> PlaceInputs:
    """The gradients in the places of the inputs."""
    phi, before, psi, written, solved = Kept.of(kept, inputs)
    N, plan = inputs.content.shape[1], _plan(inputs, products)
    content, rate, log_keep = inputs.content, inputs.rate, inputs.log_keep
    marks, asked = or_else(inputs.resets, phi), or_else(psi, phi)
    by_after, by_state = torch.empty_like(before), torch.empty_like(inputs.state)
    begins, by_right = or_else(grad_state, by_state), phi
    has_start = {"HAS_START": grad_state is not None}
    if written is None or solved is None:
        bound(chunks.state_kernel, plan, _tiles(plan), BACKWARD=True, **has_start)(
            _tile_grid(inputs, plan),
            (asked, grad_reads, rate, log_keep, marks, begins, by_after, by_state),
            (N,),
        )
    else:
        by_written, by_right = torch.empty_like(written), torch.empty_like(written)
        bound(chunks.delta_written_kernel, plan)(
            _chunk_grid(inputs), (phi, asked, log_keep, marks, grad_reads, by_written), (N,)
        )
        bound(chunks.delta_state_backward_kernel, plan, _columns(plan), **has_start)(
            _column_grid(inputs, plan),
            (
                phi, asked, rate, log_keep, marks, solved, grad_reads, by_written, begins,
                by_right, by_after, by_state,
            ),
            (N,),
        )  # fmt: skip
    by_phi, by_psi = torch.empty_like(phi), None if psi is None else torch.empty_like(psi)
    by_content, by_rate, by_log_keep = (torch.empty_like(t) for t in (content, rate, log_keep))
    bound(chunks.gradient_kernel, plan, {"VB": min(32, plan["VB"])}, SAME=psi is None)(
        _chunk_grid(inputs),
        (
            phi, asked, content, or_else(written, content), rate, log_keep, marks, before,
            by_after, grad_reads, by_right, by_phi, or_else(by_psi, by_phi), by_content, by_rate,
            by_log_keep,
        ),
        (N,),
    )  # fmt: skip
    by_write_at, by_read_at, by_width = addresses_backward(inputs, by_phi, by_psi)
    found = (by_write_at, by_read_at, by_content, by_rate, by_log_keep, by_width, by_state)
    return PlaceInputs._make((*found, None, None, None))


def empty_kept(inputs: PlaceInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors like those `forward` keeps."""
    return Kept.empty(inputs, products).tensors


def _plan(inputs: PlaceInputs, products: torch.dtype) -> dict[str, Any]:
    """Constants by the names they have in the kernels."""
    V, C = voxels(inputs.grid), inputs.content.shape[-1]
    precision = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    exact, low = ("ieee", "bf16-emulated") if INTERPRETED else (precision, "bf16")
    is_low = products == torch.bfloat16
    return {
        "H": inputs.content.shape[2],
        "V": V,
        "C": C,
        "VB": min(64, max(16, triton.next_power_of_2(V))),
        "CB": max(16, triton.next_power_of_2(C)),
        "L": chunks.L,
        "STEPS": (chunks.L - 1).bit_length(),
        "DELTA": inputs.rule == "delta",
        "HAS_RESETS": inputs.resets is not None,
        "MODE": low if is_low else exact,
        "EXACT": "tf32" if is_low and not INTERPRETED else exact,
    }


def _tiles(plan: dict[str, Any]) -> dict[str, int]:
    """Of a state whose parts are independent."""
    return {"VB": min(chunks.TILE, plan["VB"]), "CB": min(chunks.TILE, plan["CB"])}


def _columns(plan: dict[str, Any]) -> dict[str, int]:
    """Of a state whose channels are independent."""
    return {"VB": max(16, triton.next_power_of_2(plan["V"])), "CB": 16}


def _tile_grid(inputs: PlaceInputs, plan: dict[str, Any]) -> tuple[int, int, int]:
    B, _, H, C = inputs.content.shape
    tile = _tiles(plan)
    return B * H, triton.cdiv(plan["V"], tile["VB"]), triton.cdiv(C, tile["CB"])


def _column_grid(inputs: PlaceInputs, plan: dict[str, Any]) -> tuple[int, int]:
    B, _, H, C = inputs.content.shape
    return B * H, triton.cdiv(C, _columns(plan)["CB"])


def _chunk_grid(inputs: PlaceInputs) -> tuple[int, int]:
    B, N, H, _ = inputs.content.shape
    return triton.cdiv(N, chunks.L), B * H


def bound(
    kernel: Any, plan: dict[str, Any], tiles: dict[str, int] | None = None, **more: Any
) -> BoundKernel:
    """The kernel with those of the constants that it takes."""
    constants = plan | (tiles or {}) | more
    taken = {name: constants[name] for name in kernel.arg_names if name in constants}
    return bind(kernel, **taken, **({} if INTERPRETED else {"num_warps": WARPS}))
