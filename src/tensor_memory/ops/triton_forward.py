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
def mix_tile(mix, GATE: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr):
    """The (in, out) tile of gate i, f, o or g for the written (0) or the hidden (1) half."""
    c = tl.arange(0, C)
    return tl.load(mix + (GATE * C + c[None, :]) * (2 * C) + HALF * C + c[:, None])


@triton.jit
def tap(taps, AXIS: tl.constexpr, T: tl.constexpr, HALF: tl.constexpr, C: tl.constexpr):
    c = tl.arange(0, C)
    return tl.load(taps + (AXIS * 2 * C + HALF * C + c) * 3 + T)


@triton.jit
def neighbours(
    volume,
    taps,
    v,
    FLIP: tl.constexpr,
    FILTERED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """The hidden half's axis filters around voxels v, or their transpose: (BLOCK_V, C)."""
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    if not FILTERED:
        at = volume + v[:, None] * C + c[None, :]
        return tl.load(at, mask=(v < V)[:, None], other=0.0).to(tl.float32)
    z, y, x = v // (H * W), (v // W) % H, v % W
    total = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    for dz in tl.static_range(3):
        if D > 1 or dz == 1:
            plane = tl.zeros([BLOCK_V, C], dtype=tl.float32)
            for dy in tl.static_range(3):
                if H > 1 or dy == 1:
                    line = tl.zeros([BLOCK_V, C], dtype=tl.float32)
                    for dx in tl.static_range(3):
                        near_z, near_y, near_x = z + dz - 1, y + dy - 1, x + dx - 1
                        inside = (near_z >= 0) & (near_z < D) & (near_y >= 0) & (near_y < H)
                        inside = inside & (near_x >= 0) & (near_x < W)
                        near = v + ((dz - 1) * H + dy - 1) * W + dx - 1
                        value = tl.load(
                            volume + near[:, None] * C + c[None, :],
                            mask=inside[:, None],
                            other=0.0,
                        ).to(tl.float32)
                        line += value * tap(taps, AXES - 1, 2 - dx if FLIP else dx, 1, C)[None, :]
                    if H > 1:
                        line *= tap(taps, AXES - 2, 2 - dy if FLIP else dy, 1, C)[None, :]
                    plane += line
            if D > 1:
                plane *= tap(taps, AXES - 3, 2 - dz if FLIP else dz, 1, C)[None, :]
            total += plane
    return total


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
        total = (
            kernel_value(i - 1, at, sharpness, SIZE, GAUSSIAN)[:, None]
            * (tap(taps, AXIS, 0, 0, C)[None, :])
        )
        for t in tl.static_range(1, 3):
            value = kernel_value(i + t - 1, at, sharpness, SIZE, GAUSSIAN)
            total += value[:, None] * tap(taps, AXIS, t, 0, C)[None, :]
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
    """U after the axis filters, factorised: Σₘ contentₘ · Pz · Py · Px at voxels v of step `row`."""
    c = tl.arange(0, C)
    z, y, x = v // (H * W), (v // W) % H, v % W
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
        slope = tl.where(bit == 0, -0.5 * (SIZE - 1), 0.5 * (SIZE - 1))
        return lower.to(tl.int32) + bit, weight, tl.where(inside, slope, 0.0)


@triton.jit
def read_point(
    volume,
    at,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """n-linear sample of one (V, C) volume at one coordinate: (C,)."""
    c, k = tl.arange(0, C), tl.arange(0, 8)
    ix, wx, _ = corner(tl.load(at), k % 2, W)
    iy, wy, _ = corner(tl.load(at + 1) if H > 1 else 0.0, (k // 2) % 2, H)
    iz, wz, _ = corner(tl.load(at + 2) if D > 1 else 0.0, k // 4, D)
    weight = wx * wy * wz
    near = (iz * H + iy) * W + ix
    value = tl.load(volume + near[:, None] * C + c[None, :], mask=(weight != 0)[:, None], other=0.0)
    return tl.sum(value.to(tl.float32) * weight[:, None], axis=0)


@triton.jit
def read_kernel(
    volumes,
    read_at,
    reads,
    B,
    S,
    Q,
    C: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    AXES: tl.constexpr,
):
    """One program per read: volumes (S, B, V, C), read_at (B, S, Q, n) -> reads (B, S, Q, C)."""
    i = tl.program_id(0)
    b, s = i // (S * Q), (i // Q) % S
    volume = volumes + (s * B + b).to(tl.int64) * (D * H * W * C)
    tl.store(reads + i * C + tl.arange(0, C), read_point(volume, read_at + i * AXES, C, D, H, W))


@triton.jit(do_not_specialize=["S", "Q", "B", "ring"])
def forward_kernel(
    read_at,
    write_at,
    spread,
    content,
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
    WRITES: tl.constexpr,
    RESETS: tl.constexpr,
    READ: tl.constexpr,
    PRODUCTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """All steps of a row. State before step s lies in slot s % ring of the kept buffers."""
    b, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    c = tl.arange(0, C)
    V: tl.constexpr = D * H * W
    slot_size = B.to(tl.int64) * (V * C)
    kept_hidden += b.to(tl.int64) * (V * C)
    kept_cell += b.to(tl.int64) * (V * C)
    arrivals += b
    first = part * (TILES * BLOCK_V)

    for tile in range(TILES):  # the state moves from (C, V) to (V, C)
        v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
        own = (v < V)[:, None]
        given = (b.to(tl.int64) * C + c[None, :]) * V + v[:, None]
        here = v[:, None] * C + c[None, :]
        h = tl.load(hidden + given, mask=own, other=0.0)
        memory = tl.load(cell + given, mask=own, other=0.0)
        if RESETS:
            keep = 1.0 - tl.load(resets + b * S).to(tl.float32)
            h *= keep
            memory *= keep
        tl.store(kept_hidden + here, h.to(kept_hidden.dtype.element_ty), mask=own)
        tl.store(kept_cell + here, memory, mask=own)

    hi, hf = mix_tile(mix, 0, 1, C), mix_tile(mix, 1, 1, C)
    ho, hg = mix_tile(mix, 2, 1, C), mix_tile(mix, 3, 1, C)
    ui, uf = mix_tile(mix, 0, 0, C), mix_tile(mix, 1, 0, C)
    uo, ug = mix_tile(mix, 2, 0, C), mix_tile(mix, 3, 0, C)
    bias_i, bias_f = tl.load(bias + c)[None, :], tl.load(bias + C + c)[None, :]
    bias_o, bias_g = tl.load(bias + 2 * C + c)[None, :], tl.load(bias + 3 * C + c)[None, :]
    zero = tl.zeros([BLOCK_V, C], dtype=tl.float32)
    touched = tl.full([], not WRITES, dtype=tl.int1)

    for s in range(S):
        meet(arrivals, PARTS * (s + 1), PARTS)
        row = b * S + s
        now = kept_hidden + (s % ring) * slot_size
        now_cell = kept_cell + (s % ring) * slot_size
        after = kept_hidden + ((s + 1) % ring) * slot_size
        after_cell = kept_cell + ((s + 1) % ring) * slot_size
        if READ:
            for q in range(part, Q, PARTS):
                r = read_point(now, read_at + (row * Q + q) * AXES, C, D, H, W)
                tl.store(reads + (row * Q + q) * C + c, r)
        keep = 1.0
        if RESETS:
            keep = 1.0 - tl.load(resets + row + 1, mask=s + 1 < S, other=0).to(tl.float32)
        if WRITES:
            write = tl.load(writes + row).to(tl.int1)
            touched = touched | write
            if RESETS:
                touched = touched | tl.load(resets + row).to(tl.int1)

        for tile in range(TILES):
            v = first + tile * BLOCK_V + tl.arange(0, BLOCK_V)
            own = (v < V)[:, None]
            here = v[:, None] * C + c[None, :]
            memory = tl.load(now_cell + here, mask=own, other=0.0)
            u = filtered_write(
                write_at, spread, content, taps, row, v, M,
                BLOCK_V, C, D, H, W, AXES, GAUSSIAN, FILTERED,
            )  # fmt: skip
            z = neighbours(now, taps, v, False, FILTERED, BLOCK_V, C, D, H, W, AXES)
            gate = product(z, hi, product(u, ui, zero, PRODUCTS), PRODUCTS) + bias_i
            new = sigmoid(gate, FAST)
            gate = product(z, hg, product(u, ug, zero, PRODUCTS), PRODUCTS) + bias_g
            new *= tanh(gate, FAST)
            gate = product(z, hf, product(u, uf, zero, PRODUCTS), PRODUCTS) + bias_f
            new += sigmoid(gate, FAST) * memory
            gate = product(z, ho, product(u, uo, zero, PRODUCTS), PRODUCTS) + bias_o
            h = sigmoid(gate, FAST) * tanh(new, FAST)
            if WRITES:
                h = tl.where(write, h, tl.load(now + here, mask=own, other=0.0).to(tl.float32))
                new = tl.where(write, new, memory)
            if s == S - 1:
                given = (b.to(tl.int64) * C + c[None, :]) * V + v[:, None]
                if WRITES:  # a row that never wrote gets back what it gave, not what was kept
                    h = tl.where(touched, h, tl.load(hidden + given, mask=own, other=0.0))
                tl.store(last_hidden + given, h, mask=own)
                tl.store(last_cell + given, new, mask=own)
            h *= keep
            new *= keep
            tl.store(after + here, h.to(kept_hidden.dtype.element_ty), mask=own)
            tl.store(after_cell + here, new, mask=own)
