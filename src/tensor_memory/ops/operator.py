"""The fast scans as PyTorch operators, so that autograd, compile and export know them.

`tensor_memory::scan` and `tensor_memory::scan_backward` carry the name of the implementation that
serves them; each is a module with `forward`, `backward` and `empty_kept` as in `torch_scan`.
Inputs share one float type, reads that nobody wants are Q = 0, and a gradient of an input that is
None comes back empty, since an operator's results have fixed types.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any, cast

import torch
from torch import Tensor

from tensor_memory.ops import checkpointing
from tensor_memory.ops.once import NO_SECOND_DERIVATIVE
from tensor_memory.ops.request import Floats, Request

Wanted = tuple[Tensor | None, Tensor | None, Tensor | None]
"""What arrives for reads, hidden and cell; None where nobody made use of them."""
NineTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@functools.cache
def implementation(name: str) -> Any:
    """The module that serves; the fused one brings triton with it, so it is loaded when asked."""
    return importlib.import_module(f"tensor_memory.ops.{name}_scan")


def run_forward(
    request: Request, keep: bool, checkpoint_every: int, products: torch.dtype, name: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """What `scan` does: reads, hidden, cell and what is kept."""
    serving = implementation(name)
    with _no_autocast(request.hidden.device.type, name):
        if keep and checkpoint_every:
            return checkpointing.forward(serving, request, checkpoint_every, products)
        return serving.forward(request, keep=keep, products=products)


def run_backward(
    wanted: Wanted,
    request: Request,
    kept: list[Tensor],
    checkpoint_every: int,
    products: torch.dtype,
    name: str,
) -> Floats:
    """What `scan_backward` does; a gradient that never came is zero, of the state also None."""
    assert request.read_at is not None, "a request at rest"
    grad_reads, grad_hidden, grad_cell = (g if g is None else g.contiguous() for g in wanted)
    if grad_reads is None:
        grad_reads = torch.zeros_like(request.empty_reads())
    if (grad_hidden is None) != (grad_cell is None):
        grad_hidden = torch.zeros_like(request.hidden) if grad_hidden is None else grad_hidden
        grad_cell = torch.zeros_like(request.hidden) if grad_cell is None else grad_cell
    wanted = (grad_reads, grad_hidden, grad_cell)
    serving = implementation(name)
    with _no_autocast(request.hidden.device.type, name):
        if checkpoint_every:
            return checkpointing.backward(
                serving, *wanted, request, kept, checkpoint_every, products
            )
        return serving.backward(*wanted, request, kept, products=products)


_UNTOUCHED = contextlib.nullcontext()


def _no_autocast(device: str, name: str) -> Any:
    """Autocast would reach inside, but for kernels; entering the context costs more than asking."""
    if name == "triton" or not torch.is_autocast_enabled(device):
        return _UNTOUCHED
    return torch.autocast(device, enabled=False)


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
    return run_forward(request, keep, checkpoint_every, products, name)


@torch.library.custom_op("tensor_memory::scan_backward", mutates_args=())
def scan_backward(
    grad_reads: Tensor | None,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
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
    grads = run_backward(wanted, request, kept, checkpoint_every, products, name)
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
    contiguous = (g if g is None else g.contiguous() for g in (grad_reads, grad_hidden, grad_cell))
    grads = scan_backward(*contiguous, *saved[:11], list(saved[11:]), *ctx.options)
    return *(None if t is None else g for t, g in zip(saved, grads, strict=False)), *[None] * 6


def _no_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(NO_SECOND_DERIVATIVE)


scan.register_autograd(_backward, setup_context=_setup)
scan_backward.register_autograd(_no_double_backward)
