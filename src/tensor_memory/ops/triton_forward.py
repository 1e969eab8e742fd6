"""Kernels that run the recurrence forward and read the grid; the equations are in README.md.

One launch runs all S steps. PARTS programs share a row (b): each owns a range of its voxels and
they meet at a counter in global memory once per step. Rows are (V, C) with channels together, so
that a neighbouring voxel is a constant offset away and every access is wide.

Grids of 1 and 2 axes are grids of 3 whose leading axes hold one voxel. Loops over memory are
never pipelined (`num_stages=1`): a step reads what the step before it wrote.
"""

from __future__ import annotations

import triton
import triton.language as tl

EPSILON = tl.constexpr(1e-6)  # the paper's ε under the Gaussian


@triton.jit
def tanh(x, FAST: tl.constexpr):
    if FAST:  # one special-function instruction, about 11 bits
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 * tanh(0.5 * x, FAST) + 0.5
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def pinned(x, PIN: tl.constexpr):
    """x, with its layout settled here.

    Without this the compiler brings each of the 27 neighbours through shared memory into the
    layout that the product wants, instead of their sum once.
    """
    if PIN:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def product(a, b, total, PRODUCTS: tl.constexpr):
    """total + a @ b in float32; operands in bfloat16, tf32 or true float32."""
    if PRODUCTS == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    elif PRODUCTS == "bf16-emulated":  # the interpreter cannot multiply bfloat16
        a = a.to(tl.bfloat16).to(tl.float32)
        b = b.to(tl.bfloat16).to(tl.float32)
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=PRODUCTS)


@triton.jit
def meet(arrivals, target, PARTS: tl.constexpr):
    """Wait until all programs of this row have stored what they owe."""
    tl.debug_barrier()
    if PARTS > 1:
        tl.atomic_add(arrivals, 1, sem="release", scope="gpu")
        while tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") < target:
            pass
        tl.debug_barrier()


@triton.jit
def place(v, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr):
    """The z, y, x indices of voxel v."""
    return v // (H * W), (v // W) % H, v % W


@triton.jit
def mix_tile(mix, GATE: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """The (in, out) tile of gate i, f, o or g for the written (0) or the hidden (1) half."""
    c = tl.arange(0, C)
    tile = tl.load(mix + (GATE * C + c[None, :]) * (2 * C) + HALF * C + c[:, None])
    if PRODUCTS == "bf16":
        return tile.to(tl.bfloat16)
    else:
        return tile


@triton.jit
def mix_tiles(mix, HALF: tl.constexpr, C: tl.constexpr, PRODUCTS: tl.constexpr):
    i, f = mix_tile(mix, 0, HALF, C, PRODUCTS), mix_tile(mix, 1, HALF, C, PRODUCTS)
    o, g = mix_tile(mix, 2, HALF, C, PRODUCTS), mix_tile(mix, 3, HALF, C, PRODUCTS)
    return i, f, o, g


@triton.jit
def gate_sum(u, z, by_write, by_hidden, bias, mix, GATE: tl.constexpr, RESIDENT: tl.constexpr,
             C: tl.constexpr, PRODUCTS: tl.constexpr):  # fmt: skip
    """One gate before its activation, from the filtered write u and the filtered hidden half z.

    Weights that are not RESIDENT are loaded here, a gate's at a time.
    """
    if not RESIDENT:
        by_write = mix_tile(mix, GATE, 0, C, PRODUCTS)
        by_hidden = mix_tile(mix, GATE, 1, C, PRODUCTS)
    total = product(u, by_write, tl.zeros(z.shape, dtype=tl.float32), PRODUCTS)
    return product(z, by_hidden, total, PRODUCTS) + bias


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
              W: tl.constexpr):  # fmt: skip
    """Three neighbours along x of the voxels SHIFT away from v, weighted: (BLOCK_V, C)."""
    at = volume + (v + SHIFT)[:, None] * C + tl.arange(0, C)[None, :]
    before = (inside & (x > 0))[:, None]
    after = (inside & (x < W - 1))[:, None]
    total = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32) * tx1
    total += tl.load(at - C, mask=before, other=0.0).to(tl.float32) * tx0
    total += tl.load(at + C, mask=after, other=0.0).to(tl.float32) * tx2
    return total


