"""The gradients of writes (place, width, content) and of the places of reads."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import INTERPRETED, BoundKernel, bind, or_else
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.triton.addressing import (
    corner,
    kernel_value,
    profile,
    sharpness_of,
    write_taps,
)
from tensor_memory.ops.scan.triton.plan import Shape, plan_of, plane_tile
from tensor_memory.ops.scan.triton.step import as_float, product

WRITES_LOW, WRITES_FLOAT = (4096, 8), (1024, 4)  # values of a plane for what writes receive, warps
WRITES_STAGES = 4  # planes of what writes receive on their way at a time


@triton.jit
def tap_columns(taps, AXIS: tl.constexpr, C: tl.constexpr, FILTERED: tl.constexpr):
    """The written half's taps along one axis as (C, 16), columns 0 to 2; unfiltered: column 1."""
    c, t = tl.arange(0, C)[:, None], tl.arange(0, 16)[None, :]
    if FILTERED:
        return tl.load(taps + (AXIS * 2 * C + c) * 3 + t, mask=t < 3, other=0.0)
    else:
        return tl.where(t == 1, 1.0, 0.0) + c * 0.0


@triton.jit
def three(first, second, third, t):
    """Columns (or rows) 0, 1 and 2 of sixteen; the rest is zero."""
    return tl.where(t == 0, first, tl.where(t == 1, second, tl.where(t == 2, third, 0.0)))


