"""What kernels of the fused scan share: activations, products, the mix, how programs wait."""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl


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
    """x, whose layout the compiler may not change before this place.

    Without this it brings each of the 27 neighbours through shared memory into the layout that the
    product wants, instead of their sum once.
    """
    if PIN:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def pair(a, b, PIN: tl.constexpr):
    """a and b rounded to bfloat16, together in 32 bits: half the registers until they are used.

    The compiler would hold float32 and round where the values are used.
    """
    if PIN:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [a, b], dtype=tl.int32, is_pure=False, pack=1
        )
    low = a.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32)
    return low | (b.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def unpair(x):
    """What `pair` put together, in float32."""
    a = (x << 16).to(tl.float32, bitcast=True)
    return a, (x & -65536).to(tl.float32, bitcast=True)


@triton.jit
def as_float(x, PIN: tl.constexpr):
    """x in float32. Two bfloat16 values take two instructions here; Triton's cast takes three."""
    if PIN and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(tl.float32)


@triton.jit
def not_before(x, PIN: tl.constexpr):
    """x in bfloat16. The compiler may not move work on the result to before this place."""
    if PIN:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2
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
def arrive(arrivals, PARTS: tl.constexpr):
    """Tell the other programs of this row that they may read all that was stored so far."""
    tl.debug_barrier()
    if PARTS > 1:
        tl.atomic_add(arrivals, 1, sem="release", scope="gpu")


@triton.jit
def wait(arrivals, target, PARTS: tl.constexpr):
    """Wait until the programs of this row have arrived `target` times in sum."""
    if PARTS > 1:
        while tl.atomic_add(arrivals, 0, sem="acquire", scope="gpu") < target:
            pass
        tl.debug_barrier()


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
    """The tiles of all four gates."""
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
def gate_slopes(u, z, memory, live, ui, uf, uo, ug, hi, hf, ho, hg, mix, bias,
                WRITES: tl.constexpr, RESIDENT: tl.constexpr, C: tl.constexpr,
                PRODUCTS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """How a step's gates move with dc and dh, and dc with dh and the later dc.

    From the filtered write u, the filtered hidden half z and the cell before the step: the slopes
    of i, f, o and g (o by dh, the others by dc), of dc by dh, and of dc by the later dc. A step
    that does not write (live = 0) passes dc on and moves nothing else.
    """
    # The gates again. c′ grows in `new` as they come; a slope is taken as soon as it can be.
    by_c = bias + tl.arange(0, C)[None, :]
    i = sigmoid(gate_sum(u, z, ui, hi, tl.load(by_c), mix, 0, RESIDENT, C, PRODUCTS), FAST)
    g = tanh(gate_sum(u, z, ug, hg, tl.load(by_c + 3 * C), mix, 3, RESIDENT, C, PRODUCTS), FAST)
    new = i * g
    slope_i, slope_g = g * i * (1.0 - i), i * (1.0 - g * g)
    f = sigmoid(gate_sum(u, z, uf, hf, tl.load(by_c + C), mix, 1, RESIDENT, C, PRODUCTS), FAST)
    new = tanh(new + f * memory, FAST)
    slope_f = memory * f * (1.0 - f)
    o = sigmoid(gate_sum(u, z, uo, ho, tl.load(by_c + 2 * C), mix, 2, RESIDENT, C, PRODUCTS), FAST)
    slope_o, slope_h = new * o * (1.0 - o), o * (1.0 - new * new)
    if WRITES:
        slope_i, slope_f, slope_o = live * slope_i, live * slope_f, live * slope_o
        slope_g, slope_h = live * slope_g, live * slope_h
        f = live * f + (1.0 - live)
    return slope_i, slope_f, slope_o, slope_g, slope_h, f
