"""Which chunk each token of a call belongs to, when rows differ: masks, documents, flushes.

Counted with cumulative sums over the whole call, so a device is asked nothing unless documents or
flushes make the number of chunks itself a fact of the data.

Letters: B batch, N tokens, K tokens per chunk, S chunks touched by this call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tensor_memory.ops.autograd import can_ask
from tensor_memory.ops.inputs import is_autocast, is_dense


@dataclass(frozen=True)
class Assignment:
    """The place of every token, and what happens to every chunk.

    Chunk 0 is the one left unfinished by the call before, where there is one. At each position a
    reset comes first, then the token, then a flush.
    """

    steps: int
    """S, at least as many as any row uses; a step beyond a row's last chunk does nothing."""

    slot: Tensor
    """(B, N) place in the (S · K) slots; S · K, one past the end, for masked tokens."""

    writes: Tensor
    """(B, S) bool: the chunk was completed or flushed. A chunk dropped by a reset is not."""

    resets: Tensor
    """(B, S) bool: a document started between the previous chunk and this one."""

    reset_after: Tensor
    """(B,) bool: a document started after the last chunk."""

    last: Tensor
    """(B,) the last chunk touched."""

    fill: Tensor
    """(B,) tokens left in the last chunk, 0 where it was written or dropped."""

    def chunks(self, waiting: Tensor, x: Tensor) -> Tensor:
        """(B, S, K, d) the tokens that wait, (B, K, d), then those of x (B, N, d); else 0."""
        B, K, d = waiting.shape
        slots = torch.cat([waiting, x.new_zeros(B, self.steps * K + 1 - K, d)], dim=1)
        slots = slots.scatter(1, self.slot[..., None].expand_as(x), x)
        return slots[:, :-1].reshape(B, self.steps, K, d)


