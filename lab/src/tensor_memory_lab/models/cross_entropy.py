"""Cross-entropy of a large vocabulary that never holds the logits of the whole batch in float32.

Some tokens at a time: their logits become losses and, where a gradient is wanted, softmax minus
one-hot, in place and in the type of the product. That is kept; the logits themselves are not.

On a GPU one Triton kernel does it: it reads the logits twice, the second time from the cache, and
writes them once, where plain PyTorch takes four passes, two of them in float32. That is 3 of the
16 ms of a step of `base` on one H200.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOSS_TOKENS = 2048
"""Tokens whose logits exist in float32 at a time: 240 MiB for 30,000 words."""

WORDS_MULTIPLE = 64
"""Columns of the products: matrix units are slow on rows that do not begin at aligned addresses, as
those of WikiText-2's 33,278 words would not. Words that are none have no probability."""

BLOCK = 4096
"""Logits that a program of the kernel holds at a time."""

FUSED = ("cuda",) if find_spec("triton") else ()
"""Kinds of device on which the kernel serves."""


class LinearCrossEntropy(torch.autograd.Function):
    """−log softmax(h·Wᵀ)[target] of every token."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """h (tokens, d) in the type to multiply in, weight (words, d) -> losses (tokens,)."""
        words, wanted = weight.shape[0], any(ctx.needs_input_grad)
        low = F.pad(weight.to(h.dtype), (0, 0, 0, -words % WORDS_MULTIPLE))
        wide = torch.promote_types(h.dtype, torch.float32)
        losses = torch.empty(h.shape[0], dtype=wide, device=h.device)
        wrong = h.new_empty(h.shape[0], low.shape[0]) if wanted else None
        make = _fused_losses if _fuses(h) else _losses
        for start in range(0, h.shape[0], LOSS_TOKENS):
            part = slice(start, start + LOSS_TOKENS)
            place = None if wrong is None else wrong[part]
            logits = torch.mm(h[part], low.t(), out=place)
            losses[part] = make(logits, targets[part], words, keep=wanted)
        ctx.save_for_backward(h, low, wrong)
        ctx.words = words
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        """Two products with what the forward kept, weighted by each token's gradient."""
        h, low, wrong = ctx.saved_tensors
        grad = grad[:, None]
        wide = torch.promote_types(h.dtype, torch.float32)
        to_h = to_weight = None
        if ctx.needs_input_grad[0]:
            to_h = ((wrong @ low) * grad).to(h.dtype)
        if ctx.needs_input_grad[1]:
            to_weight = (wrong.t() @ (h * grad).to(h.dtype))[: ctx.words].to(wide)
        return to_h, to_weight, None


def _losses(logits: Tensor, targets: Tensor, words: int, *, keep: bool) -> Tensor:
    """Losses (B,) of logits (B, columns), which with `keep` become softmax minus one-hot."""
    logits[:, words:] = -torch.inf
    wide = torch.promote_types(logits.dtype, torch.float32)
    logs = F.log_softmax(logits, dim=-1, dtype=wide)
    losses = -logs.gather(1, targets[:, None])[:, 0]
    if keep:  # one pass over the logits, cast as it is written
        torch.exp(logs, out=logits)
        at_target = (-losses).exp() - 1
        logits.scatter_(1, targets[:, None], at_target[:, None].to(logits.dtype))
    return losses


def _fuses(h: Tensor) -> bool:
    return h.device.type in FUSED and h.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _fused_losses(logits: Tensor, targets: Tensor, words: int, *, keep: bool) -> Tensor:
    """`_losses` by the kernel, in float32."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        loss_kernel[(rows,)](
            logits, targets, losses, words, columns, KEEP=keep, BLOCK=BLOCK, num_warps=8
        )
    return losses


def linear_cross_entropy(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Losses (B, N) of h (B, N, d) against targets (B, N), multiplied in autocast's type.

    >>> h, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    >>> targets = torch.randint(5, (2, 3))
    >>> plain = F.cross_entropy((h @ weight.t()).flatten(0, 1), targets.flatten(), reduction="none")
    >>> torch.allclose(linear_cross_entropy(h, weight, targets).flatten(), plain)
    True
    """
    device = h.device.type
    if torch.is_autocast_enabled(device):
        h = h.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        losses = LinearCrossEntropy.apply(h.flatten(0, 1), weight, targets.flatten())
    assert isinstance(losses, Tensor)
    return losses.view(targets.shape)


if find_spec("triton"):
    import triton
    import triton.language as tl

    NO_WORD = tl.constexpr(-1e30)  # its difference to itself is a number, unlike that of infinity

    @triton.jit
    def loss_kernel(
        logits, targets, losses, words, columns, KEEP: tl.constexpr, BLOCK: tl.constexpr
    ):
        """A program takes a token's row: `words` logits, then columns that stand for no word."""
        row = tl.program_id(0).to(tl.int64)
        own, c = logits + row * columns, tl.arange(0, BLOCK)
        target = tl.load(targets + row)
        at_target = tl.load(own + target).to(tl.float32)  # before any of the row is overwritten
        # One pass for the log of the sum: each lane keeps its highest logit and a sum beside it.
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
        if KEEP:  # a second pass turns the logits into softmax minus one-hot
            for start in range(0, columns, BLOCK):
                at = start + c
                x = tl.load(own + at, mask=at < columns, other=0.0).to(tl.float32)
                wrong = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
                wrong = tl.where(at < words, wrong, 0.0)
                tl.store(own + at, wrong.to(logits.dtype.element_ty), mask=at < columns)
