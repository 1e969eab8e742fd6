"""The hidden half's axis filters as one sum over neighbours, for kernels of the fused scan.

Volumes are (V, C) with channels together, so that a neighbouring voxel is a constant offset away.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from tensor_memory.ops.scan.triton.step import as_float, pinned


@triton.jit
def place(v, H: tl.constexpr, W: tl.constexpr):
    """The z, y, x indices of voxel v."""
    return v // (H * W), (v // W) % H, v % W


@triton.jit
def tap(taps, AXIS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr):
    """One tap of one axis for all channels, as a row (1, C): taps (n, 2C, 3)."""
    return tl.load(taps + (AXIS * 2 * C + HALF * C + tl.arange(0, C)[None, :]) * 3 + T)


@triton.jit
def axis_taps(taps, AXIS: tl.constexpr, SIZE: tl.constexpr, FLIP: tl.constexpr, C: tl.constexpr):
    """The three taps of the hidden half along one axis; a missing axis has (0, 1, 0)."""
    if SIZE == 1:
        zero = tl.zeros([1, C], dtype=tl.float32)
        return zero, zero + 1.0, zero
    elif FLIP:
        return tap(taps, AXIS, 2, 1, C), tap(taps, AXIS, 1, 1, C), tap(taps, AXIS, 0, 1, C)
    else:
        return tap(taps, AXIS, 0, 1, C), tap(taps, AXIS, 1, 1, C), tap(taps, AXIS, 2, 1, C)


@triton.jit
def near_line(volume, v, inside, x, tx0, tx1, tx2, SHIFT: tl.constexpr, C: tl.constexpr,
              W: tl.constexpr, PIN: tl.constexpr):  # fmt: skip
    """Three neighbours along x of the voxels SHIFT away from v, weighted: (BLOCK_V, C)."""
    at = volume + (v + SHIFT)[:, None] * C + tl.arange(0, C)[None, :]
    before = (inside & (x > 0))[:, None]
    after = (inside & (x < W - 1))[:, None]
    total = as_float(tl.load(at, mask=inside[:, None], other=0.0), PIN) * tx1
    total += as_float(tl.load(at - C, mask=before, other=0.0), PIN) * tx0
    total += as_float(tl.load(at + C, mask=after, other=0.0), PIN) * tx2
    return total


@triton.jit
def near_plane(volume, v, inside, y, x, tx0, tx1, tx2, ty0, ty1, ty2, SHIFT: tl.constexpr,
               C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
               PIN: tl.constexpr):  # fmt: skip
    """Nine neighbours in the plane SHIFT voxels away."""
    total = near_line(volume, v, inside, x, tx0, tx1, tx2, SHIFT, C, W, PIN) * ty1
    if H > 1:
        before, after = inside & (y > 0), inside & (y < H - 1)
        total += near_line(volume, v, before, x, tx0, tx1, tx2, SHIFT - W, C, W, PIN) * ty0
        total += near_line(volume, v, after, x, tx0, tx1, tx2, SHIFT + W, C, W, PIN) * ty2
    return total


@triton.jit
def add_line(total, volume, v, inside, x, tx0, tx1, tx2, weight, SHIFT: tl.constexpr,
             C: tl.constexpr, W: tl.constexpr, PIN: tl.constexpr):  # fmt: skip
    """`near_line` times a weight, into a sum that exists already."""
    at = volume + (v + SHIFT)[:, None] * C + tl.arange(0, C)[None, :]
    before = (inside & (x > 0))[:, None]
    after = (inside & (x < W - 1))[:, None]
    total += as_float(tl.load(at, mask=inside[:, None], other=0.0), PIN) * (tx1 * weight)
    total += as_float(tl.load(at - C, mask=before, other=0.0), PIN) * (tx0 * weight)
    total += as_float(tl.load(at + C, mask=after, other=0.0), PIN) * (tx2 * weight)
    return total


@triton.jit
def add_plane(total, volume, v, inside, y, x, tx0, tx1, tx2, ty0, ty1, ty2, weight,
              SHIFT: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
              PIN: tl.constexpr):  # fmt: skip
    total = add_line(total, volume, v, inside, x, tx0, tx1, tx2, ty1 * weight, SHIFT, C, W, PIN)
    if H > 1:
        before, after = inside & (y > 0), inside & (y < H - 1)
        total = add_line(
            total, volume, v, before, x, tx0, tx1, tx2, ty0 * weight, SHIFT - W, C, W, PIN
        )
        total = add_line(
            total, volume, v, after, x, tx0, tx1, tx2, ty2 * weight, SHIFT + W, C, W, PIN
        )
    return total


@triton.jit
def near_cube(volume, v, own, z, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2,
              C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
              PIN: tl.constexpr):  # fmt: skip
    """All neighbours in one sum, each weighted by the product of its taps.

    With many channels the sums of lines, of planes and of all do not fit into registers together.
    """
    # Here and now: products of taps that were kept from step to step would fill all registers.
    tx0, tx1, tx2 = pinned(tx0, PIN), pinned(tx1, PIN), pinned(tx2, PIN)
    ty0, ty1, ty2 = pinned(ty0, PIN), pinned(ty1, PIN), pinned(ty2, PIN)
    tz0, tz1, tz2 = pinned(tz0, PIN), pinned(tz1, PIN), pinned(tz2, PIN)
    total = tl.zeros([v.shape[0], C], dtype=tl.float32)
    total = add_plane(
        total, volume, v, own, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz1, 0, C, H, W, PIN
    )
    if D > 1:
        before, after = own & (z > 0), own & (z < D - 1)
        total = add_plane(
            total, volume, v, before, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz0, -H * W, C, H, W, PIN
        )
        total = add_plane(
            total, volume, v, after, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz2, H * W, C, H, W, PIN
        )
    return total


@triton.jit
def neighbours(volume, v, own, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2, FILTERED: tl.constexpr,
               C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
               PIN: tl.constexpr):  # fmt: skip
    """The hidden half after its axis filters, at those voxels v that are own: (BLOCK_V, C)."""
    z, y, x = place(v, H, W)
    if not FILTERED:
        at = volume + v[:, None] * C + tl.arange(0, C)[None, :]
        return tl.load(at, mask=own[:, None], other=0.0).to(tl.float32)
    if C == 64:
        total = near_cube(
            volume, v, own, z, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2, C, D, H, W, PIN
        )
        return pinned(total, PIN)
    total = near_plane(volume, v, own, y, x, tx0, tx1, tx2, ty0, ty1, ty2, 0, C, H, W, PIN) * tz1
    if D > 1:
        before, after = own & (z > 0), own & (z < D - 1)
        total += tz0 * near_plane(
            volume, v, before, y, x, tx0, tx1, tx2, ty0, ty1, ty2, -H * W, C, H, W, PIN
        )
        total += tz2 * near_plane(
            volume, v, after, y, x, tx0, tx1, tx2, ty0, ty1, ty2, H * W, C, H, W, PIN
        )
    return pinned(total, PIN)
