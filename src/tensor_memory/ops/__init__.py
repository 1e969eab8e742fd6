"""The recurrence behind one door: check the request, choose an implementation, run it.

Letters: B batch, S steps, n axes, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import torch
from torch import Tensor

from tensor_memory.ops import direct, operator, reference, sampling
from tensor_memory.ops.request import Request

_log = logging.getLogger("tensor_memory")
_announced: set[str] = set()

_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None

BACKENDS = ("auto", "reference", "torch", "triton")


def memory_scan(
    read_at: Tensor | None,
    write_at: Tensor,
    spread: Tensor | None,
    content: Tensor,
    taps: Tensor | None,
    mix: Tensor,
    bias: Tensor,
    hidden: Tensor,
    cell: Tensor,
    *,
    writes: Tensor | None = None,
    resets: Tensor | None = None,
    backend: str = "auto",
    checkpoint_every: int | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Run the memory's recurrence over S steps: read, deposit, filter, gate; tensors only.

    Each step zeroes the rows named in `resets`, reads `hidden`, then writes the rows named in
    `writes` (all of them by default). A row that does not write keeps hidden and cell untouched.

    Args:
        read_at: (B, S, Q, n) coordinates in [-1, 1] to read at; None wants no reads.
        write_at: (B, S, M, n) coordinates in [-1, 1] to write at.
        spread: (B, S, M) the final σ of each write; None writes the nearest voxel alone.
        content: (B, S, M, C) what is written.
        taps: (n, 2C, 3) depthwise filters in grid order, channels [U; hidden]; None mixes
            pointwise only.
        mix: (4C, 2C) pointwise mix to the gates i, f, o, g.
        bias: (4C) added to them.
        hidden: (B, C, *grid) what reads see, before the first step.
        cell: (B, C, *grid) what the gates accumulate, before the first step.
        writes: (B, S) bool, rows that write at a step.
        resets: (B, S) bool, rows that are emptied before a step's read.
        backend: "reference" (readable, differentiable any number of times, in forward mode and
            under torch.func too), "torch" (fast on a CPU), "triton" (fused, on a GPU), which then
            serve or raise; "auto" takes the fastest that can serve.
        checkpoint_every: keep the state of every so many steps alone for the backward, which runs
            the steps between again; None keeps what the backward needs of all of them.

    Returns:
        reads (B, S, Q, C) or None, hidden, cell: in float32, or in float64 where an input is.
        They never share storage with the inputs.

    >>> read_at = write_at = torch.zeros(1, 5, 1, 3)
    >>> content, state = torch.ones(1, 5, 1, 2), torch.zeros(1, 2, 4, 4, 4)
    >>> mix, bias = torch.ones(8, 4), torch.zeros(8)
    >>> reads, hidden, cell = memory_scan(
    ...     read_at, write_at, torch.ones(1, 5, 1), content, None, mix, bias, state, state)
    >>> reads.shape, hidden.shape
    (torch.Size([1, 5, 1, 2]), torch.Size([1, 2, 4, 4, 4]))
    >>> bool(reads[0, 0].eq(0).all())  # the first read precedes the first write
    True
    """
    request = Request(
        read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets
    )
    request.check()
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(
            f"checkpoint_every: expected None or a number of steps, got {checkpoint_every}"
        )
    return scan_checked(request, backend, checkpoint_every, _products_dtype(request))


