"""Kernels of the backward pass; the derivation is in README.md.

Only `backward_kernel` is sequential. What it needs of each step's gates is recomputed beforehand
for all steps at once (`slopes_kernel`), what the weights and the writes receive is reduced
afterwards (`mix_kernel`, `taps_kernel`, `writes_kernel`, `reads_kernel`). Sums over programs are
left to the caller as partial sums, so every gradient is the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tensor_memory.ops.triton_forward import (
    EPSILON,
    corner,
    filtered_write,
    kernel_value,
    meet,
    mix_tile,
    neighbours,
    product,
    profile,
    sigmoid,
    tanh,
    tap,
)


@triton.jit
def slopes_kernel(
    write_at,
    spread,
    content,
    taps,
    mix,
    bias,
    writes,
    kept_hidden,
    kept_cell,
    slopes,
    inputs,
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
    WRITES: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Per voxel and channel, how the gates i, f, o, g move with dc and dh, and dc with dh and dc.

    slopes (S, B, V, 6, C): ∂i, ∂f, ∂o, ∂g, ∂c'/∂h', ∂c/∂c'. inputs (S, B, V, 2, C): what the mix
    was applied to. A step that does not write passes dc on and moves nothing else.
    """
    item, v = tl.program_id(0), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    s, b = item // B, item % B
    row = b * S + s
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    own = (v < V)[:, None]
    start = item.to(tl.int64) * (V * C)
    zero = tl.zeros([BLOCK_V, C], dtype=tl.float32)

    u = filtered_write(
        write_at, spread, content, taps, row, v, M,
        BLOCK_V, C, D, H, W, AXES, GAUSSIAN, FILTERED,
    )  # fmt: skip
    z = neighbours(kept_hidden + start, taps, v, False, FILTERED, BLOCK_V, C, D, H, W, AXES)
    pair = inputs + 2 * start + v[:, None] * (2 * C) + c[None, :]
    tl.store(pair, u.to(inputs.dtype.element_ty), mask=own)
    tl.store(pair + C, z.to(inputs.dtype.element_ty), mask=own)

    i = product(z, mix_tile(mix, 0, 1, C), product(u, mix_tile(mix, 0, 0, C), zero, PRODUCTS),
                PRODUCTS)  # fmt: skip
    f = product(z, mix_tile(mix, 1, 1, C), product(u, mix_tile(mix, 1, 0, C), zero, PRODUCTS),
                PRODUCTS)  # fmt: skip
    o = product(z, mix_tile(mix, 2, 1, C), product(u, mix_tile(mix, 2, 0, C), zero, PRODUCTS),
                PRODUCTS)  # fmt: skip
    g = product(z, mix_tile(mix, 3, 1, C), product(u, mix_tile(mix, 3, 0, C), zero, PRODUCTS),
                PRODUCTS)  # fmt: skip
    i = sigmoid(i + tl.load(bias + c)[None, :], FAST)
    f = sigmoid(f + tl.load(bias + C + c)[None, :], FAST)
    o = sigmoid(o + tl.load(bias + 2 * C + c)[None, :], FAST)
    g = tanh(g + tl.load(bias + 3 * C + c)[None, :], FAST)
    memory = tl.load(kept_cell + start + v[:, None] * C + c[None, :], mask=own, other=0.0)
    new = tanh(f * memory + i * g, FAST)

    live = 1.0
    if WRITES:
        live = tl.load(writes + row).to(tl.float32)
    at = slopes + 6 * start + v[:, None] * (6 * C) + c[None, :]
    kind = slopes.dtype.element_ty
    tl.store(at, (live * g * i * (1.0 - i)).to(kind), mask=own)
    tl.store(at + C, (live * memory * f * (1.0 - f)).to(kind), mask=own)
    tl.store(at + 2 * C, (live * new * o * (1.0 - o)).to(kind), mask=own)
    tl.store(at + 3 * C, (live * i * (1.0 - g * g)).to(kind), mask=own)
    tl.store(at + 4 * C, (live * o * (1.0 - new * new)).to(kind), mask=own)
    tl.store(at + 5 * C, (live * f + (1.0 - live)).to(kind), mask=own)


