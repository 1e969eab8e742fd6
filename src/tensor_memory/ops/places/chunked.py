"""The place memory parallel over time: products within a chunk, the state between chunks.

Within a chunk of L tokens every read is a sum over the chunk's writes and over the state before
the chunk. With g the running sum of log α inside the chunk,

    r_t = Σ_{s ≤ t} e^{g_t − g_s} (φ(q_t)·φ(p_s)) u_s + e^{g_t} φ(q_t)ᵀ S
    S  ← e^{g_L} S + Σ_s e^{g_L − g_s} φ(p_s) u_sᵀ

Rule "linear": u_s = β_s v_s. Rule "delta": u_t = β_t (v_t − φ(p_t)ᵀ α_t S_{t−1}) is a triangular
system, (I + T) u = β (v − e^g φ(p)ᵀ S) with T_ts = β_t e^{g_t − g_s} φ(p_t)·φ(p_s) for s < t.
φ(q)·φ(p) is a product over the axes, so it never needs the V values of an address.

Letters: B batch, N tokens, H heads, S chunks of L tokens, V voxels, C channels, E = 2ⁿ corners.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory.ops.autograd import can_ask, differentiable_gradients
from tensor_memory.ops.places.addresses import corners, factors, overlap
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.products import outer, product

CHUNK = 64
"""L: the products within a chunk grow with it, the steps between chunks shrink."""

BLOCK = 64 * CHUNK
"""Tokens taken at once, which bounds the memory of a long call without gradients."""

ADDRESSES = 256 * BLOCK
"""Values that the addresses of one row and head may have at once: on large grids fewer tokens."""

SPARSE_FROM = 32
"""Voxels per touched voxel from which on gathering is faster than a product with the grid."""

MOST_DECAY = 40.0
"""Of log α that the sparse path lets pile up before it touches the whole grid: e⁴⁰ is safe."""


class Chunks(NamedTuple):
    """A block's tokens by chunk, (B, H, S, L, ...), and its decays."""

    write_parts: list[Tensor]
    """Factors (B, H, S, L, G) of the write addresses, one per axis."""
    read_parts: list[Tensor]
    value: Tensor
    """v (B, H, S, L, C)."""
    rate: Tensor
    """β (B, H, S, L, 1)."""
    within: Tensor
    """e^{g_t − g_s} where s ≤ t and no reset lies between, else 0: (B, H, S, L, L)."""
    from_state: Tensor
    """e^{g_t}, 0 after a reset: (B, H, S, L, 1)."""
    to_state: Tensor
    """e^{g_L − g_s}, 0 before a reset: (B, H, S, L, 1)."""
    total: Tensor
    """g_L: (B, H, S)."""
    carried: Tensor
    """(B, 1, S) whether the state before the chunk survives it: no reset inside."""


def scan(inputs: PlaceInputs) -> tuple[Tensor, Tensor]:
    """-> reads (B, N, H, C), state (B, H, *grid, C)."""
    N = inputs.content.shape[1]
    state = inputs.state.flatten(2, -2)  # (B, H, V, C)
    if inputs.resets is not None and N:  # a decay of 0 alone would keep a NaN
        state = torch.where(inputs.resets[:, 0, None, None, None], 0, state)
    sparse = is_sparse(inputs)
    reads = [inputs.content.new_zeros(inputs.content[:, :0].shape)]
    step, at_once = (_sparse_block if sparse else _dense_block), _at_once(inputs, sparse)
    if 0 < N <= at_once:  # without a loop: a compiled graph then serves any such N
        read, state = step(inputs, state)
        return read, state.view(inputs.state.shape)
    for start in range(0, N, at_once):
        read, state = step(inputs.tokens(start, min(N, start + at_once)), state)
        reads.append(read)
    return torch.cat(reads, 1), state.view(inputs.state.shape)


