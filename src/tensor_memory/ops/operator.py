"""The fast scans as PyTorch operators, so that autograd, compile and export know them.

`tensor_memory::scan` and `tensor_memory::scan_backward` carry the name of the implementation that
serves them; each is a module with `forward`, `backward` and `empty_kept` as in `torch_scan`.
Inputs share one float type, reads that nobody wants are Q = 0, and a gradient of an input that is
None comes back empty, since an operator's results have fixed types.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor

from tensor_memory.ops import checkpointing
from tensor_memory.ops.request import Request

NineTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def implementation(name: str) -> Any:
    """The module that serves; the fused one brings triton with it, so it is loaded when asked."""
    return importlib.import_module(f"tensor_memory.ops.{name}_scan")


@torch.library.custom_op("tensor_memory::scan", mutates_args=())
def scan(
    read_at: Tensor,
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    writes: Tensor | None,
    resets: Tensor | None,
    keep: bool,
    checkpoint_every: int,
    products: torch.dtype,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Reads, hidden, cell and what the backward needs; nothing of it where `keep` is false."""
    request = Request(
        read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets
    )
    with torch.autocast(hidden.device.type, enabled=False):  # it would reach inside
        if keep and checkpoint_every:
            return checkpointing.forward(implementation(name), request, checkpoint_every, products)
        return implementation(name).forward(request, keep=keep, products=products)


@torch.library.custom_op("tensor_memory::scan_backward", mutates_args=())
def scan_backward(
    grad_reads: Tensor,
    grad_hidden: Tensor,
    grad_cell: Tensor,
    read_at: Tensor,
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    writes: Tensor | None,
    resets: Tensor | None,
    kept: list[Tensor],
    checkpoint_every: int,
    products: torch.dtype,
    name: str,
) -> NineTensors:
    """Gradients of read_at, write_at, spread, content, taps, mix, bias, hidden and cell."""
    request = Request(
        read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets
    )
    wanted = (grad_reads, grad_hidden, grad_cell)
    with torch.autocast(hidden.device.type, enabled=False):
        if checkpoint_every:
            grads = checkpointing.backward(
                implementation(name), *wanted, request, kept, checkpoint_every, products
            )
        else:
            grads = implementation(name).backward(*wanted, request, kept, products=products)
    filled = tuple(content.new_empty(0) if g is None else g.contiguous() for g in grads)
    return cast(NineTensors, filled)


@torch.library.custom_op("tensor_memory::read", mutates_args=())
def read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows and nobody learns from, in one launch: (B, S, Q, C)."""
    return implementation("triton").read(read_at, hidden)


@read.register_fake
def _(read_at, hidden):
    return hidden.new_empty(*read_at.shape[:3], hidden.shape[1])


@scan.register_fake
def _(
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets,
    keep, checkpoint_every, products, name,
):  # fmt: skip
    kept = []
    if keep and checkpoint_every:
        kept = checkpointing.empty_kept(hidden, write_at.shape[1], checkpoint_every)
    elif keep:
        kept = implementation(name).empty_kept(hidden, write_at.shape[1], products)
    reads = content.new_empty(*read_at.shape[:3], content.shape[-1])
    return reads, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape), kept


@scan_backward.register_fake
def _(
    grad_reads, grad_hidden, grad_cell,
    read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets, kept,
    checkpoint_every, products, name,
):  # fmt: skip
    inputs = (read_at, write_at, spread, content, taps, mix, bias, hidden, cell)
    return tuple(content.new_empty(0 if t is None else t.shape) for t in inputs)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, keep, checkpoint_every, products, name = inputs
    kept = output[3]
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # nobody wants zeros for all that was kept
    ctx.keep, ctx.options = keep, (checkpoint_every, products, name)


def _backward(ctx: Any, grad_reads: Any, grad_hidden: Any, grad_cell: Any, _: Any) -> Any:
    if not ctx.keep:
        raise RuntimeError(
            "tensor_memory::scan: a backward needs what a forward with keep=True has kept"
        )
    saved = ctx.saved_tensors  # asked for once: gradient checkpointing unpacks only once
    tensors, kept = saved[:11], list(saved[11:])
    read_at, content, hidden = tensors[0], tensors[3], tensors[7]
    if grad_reads is None:
        grad_reads = content.new_zeros(*read_at.shape[:3], content.shape[-1])
    if grad_hidden is None:
        grad_hidden = hidden.new_zeros(hidden.shape)
    if grad_cell is None:
        grad_cell = hidden.new_zeros(hidden.shape)
    wanted = (grad.contiguous() for grad in (grad_reads, grad_hidden, grad_cell))
    grads = scan_backward(*wanted, *tensors, kept, *ctx.options)
    present = [None if t is None else g for t, g in zip(tensors, grads, strict=False)]
    return *present, *[None] * 6


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(
        "memory_scan: this backend has no second derivative; "
        'use backend="reference", which is differentiable any number of times'
    )


scan.register_autograd(_backward, setup_context=_setup)
scan_backward.register_autograd(_no_double_backward)
