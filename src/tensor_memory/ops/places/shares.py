"""Where a read came from: the exact share of every write, by the recurrence run backwards.

A read is aᵀ S with a = φ(q). Since S_s = α_s (I − β_s φ_s φ_sᵀ) S_{s−1} + β_s φ_s v_sᵀ (the term in
brackets is 1 under the linear rule), the write of token s has the share β_s φ_s·a, and before it
a ← α_s (a − β_s φ_s (φ_s·a)). Going back from the read, a shrinks to what the state before the
first token contributes. Memory is one address per read, whatever the length.

Letters: B batch, N tokens, H heads, V voxels, C channels, R reads asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.reference import address


def shares(inputs: PlaceInputs, reads: Tensor) -> tuple[Tensor, Tensor]:
    """reads (R) token positions -> shares (B, R, N, H), and φ's rest before the first token.

    Σ_s share_s v_s + restᵀ S = r of every read asked for. A write after the read has share 0.
    """
    B, N, H, _ = inputs.content.shape
    wrote = address(inputs, inputs.write_at)  # (B, N, H, V)
    asked = address(inputs, inputs.asked_at[:, reads])  # (B, R, H, V)
    a = torch.zeros_like(asked)
    found = inputs.content.new_zeros(B, len(reads), N, H)
    for s in reversed(range(N)):
        begins = (reads == s)[None, :, None, None]
        a = torch.where(begins, asked, a)
        at, rate = wrote[:, s, None], inputs.rate[:, s, None]  # (B, 1, H, V), (B, 1, H)
        found[:, :, s] = share = rate * (at * a).sum(-1)
        if inputs.rule == "delta":
            a = a - share[..., None] * at
        a = a * inputs.log_keep[:, s, None, :, None].exp()
        if inputs.resets is not None:
            a = torch.where(inputs.resets[:, s, None, None, None], 0, a)
    return found, a
