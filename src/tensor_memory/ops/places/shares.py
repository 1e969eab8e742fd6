"""Where a read came from: the exact share of every write, by the recurrence run backwards.

A read is aᵀ S with a = φ(q). Since S_s = α_s (I − β_s φ_s φ_sᵀ) S_{s−1} + β_s φ_s v_sᵀ (the term in
brackets is 1 under the linear rule), the write of token s has the share β_s φ_s·a, and before it
a ← α_s (a − β_s φ_s (φ_s·a)). Going back from the read, a becomes what the state before the first
token contributes.

A block of L tokens is one step. In the letters of `chunked`, r = w u + e^{g} aᵀ S with
w_s = e^{g − g_s} a·φ(p_s), so the shares are β w, or β w (I + T)⁻¹ under the delta rule, and
a ← e^{g} a − Σ_s share_s e^{g_s} φ(p_s). Beside the shares, memory is one block and the addresses
of a group of reads, whatever the length.

Letters: B batch, N tokens, H heads, V voxels, C channels, R reads asked for, L tokens of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensor_memory.ops.places.addresses import corners
from tensor_memory.ops.places.chunked import (
    CHUNK,
    attention,
    cut_into_chunks,
    delta_inverse,
    is_sparse,
)
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.products import outer

VALUES = 2**22
"""Numbers that the addresses of a block or of a group of reads may have; 32 MiB in float64."""


def shares(inputs: PlaceInputs, reads: Tensor) -> tuple[Tensor, Tensor]:
    """reads (R) token positions -> shares (B, R, N, H), and the rest (B, R, H, C).

    Σ_s share_s v_s + rest = r of every read asked for, where the rest is what the state before the
    first token gave. A write after the read has share 0.
    """
    B, N, H, C = inputs.content.shape
    found = inputs.content.new_zeros(B, len(reads), N, H)
    rest = inputs.content.new_zeros(B, len(reads), H, C)
    address_size = B * H * math.prod(inputs.grid)
    state, L = inputs.state.flatten(2, -2), block_length(address_size)
    for which in torch.arange(len(reads)).split(reads_at_once(address_size)) if len(reads) else ():
        at = reads[which].expand(B, -1)
        stop = int(reads[which].max()) + 1
        a = inputs.content.new_zeros(B, H, len(which), state.shape[2])
        for start in reversed(range(0, stop, L)):
            block = inputs.tokens(start, min(start + L, stop))
            share, a = step_back(block, a, at - start)
            found[:, which, start : start + share.shape[2]] = share
        rest[:, which] = (a @ state).transpose(1, 2)
    return found, rest


def block_length(address_size: int) -> int:
    """L, where the addresses of one token, in all rows and heads, have so many numbers."""
    return max(1, min(CHUNK, VALUES // max(address_size, 1)))


def reads_at_once(address_size: int) -> int:
    """Reads that are followed together, where those of one read have so many numbers."""
    return max(1, VALUES // max(address_size, 1))


def step_back(block: PlaceInputs, a: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Through a block of L tokens: -> shares (B, R, L, H), and a on the state before it.

    a (B, H, R, V) is on the state after the block. at (B, R) is the token of each read, counted
    from the block's first; a read that lies in the block begins there.
    """
    L, H = block.content.shape[1:3]
    chunks = cut_into_chunks(block)  # one chunk
    rate, from_state = chunks.rate[:, :, 0], chunks.from_state[:, :, 0]  # (B, H, L, 1)
    keep = (chunks.total.exp() * chunks.carried)[:, :, :, None]  # (B, H, 1, 1)
    write = _Addresses(block, [part[:, :, 0] for part in chunks.write_parts])
    w = write.dot(a) * chunks.to_state[:, :, 0].mT  # (B, H, R, L)
    before = keep * a
    begins = ((at >= 0) & (at < L))[:, None, :, None]
    if bool(begins.any()):
        token = at.clamp(0, L - 1)[:, None, :, None].expand(-1, H, -1, -1)

        def of_reads(values: Tensor) -> Tensor:
            return values.gather(2, token.expand(-1, -1, -1, values.shape[-1]))

        asked = outer([of_reads(part[:, :, 0]) for part in chunks.read_parts])
        w = torch.where(begins, of_reads(attention(chunks)[:, :, 0]), w)
        before = torch.where(begins, of_reads(from_state) * asked, before)
    if block.rule == "delta":
        w = w @ delta_inverse(chunks)[:, :, 0]
    share = w * rate.mT
    if block.rule == "delta":
        before = before - write.sum(share * from_state.mT)
    return share.permute(0, 2, 3, 1), before


class _Addresses:
    """The write addresses φ of a block: all voxels, or the corners around each place."""

    def __init__(self, block: PlaceInputs, parts: list[Tensor]) -> None:
        self.voxels = math.prod(block.grid)
        self.dense = None if is_sparse(block) else outer(parts)  # (B, H, L, V)
        if self.dense is None:
            index, weight = corners(block.write_at, block.grid, block.wrap)  # (B, L, H, E)
            self.index, self.weight = index.transpose(1, 2), weight.transpose(1, 2)

    def dot(self, a: Tensor) -> Tensor:
        """a·φ_s: (B, H, R, V) -> (B, H, R, L)."""
        if self.dense is not None:
            return a @ self.dense.mT
        (B, H, L, E), R = self.index.shape, a.shape[2]
        index = self.index.reshape(B, H, 1, L * E).expand(-1, -1, R, -1)
        return (a.gather(3, index).view(B, H, R, L, E) * self.weight[:, :, None]).sum(-1)

    def sum(self, by: Tensor) -> Tensor:
        """Σ_s by_s φ_s: (B, H, R, L) -> (B, H, R, V)."""
        if self.dense is not None:
            return by @ self.dense
        (B, H, L, E), R = self.index.shape, by.shape[2]
        index = self.index.reshape(B, H, 1, L * E).expand(-1, -1, R, -1)
        values = (by[..., None] * self.weight[:, :, None]).reshape(B, H, R, L * E)
        return by.new_zeros(B, H, R, self.voxels).scatter_add(3, index, values)