def read_before(inputs: PlaceInputs, state: Tensor) -> Tensor:
    """What reads get of a state before the first token, e^{g_t} φ(q_t)ᵀ S: (B, N, H, C).

    It is the share that a scan from an empty state leaves out, under the linear rule.
    """
    (B, H), V, N = state.shape[:2], math.prod(inputs.grid), inputs.content.shape[1]
    g = inputs.log_keep.cumsum(1)  # (B, N, H)
    if inputs.resets is not None:
        g = g.masked_fill(inputs.resets.cumsum(1)[..., None] > 0, -torch.inf)
    state = state.flatten(2, -2)  # (B, H, V, C)
    found = [inputs.content.new_zeros(inputs.content[:, :0].shape)]
    sparse = is_sparse(inputs)
    at_once = _at_once(inputs, sparse)
    for start in range(0, N, at_once):
        places = inputs.asked_at[:, start : start + at_once]
        if sparse:
            index, weight = corners(places, inputs.grid, inputs.wrap)  # (B, N, H, E)
            row = torch.arange(B * H, device=state.device).view(B, 1, H, 1) * V
            read = F.embedding_bag(
                (index + row).flatten(0, 2), state.flatten(0, 2),
                per_sample_weights=weight.flatten(0, 2), mode="sum",
            ).view(*index.shape[:3], state.shape[-1])  # fmt: skip
        else:
            address = outer(factors(places, inputs.grid, inputs.width, inputs.wrap))
            read = torch.einsum("bnhv,bhvc->bnhc", address, state)
        found.append(read)
    return g.exp()[..., None] * torch.cat(found, 1)


def is_sparse(inputs: PlaceInputs) -> bool:
    """Whether to touch the voxels around each place, and not the grid."""
    grid = inputs.grid
    return inputs.width is None and math.prod(grid) >= SPARSE_FROM * 2 ** len(grid)


def _at_once(inputs: PlaceInputs, sparse: bool) -> int:
    """Tokens to take at once, whole chunks."""
    chunks = ADDRESSES // (CHUNK * math.prod(inputs.grid))
    return BLOCK if sparse else min(BLOCK, CHUNK * max(1, chunks))


