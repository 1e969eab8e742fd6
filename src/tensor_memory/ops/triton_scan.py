"""The fused scan: what it can serve, its buffers and its launches. Kernels are next door.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tensor_memory.ops import triton_backward, triton_forward

MAX_VOXELS = 4096
TILE_VALUES = 4096  # voxels × channels that one program holds at a time
WARPS = 8
INTERPRETED = triton.runtime.interpreter.InterpretedFunction is type(triton_forward.forward_kernel)


def why_not(write_at: Tensor, content: Tensor, hidden: Tensor, dtype: torch.dtype) -> str | None:
    """The reason this request cannot be served, or None."""
    grid = hidden.shape[2:]
    C = content.shape[-1]
    if hidden.device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, got {hidden.device.type}"
    if dtype != torch.float32:
        return f"it computes in float32 or bfloat16, got {dtype}"
    if len(grid) > 3:
        return f"it serves 1 to 3 grid axes, got {len(grid)}"
    if math.prod(grid) > MAX_VOXELS:
        return f"it serves up to {MAX_VOXELS} voxels, got {math.prod(grid)}"
    if C not in (16, 32, 64, 128):
        return f"it serves 16, 32, 64 or 128 channels, got {C}"
    return None


class Plan(NamedTuple):
    """How one scan is laid out on the device; everything here is fixed at compile time."""

    tile: int
    tiles: int
    parts: int
    shape: dict[str, Any]
    options: dict[str, Any]
    fast: bool
    products: str
    kept: torch.dtype


def plan(
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    hidden: Tensor,
    products: torch.dtype,
) -> Plan:
    """Divide each row's voxels among programs so that the device is full but all are resident."""
    B, C, *grid = hidden.shape
    V = math.prod(grid)
    tile = max(16, min(triton.next_power_of_2(V), TILE_VALUES // C))
    parts = 1
    if hidden.device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count
        while 2 * parts * B <= multiprocessors and V >= 2 * parts * min(tile, 64):
            parts *= 2
    tile = max(16, min(tile, triton.next_power_of_2(-(-V // parts))))
    depth, height, width = (*(1,) * (3 - len(grid)), *grid)
    low = products == torch.bfloat16
    if low:
        mode = "bf16-emulated" if INTERPRETED else "bf16"
    else:
        exact = INTERPRETED or torch.get_float32_matmul_precision() == "highest"
        mode = "ieee" if exact else "tf32"
    return Plan(
        tile=tile,
        tiles=-(-V // (parts * tile)),
        parts=parts,
        shape={"C": C, "D": depth, "H": height, "W": width, "AXES": len(grid)},
        options={
            "M": write_at.shape[2],
            "GAUSSIAN": spread is not None,
            "FILTERED": taps is not None,
        },
        fast=low and not INTERPRETED,
        products=mode,
        kept=torch.bfloat16 if low else torch.float32,
    )


def launch_options(parts: int) -> dict[str, Any]:
    """Programs that wait for each other must all be resident: a cooperative launch ensures it."""
    if INTERPRETED:
        return {}
    return {"num_warps": WARPS, "num_stages": 1, "launch_cooperative_grid": parts > 1}


def forward(
    read_at: Tensor,
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    writes: Tensor | None,
    resets: Tensor | None,
    *,
    keep: bool,
    products: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the scan; with `keep`, also return what `backward` needs: every state, (S + 1, B, V, C)."""
    B, S, Q, _ = read_at.shape
    C, V = content.shape[-1], math.prod(hidden.shape[2:])
    p = plan(write_at, spread, content, taps, hidden, products)
    ring = S + 1 if keep else 2
    kept_hidden = hidden.new_empty(ring, B, V, C, dtype=p.kept)
    kept_cell = hidden.new_empty(ring, B, V, C)
    reads = hidden.new_empty(B, S, Q, C)
    last_hidden, last_cell = torch.empty_like(hidden), torch.empty_like(cell)
    nothing = content
    triton_forward.forward_kernel[(B * p.parts,)](
        read_at,
        write_at,
        nothing if spread is None else spread,
        content,
        nothing if taps is None else taps,
        mix,
        bias,
        hidden,
        cell,
        nothing if writes is None else writes,
        nothing if resets is None else resets,
        reads,
        last_hidden,
        last_cell,
        kept_hidden,
        kept_cell,
        torch.zeros(B, dtype=torch.int32, device=hidden.device),
        S,
        Q,
        B,
        ring,
        **p.options,
        **p.shape,
        BLOCK_V=p.tile,
        TILES=p.tiles,
        PARTS=p.parts,
        WRITES=writes is not None,
        RESETS=resets is not None,
        READ=not keep and Q > 0,
        PRODUCTS=p.products,
        FAST=p.fast,
        **launch_options(p.parts),
    )
    if not keep:
        return reads, last_hidden, last_cell, []
    if Q > 0:
        triton_forward.read_kernel[(B * S * Q,)](
            kept_hidden, read_at, reads, B, S, Q, **p.shape, num_warps=1
        )
    return reads, last_hidden, last_cell, [kept_hidden, kept_cell]


def backward(
    grad_reads: Tensor,
    grad_hidden: Tensor,
    grad_cell: Tensor,
    read_at: Tensor,
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    bias: Tensor,
    hidden: Tensor,
    writes: Tensor | None,
    resets: Tensor | None,
    kept: list[Tensor],
    *,
    products: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Gradients of read_at, write_at, spread, content, taps, mix, bias, hidden and cell."""
    B, S, Q, n = read_at.shape
    M, C, V = write_at.shape[2], content.shape[-1], math.prod(hidden.shape[2:])
    p = plan(write_at, spread, content, taps, hidden, products)
    kept_hidden, kept_cell = kept
    nothing = content
    some_spread = nothing if spread is None else spread
    some_taps = nothing if taps is None else taps
    some_writes = nothing if writes is None else writes
    slopes = hidden.new_empty(S, B, V, 6, C, dtype=p.kept)
    inputs = hidden.new_empty(S, B, V, 2, C, dtype=p.kept)
    tiles = -(-V // p.tile)
    warps = {} if INTERPRETED else {"num_warps": WARPS, "num_stages": 1}
    triton_backward.slopes_kernel[(S * B, tiles)](
        write_at, some_spread, content, some_taps, mix, bias, some_writes,
        kept_hidden, kept_cell, slopes, inputs, S, B,
        **p.options, **p.shape, BLOCK_V=p.tile, WRITES=writes is not None,
        PRODUCTS=p.products, FAST=p.fast, **warps,
    )  # fmt: skip

    grad_filtered = hidden.new_empty(S, B, V, C, dtype=p.kept)
    rings = hidden.new_empty(2, 2, B, V, C)
    first_hidden, first_cell = torch.empty_like(hidden), torch.empty_like(hidden)
    triton_backward.backward_kernel[(B * p.parts,)](
        read_at, some_taps, mix, some_writes, nothing if resets is None else resets,
        grad_reads, grad_hidden, grad_cell, slopes, grad_filtered, rings[0], rings[1],
        first_hidden, first_cell, torch.zeros(B, dtype=torch.int32, device=hidden.device),
        S, Q, B, **p.shape, BLOCK_V=p.tile, TILES=p.tiles, PARTS=p.parts,
        FILTERED=taps is not None, WRITES=writes is not None, RESETS=resets is not None,
        PRODUCTS=p.products, **launch_options(p.parts),
    )  # fmt: skip

    grad_mix, grad_bias = _mix_gradients(slopes, inputs, p, warps)
    grad_content, grad_at, grad_spread, written_taps = _write_gradients(
        write_at, spread, content, taps, mix, slopes, p, warps
    )
    grad_taps = None
    if taps is not None:
        hidden_taps = _hidden_tap_gradients(taps, grad_filtered, kept_hidden, p, warps)
        grad_taps = torch.cat([written_taps, hidden_taps], dim=1)
    grad_read_at = torch.empty_like(read_at)
    if Q > 0:
        triton_backward.reads_kernel[(B * S * Q,)](
            kept_hidden, read_at, grad_reads, grad_read_at, B, S, Q, **p.shape, num_warps=1
        )
    return (
        grad_read_at, grad_at, grad_spread, grad_content, grad_taps, grad_mix, grad_bias,
        first_hidden, first_cell,
    )  # fmt: skip


def _mix_gradients(
    slopes: Tensor, inputs: Tensor, p: Plan, warps: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    rows, C = inputs[..., 0, 0].numel(), p.shape["C"]
    block = max(16, min(128, 8192 // C))
    loops = max(1, -(-rows // (block * 256)))
    chunks = -(-rows // (block * loops))
    mixes = inputs.new_empty(chunks, 4 * C, 2 * C, dtype=torch.float32)
    biases = inputs.new_empty(chunks, 4 * C, dtype=torch.float32)
    triton_backward.mix_kernel[(chunks, 4)](
        slopes, inputs, mixes, biases, rows, C=C, ROWS=block, LOOPS=loops,
        PRODUCTS=p.products, **warps,
    )  # fmt: skip
    return mixes.sum(0), biases.sum(0)


def _write_gradients(
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    slopes: Tensor,
    p: Plan,
    warps: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    S, B, V, _, C = slopes.shape
    M, n = write_at.shape[2:]
    tiles = -(-V // p.tile)
    contents = content.new_empty(S, B, tiles, M, C)
    places = content.new_empty(S, B, tiles, M, n)
    spreads = content.new_empty(S, B, tiles, M)
    filters = content.new_empty(S * B * tiles * M, n, C, 3)
    triton_backward.writes_kernel[(S * B, tiles, M)](
        write_at, content if spread is None else spread, content,
        content if taps is None else taps, mix, slopes,
        contents, places, spreads, filters, S, B,
        **p.options, **p.shape, BLOCK_V=p.tile, PRODUCTS=p.products, **warps,
    )  # fmt: skip
    return (
        contents.sum(2).transpose(0, 1),
        places.sum(2).transpose(0, 1),
        None if spread is None else spreads.sum(2).transpose(0, 1),
        filters.sum(0),
    )


def _hidden_tap_gradients(
    taps: Tensor, grad_filtered: Tensor, kept_hidden: Tensor, p: Plan, warps: dict[str, Any]
) -> Tensor:
    """(n, C, 3): the 3ⁿ products of taps are one filter; its gradient is shared out by axis."""
    S, B, V, C = grad_filtered.shape
    n = taps.shape[0]
    near = 3**n
    programs = min(264, S * B)
    partial = taps.new_empty(programs, near, C)
    triton_backward.taps_kernel[(programs,)](
        grad_filtered, kept_hidden, partial, S * B, **p.shape,
        NEAR=near, NEAR_PADDED=triton.next_power_of_2(near), BLOCK_V=max(1, 1024 // C), **warps,
    )  # fmt: skip
    cube = partial.sum(0).reshape(*[3] * n, C)  # grid order
    axis_taps = taps[:, C:].transpose(1, 2)  # (n, 3, C)
    gradients = []
    for axis in range(n):
        total = cube
        for other in reversed(range(n)):  # from the back, so that earlier axes keep their place
            if other != axis:
                weights = axis_taps[other].reshape(3, *[1] * (total.ndim - other - 2), C)
                total = (total * weights).sum(other)
        gradients.append(total.t())
    return torch.stack(gradients)
