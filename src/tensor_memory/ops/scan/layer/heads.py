"""The memory's heads: PyTorch's products, and one kernel each way for the activations behind them.

`TensorMemory` has the same equations in plain code.

Letters: B batch, K tokens per chunk, S chunks, d width, C channels, n axes, Q reads and M writes
per chunk.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tensor_memory.ops.inputs import prepared
from tensor_memory.ops.launch import BoundKernel, bind, or_else
from tensor_memory.ops.scan.inputs import ScanInputs, Steering
from tensor_memory.ops.scan.layer.weights import HeadRows, Packed
from tensor_memory.ops.scan.triton.step import tanh

HEADS_BLOCK = 512  # values per program
SIGMA_FLOOR = tl.constexpr(1e-4)


@triton.jit(do_not_specialize=["reads", "writes"])
def heads_kernel(
    raw_reads,
    raw_writes,
    bias,
    read_at,
    write_at,
    spread,
    content,
    reads,
    writes,
    sigma_scale,
    AT: tl.constexpr,
    CONTENT: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The heads' activations: μ = tanh, σ = α (softplus + 1e-4), content as it is; in float32.

    raw_reads holds `reads` numbers; raw_writes `writes` rows of AT + CONTENT + SPREAD.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = AT + CONTENT + SPREAD
    # Coordinates of reads.
    asked = tl.load(raw_reads + i, mask=i < reads, other=0.0).to(tl.float32)
    tl.store(read_at + i, tanh(asked, False), mask=i < reads)
    # A row of the writes' heads: coordinates, content, spread.
    own = i < writes * WIDTH
    row, column = i // WIDTH, i % WIDTH
    raw = tl.load(raw_writes + i, mask=own, other=0.0).to(tl.float32)
    tl.store(write_at + row * AT + column, tanh(raw, False), mask=own & (column < AT))
    after = column - AT
    tl.store(content + row * CONTENT + after, raw, mask=own & (after >= 0) & (after < CONTENT))
    if SPREAD > 0:
        head = after - CONTENT
        own = own & (head >= 0)
        raw += tl.load(bias + head, mask=own, other=0.0).to(tl.float32)
        e = tl.exp(-tl.abs(raw))
        soft = tl.maximum(raw, 0.0) + tl.where(e < 1e-4, e - 0.5 * e * e, tl.log(1.0 + e))
        tl.store(spread + row * SPREAD + head, sigma_scale * (soft + SIGMA_FLOOR), mask=own)


@triton.jit(do_not_specialize=["reads", "writes"])
def heads_backward_kernel(
    read_at,
    write_at,
    spread,
    grad_read_at,
    grad_write_at,
    grad_spread,
    grad_content,
    grad_reads,
    grad_writes,
    reads,
    writes,
    sigma_scale,
    AT: tl.constexpr,
    CONTENT: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Back through the activations, from their results: tanh′ = 1 − μ², softplus′ = 1 − e^−s."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    WIDTH: tl.constexpr = AT + CONTENT + SPREAD
    kind = grad_writes.dtype.element_ty
    # Coordinates of reads.
    at = tl.load(read_at + i, mask=i < reads, other=0.0)
    grad = tl.load(grad_read_at + i, mask=i < reads, other=0.0) * (1.0 - at * at)
    tl.store(grad_reads + i, grad.to(kind), mask=i < reads)
    # A row of the writes' heads: each column gets one of three gradients, the others are zero.
    own = i < writes * WIDTH
    row, column = i // WIDTH, i % WIDTH
    placed = own & (column < AT)
    at = tl.load(write_at + row * AT + column, mask=placed, other=0.0)
    grad = tl.load(grad_write_at + row * AT + column, mask=placed, other=0.0) * (1.0 - at * at)
    after = column - AT
    filled = own & (after >= 0) & (after < CONTENT)
    grad += tl.load(grad_content + row * CONTENT + after, mask=filled, other=0.0)
    if SPREAD > 0:
        head = after - CONTENT
        wide = own & (head >= 0)
        soft = tl.load(spread + row * SPREAD + head, mask=wide, other=0.0) / sigma_scale
        slope = sigma_scale * (1.0 - tl.exp(-(soft - SIGMA_FLOOR)))
        grad += slope * tl.load(grad_spread + row * SPREAD + head, mask=wide, other=0.0)
    tl.store(grad_writes + i, grad.to(kind), mask=own)


class HeadGradients(NamedTuple):
    """What reaches the chunks, the writes' heads before their activations, and the weights."""

    chunks: Tensor
    """(B·S, K·d)"""
    raw_writes: Tensor
    """(B·S, M·(n + C + 1))"""
    write_proj: Tensor
    reads: Tensor
    writes: Tensor