@triton.jit
def axis_gradient(
    d,
    total,
    i,
    at,
    sharpness,
    taps,
    AXIS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """From d (BLOCK_V, C), what reaches one axis's profile, on to its taps and its Gaussian.

    Returns total (16, C) with the taps' share added in rows 0 to 2, and the gradients of the
    coordinate and of the sharpness 1 / (2σ² + ε). Sums over voxels or channels are products with
    16 columns, of which three are used: cheaper than nine reductions.
    """
    t = tl.arange(0, 16)
    before = kernel_value(i - 1, at, sharpness, SIZE, GAUSSIAN)
    here = kernel_value(i, at, sharpness, SIZE, GAUSSIAN)
    after = kernel_value(i + 1, at, sharpness, SIZE, GAUSSIAN)
    if FILTERED:
        values = three(before[None, :], here[None, :], after[None, :], t[:, None])
        total = product(values, d, total, PRODUCTS)
    d_at, d_sharpness = 0.0, 0.0
    if GAUSSIAN:
        columns = tap_columns(taps, AXIS, C, FILTERED)
        d_values = product(d, columns, tl.zeros([BLOCK_V, 16], dtype=tl.float32), PRODUCTS)
        d_values *= three(before[:, None], here[:, None], after[:, None], t[None, :])
        near = (i[:, None] + t[None, :] - 1).to(tl.float32)
        offset = near * (2.0 / (SIZE - 1)) - 1.0 - at
        d_at = tl.sum(d_values * offset) * (2.0 * sharpness)
        d_sharpness = -tl.sum(d_values * offset * offset)
    return total, d_at, d_sharpness


@triton.jit
def store_taps(partial, total, AXIS: tl.constexpr, C: tl.constexpr):
    c, t = tl.arange(0, C)[None, :], tl.arange(0, 16)[:, None]
    tl.store(partial + (AXIS * 3 + t) * C + c, total, mask=t < 3)


@triton.jit
def fold(
    volume,
    own,
    z_at,
    sharpness,
    taps,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    AXIS: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
    STAGES: tl.constexpr,
    PIN: tl.constexpr,
):
    """The planes of a volume summed over z, with the five weights that its gradients need.

    volume (BLOCK_V, C) points into the first of D planes, SIZE values apart. The weights are the
    mask's values one voxel before, at and after each plane (whose products with the taps, summed,
    are the filtered mask), and the filtered mask's slopes: offset · value, offset² · value.
    """
    zero = tl.zeros(volume.shape, dtype=tl.float32)
    before, here, after, moved, sharper = zero, zero, zero, zero, zero
    tap_before, tap_here, tap_after = write_taps(taps, AXIS, C, FILTERED)
    for z in tl.range(0, D, num_stages=STAGES):
        d = as_float(tl.load(volume + z * SIZE, mask=own, other=0.0), PIN)
        level = tl.zeros([1], dtype=tl.int32) + z
        value = kernel_value(level, z_at, sharpness, D, GAUSSIAN)[:, None]
        offset = (level.to(tl.float32) * (2.0 / (D - 1)) - 1.0 - z_at)[:, None]
        here += d * value
        by_offset = value * offset * tap_here
        by_square = value * offset * offset * tap_here
        if FILTERED:
            value = kernel_value(level - 1, z_at, sharpness, D, GAUSSIAN)[:, None]
            near = offset - 2.0 / (D - 1)
            before += d * value
            by_offset += value * near * tap_before
            by_square += value * near * near * tap_before
            value = kernel_value(level + 1, z_at, sharpness, D, GAUSSIAN)[:, None]
            near = offset + 2.0 / (D - 1)
            after += d * value
            by_offset += value * near * tap_after
            by_square += value * near * near * tap_after
        if GAUSSIAN:
            moved += d * by_offset
            sharper += d * by_square
    folded = before * tap_before + here * tap_here + after * tap_after
    return folded, before, here, after, moved, sharper


@triton.jit(do_not_specialize=["S", "B"])
def writes_kernel(
    write_at,
    spread,
    content,
    taps,
    grad_written,
    grad_content,
    grad_at,
    grad_spread,
    partial_taps,
    S,
    B,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    PIN: tl.constexpr,
):
    """What write m of one step receives of grad_written (S, B, V, C).

    The taps' share is left per program. Planes of the grid are folded along z first, so that x and
    y are dealt with once per step.
    """
    # This program's write: its place, width and content.
    item, m = tl.program_id(0), tl.program_id(1)
    write = ((item % B) * S + item // B) * M + m
    c = tl.arange(0, C)
    t = tl.arange(0, 16)[:, None]
    PLANE: tl.constexpr = H * W
    at = write_at + write * AXES
    sigma, sharpness = sharpness_of(spread, write, GAUSSIAN)
    what = tl.load(content + write * C + c[None, :]).to(tl.float32)
    x_at = tl.load(at)
    y_at = tl.load(at + 1) if H > 1 else 0.0
    z_at = tl.load(at + 2) if D > 1 else 0.0
    # Sums over all voxels.
    taps_x = tl.zeros([16, C], dtype=tl.float32)
    taps_y = tl.zeros([16, C], dtype=tl.float32)
    taps_z = tl.zeros([16, C], dtype=tl.float32)
    contents = tl.zeros([1, C], dtype=tl.float32)
    d_x, d_y, d_z, d_sharpness = 0.0, 0.0, 0.0, 0.0
    volume = grad_written + item.to(tl.int64) * (D * PLANE * C)

    for block in range((PLANE + BLOCK_V - 1) // BLOCK_V):
        w = block * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (w < PLANE)[:, None]
        # Contract z: what is left is a plane.
        here = volume + w[:, None] * C + c[None, :]
        if D > 1:
            folded, lower, level, upper, moved, sharper = fold(
                here, own, z_at, sharpness, taps, D, PLANE * C, C, AXES - 3, GAUSSIAN, FILTERED,
                STAGES, PIN,
            )  # fmt: skip
        else:
            folded = tl.load(here, mask=own, other=0.0).to(tl.float32)
        # ∂content: the plane with all profiles.
        y, x = w // W, w % W
        px = profile(x, x_at, sharpness, taps, AXES - 1, W, C, GAUSSIAN, FILTERED)
        plane = px
        if H > 1:
            py = profile(y, y_at, sharpness, taps, AXES - 2, H, C, GAUSSIAN, FILTERED)
            plane = px * py
        contents += tl.sum(folded * plane, axis=0)[None, :]
        # Along z: the taps, the coordinate and the sharpness.
        if D > 1:
            plane *= what
            if FILTERED:
                lower = tl.sum(lower * plane, axis=0)[None, :]
                level = tl.sum(level * plane, axis=0)[None, :]
                upper = tl.sum(upper * plane, axis=0)[None, :]
                taps_z += three(lower, level, upper, t)
            if GAUSSIAN:
                d_z += tl.sum(moved * plane) * (2.0 * sharpness)
                d_sharpness -= tl.sum(sharper * plane)
        # Along y, then along x: what remains when the other profiles are contracted.
        folded *= what
        if H > 1:
            taps_y, more, sharper = axis_gradient(
                folded * px, taps_y, y, y_at, sharpness, taps,
                AXES - 2, H, BLOCK_V, C, GAUSSIAN, FILTERED, SUMS,
            )  # fmt: skip
            d_y += more
            d_sharpness += sharper
            folded *= py
        taps_x, more, sharper = axis_gradient(
            folded, taps_x, x, x_at, sharpness, taps,
            AXES - 1, W, BLOCK_V, C, GAUSSIAN, FILTERED, SUMS,
        )  # fmt: skip
        d_x += more
        d_sharpness += sharper

    # s = 1 / (2σ² + ε) is the sharpness: ∂σ = ∂s · (−4σ s²).
    tl.store(grad_content + write * C + c[None, :], contents)
    tl.store(grad_at + write * AXES, d_x)
    if H > 1:
        tl.store(grad_at + write * AXES + 1, d_y)
    if D > 1:
        tl.store(grad_at + write * AXES + 2, d_z)
    if GAUSSIAN:
        tl.store(grad_spread + write, d_sharpness * (-4.0 * sigma) * sharpness * sharpness)
    if FILTERED:
        partial_taps += (item.to(tl.int64) * M + m) * (AXES * 3 * C)
        store_taps(partial_taps, taps_x, AXES - 1, C)
        if H > 1:
            store_taps(partial_taps, taps_y, AXES - 2, C)
        if D > 1:
            store_taps(partial_taps, taps_z, AXES - 3, C)


@triton.jit(do_not_specialize=["B", "S", "Q"])
def reads_kernel(
    volumes,
    read_at,
    grad_reads,
    grad_read_at,
    B,
    S,
    Q,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """One program per read: how the sample moves with its coordinate. Shapes as `read_kernel`."""
    # The eight corners around the read, and ∂r · h at each of them.
    i = tl.program_id(0)
    b, s = i // (S * Q), (i // Q) % S
    volume = volumes + (s * B + b).to(tl.int64) * (D * H * W * C)
    at = read_at + i * AXES
    c, k = tl.arange(0, C), tl.arange(0, 8)
    ix, wx, slope_x = corner(tl.load(at), k % 2, W)
    iy, wy, slope_y = corner(tl.load(at + 1) if H > 1 else 0.0, (k // 2) % 2, H)
    iz, wz, slope_z = corner(tl.load(at + 2) if D > 1 else 0.0, k // 4, D)
    exists = (k % 2 < W) & ((k // 2) % 2 < H) & (k // 4 < D)
    near = (iz * H + iy) * W + ix
    value = tl.load(volume + near[:, None] * C + c[None, :], mask=exists[:, None], other=0.0)
    d = tl.sum(value.to(tl.float32) * tl.load(grad_reads + i * C + c)[None, :], axis=1)  # (8,)
    # Along an axis a weight's factor is replaced by its slope.
    tl.store(grad_read_at + i * AXES, tl.sum(d * slope_x * wy * wz))
    if H > 1:
        tl.store(grad_read_at + i * AXES + 1, tl.sum(d * wx * slope_y * wz))
    if D > 1:
        tl.store(grad_read_at + i * AXES + 2, tl.sum(d * wx * wy * slope_z))


class WriteGradients(NamedTuple):
    """Of write_at, spread and content; and what every write sends to the written half's taps."""

    write_at: Tensor
    spread: Tensor | None
    content: Tensor
    partial_taps: Tensor
    """(S, B, M, n, 3, C), to be summed."""


@functools.lru_cache(maxsize=256)
def writes_launch(shape: Shape) -> BoundKernel:
    """`writes_kernel` for a shape: a program per step, row and write."""
    p = plan_of(shape)
    values, warps = WRITES_LOW if shape.low else WRITES_FLOAT
    tile = plane_tile(p.sizes, values // shape.C, warps, least=16)  # of what a product can take
    if p.resident and not INTERPRETED:  # for two of eight warps, three of four, twelve of one
        tile.options["maxnreg"] = 128 if tile.options["num_warps"] > 4 else 168
    return bind(
        writes_kernel,
        **p.write, **p.sizes, BLOCK_V=tile.voxels,
        SUMS={"bf16": "tf32", "bf16-emulated": "ieee"}.get(p.products, p.products),
        STAGES=WRITES_STAGES, PIN=not INTERPRETED, **p.alone | tile.options,
    )  # fmt: skip


def write_gradients(inputs: ScanInputs, shape: Shape, grad_written: Tensor) -> WriteGradients:
    """From what reaches the filtered writes (S, B, V, C)."""
    write_at, spread, content, taps = inputs.write_at, inputs.spread, inputs.content, inputs.taps
    S, B, M, n = shape.S, shape.B, shape.M, len(shape.grid)
    grads = WriteGradients(
        torch.empty_like(write_at),
        None if spread is None else torch.empty_like(spread),
        torch.empty_like(content),
        content.new_empty((S, B, M, n, 3, shape.C) if shape.filtered else 1),
    )
    writes_launch(shape)(
        (S * B, M),
        (
            write_at, or_else(spread, content), content, or_else(taps, content), grad_written,
            grads.content, grads.write_at, or_else(grads.spread, content), grads.partial_taps,
        ),
        (S, B),
    )  # fmt: skip
    return grads


def read_gradients(
    inputs: ScanInputs, shape: Shape, kept_hidden: Tensor, grad_reads: Tensor
) -> Tensor:
    """Of read_at (B, S, Q, n), from what reaches the reads (B, S, Q, C)."""
    assert inputs.read_at is not None
    grad = torch.empty_like(inputs.read_at)
    B, S, Q = shape.B, shape.S, shape.Q
    if Q > 0:
        kernel = bind(reads_kernel, **plan_of(shape).sizes, num_warps=1)
        kernel((B * S * Q,), (kept_hidden, inputs.read_at, grad_reads, grad), (B, S, Q))
    return grad