def assign(
    fill: Tensor,
    mask: Tensor,
    reset: Tensor | None,
    flush: Tensor | bool | int,
    chunk_size: int,
) -> Assignment:
    """Place N > 0 tokens per row into chunks: fill (B,), mask (B, N), reset and flush (B, N).

    flush may also be True, after the last position, or a number of positions, after every so many.
    """
    B, N = mask.shape
    K = chunk_size
    if isinstance(flush, Tensor):
        frame, ends = N, flush
    else:
        every, ends = N if flush is True else int(flush), torch.zeros_like(mask)
        frame = min(every or N, N)
        if 0 < every <= N:
            ends[:, every - 1 :: every].fill_(True)  # an index tensor would travel to the device
    begins = torch.zeros_like(mask) if reset is None else reset

    real = mask.long()
    seen = fill[:, None] + real.cumsum(1)  # (B, N) tokens since the unfinished chunk began
    breaks = begins | torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=1)
    at_break = torch.where(breaks, seen - real, 0).cummax(1).values
    count = seen - at_break  # (B, N) tokens since the last document or flush, this one included

    place = (count - 1) % K
    starts = mask & (place == 0)
    chunk = starts.cumsum(1) + (fill > 0).long()[:, None] - 1  # the latest begun; −1 before any
    completed = (mask & (place == K - 1)) | (ends & (count % K > 0))

    if not can_ask(chunk) and (reset is not None or isinstance(flush, Tensor)):
        S = N + 1  # nobody can be asked: a chunk for each token, and the one begun before
    elif reset is None and not isinstance(flush, Tensor):
        # A bound the host knows: at most K − 1 tokens were waiting, and each frame has its chunks.
        S = -(-(K - 1 + frame) // K) + (N - frame) // frame * -(-frame // K) + -(-(N % frame) // K)
    else:
        S = max(int(chunk[:, -1].amax()) + 1, 1) if B else 1

    writes = mask.new_zeros(B, S + 1)
    writes = writes.scatter(1, torch.where(completed, chunk, S), True)
    next_chunk = chunk - starts.long() + 1  # the first to begin at or after this position
    resets = mask.new_zeros(B, S + 2)
    resets = resets.scatter(1, torch.where(begins, next_chunk, S + 1), True)
    return Assignment(
        steps=S,
        slot=torch.where(mask, chunk * K + place, S * K),
        writes=writes[:, :S],
        resets=resets[:, :S],
        reset_after=resets[:, S],
        last=chunk[:, -1].clamp(min=0),
        fill=torch.where(ends[:, -1], 0, count[:, -1] % K),
    )


def aligned_calls(
    length: int, waiting: int, flush: bool | int
) -> list[tuple[slice, int, int, bool]]:
    """A call of all rows together as calls of one scan each, where all know what waits.

    Of each: its tokens, how many tokens wait before them, the length of its frames, and whether
    these are flushed. What waits joins the first frame alone; a last, shorter frame stays open.
    """
    if isinstance(flush, bool):
        return [(slice(0, length), waiting, length, flush)]
    whole = length // flush * flush
    begun = flush if waiting and whole else 0
    calls = [
        (slice(0, begun), waiting, flush, True),
        (slice(begun, whole), 0, flush, True),
        (slice(whole, length), 0 if whole else waiting, length - whole, False),
    ]
    return [call for call in calls if call[0].start < call[0].stop]


def check_tokens(x: Tensor, dim: int, weight: Tensor) -> None:
    """Raise unless x is (B, N, dim), of the type and on the device of a memory's weights."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"x: expected a tensor of shape (B, N, {dim}), got {type(x).__name__}; "
            "convert it with torch.as_tensor()"
        )
    if not is_dense(x):
        raise TypeError(
            f"x: expected a dense tensor of shape (B, N, {dim}), got a sparse or nested one; "
            "pad rows of several lengths and pass mask="
        )
    if not x.is_floating_point():
        raise TypeError(f"x: expected a float type, got {x.dtype}; embed token ids first")
    if x.ndim != 3 or x.shape[-1] != dim:
        remedy = f"this memory was built for width {dim}"
        if x.ndim == 2 and x.shape[-1] == dim:
            remedy = "one token per row is x[:, None], the tokens of one row are x[None]"
        raise ValueError(
            f"x: expected tokens of shape (B, N, {dim}), got {tuple(x.shape)}; {remedy}"
        )
    if x.device != weight.device:
        raise ValueError(
            f"x: expected device {weight.device} like the memory's weights, got {x.device}; "
            "move one of them with .to()"
        )
    if x.dtype != weight.dtype and not is_autocast(x.device):
        raise TypeError(
            f"x: expected {weight.dtype} like the memory's weights, got {x.dtype}; "
            "convert one of them with .to(), or run under torch.autocast"
        )


def check_marks(
    x: Tensor, mask: Tensor | None, reset: Tensor | None, flush: Tensor | bool | int = False
) -> None:
    """Raise unless the marks fit x (B, N, d)."""
    for name, marks in (("mask", mask), ("reset", reset), ("flush", flush)):
        if isinstance(marks, int) if name == "flush" else marks is None:
            if marks is not None and not isinstance(marks, bool) and marks < 1:
                raise ValueError(
                    f"flush: expected at least 1 token per frame, got {marks}; "
                    "False writes no unfinished chunk"
                )
            continue
        if not isinstance(marks, Tensor) or not is_dense(marks):
            expected, remedy = "a bool tensor of shape (B, N)", "give one mark per token of x"
            if name == "flush":
                expected = f"True, False, a whole number of tokens per frame, or {expected}"
                remedy = "leave it out to write no unfinished chunk"
            raise TypeError(f"{name}: expected {expected}, got {marks!r:.80}; {remedy}")
        if marks.dtype != torch.bool:
            raise TypeError(
                f"{name}: expected a bool tensor of shape (B, N), got {marks.dtype}; "
                "convert it with .bool()"
            )
        if marks.shape != x.shape[:2]:
            raise ValueError(
                f"{name}: expected shape (B, N) = {tuple(x.shape[:2])}, "
                f"got {tuple(marks.shape)}; give one mark per token of x"
            )
        if marks.device != x.device:
            raise ValueError(
                f"{name}: expected device {x.device} like x, got {marks.device}; move it with .to()"
            )


def packed_resets(x: Tensor, reset: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """(1, N) bool: where a packed document starts, after the first, or `reset` is true.

    A wrong cut is an error wherever values can be looked at, which asks the device.
    """
    check_marks(x, None, reset)
    remedy = "pass the cumulative lengths of the documents, such as torch.tensor([0, 5, 12])"
    whole = (torch.int32, torch.int64)
    fits = isinstance(cu_seqlens, Tensor) and is_dense(cu_seqlens) and cu_seqlens.dtype in whole
    if not fits:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: expected a tensor of int32 or int64, got {got}; {remedy}")
    N = x.shape[1]
    if x.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: expected documents packed into one row, got {x.shape[0]} rows; pack "
            "them into x of shape (1, N, d), or mark where documents start with reset="
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens: expected shape (documents + 1,), got {tuple(cu_seqlens.shape)}; {remedy}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"cu_seqlens: expected device {x.device} like x, got {cu_seqlens.device}; "
            "move it with .to()"
        )
    if can_ask(cu_seqlens):
        cuts = cu_seqlens.tolist()
        if cuts[0] != 0 or cuts[-1] != N or sorted(cuts) != cuts:
            raise ValueError(
                f"cu_seqlens: expected rising numbers from 0 to N = {N}, got {cuts!r:.80}; {remedy}"
            )
    starts = torch.zeros(1, N + 1, dtype=torch.bool, device=x.device)
    starts = starts.index_fill(1, cu_seqlens[1:-1].long(), True)[:, :N]  # N: an empty document
    return starts if reset is None else starts | reset
