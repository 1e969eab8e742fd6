"""What every step of a fused scan is made of: activations, products, the mix, meetings."""

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
