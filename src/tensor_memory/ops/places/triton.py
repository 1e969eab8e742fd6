"""The place memory fused: one program per row and head goes through the chunks, state on chip.

The equations are those of `chunked`; addresses are made from places inside the kernels and never
stored. Forward keeps the state before every chunk; backward goes from the last chunk to the first
with the gradient of the state on chip.

Letters: B batch, N tokens, H heads, L tokens per chunk, V voxels, C channels, n axes.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tensor_memory.ops.places.addresses import voxels
from tensor_memory.ops.places.inputs import PlaceInputs

MOST_VOXELS = 256
"""V that a program can hold on chip beside its chunk."""
MOST_CHANNELS = 64


@triton.jit
def product(a, b, MODE: tl.constexpr):
    """a @ b with float32 sums; operands in bfloat16, in (three) TF32 products, or as they are."""
    if MODE == "bf16":
        found = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif MODE == "bf16-emulated":  # the interpreter multiplies bfloat16 wrongly
        a, b = a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32)
        found = tl.dot(a, b, input_precision="ieee")
    else:
        found = tl.dot(a, b, input_precision=MODE)
    return found


@triton.jit
def coordinate(place, SIZE: tl.constexpr, WRAP: tl.constexpr):
    """A place in [-1, 1] in voxels: moved to the border, or round again."""
    at = (place + 1.0) * ((SIZE - 1) / 2)
    if WRAP:
        at -= tl.floor(at / SIZE) * SIZE
    else:
        at = tl.minimum(tl.maximum(at, 0.0), SIZE - 1.0)
    return at


@triton.jit
def distance(at, index, SIZE: tl.constexpr, WRAP: tl.constexpr):
    """(L) coordinates and (I) voxels -> (L, I) signed distances."""
    d = at[:, None] - index[None, :].to(tl.float32)
    if WRAP:
        d += SIZE / 2
        d -= tl.floor(d / SIZE) * SIZE + SIZE / 2
    return d


@triton.jit
def weight(d, at, width, GAUSSIAN: tl.constexpr):
    """The kernel before its norm; the nearest voxel of a Gaussian gets 1."""
    if GAUSSIAN:
        nearest = at - tl.floor(at + 0.5)
        e = tl.exp(-0.5 * (d * d - (nearest * nearest)[:, None]) / (width * width))
    else:
        e = tl.maximum(1.0 - tl.abs(d), 0.0)
    return e


@triton.jit
def slope(d, e, width, GAUSSIAN: tl.constexpr):
    """∂e/∂at, less what the norm takes out again."""
    if GAUSSIAN:
        found = -e * d / (width * width)
    else:
        sign = tl.where(d > 0, -1.0, tl.where(d < 0, 1.0, 0.0))
        found = tl.where(tl.abs(d) <= 1.0, sign, 0.0)
    return found


@triton.jit
def axis_factor(
    at, voxel, width, SIZE: tl.constexpr, PAD: tl.constexpr, STRIDE: tl.constexpr,
    WRAP: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """One axis' factor of unit length for every voxel of the grid: (L, V)."""
    line = tl.arange(0, PAD)
    d = distance(at, line, SIZE, WRAP)
    e = tl.where((line < SIZE)[None, :], weight(d, at, width, GAUSSIAN), 0.0)
    scale = tl.rsqrt(tl.sum(e * e, axis=1))
    d = distance(at, (voxel // STRIDE) % SIZE, SIZE, WRAP)
    return weight(d, at, width, GAUSSIAN) * scale[:, None]


@triton.jit
def axis_backward(
    by_factor, at, voxel, width, SIZE: tl.constexpr, PAD: tl.constexpr, STRIDE: tl.constexpr,
    WRAP: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """What the coordinate (L) and the width (L) receive of the gradient of a factor (L, V)."""
    line = tl.arange(0, PAD)
    d = distance(at, line, SIZE, WRAP)
    e = tl.where((line < SIZE)[None, :], weight(d, at, width, GAUSSIAN), 0.0)
    de = tl.where((line < SIZE)[None, :], slope(d, e, width, GAUSSIAN), 0.0)
    squares = tl.sum(e * e, axis=1)
    scale = tl.rsqrt(squares)
    mean = tl.sum(e * de, axis=1) / squares
    here = distance(at, (voxel // STRIDE) % SIZE, SIZE, WRAP)
    factor = weight(here, at, width, GAUSSIAN)
    changed = (slope(here, factor, width, GAUSSIAN) - factor * mean[:, None]) * scale[:, None]
    by_at = tl.sum(by_factor * changed, axis=1)
    by_width = tl.zeros_like(by_at)
    if GAUSSIAN:
        spread = tl.sum(e * e * d * d, axis=1) / squares
        grown = factor * scale[:, None] * (here * here - spread[:, None])
        by_width = tl.sum(by_factor * grown, axis=1) / (width * width * width)
    return by_at, by_width


@triton.jit
def axis_coordinate(places, token, real, n: tl.constexpr, axis: tl.constexpr,
                    SIZE: tl.constexpr, WRAP: tl.constexpr):  # fmt: skip
    """The coordinates (L) of some tokens along an axis; coordinate 0 is the last axis."""
    place = tl.load(places + token * n + (n - 1 - axis), mask=real, other=0.0).to(tl.float32)
    return coordinate(place, SIZE, WRAP)


@triton.jit
def address(
    places, token, real, voxel, width,
    n: tl.constexpr, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, PAD: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """φ (L, V) of some tokens: the product of one factor per axis; 0 at voxels that are padding."""
    at = axis_coordinate(places, token, real, n, 0, G0, W0)
    phi = axis_factor(at, voxel, width, G0, PAD, V // G0, W0, GAUSSIAN)
    if n > 1:
        at = axis_coordinate(places, token, real, n, 1, G1, W1)
        phi *= axis_factor(at, voxel, width, G1, PAD, V // (G0 * G1), W1, GAUSSIAN)
    if n > 2:
        at = axis_coordinate(places, token, real, n, 2, G2, W2)
        phi *= axis_factor(at, voxel, width, G2, PAD, G3, W2, GAUSSIAN)
    if n > 3:
        at = axis_coordinate(places, token, real, n, 3, G3, W3)
        phi *= axis_factor(at, voxel, width, G3, PAD, 1, W3, GAUSSIAN)
    return tl.where((voxel < V)[None, :], phi, 0.0)


@triton.jit
def others(
    places, token, real, voxel, width, axis: tl.constexpr,
    n: tl.constexpr, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, PAD: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """The product of the factors of all axes but one."""
    phi = tl.full([token.shape[0], voxel.shape[0]], 1.0, tl.float32)
    phi = tl.where((voxel < V)[None, :], phi, 0.0)
    if axis != 0:
        at = axis_coordinate(places, token, real, n, 0, G0, W0)
        phi *= axis_factor(at, voxel, width, G0, PAD, V // G0, W0, GAUSSIAN)
    if n > 1 and axis != 1:
        at = axis_coordinate(places, token, real, n, 1, G1, W1)
        phi *= axis_factor(at, voxel, width, G1, PAD, V // (G0 * G1), W1, GAUSSIAN)
    if n > 2 and axis != 2:
        at = axis_coordinate(places, token, real, n, 2, G2, W2)
        phi *= axis_factor(at, voxel, width, G2, PAD, G3, W2, GAUSSIAN)
    if n > 3 and axis != 3:
        at = axis_coordinate(places, token, real, n, 3, G3, W3)
        phi *= axis_factor(at, voxel, width, G3, PAD, 1, W3, GAUSSIAN)
    return phi


@triton.jit
def place_backward(
    by_phi, places, by_places, token, real, voxel, width, axis: tl.constexpr,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, WRAP: tl.constexpr,
    n: tl.constexpr, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, PAD: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """Store what the places receive along one axis; return what the width does, (L)."""
    rest = others(
        places, token, real, voxel, width, axis,
        n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
    )  # fmt: skip
    place = tl.load(places + token * n + (n - 1 - axis), mask=real, other=0.0).to(tl.float32)
    at = coordinate(place, SIZE, WRAP)
    by_at, by_width = axis_backward(
        by_phi * rest, at, voxel, width, SIZE, PAD, STRIDE, WRAP, GAUSSIAN
    )
    if not WRAP:  # at the border a place does not move its coordinate
        raw = (place + 1.0) * ((SIZE - 1) / 2)
        by_at = tl.where((raw >= 0.0) & (raw <= SIZE - 1.0), by_at, 0.0)
    tl.store(by_places + token * n + (n - 1 - axis), by_at * ((SIZE - 1) / 2), mask=real)
    return by_width


@triton.jit
def address_backward(
    by_phi, places, by_places, token, real, voxel, width,
    n: tl.constexpr, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, PAD: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """Store what the places receive; return what the width does, (L)."""
    by_width = place_backward(
        by_phi, places, by_places, token, real, voxel, width, 0, G0, V // G0, W0,
        n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
    )  # fmt: skip
    if n > 1:
        by_width += place_backward(
            by_phi, places, by_places, token, real, voxel, width, 1, G1, V // (G0 * G1), W1,
            n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
        )  # fmt: skip
    if n > 2:
        by_width += place_backward(
            by_phi, places, by_places, token, real, voxel, width, 2, G2, G3, W2,
            n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
        )  # fmt: skip
    if n > 3:
        by_width += place_backward(
            by_phi, places, by_places, token, real, voxel, width, 3, G3, 1, W3,
            n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
        )  # fmt: skip
    return by_width


@triton.jit
def decays(log_keep, resets, token, row_token, real, HAS_RESETS: tl.constexpr, L: tl.constexpr):
    """g (L), its end g_L, the document (L) of each token within the chunk, and the last one."""
    g = tl.cumsum(tl.load(log_keep + token, mask=real, other=0.0).to(tl.float32), axis=0)
    part = tl.zeros([L], tl.int32)
    if HAS_RESETS:
        marks = tl.load(resets + row_token, mask=real, other=0).to(tl.int32)
        part = tl.cumsum(marks, axis=0)
    last = tl.arange(0, L) == L - 1
    return g, tl.sum(tl.where(last, g, 0.0)), part, tl.sum(tl.where(last, part, 0))


@triton.jit
def inverse(system, L: tl.constexpr, STEPS: tl.constexpr, MODE: tl.constexpr):
    """(I + T)⁻¹ of a strictly lower T: (I − T)(I + T²)(I + T⁴)…, since T to the L is zero."""
    i = tl.arange(0, L)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    power = -system
    found = eye + power
    for _ in tl.static_range(STEPS - 1):
        power = product(power, power, MODE)
        found += product(found, power, MODE)
    return found


@triton.jit
def forward_kernel(
    write_at, read_at, content, rate, log_keep, width, state, resets, reads, after, kept, N,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, VP: tl.constexpr, L: tl.constexpr,
    STEPS: tl.constexpr, DELTA: tl.constexpr, SAME: tl.constexpr, KEEP: tl.constexpr,
    HAS_RESETS: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr,
    n: tl.constexpr, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, PAD: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """A row and head through all chunks."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // H, program % H
    voxel, channel, i = tl.arange(0, VP), tl.arange(0, CP), tl.arange(0, L)
    grid_at = voxel[:, None] * C + channel[None, :]
    grid_real = (voxel < V)[:, None] & (channel < C)[None, :]
    S = tl.load(state + program * V * C + grid_at, mask=grid_real, other=0.0)
    w = 1.0
    if GAUSSIAN:
        w = tl.load(width + head).to(tl.float32)
    chunks = tl.cdiv(N, L)
    for s in range(chunks):
        t = s * L + i
        real = t < N
        row_token = row * N + t
        token = row_token * H + head
        if KEEP:
            tl.store(kept + (program * chunks + s) * V * C + grid_at, S, mask=grid_real)
        g, total, part, parts = decays(log_keep, resets, token, row_token, real, HAS_RESETS, L)
        # Addresses of the chunk, and what its tokens write.
        phi = address(write_at, token, real, voxel, w, n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3,
                      GAUSSIAN)  # fmt: skip
        psi = phi
        if not SAME:
            psi = address(read_at, token, real, voxel, w, n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3,
                          GAUSSIAN)  # fmt: skip
        value_real = real[:, None] & (channel < C)[None, :]
        value_at = token[:, None] * C + channel[None, :]
        v = tl.load(content + value_at, mask=value_real, other=0.0).to(tl.float32)
        beta = tl.load(rate + token, mask=real, other=0.0).to(tl.float32)
        same_part = part[:, None] == part[None, :]
        earlier = (i[:, None] >= i[None, :]) & same_part
        within = tl.where(earlier, tl.exp(tl.where(earlier, g[:, None] - g[None, :], 0.0)), 0.0)
        from_state = tl.where(part == 0, tl.exp(g), 0.0)
        to_state = tl.where(part == parts, tl.exp(total - g), 0.0)
        u = beta[:, None] * v
        if DELTA:
            among = product(phi, tl.trans(phi), EXACT) * within
            system = tl.where(i[:, None] > i[None, :], beta[:, None] * among, 0.0)
            held = from_state[:, None] * product(phi, S, EXACT)
            u = product(inverse(system, L, STEPS, EXACT), u - beta[:, None] * held, EXACT)
        # Reads: of this chunk's writes, and of the state before it.
        attention = product(psi, tl.trans(phi), MODE) * within
        r = product(attention, u, MODE) + from_state[:, None] * product(psi, S, MODE)
        tl.store(reads + value_at, r, mask=value_real)
        carry = tl.where(parts == 0, tl.exp(total), 0.0)
        S = carry * S + product(tl.trans(phi * to_state[:, None]), u, MODE)
    tl.store(after + program * V * C + grid_at, S, mask=grid_real)


@triton.jit
def backward_kernel(
    write_at, read_at, content, rate, log_keep, width, resets, kept, by_reads, by_after,
    by_write_at, by_read_at, by_content, by_rate, by_log_keep, by_width, by_state, N,
    H: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, VP: tl.constexpr, L: tl.constexpr,
    STEPS: tl.constexpr, DELTA: tl.constexpr, SAME: tl.constexpr, HAS_AFTER: tl.constexpr,
    HAS_RESETS: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr,
    n: tl.constexpr, V: tl.constexpr, G0: tl.constexpr, G1: tl.constexpr, G2: tl.constexpr,
    G3: tl.constexpr, PAD: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr,
    W3: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """From the last chunk to the first, the gradient of the state on chip."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // H, program % H
    voxel, channel, i = tl.arange(0, VP), tl.arange(0, CP), tl.arange(0, L)
    grid_at = voxel[:, None] * C + channel[None, :]
    grid_real = (voxel < V)[:, None] & (channel < C)[None, :]
    dS = tl.zeros([VP, CP], tl.float32)
    if HAS_AFTER:
        dS = tl.load(by_after + program * V * C + grid_at, mask=grid_real, other=0.0)
    w = 1.0
    if GAUSSIAN:
        w = tl.load(width + head).to(tl.float32)
    dw = 0.0
    chunks = tl.cdiv(N, L)
    for back in range(chunks):
        s = chunks - 1 - back
        t = s * L + i
        real = t < N
        row_token = row * N + t
        token = row_token * H + head
        # What the forward had: state before, addresses, values, decays.
        S = tl.load(kept + (program * chunks + s) * V * C + grid_at, mask=grid_real, other=0.0)
        g, total, part, parts = decays(log_keep, resets, token, row_token, real, HAS_RESETS, L)
        phi = address(write_at, token, real, voxel, w, n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3,
                      GAUSSIAN)  # fmt: skip
        psi = phi
        if not SAME:
            psi = address(read_at, token, real, voxel, w, n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3,
                          GAUSSIAN)  # fmt: skip
        value_real = real[:, None] & (channel < C)[None, :]
        value_at = token[:, None] * C + channel[None, :]
        v = tl.load(content + value_at, mask=value_real, other=0.0).to(tl.float32)
        beta = tl.load(rate + token, mask=real, other=0.0).to(tl.float32)
        dr = tl.load(by_reads + value_at, mask=value_real, other=0.0).to(tl.float32)
        earlier = (i[:, None] >= i[None, :]) & (part[:, None] == part[None, :])
        within = tl.where(earlier, tl.exp(tl.where(earlier, g[:, None] - g[None, :], 0.0)), 0.0)
        from_state = tl.where(part == 0, tl.exp(g), 0.0)
        to_state = tl.where(part == parts, tl.exp(total - g), 0.0)
        carry = tl.where(parts == 0, tl.exp(total), 0.0)
        u = beta[:, None] * v
        if DELTA:
            overlap = product(phi, tl.trans(phi), EXACT)
            system = tl.where(i[:, None] > i[None, :], beta[:, None] * overlap * within, 0.0)
            solved = inverse(system, L, STEPS, EXACT)
            was = product(phi, S, EXACT)
            error = v - from_state[:, None] * was
            u = product(solved, beta[:, None] * error, EXACT)
        # Through the state after the chunk: S' = carry S + (φ to)ᵀ u.
        phi_dS = product(phi, dS, MODE)
        du = to_state[:, None] * phi_dS
        moved = to_state * tl.sum(u * phi_dS, axis=1)
        dg = -moved
        dtotal = tl.sum(moved) + carry * tl.sum(S * dS)
        dphi = to_state[:, None] * product(u, tl.trans(dS), MODE)
        # Through the reads: attention to this chunk, and the state before it.
        attention = product(psi, tl.trans(phi), MODE) * within
        du += product(tl.trans(attention), dr, MODE)
        by_attention = product(dr, tl.trans(u), MODE)
        by_gap = by_attention * attention
        dg += tl.sum(by_gap, axis=1) - tl.sum(by_gap, axis=0)
        by_overlap = by_attention * within
        dr_S = from_state[:, None] * product(dr, tl.trans(S), MODE)
        dpsi = product(by_overlap, phi, MODE) + dr_S
        dphi += product(tl.trans(by_overlap), psi, MODE)
        dg += tl.sum(psi * dr_S, axis=1)
        dS = carry * dS + product(tl.trans(psi * from_state[:, None]), dr, MODE)
        if DELTA:
            # u = solved (β error): the triangular system run the other way.
            by_right = product(tl.trans(solved), du, EXACT)
            by_system = -product(by_right, tl.trans(u), EXACT)
            by_system = tl.where(i[:, None] > i[None, :], by_system, 0.0)
            dbeta = tl.sum(by_right * error, axis=1)
            dbeta += tl.sum(by_system * overlap * within, axis=1)
            dv = beta[:, None] * by_right
            by_gap = by_system * system
            dg += tl.sum(by_gap, axis=1) - tl.sum(by_gap, axis=0)
            by_overlap = by_system * beta[:, None] * within
            dphi += product(by_overlap, phi, EXACT) + product(tl.trans(by_overlap), phi, EXACT)
            by_was = -from_state[:, None] * dv
            dg += tl.sum(by_was * was, axis=1)
            dphi += product(by_was, tl.trans(S), EXACT)
            dS += product(tl.trans(phi), by_was, EXACT)
        else:
            dbeta = tl.sum(du * v, axis=1)
            dv = beta[:, None] * du
        tl.store(by_content + value_at, dv, mask=value_real)
        tl.store(by_rate + token, dbeta, mask=real)
        # Every log α is in g from its token on, and in the chunk's total.
        after_sum = tl.sum(dg) - tl.cumsum(dg, axis=0) + dg
        tl.store(by_log_keep + token, after_sum + dtotal, mask=real)
        if SAME:
            dphi += dpsi
        by_w = address_backward(
            dphi, write_at, by_write_at, token, real, voxel, w,
            n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
        )  # fmt: skip
        if not SAME:
            by_w += address_backward(
                dpsi, read_at, by_read_at, token, real, voxel, w,
                n, V, G0, G1, G2, G3, PAD, W0, W1, W2, W3, GAUSSIAN,
            )  # fmt: skip
        dw += tl.sum(tl.where(real, by_w, 0.0))
    if GAUSSIAN:
        tl.store(by_width + program, dw)
    tl.store(by_state + program * V * C + grid_at, dS, mask=grid_real)


INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)


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


def scan(inputs: PlaceInputs, products: torch.dtype) -> tuple[Tensor, Tensor]:
    """-> reads (B, N, H, C), state (B, H, *grid, C), with products in float32 or bfloat16."""
    tensors = [None if t is None else t.contiguous() for t in inputs[:8]]
    same = inputs.read_at is inputs.write_at
    options = (inputs.rule, inputs.wrap, same, products)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return FusedPlaces.apply(*tensors, options)  # type: ignore[return-value]
    reads, after, _ = _forward(PlaceInputs(*tensors, *options[:2]), same, products, keep=False)
    return reads, after


class FusedPlaces(torch.autograd.Function):
    """The eight tensors of `PlaceInputs`, then the options."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Keeps the inputs and the state before every chunk."""
        *tensors, options = arguments
        rule, wrap, same, products = options
        inputs = PlaceInputs(*tensors, rule, wrap)
        reads, after, kept = _forward(inputs, same, products, keep=True)
        ctx.save_for_backward(*tensors, kept)
        ctx.set_materialize_grads(False)
        ctx.options = options
        return reads, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore
        """The gradients of the seven floats."""
        *tensors, kept = ctx.saved_tensors
        rule, wrap, same, products = ctx.options
        inputs = PlaceInputs(*tensors, rule, wrap)
        return *_backward(inputs, same, products, kept, *grads), None, None


def _constants(inputs: PlaceInputs, same: bool, products: torch.dtype) -> dict[str, Any]:
    grid, wrap, C = inputs.grid, inputs.wrap, inputs.content.shape[-1]
    n, V = len(grid), voxels(grid)
    sizes = (*grid, 1, 1, 1)[:4]
    wraps = (*wrap, False, False, False)[:4]
    delta = inputs.rule == "delta"
    L = 32  # at 64 the products take Hopper's wide instructions, and Triton 3.6 then writes astray
    precision = "ieee" if INTERPRETED else "tf32x3"
    if not INTERPRETED and torch.get_float32_matmul_precision() != "highest":
        precision = "tf32"
    low = "bf16-emulated" if INTERPRETED else "bf16"
    return {
        "H": inputs.content.shape[2],
        "C": C,
        "CP": max(16, triton.next_power_of_2(C)),
        "VP": max(16, triton.next_power_of_2(V)),
        "L": L,
        "STEPS": (L - 1).bit_length(),
        "DELTA": delta,
        "SAME": same,
        "HAS_RESETS": inputs.resets is not None,
        "MODE": low if products == torch.bfloat16 else precision,
        "EXACT": precision if products != torch.bfloat16 or INTERPRETED else "tf32",
        "n": n,
        "V": V,
        "PAD": triton.next_power_of_2(max(grid)),
        "GAUSSIAN": inputs.width is not None,
        **{f"G{axis}": size for axis, size in enumerate(sizes)},
        **{f"W{axis}": wraps_ for axis, wraps_ in enumerate(wraps)},
    }


def _launch_options(warps: int) -> dict[str, Any]:
    return {} if INTERPRETED else {"num_warps": warps, "num_stages": 1}


def _forward(
    inputs: PlaceInputs, same: bool, products: torch.dtype, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    B, N, H, _ = inputs.content.shape
    reads, after = torch.empty_like(inputs.content), torch.empty_like(inputs.state)
    constants = _constants(inputs, same, products)
    chunks = triton.cdiv(N, constants["L"])
    kept = inputs.state.new_empty(B, H, chunks if keep else 0, *inputs.state.shape[2:])
    stand_in = reads
    forward_kernel[(B * H,)](
        inputs.write_at, inputs.read_at, inputs.content, inputs.rate, inputs.log_keep,
        stand_in if inputs.width is None else inputs.width, inputs.state,
        stand_in if inputs.resets is None else inputs.resets, reads, after, kept, N,
        **constants, KEEP=keep, **_launch_options(4),
    )  # fmt: skip
    return reads, after, kept


def _backward(
    inputs: PlaceInputs, same: bool, products: torch.dtype, kept: Tensor,
    grad_reads: Tensor | None, grad_after: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    B, N, H, _ = inputs.content.shape
    if grad_reads is None:
        grad_reads = torch.zeros_like(inputs.content)
    by_write_at = torch.empty_like(inputs.write_at)
    by_read_at = by_write_at if same else torch.empty_like(inputs.read_at)
    by_content, by_rate = torch.empty_like(inputs.content), torch.empty_like(inputs.rate)
    by_log_keep, by_state = torch.empty_like(inputs.log_keep), torch.empty_like(inputs.state)
    by_width = inputs.content.new_empty(B, H)
    stand_in = by_rate
    constants = _constants(inputs, same, products)
    backward_kernel[(B * H,)](
        inputs.write_at, inputs.read_at, inputs.content, inputs.rate, inputs.log_keep,
        stand_in if inputs.width is None else inputs.width,
        stand_in if inputs.resets is None else inputs.resets, kept, grad_reads.contiguous(),
        stand_in if grad_after is None else grad_after.contiguous(),
        by_write_at, by_read_at, by_content, by_rate, by_log_keep, by_width, by_state, N,
        **constants, HAS_AFTER=grad_after is not None, **_launch_options(8),
    )  # fmt: skip
    return (
        by_write_at, None if same else by_read_at, by_content, by_rate, by_log_keep,
        None if inputs.width is None else by_width.sum(0), by_state,
    )  # fmt: skip
