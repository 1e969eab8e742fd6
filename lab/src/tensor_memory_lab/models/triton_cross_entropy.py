"""The kernel of `cross_entropy.py`: losses of logits, which become softmax minus one-hot.

Plain PyTorch takes four passes over the logits, two of them in float32; here the logits are read
twice, the second time from the cache, and written once. Letters: B tokens.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_WORD = tl.constexpr(-1e30)  # its difference to itself is a number, unlike that of infinity

BLOCK = 4096
"""Logits that a program holds at a time."""


@triton.jit
def loss_kernel(logits, targets, losses, words, columns, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes the row of one token: `words` logits, then columns that stand for no word."""
    row = tl.program_id(0).to(tl.int64)
    own, c = logits + row * columns, tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    at_target = tl.load(own + target).to(tl.float32)  # before any of the row is overwritten
    high = tl.full([BLOCK], NO_WORD, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + c
        x = tl.load(own + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(at < words, x, NO_WORD)
        higher = tl.maximum(high, x)
        total = total * tl.exp(high - higher) + tl.exp(x - higher)
        high = higher
    highest = tl.max(high, axis=0)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(high - highest), axis=0))
    tl.store(losses + row, log_sum - at_target)
    if KEEP:
        for start in range(0, columns, BLOCK):
            at = start + c
            x = tl.load(own + at, mask=at < columns, other=0.0).to(tl.float32)
            wrong = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
            wrong = tl.where(at < words, wrong, 0.0)
            tl.store(own + at, wrong.to(logits.dtype.element_ty), mask=at < columns)


def losses_in_place(logits: Tensor, targets: Tensor, words: int, *, keep: bool) -> Tensor:
    """Losses (B,) in float32 of logits (B, columns), of which the first `words` stand for words.

    With `keep` the logits become softmax minus one-hot, zero in the other columns.
    """
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        loss_kernel[(rows,)](
            logits, targets, losses, words, columns, KEEP=keep, BLOCK=BLOCK, num_warps=8
        )
    return losses
