"""Kernels from places to addresses φ, and back from their gradients.

An address is the product of one factor per axis, so that exponentials are taken along the axes
alone. A grid of n < 4 axes has axes of one voxel before it here.

Letters: B batch, N tokens, H heads, T tokens per program, V voxels, n axes, P an axis' voxels
padded to a power of two.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportAssignmentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import BoundKernel, blocks, or_else
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.triton.plan import WARP_VALUES, Plan


@triton.jit
def tanh(x):
    """By its definition through the exponential of a negative number."""
    small = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)


@triton.jit
def clamped(at, most):
    """Between 0 and `most`; NaN stays, where a plain minimum would make it a place."""
    at = tl.maximum(at, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(at, most, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def below(at, last):
    """The lower of the two voxels beside coordinates in voxels; 0 of NaN."""
    return tl.minimum(tl.where(at >= 0.0, tl.floor(at), 0.0), last).to(tl.int32)


@triton.jit
def factor(
    place, width, SIZE: tl.constexpr, WRAP: tl.constexpr, P: tl.constexpr, GAUSSIAN: tl.constexpr
):
    """An axis' factor (T, P) of unit length at places (T), and its slopes by place and width."""
    voxel = tl.arange(0, P)
    if SIZE == 1:
        one = tl.full([place.shape[0], P], 1.0, tl.float32)
        return one, one * 0.0, one * 0.0
    # The place in voxels, on the axis: brought round or moved to the border.
    at = (place + 1.0) * ((SIZE - 1) / 2)
    unit = tl.full(at.shape, (SIZE - 1) / 2, tl.float32)  # voxels per unit of place
    if WRAP:
        at -= tl.floor(at / SIZE) * SIZE
    else:  # a place beyond the border moves nothing
        unit = tl.where((at >= 0.0) & (at <= SIZE - 1.0), unit, 0.0)
        at = clamped(at, SIZE - 1.0)
    # d: the signed distance to each voxel, (T, P); the shorter way round where the axis wraps.
    d = at[:, None] - voxel[None, :].to(tl.float32)
    if WRAP:
        d += SIZE / 2
        d -= tl.floor(d / SIZE) * SIZE + SIZE / 2
    # e before it is brought to unit length, and de/d(at).
    if GAUSSIAN:
        nearest = at - tl.floor(at + 0.5)  # whose weight is 1, so that no sum is zero
        inverse = 1.0 / (width * width)
        e = tl.exp((d * d - (nearest * nearest)[:, None]) * (-0.5 * inverse))
        slope = -e * d * inverse
    else:
        e = tl.maximum(1.0 - tl.abs(d), 0.0)
        low = below(at, SIZE - 1.0 if WRAP else SIZE - 2.0)[:, None]
        slope = tl.where(voxel[None, :] == (low + 1) % SIZE, 1.0, 0.0)
        slope = tl.where(voxel[None, :] == low, -1.0, slope)
    e = tl.where((voxel < SIZE)[None, :], e, 0.0)
    slope = tl.where((voxel < SIZE)[None, :], slope, 0.0)
    # f = e/|e|, so that df = (de − f (f·de))/|e|; of a Gaussian de/dw = e d²/w³.
    squares = tl.sum(e * e, axis=1)
    scale = tl.rsqrt(squares)[:, None]
    by_place = (slope - e * (tl.sum(e * slope, axis=1) / squares)[:, None]) * scale
    spread = tl.sum(e * e * d * d, axis=1) / squares
    by_width = e * scale * (d * d - spread[:, None]) / (width * width * width)
    return e * scale, by_place * unit[:, None], by_width


@triton.jit
def coordinate(places, token, real, A: tl.constexpr, n: tl.constexpr):
    """The places (T) of some tokens along an axis; coordinate 0 addresses the last axis."""
    if n <= 3 - A:
        return tl.zeros(real.shape, tl.float32)
    return tl.load(places + token * n + (3 - A), mask=real, other=0.0).to(tl.float32)


