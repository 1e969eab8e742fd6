"""The paper's recurrence: `memory_scan`, and `memory_read` where nothing is written.

Letters: B batch, S steps, n axes, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensor_memory.config import MAX_COUNT
from tensor_memory.ops import dispatch
from tensor_memory.ops.autograd import Options, Recurrence, is_transformed, no_autocast
from tensor_memory.ops.inputs import products_dtype
from tensor_memory.ops.scan import reference
from tensor_memory.ops.scan import torch as torch_backend
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.torch.sampling import sample


def _backend(name: str) -> Any:
    """The module of a backend. Triton is imported only where the fused backend is chosen."""
    if name == "triton":
        from tensor_memory.ops.scan import triton as triton_backend

        return triton_backend
    return reference if name == "reference" else torch_backend


SCAN = Recurrence("scan", ScanInputs, _backend, lambda inputs: reference.scan(*inputs))


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
    """Run the memory's recurrence over S steps: read, write, filter, gate; tensors only.

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
    inputs = ScanInputs(
        read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets
    )
    inputs.check()
    whole = isinstance(checkpoint_every, int) and not isinstance(checkpoint_every, bool)
    if checkpoint_every is not None and not (whole and 1 <= checkpoint_every <= MAX_COUNT):
        raise ValueError(
            "checkpoint_every: expected None or a whole number of steps, got "
            f"{checkpoint_every!r:.80}; leave it out to keep every step"
        )
    dtype = inputs.dtype
    chosen, ready = scan_backend(backend, hidden.shape, hidden.device, dtype), inputs.prepared()
    if chosen == "reference":
        if checkpoint_every is not None:
            raise ValueError(
                "checkpoint_every: backend 'reference' leaves its backward to autograd, which "
                "keeps every step; choose backend 'auto', or use torch.utils.checkpoint"
            )
        with no_autocast(hidden.device):
            reads, hidden, cell = reference.scan(*ready)
    else:
        low = products_dtype(content) == torch.bfloat16  # the type the caller works in
        options = Options(checkpoint_every or 0, torch.bfloat16 if low else dtype, chosen)
        reads, hidden, cell = SCAN.run(ready, options)
    return None if read_at is None else reads, hidden, cell


def scan_backend(backend: str, state: torch.Size, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that serves a scan of hidden (B, C, *grid) in a type; raises where none does."""
    return dispatch.choose(
        "memory_scan",
        backend,
        device,
        lambda: SCAN.backend("triton").why_not(state, device, dtype),
    )


def memory_read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows: read_at (B, S, Q, n), hidden (B, C, *grid) -> (B, S, Q, C)."""
    dtype = torch.promote_types(read_at.dtype, hidden.dtype)
    at, volume = read_at.to(dtype), hidden.to(dtype)
    learning = torch.is_grad_enabled() and (at.requires_grad or volume.requires_grad)
    if volume.is_cuda and not learning and not is_transformed() and _is_fused_read(volume):
        return _fused_read(at.contiguous(), volume.contiguous())
    with no_autocast(hidden.device):
        return sample(volume, at.flatten(1, 2)).unflatten(1, read_at.shape[1:3])


def _is_fused_read(hidden: Tensor) -> bool:
    if dispatch.why_not("triton", hidden.device) is not None:
        return False
    return SCAN.backend("triton").why_not_read(hidden) is None


@torch.library.custom_op("tensor_memory::read", mutates_args=())
def _fused_read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """`memory_read` in one launch, without a gradient."""
    return SCAN.backend("triton").read(read_at, hidden)


@_fused_read.register_fake
def _(read_at: Tensor, hidden: Tensor) -> Tensor:
    return hidden.new_empty(*read_at.shape[:3], hidden.shape[1])
