"""The recurrence behind one door: check the request, choose an implementation, run it.

Letters: B batch, S steps, n axes, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from tensor_memory.config import MAX_AXES
from tensor_memory.ops import reference

_log = logging.getLogger("tensor_memory")

_SCANS = {"reference": reference.scan}

BACKENDS = ("auto", *_SCANS)


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
        backend: "auto", or the name of an implementation, which then serves or raises.

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
    _check(read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets)
    run = _SCANS[_choose(backend)]
    floats = (read_at, write_at, spread, content, taps, mix, bias, hidden, cell)
    dtype = functools.reduce(
        torch.promote_types, (t.dtype for t in floats if t is not None), torch.float32
    )
    with torch.autocast(hidden.device.type, enabled=False):
        reads, new_hidden, new_cell = run(
            *(None if t is None else t.to(dtype) for t in floats), writes=writes, resets=resets
        )
    if write_at.shape[1] == 0:
        new_hidden, new_cell = new_hidden.clone(), new_cell.clone()
    return reads, new_hidden, new_cell


def memory_read(read_at: Tensor, hidden: Tensor) -> Tensor:
    """Reads that no write follows: read_at (B, S, Q, n), hidden (B, C, *grid) -> (B, S, Q, C)."""
    dtype = torch.promote_types(read_at.dtype, hidden.dtype)
    at = read_at.to(dtype).flatten(1, 2)
    with torch.autocast(hidden.device.type, enabled=False):
        return reference.sample(hidden.to(dtype), at).unflatten(1, read_at.shape[1:3])


def _choose(backend: str) -> str:
    if backend == "auto":
        _announce("reference")
        return "reference"
    if backend not in _SCANS:
        raise ValueError(
            f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}; "
            "'auto' picks the fastest that can serve"
        )
    return backend


@functools.cache
def _announce(name: str) -> None:
    _log.info("memory_scan: backend 'auto' chose '%s'", name)


def _check(
    read_at: Tensor | None,
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
) -> None:
    if not 3 <= hidden.ndim <= 2 + MAX_AXES:
        raise ValueError(
            f"memory_scan: expected hidden of shape (B, C, *grid) with 1 to {MAX_AXES} grid axes, "
            f"got {tuple(hidden.shape)}"
        )
    if write_at.ndim != 4:
        raise ValueError(
            f"memory_scan: expected write_at of shape (B, S, M, n), got {tuple(write_at.shape)}"
        )
    B, C, *grid = hidden.shape
    S, M = write_at.shape[1:3]
    n = len(grid)
    if min(grid) < 2:
        raise ValueError(
            f"memory_scan: expected at least 2 voxels along every axis, got {tuple(grid)}"
        )
    Q = read_at.shape[2] if read_at is not None and read_at.ndim == 4 else 1
    expected = {
        "read_at": (read_at, (B, S, Q, n), "(B, S, Q, n)"),
        "write_at": (write_at, (B, S, M, n), "(B, S, M, n)"),
        "spread": (spread, (B, S, M), "(B, S, M)"),
        "content": (content, (B, S, M, C), "(B, S, M, C)"),
        "taps": (taps, (n, 2 * C, 3), "(n, 2C, 3)"),
        "mix": (mix, (4 * C, 2 * C), "(4C, 2C)"),
        "bias": (bias, (4 * C,), "(4C)"),
        "cell": (cell, tuple(hidden.shape), "(B, C, *grid)"),
        "writes": (writes, (B, S), "(B, S)"),
        "resets": (resets, (B, S), "(B, S)"),
    }
    for name, (tensor, shape, letters) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"memory_scan: expected {name} of shape {letters} = {shape} to go with hidden "
                f"{tuple(hidden.shape)} and write_at {tuple(write_at.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"memory_scan: expected {name} on {hidden.device} like hidden, "
                f"got {tensor.device}; move it with .to()"
            )
        if name in ("writes", "resets"):
            if tensor.dtype != torch.bool:
                raise TypeError(f"memory_scan: expected {name} of type bool, got {tensor.dtype}")
        elif not tensor.is_floating_point():
            raise TypeError(f"memory_scan: expected {name} of a float type, got {tensor.dtype}")