@triton.jit
def spread_reads(
    dh,
    read_at,
    grad_reads,
    row,
    v,
    Q,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """dh + what the reads of step `row` send back to voxels v: a hat of width 1 per axis."""
    c = tl.arange(0, C)
    z, y, x = v // (H * W), (v // W) % H, v % W
    for q in range(Q):
        at = read_at + (row * Q + q) * AXES
        weight = hat(tl.load(at), x, W)
        if H > 1:
            weight *= hat(tl.load(at + 1), y, H)
        if D > 1:
            weight *= hat(tl.load(at + 2), z, D)
        dh += weight[:, None] * tl.load(grad_reads + (row * Q + q) * C + c)[None, :]
    return dh


@triton.jit
def hat(at, i, SIZE: tl.constexpr):
    position = (tl.minimum(tl.maximum(at, -1.0), 1.0) + 1.0) * (0.5 * (SIZE - 1))
    return tl.maximum(1.0 - tl.abs(position - i), 0.0)


@triton.jit(do_not_specialize=["S", "Q", "B"])
def backward_kernel(
    read_at,
    taps,
    mix,
    writes,
    resets,
    grad_reads,
    grad_last_hidden,
    grad_last_cell,
    slopes,
    grad_filtered,
    cell_ring,
    pass_ring,
    grad_hidden,
    grad_cell,
    arrivals,
    S,
    Q,
    B,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    FILTERED: tl.constexpr,
    WRITES: tl.constexpr,
    RESETS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """All steps of a row, last to first. Leaves the gates' gradients in slopes[..., :4, :].

    grad_filtered (S, B, V, C) is what reaches the filtered hidden half of each step; its transpose
    filter is the only thing neighbours exchange.
    """
    b, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    size = B.to(tl.int64) * (V * C)
    offset = b.to(tl.int64) * (V * C)
    cell_ring += offset
    pass_ring += offset
    arrivals += b
    first = part * (TILES * BLOCK_V)
    # (out, in) tiles of the hidden half
    wi, wf = tl.trans(mix_tile(mix, 0, 1, C)), tl.trans(mix_tile(mix, 1, 1, C))
    wo, wg = tl.trans(mix_tile(mix, 2, 1, C)), tl.trans(mix_tile(mix, 3, 1, C))
    kind = slopes.dtype.element_ty

    for done in range(S + 1):
        s = S - 1 - done  # −1 at the end: only the gradient of the first state is left to gather
        row = b * S + s
        if done > 0:
            meet(arrivals, PARTS * done, PARTS)
        keep = 1.0
        if RESETS:
            keep = 1.0 - tl.load(resets + row + 1, mask=done > 0, other=0).to(tl.float32)
        for tile in range(TILES):
            v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            own = (v < V)[:, None]
            here = v[:, None] * C + c[None, :]
            given = (b.to(tl.int64) * C + c[None, :]) * V + v[:, None]
            if done == 0:
                dh = tl.load(grad_last_hidden + given, mask=own, other=0.0)
                dc = tl.load(grad_last_cell + given, mask=own, other=0.0)
            else:
                later = grad_filtered + (s + 1) * size + offset
                dh = neighbours(later, taps, v, True, FILTERED, BLOCK_V, C, D, H, W, AXES)
                dc = tl.load(cell_ring + (done % 2) * size + here, mask=own, other=0.0)
                if WRITES:
                    dh += tl.load(pass_ring + (done % 2) * size + here, mask=own, other=0.0)
                dh = spread_reads(dh, read_at, grad_reads, row + 1, v, Q, C, D, H, W, AXES)
                dh *= keep
                dc *= keep
            if s < 0:
                tl.store(grad_hidden + given, dh, mask=own)
                tl.store(grad_cell + given, dc, mask=own)
            else:
                if WRITES:
                    rest = 1.0 - tl.load(writes + row).to(tl.float32)
                    tl.store(pass_ring + ((done + 1) % 2) * size + here, dh * rest, mask=own)
                at = slopes + 6 * (s * size + offset) + v[:, None] * (6 * C) + c[None, :]
                dc += dh * tl.load(at + 4 * C, mask=own, other=0.0).to(tl.float32)
                di = dc * tl.load(at, mask=own, other=0.0).to(tl.float32)
                df = dc * tl.load(at + C, mask=own, other=0.0).to(tl.float32)
                do = dh * tl.load(at + 2 * C, mask=own, other=0.0).to(tl.float32)
                dg = dc * tl.load(at + 3 * C, mask=own, other=0.0).to(tl.float32)
                dc *= tl.load(at + 5 * C, mask=own, other=0.0).to(tl.float32)
                tl.store(cell_ring + ((done + 1) % 2) * size + here, dc, mask=own)
                tl.store(at, di.to(kind), mask=own)
                tl.store(at + C, df.to(kind), mask=own)
                tl.store(at + 2 * C, do.to(kind), mask=own)
                tl.store(at + 3 * C, dg.to(kind), mask=own)
                total = tl.zeros([BLOCK_V, C], dtype=tl.float32)
                total = product(di, wi, total, PRODUCTS)
                total = product(df, wf, total, PRODUCTS)
                total = product(do, wo, total, PRODUCTS)
                total = product(dg, wg, total, PRODUCTS)
                filtered = grad_filtered + s * size + offset + here
                tl.store(filtered, total.to(grad_filtered.dtype.element_ty), mask=own)


@triton.jit
def mix_kernel(
    slopes,
    inputs,
    partial_mix,
    partial_bias,
    rows,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    LOOPS: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Gate gradients times gate inputs, for one gate over ROWS · LOOPS voxels: (C, 2C) and (C,)."""
    chunk, gate = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, C)
    written = tl.zeros([C, C], dtype=tl.float32)
    kept = tl.zeros([C, C], dtype=tl.float32)
    total = tl.zeros([C], dtype=tl.float32)
    for loop in range(LOOPS):
        i = (chunk.to(tl.int64) * LOOPS + loop) * ROWS + tl.arange(0, ROWS)
        own = (i < rows)[:, None]
        d = tl.load(slopes + i[:, None] * (6 * C) + gate * C + c[None, :], mask=own, other=0.0)
        pair = inputs + i[:, None] * (2 * C) + c[None, :]
        u = tl.load(pair, mask=own, other=0.0)
        z = tl.load(pair + C, mask=own, other=0.0)
        written = product(tl.trans(d), u, written, PRODUCTS)
        kept = product(tl.trans(d), z, kept, PRODUCTS)
        total += tl.sum(d.to(tl.float32), axis=0)
    at = partial_mix + ((chunk * 4 + gate) * C + c[:, None]) * (2 * C) + c[None, :]
    tl.store(at, written)
    tl.store(at + C, kept)
    tl.store(partial_bias + (chunk * 4 + gate) * C + c, total)


@triton.jit
def taps_kernel(
    grad_filtered,
    kept_hidden,
    partial,
    items,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    NEAR: tl.constexpr,
    NEAR_PADDED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Correlation of grad_filtered with each of the 3ⁿ shifts of hidden: (3ⁿ, C) per program."""
    c = tl.arange(0, C)
    k = tl.arange(0, NEAR_PADDED)
    dx, dy, dz = k % 3 - 1, (k // 3) % 3 - 1, (k // 9) % 3 - 1
    if H == 1:
        dy = dy * 0
    if D == 1:
        dz = dz * 0
    V: tl.constexpr = D * H * W
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    size = tl.full([], V * C, dtype=tl.int64)
    total = tl.zeros([NEAR_PADDED, BLOCK_V, C], dtype=tl.float32)
    for i in range(tl.program_id(0), items * TILES, tl.num_programs(0)):
        v = (i % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
        start = (i // TILES) * size
        z, y, x = v // (H * W), (v // W) % H, v % W
        near_x, near_y, near_z = x[None] + dx[:, None], y[None] + dy[:, None], z[None] + dz[:, None]
        inside = (near_x >= 0) & (near_x < W) & (near_y >= 0) & (near_y < H)
        inside = inside & (near_z >= 0) & (near_z < D) & (k < NEAR)[:, None] & (v < V)[None]
        near = (near_z * H + near_y) * W + near_x  # (3ⁿ, BLOCK_V)
        d = tl.load(
            grad_filtered + start + v[:, None] * C + c[None, :], mask=(v < V)[:, None], other=0.0
        )
        h = tl.load(
            kept_hidden + start + near[:, :, None] * C + c[None, None, :],
            mask=inside[:, :, None],
            other=0.0,
        )
        total += d.to(tl.float32)[None] * h.to(tl.float32)
    at = partial + (tl.program_id(0) * NEAR + k[:, None]) * C + c[None, :]
    tl.store(at, tl.sum(total, axis=1), mask=(k < NEAR)[:, None])


@triton.jit
def axis_gradient(
    d,
    i,
    at,
    sharpness,
    taps,
    partial_taps,
    AXIS: tl.constexpr,
    SIZE: tl.constexpr,
    C: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """From d (BLOCK_V, C), what reaches one axis's profile, on to its taps and its Gaussian.

    Stores the taps' share; returns those of the coordinate and of the sharpness 1 / (2σ² + ε).
    """
    c = tl.arange(0, C)
    d_at, d_sharpness = 0.0, 0.0
    for t in tl.static_range(3):
        if FILTERED or t == 1:
            j = i + t - 1
            value = kernel_value(j, at, sharpness, SIZE, GAUSSIAN)
            if FILTERED:
                at_taps = partial_taps + (AXIS * C + c) * 3 + t
                tl.store(at_taps, tl.sum(d * value[:, None], axis=0))
            if GAUSSIAN:
                if FILTERED:
                    d_value = tl.sum(d * tap(taps, AXIS, t, 0, C)[None, :], axis=1)
                else:
                    d_value = tl.sum(d, axis=1)
                offset = j.to(tl.float32) * (2.0 / (SIZE - 1)) - 1.0 - at
                d_at += tl.sum(d_value * value * offset) * (2.0 * sharpness)
                d_sharpness -= tl.sum(d_value * value * offset * offset)
    return d_at, d_sharpness


@triton.jit
def writes_kernel(
    write_at,
    spread,
    content,
    taps,
    mix,
    slopes,
    partial_content,
    partial_at,
    partial_spread,
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
    PRODUCTS: tl.constexpr,
):
    """What one write receives from one tile of voxels; the partial sums are (items, tiles, M, …)."""
    item, tile, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s, b = item // B, item % B
    write = (b * S + s) * M + m
    out = (item * tl.num_programs(1) + tile).to(tl.int64) * M + m
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    own = (v < V)[:, None]
    z, y, x = v // (H * W), (v // W) % H, v % W

    gates = slopes + item.to(tl.int64) * (V * 6 * C) + v[:, None] * (6 * C) + c[None, :]
    d = tl.zeros([BLOCK_V, C], dtype=tl.float32)  # reaches the filtered write
    for gate in tl.static_range(4):
        weight = tl.trans(mix_tile(mix, gate, 0, C))
        d = product(
            tl.load(gates + gate * C, mask=own, other=0.0).to(tl.float32), weight, d, PRODUCTS
        )

    at = write_at + write * AXES
    sigma, sharpness = 0.0, 0.0
    if GAUSSIAN:
        sigma = tl.load(spread + write)
        sharpness = 1.0 / (2.0 * sigma * sigma + EPSILON)
    what = tl.load(content + write * C + c)[None, :]
    partial_taps += out * (AXES * C * 3)

    x_at = tl.load(at)
    px = profile(x, x_at, sharpness, taps, AXES - 1, W, C, GAUSSIAN, FILTERED)
    others = d * what
    if H > 1:
        y_at = tl.load(at + 1)
        py = profile(y, y_at, sharpness, taps, AXES - 2, H, C, GAUSSIAN, FILTERED)
    if D > 1:
        z_at = tl.load(at + 2)
        pz = profile(z, z_at, sharpness, taps, AXES - 3, D, C, GAUSSIAN, FILTERED)
        others *= pz
    d_sharpness = 0.0
    if H > 1:
        d_y, more = axis_gradient(
            others * px, y, y_at, sharpness, taps, partial_taps, AXES - 2, H, C, GAUSSIAN, FILTERED
        )
        d_sharpness += more
        tl.store(partial_at + out * AXES + 1, d_y)
        others *= py
    d_x, more = axis_gradient(
        others, x, x_at, sharpness, taps, partial_taps, AXES - 1, W, C, GAUSSIAN, FILTERED
    )
    d_sharpness += more
    tl.store(partial_at + out * AXES, d_x)
    volume = d * px
    if H > 1:
        volume *= py
    if D > 1:
        d_z, more = axis_gradient(
            volume * what, z, z_at, sharpness, taps, partial_taps, AXES - 3, D, C,
            GAUSSIAN, FILTERED,
        )  # fmt: skip
        d_sharpness += more
        tl.store(partial_at + out * AXES + 2, d_z)
        volume *= pz
    tl.store(partial_content + out * C + c, tl.sum(volume, axis=0))
    if GAUSSIAN:
        tl.store(partial_spread + out, d_sharpness * (-4.0 * sigma) * sharpness * sharpness)


@triton.jit
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
    tl.store(grad_read_at + i * AXES, tl.sum(d * slope_x * wy * wz))
    if H > 1:
        tl.store(grad_read_at + i * AXES + 1, tl.sum(d * wx * slope_y * wz))
    if D > 1:
        tl.store(grad_read_at + i * AXES + 2, tl.sum(d * wx * wy * slope_z))