@triton.jit
def offsets(
    token, real, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
):  # fmt: skip
    """Where the addresses of some tokens are in memory, (T, P0, P1, P2, P3), and which exist."""
    i0 = tl.arange(0, P0)[None, :, None, None, None]
    i1 = tl.arange(0, P1)[None, None, :, None, None]
    i2 = tl.arange(0, P2)[None, None, None, :, None]
    i3 = tl.arange(0, P3)[None, None, None, None, :]
    voxel = ((i0 * G1 + i1) * G2 + i2) * G3 + i3
    exist = (i0 < G0) & (i1 < G1) & (i2 < G2) & (i3 < G3)
    where = token[:, None, None, None, None] * V + voxel
    return where, real[:, None, None, None, None] & exist


@triton.jit
def along(values, A: tl.constexpr):
    """(T, P0, P1, P2, P3) summed over all axes but one: (T, P)."""
    if A != 3:
        values = tl.sum(values, axis=4)
    if A != 2:
        values = tl.sum(values, axis=3)
    if A != 1:
        values = tl.sum(values, axis=2)
    if A != 0:
        values = tl.sum(values, axis=1)
    return values


@triton.jit
def store_gradient(
    by_places, by_factor, by_place, by_width, token, real, A: tl.constexpr, n: tl.constexpr
):
    """Store what an axis' coordinate receives; return what the width does, (T)."""
    tl.store(by_places + token * n + (3 - A), tl.sum(by_factor * by_place, axis=1), mask=real)
    return tl.sum(by_factor * by_width, axis=1)