def scan_checked(
    request: Request, backend: str, checkpoint_every: int | None, products: torch.dtype
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`memory_scan` of a request known to be sound, its products in the type given."""
    hidden, writes, resets = request.hidden, request.writes, request.resets
    chosen = _choose(backend, request)
    ready = request.at_rest(request.dtype)
    if chosen == "reference":
        if checkpoint_every is not None:
            raise ValueError(
                "checkpoint_every: backend 'reference' leaves its backward to autograd, which "
                "keeps every step; choose backend 'auto', or use torch.utils.checkpoint"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            reads, hidden, cell = reference.scan(*ready.floats, writes=writes, resets=resets)
        if request.write_at.shape[1] == 0:
            hidden, cell = hidden.clone(), cell.clone()
    else:
        keep = torch.is_grad_enabled() and any(
            value is not None and value.requires_grad for value in request.floats
        )
        options = (keep, checkpoint_every or 0, products, chosen)
        if direct.serves(ready):
            reads, hidden, cell = direct.scan(ready, *options)
        else:
            reads, hidden, cell, _ = operator.scan(*ready, *options)
    return None if request.read_at is None else reads, hidden, cell


def memory_read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows: read_at (B, S, Q, n), hidden (B, C, *grid) -> (B, S, Q, C)."""
    dtype = torch.promote_types(read_at.dtype, hidden.dtype)
    at, volume = read_at.to(dtype), hidden.to(dtype)
    learning = torch.is_grad_enabled() and (at.requires_grad or volume.requires_grad)
    fused = volume.is_cuda and not learning and not direct.transformed()
    if fused and _why_not_read(volume) is None:
        return operator.read(at.contiguous(), volume.contiguous())
    with torch.autocast(hidden.device.type, enabled=False):
        return sampling.sample(volume, at.flatten(1, 2)).unflatten(1, read_at.shape[1:3])


def fused_layer(x: Tensor, backend: str) -> Any | None:
    """`ops.layer` where its functions can stand in for plain code around a fused scan of x."""
    if backend not in ("auto", "triton") or not (x.is_cuda or backend == "triton"):
        return None
    if not direct.serves((x,)) or why_not("triton", x.device) is not None:
        return None
    from tensor_memory.ops import layer

    return layer if layer.serves(x) else None


def why_not(backend: str, device: torch.device) -> str | None:
    """The reason a backend cannot serve on this machine and device, or None where it can."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}; "
            "'auto' picks the fastest that can serve"
        )
    if backend != "triton":
        return None
    if not _TRITON_INSTALLED:
        return (
            "triton is not installed; it comes with CUDA builds of torch, or `pip install triton`"
        )
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return (
        f"it needs a CUDA device, got {device.type}; "
        "TRITON_INTERPRET=1 runs its kernels on a CPU, slowly, to test them"
    )


def _choose(backend: str, request: Request) -> str:
    """The implementation that serves this request; an explicit one serves or raises."""
    device = request.hidden.device
    if backend != "reference" and direct.transformed():
        reason = "torch.func and forward-mode differentiation see through 'reference' alone"
        if backend == "auto":
            return _announce("reference", f"because {reason}")
        raise ValueError(
            f"backend {backend!r} cannot serve this request: {reason}; use 'auto' or 'reference'"
        )
    if backend == "auto":
        if device.type != "cuda":
            return _announce("torch", f"on device {device.type}")
        reason = _why_not_fused(request)
        if reason is None:
            return _announce("triton", "on device cuda")
        return _announce("torch", f"because 'triton' cannot serve: {reason}")
    reason = _why_not_fused(request) if backend == "triton" else why_not(backend, device)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot serve this request: {reason}")
    return backend


def _why_not_fused(request: Request) -> str | None:
    reason = why_not("triton", request.hidden.device)
    if reason is None:
        from tensor_memory.ops import triton_plan

        reason = triton_plan.why_not(request.hidden, request.dtype)
    return reason


def _why_not_read(hidden: Tensor) -> str | None:
    reason = why_not("triton", hidden.device)
    if reason is None:
        from tensor_memory.ops import triton_plan

        reason = triton_plan.why_not_read(hidden)
    return reason


def _announce(name: str, why: str) -> str:
    """Log a choice of "auto" once, and return it."""
    line = f"memory_scan: backend 'auto' chose '{name}' {why}"
    if not torch.compiler.is_compiling() and line not in _announced:
        _announced.add(line)
        _log.info(line)
    return name


def _products_dtype(request: Request) -> torch.dtype:
    """The type a fused scan multiplies in: bfloat16 where the caller works in it."""
    low = products_of(request.content) == torch.bfloat16
    return torch.bfloat16 if low else request.dtype


def products_of(x: Tensor) -> torch.dtype:
    """The type a matrix product of x runs in here."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
