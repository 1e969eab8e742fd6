"""The recurrence made fast with plain tensor operations, its backward written by hand.

The same equations as `reference.py`, arranged so that a step is one matrix product and a dozen
passes over contiguous memory; README.md derives the gradients.

Rows do not interact, so they are taken a block at a time and a step's volumes stay in cache. For
the backward each step keeps a record of 7 volumes; what is cheap to run again (the write's half,
the filters) is not kept. Everything is computed in the inputs' own type: `products` is for devices
that multiply faster in another.

Letters: B batch, S steps, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.ops.request import Floats, Request
from tensor_memory.ops.torch_steps import RECORD, STATE, Block, BlockGradients

BLOCK_VALUES = 1 << 17  # values of one volume, C · V · rows, in a block


def forward(
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
    *,
    keep: bool,
    products: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the scan; with `keep`, also return what `backward` needs."""
    request = Request(
        read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets
    )
    S, C = write_at.shape[1], content.shape[-1]
    reads = content.new_empty(*read_at.shape[:3], C)
    last_hidden, last_cell = hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)
    kept = empty_kept(hidden, S, products) if keep else []
    for rows, records in _blocks(hidden, kept):
        block = Block(request.rows(rows))
        if keep:
            tape = [*records, block.new_volumes(STATE)]
        else:  # one record, which every step overwrites
            tape = [block.new_volumes(RECORD)] * (S + 1)
        block.load(tape[0])
        block.run(tape, reads[rows])
        last_hidden[rows] = tape[S][:C].movedim(-1, 0)
        last_cell[rows] = tape[S][C : 2 * C].movedim(-1, 0)
    return reads, last_hidden, last_cell, kept


def backward(
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
    *,
    products: torch.dtype,
) -> Floats:
    """Gradients of read_at, write_at, spread, content, taps, mix, bias, hidden and cell."""
    request = Request(
        read_at, write_at, spread, content, taps, mix, bias, hidden, cell, writes, resets
    )
    zeros = [None if value is None else torch.zeros_like(value) for value in request.floats]
    total = Request._make([*zeros, None, None])
    for rows, records in _blocks(hidden, kept):
        block = Block(request.rows(rows))
        back = BlockGradients(block, grad_reads[rows], grad_hidden[rows], grad_cell[rows])
        for s in reversed(range(len(records))):
            back.step(s, records[s])
        for into, grad in zip(total.rows(rows), back.finish(), strict=True):
            if into is not None and grad is not None:
                into += grad
    return total.floats


def empty_kept(hidden: Tensor, steps: int, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors for what `forward` keeps of S steps: per block of rows, one a step.

    Many of moderate size, not one: the C library gives pages above 32 MiB back to the system at
    once, and touching new ones costs several times what the scan does to them.
    """
    C, *grid = hidden.shape[1:]
    return [
        hidden.new_empty(RECORD * C, *grid, rows.stop - rows.start)
        for rows, _ in _blocks(hidden, [])
        for _ in range(steps)
    ]


def _blocks(hidden: Tensor, kept: list[Tensor]) -> list[tuple[slice, list[Tensor]]]:
    """The blocks of rows, and what was kept of each."""
    B = hidden.shape[0]
    size = max(1, BLOCK_VALUES // max(1, hidden[0].numel())) if B else 1
    starts = range(0, B, size)
    each = len(kept) // max(1, len(starts))
    return [
        (slice(start, min(start + size, B)), kept[j * each : (j + 1) * each])
        for j, start in enumerate(starts)
    ]
