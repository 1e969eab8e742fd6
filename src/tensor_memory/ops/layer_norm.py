"""LayerNorm in one pass, and its backward in another.

Letters: d width of a token.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.launch import BoundKernel, bind, blocks, or_else

NORM_VALUES = 2048  # per program
NORM_PROGRAMS = 528  # that share the sums for weight and bias: four per multiprocessor of an H200


@triton.jit
def normalised(x, at, own, epsilon, D: tl.constexpr):
    """Rows of x less their mean, divided by their deviation; and 1 / deviation, a column."""
    value = tl.load(x + at, mask=own, other=0.0).to(tl.float32)
    mean = tl.sum(value, axis=1)[:, None] / D
    value = tl.where(own, value - mean, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1)[:, None] / D + epsilon)
    return tl.where(own, value * inverse, 0.0), inverse


@triton.jit(do_not_specialize=["rows", "epsilon"])
def norm_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    epsilon,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """LayerNorm of ROWS rows of D values in the type of `out`."""
    row, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    own = (row < rows)[:, None] & (c < D)[None, :]
    at = row[:, None].to(tl.int64) * D + c[None, :]
    value, _ = normalised(x, at, own, epsilon, D)
    # Scale and shift, in the type of `out`.
    factor = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)
    offset = tl.load(bias + c, mask=c < D, other=0.0).to(tl.float32)
    value = value * factor[None, :] + offset[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["rows", "loops", "epsilon"])
def norm_backward_kernel(
    x,
    weight,
    grad_out,
    grad_past,
    bias,
    grad_x,
    partial,
    normed,
    rows,
    loops,
    epsilon,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NORMED: tl.constexpr,
):
    """What reaches x through its norm, plus what reached it past the norm.

    partial (programs, 2, D): sums for weight and bias over ROWS · loops rows. NORMED: what the
    norm gave is stored once more.
    """
    c = tl.arange(0, WIDTH)
    factor = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    offset = tl.zeros([1, WIDTH], dtype=tl.float32)
    if NORMED:
        offset += tl.load(bias + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    to_weight = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    to_bias = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for loop in range(loops):
        row = (tl.program_id(0) + loop * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        own = (row < rows)[:, None] & (c < D)[None, :]
        at = row[:, None].to(tl.int64) * D + c[None, :]
        # The normed values before scale and shift, again: whole rows are here anyway.
        value, inverse = normalised(x, at, own, epsilon, D)
        if NORMED:
            again = value * factor + offset
            tl.store(normed + at, again.to(normed.dtype.element_ty), mask=own)
        # What scale and shift receive.
        grad = tl.load(grad_out + at, mask=own, other=0.0).to(tl.float32)
        to_weight += grad * value
        to_bias += grad
        # What x receives: without its mean, and without its part along the normed values.
        grad *= factor
        along = tl.sum(grad * value, axis=1)[:, None] / D
        mean_grad = tl.sum(grad, axis=1)[:, None] / D
        total = (grad - value * along - mean_grad) * inverse
        total += tl.load(grad_past + at, mask=own, other=0.0).to(tl.float32)
        tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=own)
    out = partial + tl.program_id(0) * (2 * D) + c
    tl.store(out, tl.sum(to_weight, axis=0), mask=c < D)
    tl.store(out + D, tl.sum(to_bias, axis=0), mask=c < D)


class _Launches(NamedTuple):
    rows: int
    """Per program."""
    forward: BoundKernel
    backward: BoundKernel
    backward_normed: BoundKernel


@functools.lru_cache(maxsize=64)
def _launches(D: int) -> _Launches:
    width = triton.next_power_of_2(D)
    sizes = {"D": D, "WIDTH": width, "ROWS": max(1, NORM_VALUES // width)}
    backward = (bind(norm_backward_kernel, **sizes, NORMED=normed) for normed in (False, True))
    return _Launches(sizes["ROWS"], bind(norm_kernel, **sizes), *backward)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """LayerNorm (tokens, d) in a type, of x (..., d) contiguous."""
    D = x.shape[-1]
    do, rows = _launches(D), x.numel() // D
    out = x.new_empty(rows, D, dtype=dtype)
    tensors = x, weight.contiguous(), bias.contiguous(), out
    do.forward((blocks(rows, do.rows),), tensors, (rows, float(epsilon)))
    return out


def layer_norm_backward(
    x: Tensor,
    weight: Tensor,
    epsilon: float,
    grad_out: Tensor,
    grad_past: Tensor,
    bias: Tensor | None = None,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What x receives through its norm and past it, and partial sums for weight and bias.

    The sums are (programs, 2, d). `normed`, given with the bias, is filled with what `layer_norm`
    returned.
    """
    D = x.shape[-1]
    do, rows, weight = _launches(D), x.numel() // D, weight.contiguous()
    tiles = blocks(rows, do.rows)
    programs = min(tiles, NORM_PROGRAMS)
    grad_x, partial = torch.empty_like(x), x.new_empty(programs, 2, D, dtype=torch.float32)
    kernel = do.backward if normed is None else do.backward_normed
    bias = weight if bias is None else bias.contiguous()
    kernel(
        (programs,),
        (
            x, weight, grad_out.contiguous(), grad_past.contiguous(), bias, grad_x, partial,
            or_else(normed, grad_x),
        ),
        (rows, blocks(tiles, programs), float(epsilon)),
    )  # fmt: skip
    return grad_x, partial