@functools.lru_cache(maxsize=64)
def _launches(rows: HeadRows) -> tuple[BoundKernel, BoundKernel]:
    """Forward and backward."""
    constants = {
        "AT": rows.at, "CONTENT": rows.content, "SPREAD": rows.spread, "BLOCK": HEADS_BLOCK,
    }  # fmt: skip
    return bind(heads_kernel, **constants), bind(heads_backward_kernel, **constants)


def run_heads(
    chunks: Tensor,
    queries: Tensor,
    packed: Packed,
    rows: HeadRows,
    spread_bias: Tensor | None,
    shape: tuple[int, int, int],
    sigma_scale: float,
) -> tuple[Tensor, Steering]:
    """The summary (B·S, d) of chunks (B·S, K·d), and what the heads make of it, in float32.

    queries (B·S, d), or (B·S·K, d) where every token reads; shape (B, S, n).
    """
    B, S, n = shape
    M = rows.at // n
    if spread_bias is not None:
        spread_bias = prepared(spread_bias, spread_bias.dtype)
    summary = F.linear(chunks, packed.write_proj)
    raw_reads, raw_writes = F.linear(queries, packed.reads), F.linear(summary, packed.writes)
    asked = raw_reads.numel()
    read_at = chunks.new_empty(B, S, asked // (B * S * n), n, dtype=torch.float32)
    steering = Steering(
        read_at,
        read_at.new_empty(B, S, M, n),
        read_at.new_empty(B, S, M) if rows.spread else None,
        read_at.new_empty(B, S, M, rows.content // M),
    )
    _launches(rows)[0](
        (-(-max(asked, raw_writes.numel()) // HEADS_BLOCK),),
        (
            raw_reads, raw_writes, or_else(spread_bias, read_at), read_at, steering.write_at,
            or_else(steering.spread, read_at), steering.content,
        ),
        (asked, B * S, sigma_scale),
    )  # fmt: skip
    return summary, steering


def run_heads_backward(
    chunks: Tensor,
    queries: Tensor,
    summary: Tensor,
    packed: Packed,
    rows: HeadRows,
    inputs: ScanInputs,
    grads: ScanInputs,
    sigma_scale: float,
) -> HeadGradients:
    """From the gradients of what `run_heads` gave the scan as inputs."""
    (asked, d), count = queries.shape, chunks.shape[0]
    raw_reads = chunks.new_empty(asked, packed.reads.shape[0])
    raw_writes = chunks.new_empty(count, sum(rows))
    results = (inputs.read_at, inputs.write_at, inputs.spread)
    arrived = (grads.read_at, grads.write_at, grads.spread, grads.content)
    tensors = (or_else(t, chunks).contiguous() for t in (*results, *arrived))
    _launches(rows)[1](
        (-(-max(raw_reads.numel(), raw_writes.numel()) // HEADS_BLOCK),),
        (*tensors, raw_reads, raw_writes),
        (raw_reads.numel(), count, sigma_scale),
    )
    grad_summary = torch.mm(raw_writes, packed.writes)
    grad_chunks = torch.mm(grad_summary, packed.write_proj)
    grad_queries = grad_chunks.view(-1, d) if asked > count else grad_chunks[:, :d]
    grad_queries.addmm_(raw_reads, packed.reads)  # queries are a part of the chunks
    return HeadGradients(
        chunks=grad_chunks,
        raw_writes=raw_writes,
        write_proj=torch.mm(grad_summary.t(), chunks),
        reads=torch.mm(raw_reads.t(), queries),
        writes=torch.mm(raw_writes.t(), summary),
    )