@triton.jit
def near_plane(volume, v, inside, y, x, tx0, tx1, tx2, ty0, ty1, ty2, SHIFT: tl.constexpr,
               C: tl.constexpr, H: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """Nine neighbours in the plane SHIFT voxels away."""
    total = near_line(volume, v, inside, x, tx0, tx1, tx2, SHIFT, C, W) * ty1
    if H > 1:
        before, after = inside & (y > 0), inside & (y < H - 1)
        total += near_line(volume, v, before, x, tx0, tx1, tx2, SHIFT - W, C, W) * ty0
        total += near_line(volume, v, after, x, tx0, tx1, tx2, SHIFT + W, C, W) * ty2
    return total


@triton.jit
def add_line(total, volume, v, inside, x, tx0, tx1, tx2, weight, SHIFT: tl.constexpr,
             C: tl.constexpr, W: tl.constexpr):  # fmt: skip
    """`near_line` times a weight, into a sum that exists already."""
    at = volume + (v + SHIFT)[:, None] * C + tl.arange(0, C)[None, :]
    before = (inside & (x > 0))[:, None]
    after = (inside & (x < W - 1))[:, None]
    total += tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32) * (tx1 * weight)
    total += tl.load(at - C, mask=before, other=0.0).to(tl.float32) * (tx0 * weight)
    total += tl.load(at + C, mask=after, other=0.0).to(tl.float32) * (tx2 * weight)
    return total


@triton.jit
def add_plane(total, volume, v, inside, y, x, tx0, tx1, tx2, ty0, ty1, ty2, weight,
              SHIFT: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr):  # fmt: skip
    total = add_line(total, volume, v, inside, x, tx0, tx1, tx2, ty1 * weight, SHIFT, C, W)
    if H > 1:
        before, after = inside & (y > 0), inside & (y < H - 1)
        total = add_line(total, volume, v, before, x, tx0, tx1, tx2, ty0 * weight, SHIFT - W, C, W)
        total = add_line(total, volume, v, after, x, tx0, tx1, tx2, ty2 * weight, SHIFT + W, C, W)
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
    total = add_plane(total, volume, v, own, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz1, 0, C, H, W)
    if D > 1:
        before, after = own & (z > 0), own & (z < D - 1)
        total = add_plane(
            total, volume, v, before, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz0, -H * W, C, H, W
        )
        total = add_plane(
            total, volume, v, after, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz2, H * W, C, H, W
        )
    return total


@triton.jit
def neighbours(volume, v, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2, FILTERED: tl.constexpr,
               C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
               PIN: tl.constexpr):  # fmt: skip
    """The hidden half after its axis filters, at voxels v: (BLOCK_V, C)."""
    z, y, x = place(v, D, H, W)
    own = v < D * H * W
    if not FILTERED:
        at = volume + v[:, None] * C + tl.arange(0, C)[None, :]
        return tl.load(at, mask=own[:, None], other=0.0).to(tl.float32)
    if C == 64:
        total = near_cube(
            volume, v, own, z, y, x, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2, C, D, H, W, PIN
        )
        return pinned(total, PIN)
    total = near_plane(volume, v, own, y, x, tx0, tx1, tx2, ty0, ty1, ty2, 0, C, H, W) * tz1
    if D > 1:
        before, after = own & (z > 0), own & (z < D - 1)
        total += tz0 * near_plane(
            volume, v, before, y, x, tx0, tx1, tx2, ty0, ty1, ty2, -H * W, C, H, W
        )
        total += tz2 * near_plane(
            volume, v, after, y, x, tx0, tx1, tx2, ty0, ty1, ty2, H * W, C, H, W
        )
    return pinned(total, PIN)


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
    if FILTERED:
        total = kernel_value(i - 1, at, sharpness, SIZE, GAUSSIAN)[:, None] * (
            tap(taps, AXIS, 0, 0, C)
        )
        for t in tl.static_range(1, 3):
            value = kernel_value(i + t - 1, at, sharpness, SIZE, GAUSSIAN)
            total += value[:, None] * tap(taps, AXIS, t, 0, C)
    else:
        total = kernel_value(i, at, sharpness, SIZE, GAUSSIAN)[:, None] + tl.zeros(
            [1, C], dtype=tl.float32
        )
    return total


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
    z, y, x = place(v, D, H, W)
    total = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for m in range(M):
        at = write_at + (row * M + m) * AXES
        sharpness = 0.0
        if GAUSSIAN:
            sigma = tl.load(spread + row * M + m)
            sharpness = 1.0 / (2.0 * sigma * sigma + EPSILON)
        volume = profile(x, tl.load(at), sharpness, taps, AXES - 1, W, C, GAUSSIAN, FILTERED)
        if H > 1:
            volume *= profile(
                y, tl.load(at + 1), sharpness, taps, AXES - 2, H, C, GAUSSIAN, FILTERED
            )
        if D > 1:
            volume *= profile(
                z, tl.load(at + 2), sharpness, taps, AXES - 3, D, C, GAUSSIAN, FILTERED
            )
        total += volume * tl.load(content + (row * M + m) * C + c)[None, :]
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