@triton.jit(do_not_specialize=["N"])
def address_kernel(
    write_at, read_at, width, phi, psi, N,
    H: tl.constexpr, V: tl.constexpr, T: tl.constexpr, n: tl.constexpr, GAUSSIAN: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """Addresses (B, N, H, V) of some tokens of a row and head, of writes or of reads."""
    # The tokens of this program, of one row and head.
    program = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * T + tl.arange(0, T)
    real = t < N
    token = (program // H * N + t) * H + program % H
    w = 1.0
    if GAUSSIAN:
        w = tl.load(width + program % H).to(tl.float32)
    places, found = write_at, phi
    if tl.program_id(2) == 1:
        places, found = read_at, psi
    # One factor (T, P) per axis.
    p0 = coordinate(places, token, real, 0, n)
    p1 = coordinate(places, token, real, 1, n)
    p2 = coordinate(places, token, real, 2, n)
    p3 = coordinate(places, token, real, 3, n)
    f0, _, _ = factor(p0, w, G0, W0, P0, GAUSSIAN)
    f1, _, _ = factor(p1, w, G1, W1, P1, GAUSSIAN)
    f2, _, _ = factor(p2, w, G2, W2, P2, GAUSSIAN)
    f3, _, _ = factor(p3, w, G3, W3, P3, GAUSSIAN)
    # φ = e₀ ⊗ e₁ ⊗ e₂ ⊗ e₃   (T, P0, P1, P2, P3)
    address = f0[:, :, None, None, None] * f1[:, None, :, None, None]
    address = address * (f2[:, None, None, :, None] * f3[:, None, None, None, :])
    where, exist = offsets(token, real, V, G0, G1, G2, G3, P0, P1, P2, P3)
    tl.store(found + where, address, mask=exist)


@triton.jit(do_not_specialize=["N"])
def address_backward_kernel(
    write_at, read_at, width, by_phi, by_psi, by_write_at, by_read_at, by_width, N,
    H: tl.constexpr, V: tl.constexpr, T: tl.constexpr, n: tl.constexpr, GAUSSIAN: tl.constexpr,
    G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr, G3: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr,
):  # fmt: skip
    """What places and width receive of the gradient of addresses; the width's in parts."""
    # The tokens of this program, of one row and head.
    program = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * T + tl.arange(0, T)
    real = t < N
    token = (program // H * N + t) * H + program % H
    w = 1.0
    if GAUSSIAN:
        w = tl.load(width + program % H).to(tl.float32)
    places, by_address, by_places = write_at, by_phi, by_write_at
    if tl.program_id(2) == 1:
        places, by_address, by_places = read_at, by_psi, by_read_at
    # dφ (T, P0, P1, P2, P3), and the factors with their slopes once more.
    where, exist = offsets(token, real, V, G0, G1, G2, G3, P0, P1, P2, P3)
    given = tl.load(by_address + where, mask=exist, other=0.0).to(tl.float32)
    p0 = coordinate(places, token, real, 0, n)
    p1 = coordinate(places, token, real, 1, n)
    p2 = coordinate(places, token, real, 2, n)
    p3 = coordinate(places, token, real, 3, n)
    f0, slope0, wider0 = factor(p0, w, G0, W0, P0, GAUSSIAN)
    f1, slope1, wider1 = factor(p1, w, G1, W1, P1, GAUSSIAN)
    f2, slope2, wider2 = factor(p2, w, G2, W2, P2, GAUSSIAN)
    f3, slope3, wider3 = factor(p3, w, G3, W3, P3, GAUSSIAN)
    f0, f1 = f0[:, :, None, None, None], f1[:, None, :, None, None]
    f2, f3 = f2[:, None, None, :, None], f3[:, None, None, None, :]
    # de_a = Σ over the other axes of dφ times their factors, (T, P).
    by_3 = along(given * (f0 * (f1 * f2)), 3)
    by_w = store_gradient(by_places, by_3, slope3, wider3, token, real, 3, n)
    if n > 1:
        by_2 = along(given * (f0 * (f1 * f3)), 2)
        by_w += store_gradient(by_places, by_2, slope2, wider2, token, real, 2, n)
    if n > 2:
        by_1 = along(given * (f0 * (f2 * f3)), 1)
        by_w += store_gradient(by_places, by_1, slope1, wider1, token, real, 1, n)
    if n > 3:
        by_0 = along(given * (f1 * (f2 * f3)), 0)
        by_w += store_gradient(by_places, by_0, slope0, wider0, token, real, 0, n)
    # A program's part of the width's gradient: by_width is (B · programs, H).
    if GAUSSIAN:
        part = (program // H * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2)
        part = (part + tl.program_id(2)) * H + program % H
        tl.store(by_width + part, tl.sum(tl.where(real, by_w, 0.0)))


def make_addresses(
    inputs: PlaceInputs, plan: Plan, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """φ (B, N, H, V) of the writes, and of the reads where they have places of their own."""
    B, N, H, _ = inputs.content.shape
    phi = inputs.content.new_empty(B, N, H, plan["V"], dtype=dtype)
    psi = None if inputs.read_at is None else torch.empty_like(phi)
    kernel, _ = plan.once(_kernels)
    kernel(
        (B * H, blocks(N, plan["T"]), 1 if psi is None else 2),
        (inputs.write_at, inputs.asked_at, or_else(inputs.width, phi), phi, or_else(psi, phi)),
        (N,),
    )
    return phi, psi


def _kernels(plan: Plan) -> tuple[BoundKernel, BoundKernel]:
    """Forward and backward."""
    # One warp sums along an axis without the others; more where a single address is larger.
    warps = min(8, max(1, plan["P0"] * plan["P1"] * plan["P2"] * plan["P3"] // WARP_VALUES))
    kernels = address_kernel, address_backward_kernel
    forward, backward = (plan.bound(kernel, warps=warps) for kernel in kernels)
    return forward, backward


def addresses_backward(
    inputs: PlaceInputs, plan: Plan, by_phi: Tensor, by_psi: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What write_at, read_at and width receive, the width in parts (programs, H).

    `by_psi` is None where they share places.
    """
    B, N, H, _ = inputs.content.shape
    by_write_at = torch.empty_like(inputs.write_at)
    by_read_at = None if by_psi is None else torch.empty_like(inputs.asked_at)
    grid = (B * H, blocks(N, plan["T"]), 1 if by_psi is None else 2)
    by_width = inputs.write_at.new_empty(B * grid[1] * grid[2], H)
    _, kernel = plan.once(_kernels)
    kernel(
        grid,
        (
            inputs.write_at, inputs.asked_at, or_else(inputs.width, by_width), by_phi,
            or_else(by_psi, by_phi), by_write_at, or_else(by_read_at, by_write_at), by_width,
        ),
        (N,),
    )  # fmt: skip
    return by_write_at, by_read_at, None if inputs.width is None else by_width