def _dense_block(block: PlaceInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Addresses as rows of V values: between chunks two products with the grid."""
    N = block.content.shape[1]
    chunks = cut_into_chunks(block)
    write_address, read_address = outer(chunks.write_parts), outer(chunks.read_parts)
    keep = chunks.total.exp() * chunks.carried  # (B, H, S)
    inwards = (write_address * chunks.to_state).mT  # (B, H, S, V, L)
    weighted = chunks.rate * chunks.value
    before, values = [], []  # the state before each chunk, and what the chunk writes
    if block.rule == "linear":
        added = product(inwards, weighted).unbind(2)
        for s, add in enumerate(added):
            before.append(state)
            state = keep[:, :, s, None, None] * state + add
        written = weighted
    else:
        inverse = delta_inverse(chunks)
        outwards = write_address * chunks.from_state
        for s in range(keep.shape[2]):
            before.append(state)
            held = product(outwards[:, :, s], state)
            asked = weighted[:, :, s] - chunks.rate[:, :, s] * held
            value = product(inverse[:, :, s], asked)  # (B, H, L, C)
            values.append(value)
            state = keep[:, :, s, None, None] * state + product(inwards[:, :, s], value)
        written = torch.stack(values, 2)
    reads = product(attention(chunks), written)
    reads = reads + product(read_address * chunks.from_state, torch.stack(before, 2))
    return _flat(reads, N), state


def _sparse_block(block: PlaceInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Addresses as E corners: between chunks the voxels around each place, and not the grid."""
    reads, N = [], block.content.shape[1]
    L, whole = min(CHUNK, N), [(0, N)]  # a graph cannot ask for decays, and undoes none
    for start, stop in _segments(block) if can_ask(state) else whole:
        read, state = _sparse_segment(block.tokens(start, stop), state, L)
        reads.append(read)
    return torch.cat(reads, 1), state


def _segments(block: PlaceInputs) -> list[tuple[int, int]]:
    """Pieces of a block: no reset but in the last chunk, and no more decay than can be undone.

    A piece's last chunk is never undone, so that what came before tells where the piece ends.
    """
    N = block.content.shape[1]
    edges = range(0, N, CHUNK)
    before = F.pad(block.log_keep.detach().cumsum(1), (0, 0, 1, 0))[:, edges].cpu()  # (B, S, H)
    resets = set[int]()  # the chunks that have one
    if block.resets is not None:
        resets.update((block.resets.any(0).nonzero() // CHUNK).flatten().tolist())
    cuts, begin = [0], 0
    for number, at in enumerate(edges):
        # Row by row: the one that forgets most so far may not be the one that does now.
        forgotten = before[:, number] - before[:, begin]
        if number - 1 in resets or (forgotten < -MOST_DECAY).any():
            cuts.append(at)
            begin = number
    return list(itertools.pairwise([*cuts, N]))


def _sparse_segment(segment: PlaceInputs, state: Tensor, L: int) -> tuple[Tensor, Tensor]:
    (B, N, H), V = segment.content.shape[:3], state.shape[2]
    chunks = cut_into_chunks(segment, L)
    row = torch.arange(B * H, device=state.device).view(B, H, 1, 1, 1) * V
    write_index, write_weight = corners(segment.write_at, segment.grid, segment.wrap)
    read_index, read_weight = corners(segment.asked_at, segment.grid, segment.wrap)
    given = chunks.rate * chunks.value
    solve = None
    if segment.rule == "delta":
        inverse = delta_inverse(chunks)
        given = product(inverse, given)
        solve = inverse * (chunks.rate * chunks.from_state).mT
    run = SparseChunks.apply if can_ask(state) else _plain_chunks
    held, written, state = run(
        _by_chunk(write_index, L) + row, _by_chunk(read_index, L) + row,
        _by_chunk(write_weight, L), _by_chunk(read_weight, L), given, solve, chunks.to_state,
        chunks.total.masked_fill(~chunks.carried, -torch.inf), state,
    )  # type: ignore[misc]  # fmt: skip
    reads = product(attention(chunks), written) + chunks.from_state * held
    return _flat(reads, N), state


class SparseChunks(torch.autograd.Function):
    """The state through a segment's chunks, touching E voxels per token.

    The buffer holds the state over e^{decay so far}, so that keeping costs nothing; it meets the
    whole grid once, before the last chunk is written.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """-> what the places held (B, H, S, L, C), what was written, the state after."""
        write_flat, read_flat, write_weight, read_weight, given, solve, to_state = inputs[:7]
        total, state = inputs[7:]
        (B, H, S), V = given.shape[:3], state.shape[2]
        buffer = state.flatten(0, 2).clone()  # (B·H·V, C)
        scale = F.pad(total.cumsum(2), (1, 0))  # (B, H, S + 1), log of what the buffer leaves out
        held, written = torch.empty_like(given), given.clone()
        around_reads, around_writes = [], []
        for s in range(S):
            now = scale[:, :, s].exp()[..., None, None]  # (B, H, 1, 1)
            around = _gather(buffer, read_flat[:, :, s])  # (B, H, L, E, C)
            around_reads.append(around)
            held[:, :, s] = now * (read_weight[:, :, s, :, :, None] * around).sum(3)
            if solve is not None:
                around = _gather(buffer, write_flat[:, :, s])
                around_writes.append(around)
                was = now * (write_weight[:, :, s, :, :, None] * around).sum(3)
                written[:, :, s] -= solve[:, :, s] @ was
            factor = to_state[:, :, s]
            if s == S - 1:
                buffer.view(B, H, V, -1).mul_(scale[:, :, S].exp()[..., None, None])
            else:
                factor = factor * (-scale[:, :, s + 1]).exp()[..., None, None]
            value = (factor * written[:, :, s])[:, :, :, None] * write_weight[:, :, s, :, :, None]
            buffer.index_add_(0, write_flat[:, :, s].flatten(), value.flatten(0, 3))
        after = buffer.view(state.shape)
        ctx.save_for_backward(
            write_flat, read_flat, write_weight, read_weight, given, solve, to_state, total, state,
            scale, held, given if solve is None else written, after, *around_reads, *around_writes,
        )  # fmt: skip
        return held, written, after

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """From the last chunk to the first; the gradient's buffer is touched as the state's."""
        if torch.is_grad_enabled():  # it will be differentiated again
            return tuple(differentiable_gradients(_plain_chunks, ctx.saved_tensors[:9], grads))
        grad_held, grad_written, grad_after = grads
        (write_flat, read_flat, write_weight, read_weight, _, solve, to_state, _, _, scale, held,
         written, after, *around) = ctx.saved_tensors  # fmt: skip
        (B, H, S), V = held.shape[:3], after.shape[2]
        around_reads, around_writes = around[:S], around[S:]
        grad_write_weight = torch.zeros_like(write_weight)
        grad_read_weight = torch.zeros_like(read_weight)
        grad_given, grad_to_state = grad_written.clone(), torch.zeros_like(to_state)
        grad_solve = None if solve is None else torch.zeros_like(solve)
        grad_scale = torch.zeros_like(scale)
        buffer = grad_after.contiguous().view(B * H * V, -1).clone()
        for s in reversed(range(S)):
            now = scale[:, :, s].exp()[..., None, None]
            last = s == S - 1
            undo = None if last else (-scale[:, :, s + 1]).exp()[..., None, None]
            factor = to_state[:, :, s] if undo is None else to_state[:, :, s] * undo
            weight = write_weight[:, :, s, :, :, None]
            arriving = _gather(buffer, write_flat[:, :, s])  # (B, H, L, E, C)
            by_value = (weight * arriving).sum(3)  # (B, H, L, C)
            value = written[:, :, s]
            grad_given[:, :, s] += factor * by_value
            grad_write_weight[:, :, s] += (arriving * (factor * value)[:, :, :, None]).sum(-1)
            by_factor = (value * by_value).sum(-1, keepdim=True)  # (B, H, L, 1)
            grad_to_state[:, :, s] = by_factor if undo is None else by_factor * undo
            through = (factor * by_factor).sum((2, 3))  # (B, H)
            if last:
                kept = (grad_after * after).sum((2, 3)) - through
                grad_scale[:, :, S] += kept
                buffer.view(B, H, V, -1).mul_(scale[:, :, S].exp()[..., None, None])
            else:
                grad_scale[:, :, s + 1] -= through
            if solve is not None:
                grad_value = grad_given[:, :, s]
                grad_was = -(solve[:, :, s].mT @ grad_value)
                was = now * (weight * around_writes[s]).sum(3)
                assert grad_solve is not None
                grad_solve[:, :, s] = -(grad_value @ was.mT)
                grad_scale[:, :, s] += (grad_was * was).sum((2, 3))
                grad_was = (now * grad_was)[:, :, :, None]  # (B, H, L, 1, C)
                grad_write_weight[:, :, s] += (grad_was * around_writes[s]).sum(-1)
                _scatter(buffer, write_flat[:, :, s], weight * grad_was)
            wanted = grad_held[:, :, s]
            grad_scale[:, :, s] += (wanted * held[:, :, s]).sum((2, 3))
            wanted = (now * wanted)[:, :, :, None]
            grad_read_weight[:, :, s] = (wanted * around_reads[s]).sum(-1)
            _scatter(buffer, read_flat[:, :, s], read_weight[:, :, s, :, :, None] * wanted)
        # Each chunk's total is in the scale of all boundaries after it.
        grad_total = grad_scale[:, :, 1:].flip(2).cumsum(2).flip(2)
        return (
            None, None, grad_write_weight, grad_read_weight, grad_given, grad_solve,
            grad_to_state, grad_total, buffer.view(after.shape),
        )  # fmt: skip


def _plain_chunks(
    write_flat: Tensor, read_flat: Tensor, write_weight: Tensor, read_weight: Tensor,
    given: Tensor, solve: Tensor | None, to_state: Tensor, total: Tensor, state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`SparseChunks` with a whole state per chunk, differentiable any number of times."""
    shape, held, written = state.shape, [], []
    for s in range(given.shape[2]):
        buffer, weight = state.flatten(0, 2), write_weight[:, :, s, :, :, None]
        around = _gather(buffer, read_flat[:, :, s])  # (B, H, L, E, C)
        held.append((read_weight[:, :, s, :, :, None] * around).sum(3))
        value = given[:, :, s]
        if solve is not None:
            was = (weight * _gather(buffer, write_flat[:, :, s])).sum(3)
            value = value - solve[:, :, s] @ was
        written.append(value)
        added = weight * (to_state[:, :, s] * value)[:, :, :, None]
        kept = (total[:, :, s].exp()[..., None, None] * state).flatten(0, 2)
        index = write_flat[:, :, s].flatten()
        state = kept.index_add(0, index, added.flatten(0, 3)).view(shape)
    return torch.stack(held, 2), torch.stack(written, 2), state


def _gather(buffer: Tensor, index: Tensor) -> Tensor:
    return buffer.index_select(0, index.flatten()).view(*index.shape, -1)


def _scatter(buffer: Tensor, index: Tensor, values: Tensor) -> None:
    buffer.index_add_(0, index.flatten(), values.flatten(0, -2))


def cut_into_chunks(block: PlaceInputs, L: int | None = None) -> Chunks:
    """A block's tokens by chunk of L; the last one is filled up."""
    L = min(CHUNK, block.content.shape[1]) if L is None else L
    log_keep = _by_chunk(block.log_keep[..., None], L)[..., 0]  # (B, H, S, L)
    g = log_keep.cumsum(-1)
    earlier = torch.ones(L, L, dtype=torch.bool, device=g.device).tril()
    carried = torch.ones((), dtype=torch.bool, device=g.device).expand(g.shape[0], 1, g.shape[2])
    from_state, to_state = g, g[..., -1:] - g
    if block.resets is not None:
        resets = _by_chunk(block.resets[:, :, None, None], L)[..., 0]
        part = resets.cumsum(-1)  # (B, 1, S, L), the document of a token within its chunk
        earlier = earlier & (part[..., :, None] == part[..., None, :])
        carried = part[..., -1] == 0
        from_state = from_state.masked_fill(part > 0, -torch.inf)
        to_state = to_state.masked_fill(part != part[..., -1:], -torch.inf)
    gap = g[..., :, None] - g[..., None, :]
    write_parts = factors(block.write_at, block.grid, block.width, block.wrap)
    read_parts = write_parts
    if block.read_at is not None:
        read_parts = factors(block.read_at, block.grid, block.width, block.wrap)
    return Chunks(
        [_by_chunk(part, L) for part in write_parts],
        [_by_chunk(part, L) for part in read_parts],
        _by_chunk(block.content, L),
        _by_chunk(block.rate[..., None], L),
        gap.masked_fill(~earlier, -torch.inf).exp(),
        from_state.exp()[..., None],
        to_state.exp()[..., None],
        g[..., -1],
        carried,
    )


def attention(chunks: Chunks) -> Tensor:
    """How much of each write of the chunk a read gets: (B, H, S, L, L)."""
    return overlap(chunks.read_parts, chunks.write_parts) * chunks.within


def delta_inverse(chunks: Chunks) -> Tensor:
    """(I + T)⁻¹ of the delta rule: (B, H, S, L, L)."""
    among = overlap(chunks.write_parts, chunks.write_parts) * chunks.within
    system = (chunks.rate * among).tril(-1)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    return torch.linalg.solve_triangular(
        system + eye, eye.expand_as(system), upper=False, unitriangular=True
    )


def _by_chunk(tokens: Tensor, L: int) -> Tensor:
    """(B, N, H, ...) -> (B, H, S, L, ...); zeros fill the last chunk up and do nothing."""
    if short := -tokens.shape[1] % L:
        fill = tokens.new_zeros((tokens.shape[0], short, *tokens.shape[2:]))
        tokens = torch.cat([tokens, fill], 1)
    return tokens.unflatten(1, (-1, L)).movedim(3, 1)


def _flat(reads: Tensor, N: int) -> Tensor:
    """(B, H, S, L, C) -> (B, N, H, C)."""
    return reads.movedim(1, 3).flatten(1, 2)[:, :N]