@triton.jit(do_not_specialize=["row_size", "step_size", "B", "S", "Q"])
def read_kernel(
    volumes,
    read_at,
    reads,
    row_size,
    step_size,
    B,
    S,
    Q,
    VOXEL: tl.constexpr,
    CHANNEL: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """One program per read: read_at (B, S, Q, n) -> reads (B, S, Q, C)."""
    i = tl.program_id(0)
    b, s = i // (S * Q), (i // Q) % S
    volume = volumes + s.to(tl.int64) * step_size + b.to(tl.int64) * row_size
    r = read_point(volume, read_at + i * AXES, VOXEL, CHANNEL, C, D, H, W)
    tl.store(reads + i * C + tl.arange(0, C), r)


@triton.jit(do_not_specialize=["S", "B"])
def written_kernel(
    write_at,
    spread,
    content,
    taps,
    written,
    arrivals,
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
):
    """The filtered write of every step at once, off the scan's path: written (S, B, V, C).

    It precedes a scan, whose meeting counters it clears.
    """
    item, v = tl.program_id(0), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    if item < B and tl.program_id(1) == 0:
        tl.store(arrivals + item, 0)
    s, b = item // B, item % B
    u = filtered_write(
        write_at, spread, content, taps, b * S + s, v, M,
        BLOCK_V, C, D, H, W, AXES, GAUSSIAN, FILTERED,
    )  # fmt: skip
    start = item.to(tl.int64) * (D * H * W * C)
    at = written + start + v[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(at, u.to(written.dtype.element_ty), mask=(v < D * H * W)[:, None])


@triton.jit(do_not_specialize=["S", "Q", "B", "ring"])
def forward_kernel(
    read_at,
    write_at,
    spread,
    content,
    written,
    taps,
    mix,
    bias,
    hidden,
    cell,
    writes,
    resets,
    reads,
    last_hidden,
    last_cell,
    kept_hidden,
    kept_cell,
    kept_filtered,
    cell_ring,
    arrivals,
    S,
    Q,
    B,
    ring,
    M: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    FILTERED: tl.constexpr,
    INLINE: tl.constexpr,
    WRITES: tl.constexpr,
    RESETS: tl.constexpr,
    READ: tl.constexpr,
    KEEP: tl.constexpr,
    RESIDENT: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
    PIN: tl.constexpr,
):
    """All steps of a row. Hidden before step s lies in slot s % ring of kept_hidden.

    The cell stays in registers, or with several tiles in the two slots of cell_ring.

    INLINE computes the write here, in place of reading it from `written`: one launch for one step.
    READ reads here too; otherwise reads are gathered afterwards from the kept states. KEEP keeps
    the cell before every step and its filtered hidden half for the backward pass. RESIDENT
    weights stay in shared memory: meeting empties the first-level cache, so that others would
    come from afar in every step.
    """
    b, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    slot_size = B.to(tl.int64) * (V * C)
    offset = b.to(tl.int64) * (V * C)
    kept_hidden += offset
    arrivals += b
    first = part * (TILES * BLOCK_V)

    memory = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for tile in range(TILES):  # the state moves from (C, V) to (V, C)
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = offset + c[None, :] * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        h = tl.load(hidden + given, mask=own, other=0.0)
        memory = tl.load(cell + given, mask=own, other=0.0)
        if RESETS:
            keep = 1.0 - tl.load(resets + b * S).to(tl.float32)
            h *= keep
            memory *= keep
        tl.store(kept_hidden + here, h.to(kept_hidden.dtype.element_ty), mask=own)
        if TILES > 1:
            tl.store(cell_ring + offset + here, memory, mask=own)

    tx0, tx1, tx2 = axis_taps(taps, AXES - 1, W if FILTERED else 1, False, C)
    ty0, ty1, ty2 = axis_taps(taps, AXES - 2, H if FILTERED else 1, False, C)
    tz0, tz1, tz2 = axis_taps(taps, AXES - 3, D if FILTERED else 1, False, C)
    ui, uf, uo, ug, hi, hf, ho, hg = 0, 0, 0, 0, 0, 0, 0, 0
    if RESIDENT:
        ui, uf, uo, ug = mix_tiles(mix, 0, C, PRODUCTS)
        hi, hf, ho, hg = mix_tiles(mix, 1, C, PRODUCTS)
    bias_i, bias_f = tl.load(bias + c[None, :]), tl.load(bias + C + c[None, :])
    bias_o, bias_g = tl.load(bias + 2 * C + c[None, :]), tl.load(bias + 3 * C + c[None, :])
    touched = tl.full([], not WRITES, dtype=tl.int1)

    for s in range(S):
        row = b * S + s
        now = kept_hidden + (s % ring) * slot_size
        now_cell = cell_ring + offset + (s % 2) * slot_size
        after = kept_hidden + ((s + 1) % ring) * slot_size
        after_cell = cell_ring + offset + ((s + 1) % 2) * slot_size
        keep = 1.0
        if RESETS:
            keep = 1.0 - tl.load(resets + row + 1, mask=s + 1 < S, other=0).to(tl.float32)
        if WRITES:
            write = tl.load(writes + row).to(tl.int1)
            touched = touched | write
            if RESETS:
                touched = touched | tl.load(resets + row).to(tl.int1)

        if TILES > 1:
            meet(arrivals, PARTS * (s + 1), PARTS)
        for tile in range(TILES):
            v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            own = (v < V)[:, None]
            here = v[:, None] * C + c[None, :]
            if INLINE:
                u = filtered_write(
                    write_at, spread, content, taps, row, v, M,
                    BLOCK_V, C, D, H, W, AXES, GAUSSIAN, FILTERED,
                )  # fmt: skip
            else:
                u = tl.load(written + s * slot_size + offset + here, mask=own, other=0.0)
            if TILES > 1:
                memory = tl.load(now_cell + here, mask=own, other=0.0)
            if TILES == 1:
                meet(arrivals, PARTS * (s + 1), PARTS)
            z = neighbours(
                now, v, tx0, tx1, tx2, ty0, ty1, ty2, tz0, tz1, tz2, FILTERED, C, D, H, W, PIN
            )
            if KEEP:
                kept = s * slot_size + offset + here
                tl.store(kept_cell + kept, memory.to(kept_cell.dtype.element_ty), mask=own)
                tl.store(kept_filtered + kept, z.to(kept_filtered.dtype.element_ty), mask=own)
            i = gate_sum(u, z, ui, hi, bias_i, mix, 0, RESIDENT, C, PRODUCTS)
            new = sigmoid(i, FAST)  # one gate after another: four at once do not fit
            g = gate_sum(u, z, ug, hg, bias_g, mix, 3, RESIDENT, C, PRODUCTS)
            new *= tanh(g, FAST)
            f = gate_sum(u, z, uf, hf, bias_f, mix, 1, RESIDENT, C, PRODUCTS)
            new += sigmoid(f, FAST) * memory
            o = gate_sum(u, z, uo, ho, bias_o, mix, 2, RESIDENT, C, PRODUCTS)
            h = sigmoid(o, FAST) * tanh(new, FAST)
            if WRITES:
                h = tl.where(write, h, tl.load(now + here, mask=own, other=0.0).to(tl.float32))
                new = tl.where(write, new, memory)
            if s == S - 1:
                given = offset + c[None, :] * V + v[:, None]
                final = h
                if WRITES:  # a row that never wrote gets back what it gave, not what was kept
                    final = tl.where(touched, h, tl.load(hidden + given, mask=own, other=0.0))
                tl.store(last_hidden + given, final, mask=own)
                tl.store(last_cell + given, new, mask=own)
            h *= keep
            memory = new * keep  # stays in registers where a program owns a single tile
            if s < S - 1:
                tl.store(after + here, h.to(kept_hidden.dtype.element_ty), mask=own)
            if TILES > 1:
                tl.store(after_cell + here, memory, mask=own)

        if READ:  # of the state before this step; its slot is next written after the next meeting
            for q in range(part, Q, PARTS):
                r = read_point(now, read_at + (row * Q + q) * AXES, C, 1, C, D, H, W)
                tl.store(reads + (row * Q + q) * C + c, r)
