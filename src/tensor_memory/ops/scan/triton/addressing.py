"""Places between voxels, for kernels of the fused scan: where a write goes, what a read sees."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from tensor_memory.ops.scan.triton.filter import place, tap

EPSILON = tl.constexpr(1e-6)  # the paper's ε under the Gaussian


@triton.jit
def kernel_value(i, at, sharpness, SIZE: tl.constexpr, GAUSSIAN: tl.constexpr):
    """One axis of the mask M at voxel index i, zero outside the grid."""
    if GAUSSIAN:
        offset = i.to(tl.float32) * (2.0 / (SIZE - 1)) - 1.0 - at
        value = tl.exp(-offset * offset * sharpness)
    else:
        position = (tl.minimum(tl.maximum(at, -1.0), 1.0) + 1.0) * (0.5 * (SIZE - 1))
        value = tl.where(i == tl.floor(position + 0.5).to(tl.int32), 1.0, 0.0)
    return tl.where((i >= 0) & (i < SIZE), value, 0.0)


@triton.jit
def profile(
    i,
    at,
    sharpness,
    taps,
    AXIS: tl.constexpr,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """One axis of the filtered mask: P[i, c] = Σ_t tap[c, t] · M(i + t − 1)."""
    before, here, after = write_taps(taps, AXIS, C, FILTERED)
    return tapped(i, at, sharpness, before, here, after, SIZE, GAUSSIAN, FILTERED)


@triton.jit
def write_taps(taps, AXIS: tl.constexpr, C: tl.constexpr, FILTERED: tl.constexpr):
    """The written half's three taps along one axis, (1, C) each; unfiltered: 0, 1, 0."""
    if FILTERED:
        return tap(taps, AXIS, 0, 0, C), tap(taps, AXIS, 1, 0, C), tap(taps, AXIS, 2, 0, C)
    else:
        zero = tl.zeros([1, C], dtype=tl.float32)
        return zero, zero + 1.0, zero


@triton.jit
def tapped(i, at, sharpness, before, here, after, SIZE: tl.constexpr, GAUSSIAN: tl.constexpr,
           FILTERED: tl.constexpr):  # fmt: skip
    """`profile` with taps that are loaded already."""
    if FILTERED:
        total = kernel_value(i - 1, at, sharpness, SIZE, GAUSSIAN)[:, None] * before
        total += kernel_value(i, at, sharpness, SIZE, GAUSSIAN)[:, None] * here
        total += kernel_value(i + 1, at, sharpness, SIZE, GAUSSIAN)[:, None] * after
    else:
        total = kernel_value(i, at, sharpness, SIZE, GAUSSIAN)[:, None] * here
    return total


@triton.jit
def sharpness_of(spread, write, GAUSSIAN: tl.constexpr):
    """σ of one write and 1 / (2σ² + ε); the nearest voxel has none."""
    if GAUSSIAN:
        sigma = tl.load(spread + write)
        return sigma, 1.0 / (2.0 * sigma * sigma + EPSILON)
    else:
        return 0.0, 0.0


@triton.jit
def written_plane(at, sharpness, what, taps, y, x, H: tl.constexpr, W: tl.constexpr,
                  C: tl.constexpr, AXES: tl.constexpr, GAUSSIAN: tl.constexpr,
                  FILTERED: tl.constexpr):  # fmt: skip
    """content · Py · Px of one write, which all planes share up to a factor: (BLOCK_V, C)."""
    plane = profile(x, tl.load(at), sharpness, taps, AXES - 1, W, C, GAUSSIAN, FILTERED)
    if H > 1:
        plane *= profile(y, tl.load(at + 1), sharpness, taps, AXES - 2, H, C, GAUSSIAN, FILTERED)
    return plane * what


@triton.jit
def filtered_write(
    write_at,
    spread,
    content,
    taps,
    row,
    v,
    M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """U after the axis filters, factorised: Σₘ contentₘ · Pz · Py · Px, at voxels v of step `row`.

    (BLOCK_V, C)
    """
    c = tl.arange(0, C)
    z, y, x = place(v, H, W)
    total = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for m in range(M):
        at = write_at + (row * M + m) * AXES
        what = tl.load(content + (row * M + m) * C + c)[None, :]
        _, sharpness = sharpness_of(spread, row * M + m, GAUSSIAN)
        volume = written_plane(at, sharpness, what, taps, y, x, H, W, C, AXES, GAUSSIAN, FILTERED)
        if D > 1:
            volume *= profile(
                z, tl.load(at + 2), sharpness, taps, AXES - 3, D, C, GAUSSIAN, FILTERED
            )
        total += volume
    return total


@triton.jit
def corner(position_at, bit, SIZE: tl.constexpr):
    """Index and weight of the lower (bit 0) or upper neighbour along one axis, and the slope."""
    if SIZE == 1:
        return bit * 0, tl.where(bit == 0, 1.0, 0.0), bit * 0.0
    else:
        inside = (position_at >= -1.0) & (position_at <= 1.0)
        position = (tl.minimum(tl.maximum(position_at, -1.0), 1.0) + 1.0) * (0.5 * (SIZE - 1))
        lower = tl.minimum(tl.floor(position), SIZE - 2.0)
        upper = position - lower
        weight = tl.where(bit == 0, 1.0 - upper, upper)
        weight = tl.where(position_at == position_at, weight, position_at)  # nowhere reads NaN
        slope = tl.where(bit == 0, -0.5 * (SIZE - 1), 0.5 * (SIZE - 1))
        return lower.to(tl.int32) + bit, weight, tl.where(inside, slope, 0.0)


@triton.jit
def read_place(
    volume,
    x,
    y,
    z,
    VOXEL: tl.constexpr,
    CHANNEL: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """n-linear sample of one volume, its voxels and channels VOXEL and CHANNEL apart: (C,)."""
    c, k = tl.arange(0, C), tl.arange(0, 8)
    ix, wx, _ = corner(x, k % 2, W)
    iy, wy, _ = corner(y, (k // 2) % 2, H)
    iz, wz, _ = corner(z, k // 4, D)
    weight = wx * wy * wz
    near = volume + ((iz * H + iy) * W + ix)[:, None] * VOXEL + c[None, :] * CHANNEL
    value = tl.load(near, mask=(weight != 0)[:, None], other=0.0).to(tl.float32)
    return tl.sum(value * weight[:, None], axis=0)


@triton.jit
def read_point(
    volume,
    at,
    VOXEL: tl.constexpr,
    CHANNEL: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """`read_place` at the coordinates stored at `at`."""
    y = tl.load(at + 1) if H > 1 else 0.0
    z = tl.load(at + 2) if D > 1 else 0.0
    return read_place(volume, tl.load(at), y, z, VOXEL, CHANNEL, C, D, H, W)
