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
    axis_taps,
    corner,
    gate_sum,
    kernel_value,
    meet,
    mix_tiles,
    neighbours,
    place,
    product,
    profile,
    sigmoid,
    tanh,
    tap,
)


@triton.jit(do_not_specialize=["S", "B", "loops"])
def slopes_kernel(
    mix,
    bias,
    writes,
    written,
    kept_filtered,
    kept_cell,
    slopes,
    S,
    B,
    loops,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITES: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """How each step's gates move with dc and dh, and dc with dh and the later dc.

    slopes (S, B, V, 6, C): i, f, o, g (o by dh, the others by dc), then dc by dh, then dc by the
    later dc. A step that does not write passes dc on and moves nothing else. A program takes
    BLOCK · loops voxels, so that the weights are loaded once for many.
    """
    c = tl.arange(0, C)
    kind = slopes.dtype.element_ty
    ui, uf, uo, ug, hi, hf, ho, hg = 0, 0, 0, 0, 0, 0, 0, 0
    if RESIDENT:
        ui, uf, uo, ug = mix_tiles(mix, 0, C, PRODUCTS)
        hi, hf, ho, hg = mix_tiles(mix, 1, C, PRODUCTS)
    bias_i, bias_f = tl.load(bias + c[None, :]), tl.load(bias + C + c[None, :])
    bias_o, bias_g = tl.load(bias + 2 * C + c[None, :]), tl.load(bias + 3 * C + c[None, :])
    rows = S.to(tl.int64) * B * V
    for loop in range(loops):
        block = (tl.program_id(0) + loop * tl.num_programs(0)).to(tl.int64)
        v = block * BLOCK + tl.arange(0, BLOCK)
        own = (v < rows)[:, None]
        here = v[:, None] * C + c[None, :]
        u = tl.load(written + here, mask=own, other=0.0)
        z = tl.load(kept_filtered + here, mask=own, other=0.0)
        memory = tl.load(kept_cell + here, mask=own, other=0.0).to(tl.float32)
        i = gate_sum(u, z, ui, hi, bias_i, mix, 0, RESIDENT, C, PRODUCTS)
        g = gate_sum(u, z, ug, hg, bias_g, mix, 3, RESIDENT, C, PRODUCTS)
        f = gate_sum(u, z, uf, hf, bias_f, mix, 1, RESIDENT, C, PRODUCTS)
        o = gate_sum(u, z, uo, ho, bias_o, mix, 2, RESIDENT, C, PRODUCTS)
        i, f, o = sigmoid(i, FAST), sigmoid(f, FAST), sigmoid(o, FAST)
        g = tanh(g, FAST)
        new = tanh(f * memory + i * g, FAST)

        slope_i, slope_g = g * i * (1.0 - i), i * (1.0 - g * g)
        slope_f, slope_o = memory * f * (1.0 - f), new * o * (1.0 - o)
        slope_h = o * (1.0 - new * new)
        if WRITES:
            item = v // V
            live = tl.load(writes + (item % B) * S + item // B, mask=v < rows, other=0)
            live = live.to(tl.float32)[:, None]
            slope_i, slope_f, slope_o = live * slope_i, live * slope_f, live * slope_o
            slope_g, slope_h = live * slope_g, live * slope_h
            f = live * f + (1.0 - live)
        at = slopes + v[:, None] * (6 * C) + c[None, :]
        tl.store(at, slope_i.to(kind), mask=own)
        tl.store(at + C, slope_f.to(kind), mask=own)
        tl.store(at + 2 * C, slope_o.to(kind), mask=own)
        tl.store(at + 3 * C, slope_g.to(kind), mask=own)
        tl.store(at + 4 * C, slope_h.to(kind), mask=own)
        tl.store(at + 5 * C, f.to(kind), mask=own)


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
    z, y, x = place(v, D, H, W)
    for q in range(Q):
        at = read_at + (row * Q + q) * AXES
        weight = hat(tl.load(at), x, W)
        if H > 1:
            weight *= hat(tl.load(at + 1), y, H)
        if D > 1:
            weight *= hat(tl.load(at + 2), z, D)
        dh += weight[:, None] * tl.load(grad_reads + (row * Q + q) * C + c[None, :])
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
    LAST: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    PIN: tl.constexpr,
):
    """All steps of a row, last to first. Leaves the gates' gradients in slopes[..., :4, :].

    LAST: something arrives for the state after the last step.

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
    tx0, tx1, tx2 = axis_taps(taps, AXES - 1, W if FILTERED else 1, True, C)
    ty0, ty1, ty2 = axis_taps(taps, AXES - 2, H if FILTERED else 1, True, C)
    tz0, tz1, tz2 = axis_taps(taps, AXES - 3, D if FILTERED else 1, True, C)
    kind = slopes.dtype.element_ty
    if RESIDENT:
        wi, wf, wo, wg = mix_tiles(mix, 1, C, PRODUCTS)

    rest = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    dc = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for tile in range(TILES):  # the gradients move from (C, V) to (V, C)
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = offset + c[None, :] * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        if LAST:
            rest = tl.load(grad_last_hidden + given, mask=own, other=0.0)
            dc = tl.load(grad_last_cell + given, mask=own, other=0.0)
        if TILES > 1:
            tl.store(pass_ring + here, rest, mask=own)
            tl.store(cell_ring + here, dc, mask=own)

    for done in range(S):
        s = S - 1 - done
        row = b * S + s
        now, then = (done % 2) * size, ((done + 1) % 2) * size
        keep, idle = 1.0, 0.0
        if RESETS:
            keep = 1.0 - tl.load(resets + row + 1, mask=done > 0, other=0).to(tl.float32)
        if WRITES:
            idle = 1.0 - tl.load(writes + row).to(tl.float32)
        if TILES > 1:
            meet(arrivals, PARTS * (done + 1), PARTS)
        for tile in range(TILES):
            v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            own = (v < V)[:, None]
            here = v[:, None] * C + c[None, :]
            at = slopes + 6 * (s * size + offset) + v[:, None] * (6 * C) + c[None, :]
            slope_i = tl.load(at, mask=own, other=0.0)
            slope_f = tl.load(at + C, mask=own, other=0.0)
            slope_o = tl.load(at + 2 * C, mask=own, other=0.0)
            slope_g = tl.load(at + 3 * C, mask=own, other=0.0)
            slope_h = tl.load(at + 4 * C, mask=own, other=0.0)
            slope_c = tl.load(at + 5 * C, mask=own, other=0.0)
            if TILES > 1:
                rest = tl.load(pass_ring + now + here, mask=own, other=0.0)
                dc = tl.load(cell_ring + now + here, mask=own, other=0.0)
            dh = rest
            if done > 0:
                dh = spread_reads(dh, read_at, grad_reads, row + 1, v, Q, C, D, H, W, AXES)
            if TILES == 1:  # all that could be done before the neighbours arrive is done
                meet(arrivals, PARTS * (done + 1), PARTS)
            if done > 0:
                later = grad_filtered + (s + 1) * size + offset
                dh += neighbours(
                    later, v, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2,
                    FILTERED, C, D, H, W, PIN,
                )  # fmt: skip
            dh *= keep
            dc *= keep
            rest = dh * idle
            dc += dh * slope_h.to(tl.float32)
            di = dc * slope_i.to(tl.float32)
            df = dc * slope_f.to(tl.float32)
            do = dh * slope_o.to(tl.float32)
            dg = dc * slope_g.to(tl.float32)
            dc *= slope_c.to(tl.float32)
            if not RESIDENT:
                wi, wf, wo, wg = mix_tiles(mix, 1, C, PRODUCTS)
            total = tl.zeros([BLOCK_V, C], dtype=tl.float32)
            total = product(di, tl.trans(wi), total, PRODUCTS)
            total = product(df, tl.trans(wf), total, PRODUCTS)
            total = product(do, tl.trans(wo), total, PRODUCTS)
            total = product(dg, tl.trans(wg), total, PRODUCTS)
            filtered = grad_filtered + s * size + offset + here
            tl.store(filtered, total.to(grad_filtered.dtype.element_ty), mask=own)
            tl.store(at, di.to(kind), mask=own)
            tl.store(at + C, df.to(kind), mask=own)
            tl.store(at + 2 * C, do.to(kind), mask=own)
            tl.store(at + 3 * C, dg.to(kind), mask=own)
            if TILES > 1:
                tl.store(pass_ring + then + here, rest, mask=own)
                tl.store(cell_ring + then + here, dc, mask=own)

    meet(arrivals, PARTS * (S + 1), PARTS)
    keep = 1.0
    if RESETS:
        keep = 1.0 - tl.load(resets + b * S).to(tl.float32)
    for tile in range(TILES):
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = offset + c[None, :] * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        if TILES > 1:
            rest = tl.load(pass_ring + (S % 2) * size + here, mask=own, other=0.0)
            dc = tl.load(cell_ring + (S % 2) * size + here, mask=own, other=0.0)
        dh = spread_reads(rest, read_at, grad_reads, b * S, v, Q, C, D, H, W, AXES)
        dh += neighbours(
            grad_filtered + offset, v, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2,
            FILTERED, C, D, H, W, PIN,
        )  # fmt: skip
        tl.store(grad_hidden + given, dh * keep, mask=own)
        tl.store(grad_cell + given, dc * keep, mask=own)


@triton.jit(do_not_specialize=["rows", "loops"])
def mix_kernel(
    slopes,
    written,
    kept_filtered,
    partial,
    rows,
    loops,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
    PRODUCTS: tl.constexpr,
):
    """Gate gradients times gate inputs over BLOCK · loops voxels: OUT of the mix's 4C rows.

    partial (chunks, 4C · 2C + 4C): the mix, then the bias.
    """
    chunk = tl.program_id(0)
    out = tl.program_id(1) * OUT + tl.arange(0, OUT)
    c = tl.arange(0, C)
    by_write = tl.zeros([OUT, C], dtype=tl.float32)
    by_hidden = tl.zeros([OUT, C], dtype=tl.float32)
    sums = tl.zeros([OUT, 16], dtype=tl.float32)
    ones = tl.full([BLOCK, 16], 1.0, dtype=slopes.dtype.element_ty)
    for loop in range(loops):
        i = (chunk.to(tl.int64) * loops + loop) * BLOCK + tl.arange(0, BLOCK)
        own = (i < rows)[:, None]
        d = tl.trans(tl.load(slopes + i[:, None] * (6 * C) + out[None, :], mask=own, other=0.0))
        here = i[:, None] * C + c[None, :]
        by_write = product(d, tl.load(written + here, mask=own, other=0.0), by_write, PRODUCTS)
        z = tl.load(kept_filtered + here, mask=own, other=0.0)
        by_hidden = product(d, z, by_hidden, PRODUCTS)
        sums = product(d, ones, sums, PRODUCTS)
    partial += chunk * (4 * C * (2 * C + 1))
    at = partial + out[:, None] * (2 * C) + c[None, :]
    tl.store(at, by_write)
    tl.store(at + C, by_hidden)
    column = tl.arange(0, 16)[None, :]
    tl.store(partial + 8 * C * C + out[:, None] + column, sums, mask=column == 0)


@triton.jit(do_not_specialize=["items", "loops"])
def taps_kernel(
    grad_filtered,
    kept_hidden,
    partial,
    items,
    loops,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Correlation of grad_filtered with the shifts of hidden, over `loops` steps of one tile.

    A tile is a piece of a plane and goes through the planes: what is loaded of hidden meets the
    gradients of three. The last program axis is the shift along y; the nine shifts along z and x
    are nine sums, kept per voxel until the end. partial (tiles, chunks, 3 along z, y and x, C).
    """
    tile, chunk = tl.program_id(0), tl.program_id(1)
    dy = tl.program_id(2) - 1 if H > 1 else 0
    w = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    y, x = w // W, w % W
    c = tl.arange(0, C)
    PLANE: tl.constexpr = H * W
    own = w < PLANE
    line = own & (y + dy >= 0) & (y + dy < H)
    before, after = (line & (x > 0))[:, None], (line & (x < W - 1))[:, None]
    own, line = own[:, None], line[:, None]
    here = w[:, None] * C + c[None, :]
    near = here + dy * (W * C)
    size = tl.full([], D * PLANE * C, dtype=tl.int64)
    down_m = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    down_o, down_p = down_m, down_m
    same_m, same_o, same_p = down_m, down_m, down_m
    up_m, up_o, up_p = down_m, down_m, down_m
    for item in range(chunk * loops, tl.minimum((chunk + 1) * loops, items)):
        start = size * item
        g_below = tl.zeros([BLOCK_V, C], dtype=tl.float32)
        g = tl.load(grad_filtered + start + here, mask=own, other=0.0).to(tl.float32)
        for z in range(D):
            plane = start + z * (PLANE * C)
            h = kept_hidden + plane + near
            h_m = tl.load(h - C, mask=before, other=0.0).to(tl.float32)
            h_o = tl.load(h, mask=line, other=0.0).to(tl.float32)
            h_p = tl.load(h + C, mask=after, other=0.0).to(tl.float32)
            same_m += g * h_m
            same_o += g * h_o
            same_p += g * h_p
            if D > 1:  # hidden of this plane lies above the gradients of the plane below
                g_above = tl.load(
                    grad_filtered + plane + PLANE * C + here, mask=own & (z < D - 1), other=0.0
                ).to(tl.float32)
                up_m += g_below * h_m
                up_o += g_below * h_o
                up_p += g_below * h_p
                down_m += g_above * h_m
                down_o += g_above * h_o
                down_p += g_above * h_p
                g_below, g = g, g_above
    place_of = (tile * tl.num_programs(1) + chunk) * 27 + (dy + 1) * 3
    out = partial + place_of * C + c
    tl.store(out, tl.sum(down_m, axis=0))
    tl.store(out + C, tl.sum(down_o, axis=0))
    tl.store(out + 2 * C, tl.sum(down_p, axis=0))
    tl.store(out + 9 * C, tl.sum(same_m, axis=0))
    tl.store(out + 10 * C, tl.sum(same_o, axis=0))
    tl.store(out + 11 * C, tl.sum(same_p, axis=0))
    tl.store(out + 18 * C, tl.sum(up_m, axis=0))
    tl.store(out + 19 * C, tl.sum(up_o, axis=0))
    tl.store(out + 20 * C, tl.sum(up_p, axis=0))


@triton.jit
def add_rows(rows, first, count, width, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of rows (…, width), summed over the rows from `first` up to `count`."""
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, count, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < count)[:, None] & (column < width)[None, :]
        at = rows + row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(at, mask=mask, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def add_share(rows, sums, count, part, block, WIDTH: tl.constexpr, PARTS: tl.constexpr,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """One of PARTS shares of the rows, into sums (PARTS, WIDTH)."""
    share = (count + PARTS - 1) // PARTS
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    until = tl.minimum((part + 1) * share, count)
    total = add_rows(rows, part * share, until, WIDTH, column, ROWS, COLUMNS)
    tl.store(sums + part * WIDTH + column, total, mask=column < WIDTH)


@triton.jit(do_not_specialize=["mix_count", "write_count", "hidden_count"])
def sums_kernel(
    partial_mix,
    partial_writes,
    partial_hidden,
    grad_mix,
    grad_bias,
    written,
    cube,
    mix_count,
    write_count,
    hidden_count,
    C: tl.constexpr,
    AXES: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All partial sums in one launch: the mix with its bias, the taps of both halves.

    The taps' rows, thousands, are shared by PARTS programs, whose sums `share_taps_kernel` adds.
    """
    MIX: tl.constexpr = 8 * C * C
    WRITES: tl.constexpr = AXES * 3 * C
    block = tl.program_id(0)
    mixes: tl.constexpr = (MIX + 4 * C + COLUMNS - 1) // COLUMNS
    writes: tl.constexpr = (WRITES + COLUMNS - 1) // COLUMNS
    shared: tl.constexpr = writes + (27 * C + COLUMNS - 1) // COLUMNS
    if block < mixes:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        total = add_rows(partial_mix, 0, mix_count, MIX + 4 * C, column, ROWS, COLUMNS)
        tl.store(grad_mix + column, total, mask=column < MIX)
        column -= MIX
        tl.store(grad_bias + column, total, mask=(column >= 0) & (column < 4 * C))
    else:
        part, block = (block - mixes) // shared, (block - mixes) % shared
        if block < writes:
            add_share(
                partial_writes, written, write_count, part, block, WRITES, PARTS, ROWS, COLUMNS
            )
        else:
            add_share(
                partial_hidden, cube, hidden_count, part, block - writes, 27 * C, PARTS, ROWS,
                COLUMNS,
            )  # fmt: skip


@triton.jit
def share_taps_kernel(
    cube,
    written,
    taps,
    grad_taps,
    C: tl.constexpr,
    AXES: tl.constexpr,
    ALL: tl.constexpr,
    ALL_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The 3ⁿ products of taps are one filter: share its gradient out by axis.

    cube (PARTS, 3, 3, 3, C), of which missing axes use the middle alone; written (PARTS, n, 3, C)
    is the written half's gradient; grad_taps and taps (n, 2C, 3).
    """
    c = tl.program_id(0) * 16 + tl.arange(0, 16)
    k, part = tl.arange(0, ALL_PADDED), tl.arange(0, PARTS)
    own = (k < ALL)[:, None]
    MIDDLE: tl.constexpr = (27 - ALL) // 2  # 0, 9 or 12: where the used part begins
    d = tl.zeros([ALL_PADDED, 16], dtype=tl.float32)
    for i in tl.static_range(PARTS):
        at = cube + ((i * 27 + MIDDLE + k)[:, None] * C + c[None, :])
        d += tl.load(at, mask=own, other=0.0)
    for axis in tl.static_range(AXES):
        rest = d
        for other in tl.static_range(AXES):
            if other != axis:
                digit = (k // 3 ** (AXES - 1 - other)) % 3
                at = taps + (other * 2 * C + C + c[None, :]) * 3 + digit[:, None]
                rest *= tl.load(at, mask=own, other=0.0)
        digit = (k // 3 ** (AXES - 1 - axis)) % 3
        for t in tl.static_range(3):
            at = grad_taps + (axis * 2 * C + c) * 3 + t
            from_writes = written + (part[:, None] * AXES + axis) * (3 * C) + t * C + c[None, :]
            tl.store(at, tl.sum(tl.load(from_writes), axis=0))
            tl.store(at + 3 * C, tl.sum(tl.where((digit == t)[:, None], rest, 0.0), axis=0))


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
def level_gradient(
    d,
    total,
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
    """`axis_gradient` for voxels that share index i along the axis, summed already: d (1, C)."""
    t = tl.arange(0, 16)[:, None]
    d_at, d_sharpness = 0.0, 0.0
    for k in tl.static_range(3):
        if FILTERED or k == 1:
            value = kernel_value(i + k - 1, at, sharpness, SIZE, GAUSSIAN)
            if FILTERED:
                total += tl.where(t == k, d * value[:, None], 0.0)
            if GAUSSIAN:
                d_value = tl.sum(d * tap(taps, AXIS, k, 0, C)) if FILTERED else tl.sum(d)
                offset = (i + k - 1).to(tl.float32) * (2.0 / (SIZE - 1)) - 1.0 - at
                d_at += tl.sum(value * offset) * d_value * (2.0 * sharpness)
                d_sharpness -= tl.sum(value * offset * offset) * d_value
    return total, d_at, d_sharpness


@triton.jit
def store_taps(partial, total, AXIS: tl.constexpr, C: tl.constexpr):
    c, t = tl.arange(0, C)[None, :], tl.arange(0, 16)[:, None]
    tl.store(partial + (AXIS * 3 + t) * C + c, total, mask=t < 3)


@triton.jit(do_not_specialize=["S", "B"])
def writes_kernel(
    write_at,
    spread,
    content,
    taps,
    mix,
    slopes,
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
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """What write m of one step receives; the taps' share is left per program.

    Planes of the grid are folded along z first, so that x and y are dealt with once per step.
    """
    item, m = tl.program_id(0), tl.program_id(1)
    write = ((item % B) * S + item // B) * M + m
    c = tl.arange(0, C)
    gate, t = tl.arange(0, 4 * C), tl.arange(0, 16)
    PLANE: tl.constexpr = H * W
    at = write_at + write * AXES
    sigma, sharpness = 0.0, 0.0
    if GAUSSIAN:
        sigma = tl.load(spread + write)
        sharpness = 1.0 / (2.0 * sigma * sigma + EPSILON)
    what = tl.load(content + write * C + c[None, :])
    if RESIDENT:
        weight = tl.load(mix + gate[:, None] * (2 * C) + c[None, :])  # (4C, C), the written half
    x_at = tl.load(at)
    y_at = tl.load(at + 1) if H > 1 else 0.0
    z_at = tl.load(at + 2) if D > 1 else 0.0
    ones = tl.where(t == 0, 1.0, 0.0)[:, None] + tl.zeros([1, BLOCK_V], dtype=tl.float32)
    taps_x = tl.zeros([16, C], dtype=tl.float32)
    taps_y = tl.zeros([16, C], dtype=tl.float32)
    taps_z = tl.zeros([16, C], dtype=tl.float32)
    contents = tl.zeros([16, C], dtype=tl.float32)
    d_x, d_y, d_z, d_sharpness = 0.0, 0.0, 0.0, 0.0

    for block in range((PLANE + BLOCK_V - 1) // BLOCK_V):
        w = block * BLOCK_V + tl.arange(0, BLOCK_V)
        y, x = w // W, w % W
        px = profile(x, x_at, sharpness, taps, AXES - 1, W, C, GAUSSIAN, FILTERED)
        plane = px
        if H > 1:
            py = profile(y, y_at, sharpness, taps, AXES - 2, H, C, GAUSSIAN, FILTERED)
            plane = px * py
        folded = tl.zeros([BLOCK_V, C], dtype=tl.float32)
        for z in range(D):
            row = item.to(tl.int64) * (D * PLANE) + z * PLANE + w
            at_gates = slopes + row[:, None] * (6 * C)
            own = (w < PLANE)[:, None]
            d = tl.zeros([BLOCK_V, C], dtype=tl.float32)  # reaches the filtered write
            if RESIDENT:
                d_gates = tl.load(at_gates + gate[None, :], mask=own, other=0.0)
                d = product(d_gates, weight, d, PRODUCTS)
            else:
                for k in range(4):  # not unrolled: one tile at a time fits
                    d_gate = tl.load(at_gates + k * C + c[None, :], mask=own, other=0.0)
                    weight = tl.load(mix + (k * C + c[:, None]) * (2 * C) + c[None, :])
                    d = product(d_gate, weight, d, PRODUCTS)
            if D > 1:
                level = tl.zeros([1], dtype=tl.int32) + z
                pz = profile(level, z_at, sharpness, taps, AXES - 3, D, C, GAUSSIAN, FILTERED)
                folded += d * pz
                column = tl.sum(d * plane, axis=0)[None, :]
                contents += tl.where((t == 0)[:, None], column * pz, 0.0)
                column *= what
                taps_z, more, sharper = level_gradient(
                    column, taps_z, level, z_at, sharpness, taps,
                    AXES - 3, D, C, GAUSSIAN, FILTERED,
                )  # fmt: skip
                d_z += more
                d_sharpness += sharper
            else:
                folded = d
        if D == 1:
            contents = product(ones, folded * plane, contents, SUMS)
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

    row = tl.arange(0, 16)[:, None]
    tl.store(grad_content + write * C + c[None, :] + row * C, contents, mask=row == 0)
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
