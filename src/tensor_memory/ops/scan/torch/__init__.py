"""The recurrence made fast with plain tensor operations, its backward written by hand.

The same equations as in `reference.py`, arranged so that a step is one matrix product and a dozen
passes over contiguous memory; the README of `ops` derives the gradients.

Rows do not interact, so they are taken a block at a time and a step's volumes stay in cache. For
the backward h and c are kept, and the gates computed again: that takes no longer than fetching
them from memory would. Everything is computed in the inputs' own type; `products` is for devices
that multiply faster in another.

Letters: B batch, S steps, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.torch.block import Block, BlockGradients

BLOCK_VALUES = 1 << 17  # values of one volume, C · V · rows, in a block
SEGMENT = 64  # steps whose reads and writes are prepared at once
PIECE_BYTES = 24 << 20  # of what is kept, in one tensor


def forward(
    inputs: ScanInputs, *, keep: bool, products: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Run the scan; with `keep`, also return what `backward` needs."""
    hidden, cell, S = inputs.hidden, inputs.cell, inputs.length
    reads = inputs.empty_reads()
    last_hidden, last_cell = hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)
    kept = empty_kept(inputs, products) if keep else []
    for rows, pieces in _blocks(hidden, kept):
        block = Block(inputs.rows(rows))
        states = [state for piece in pieces for state in piece]
        for start in range(0, S, SEGMENT):
            block.prepare_steps(start, start + SEGMENT)
            block.run(states[start : start + SEGMENT], reads[rows, start : start + SEGMENT])
        last_hidden[rows] = block.hidden.movedim(-1, 0)
        last_cell[rows] = block.cell.movedim(-1, 0)
    return reads, last_hidden, last_cell, kept


def backward(
    grad_reads: Tensor,
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    inputs: ScanInputs,
    kept: list[Tensor],
    *,
    products: torch.dtype,
) -> ScanInputs:
    """The gradients in the places of the inputs."""
    if grad_hidden is None or grad_cell is None:  # nobody made use of the last state
        grad_hidden = grad_cell = torch.zeros_like(inputs.hidden)
    zeros = (t if t is None else torch.zeros_like(t) for t in inputs)
    total = ScanInputs._make(zeros)._replace(writes=None, resets=None)
    for rows, pieces in _blocks(inputs.hidden, kept):
        block = Block(inputs.rows(rows))
        block.prepare_steps(0, inputs.length)
        back = BlockGradients(block, grad_reads[rows], grad_hidden[rows], grad_cell[rows])
        states = [state for piece in pieces for state in piece]
        for s in reversed(range(len(states))):
            back.step(s, states[s])
        for into, grad in zip(total.rows(rows), back.finish(), strict=True):
            if into is not None and grad is not None:
                into += grad
    return total


def empty_kept(inputs: ScanInputs, products: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors for h and c before each step: per block (steps, 2C, *grid, rows).

    In pieces: the C library hands memory that comes in one piece of more than 32 MiB back to the
    system at once, and to touch it anew costs more than the scan does with it.
    """
    hidden, steps = inputs.hidden, inputs.length
    C, *grid = hidden.shape[1:]
    kept = []
    for rows, _ in _blocks(hidden, []):
        state = (2 * C, *grid, rows.stop - rows.start)
        most = max(1, PIECE_BYTES // (math.prod(state) * hidden.element_size()))
        for start in range(0, steps, most):
            kept.append(hidden.new_empty(min(most, steps - start), *state))
    return kept


def _blocks(hidden: Tensor, kept: list[Tensor]) -> list[tuple[slice, list[Tensor]]]:
    """The blocks of rows, about equal in size, and what was kept of each."""
    B, values = hidden.shape[0], math.prod(hidden.shape[1:])
    count = min(B, -(-B * values // BLOCK_VALUES))
    each = len(kept) // max(1, count)
    return [
        (slice(B * j // count, B * (j + 1) // count), kept[j * each : (j + 1) * each])
        for j in range(count)
    ]
