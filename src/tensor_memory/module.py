"""The memory as a module.

Nothing that steers the memory depends on the memory: coordinates, spread and content come from
tokens alone, so every projection is one product over all chunks and only `memory_scan` is
sequential.

Letters: B batch, N tokens, K tokens per chunk, S chunks, d width, C channels, n axes, R reads and
M writes per chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory.chunking import aligned_calls, assign, check_marks
from tensor_memory.ops import fused_layer, memory_read, products_of, scan_checked, why_not
from tensor_memory.ops.placing import Placing
from tensor_memory.ops.request import Request
from tensor_memory.state import MemoryState
from tensor_memory.weights import MemoryWeights


class TensorMemory(MemoryWeights):
    """A fixed-size spatial memory that tokens write into and read from, causally.

    Tokens are taken in chunks of K. A chunk reads the state left by the chunks before it, then
    writes. An unfinished chunk waits in the returned state, read but not written, so that cutting
    a sequence into calls anywhere changes nothing.

    Args:
        dim: d, width of the tokens.
        config: what the memory is.
        zero_init: start W_out at zero, so that the readout is zero until it has been trained.

    >>> from tensor_memory import MemoryConfig
    >>> memory = TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2))
    >>> x = torch.randn(2, 5, 8)
    >>> whole, _ = memory(x)
    >>> first, state = memory(x[:, :3])
    >>> second, state = memory(x[:, 3:], state)
    >>> torch.allclose(whole, torch.cat([first, second], dim=1), atol=1e-6)
    True
    >>> state.fill  # the fifth token waits for a sixth
    tensor([1, 1])
    """

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        flush: Tensor | bool | int = False,
    ) -> tuple[Tensor, MemoryState]:
        """Read and write N tokens.

        Args:
            x: (B, N, d) tokens; N = 0 is legal.
            state: where the previous call ended; None starts from an empty memory.
            mask: (B, N) bool, true where a token is real. The others neither read nor write nor
                advance a chunk, and their readout is exactly zero.
            reset: (B, N) bool, true where a new document starts: the state is emptied before that
                position and an unfinished chunk is dropped. Counts on masked positions too.
            flush: write the unfinished chunk zero-padded: after the last token (True), after every
                so many positions of this call (an integer: frames of equal length), or after each
                position marked in a (B, N) bool tensor. An integer needs no answer from a device,
                so a CUDA graph can capture the call; a tensor needs one.

        Returns:
            m (B, N, d) in x's type, and the state to continue from, differentiable until
            `state.detach()`.
        """
        state = self._begin(x, state, mask, reset, flush)
        if x.shape[1] == 0:
            if flush is not True or state.aligned == 0:
                return torch.zeros_like(x), state
            mask = reset = None
        marked = mask is not None or reset is not None
        if state.aligned is None or marked or isinstance(flush, Tensor):
            m, state = self._forward_rows(x, state, mask, reset, flush)
            return m.to(x.dtype), state
        parts = []
        for tokens, *how in aligned_calls(x.shape[1], state.aligned, flush):
            m, placing, state = self._forward_aligned(x[:, tokens], state, *how)
            parts.append(placing.expand(m))
        m = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return m.to(x.dtype), state

    def _begin(
        self,
        x: Tensor,
        state: MemoryState | None,
        mask: Tensor | None,
        reset: Tensor | None,
        flush: Tensor | bool | int,
    ) -> MemoryState:
        """The state to start from, everything checked."""
        self._check(x, mask, reset, flush)
        if state is None:
            return MemoryState.zeros(
                self.config, self.dim, x.shape[0], dtype=x.dtype, device=x.device
            )
        if not isinstance(state, MemoryState):
            raise TypeError(
                f"state: expected a MemoryState, got {type(state).__name__}; "
                "pass what the previous call returned, and mask, reset and flush by name"
            )
        state.require(self.config, x)
        return state

    def _forward_aligned(
        self, x: Tensor, state: MemoryState, waiting: int, frame: int, flush: bool | int
    ) -> tuple[Tensor, Placing, MemoryState]:
        """All rows stand at the same place in their chunk, and the host knows which.

        x (B, N, d) in the type to multiply in, frames of `frame` tokens -> a readout per chunk, or
        per token where every token reads; who gets which; the state.
        """
        B, N, d = x.shape
        K = self.config.chunk_size
        padded = -(-(waiting + frame) // K) * K
        frames = N // frame if frame else 1
        S, left = frames * padded // K, 0 if flush else (waiting + N) % K
        written = S - (left > 0)
        x = x.reshape(B, frames, frame, d)
        if waiting:
            x = torch.cat([state.tokens[:, None, :waiting].to(x.dtype), x], dim=2)
        if padded > waiting + frame:
            x = F.pad(x, (0, 0, 0, padded - waiting - frame))
        tokens = x.reshape(B, S, K, d)

        hidden, cell, parts = state.hidden, state.cell, []
        if written:
            reads, hidden, cell = self._scan(tokens[:, :written], hidden, cell)
            parts.append(reads)
        if left:
            begun_before = self.config.reads == "chunk" and waiting and not written
            parts.append(
                state.readout[:, None]
                if begun_before
                else memory_read(self._read_at(tokens[:, written:]), hidden).flatten(2)
            )
        reads = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if self.config.reads == "chunk" and waiting and written:
            reads = torch.cat([state.readout[:, None], reads[:, 1:]], dim=1)

        m, repeat = self._readout(reads)
        placing = Placing(repeat, frame, padded // repeat, waiting)
        if not (waiting or left):  # nothing was kept of an unfinished chunk, and nothing is
            return m, placing, replace(state, hidden=hidden, cell=cell)
        if left:
            last, kept = tokens[:, -1].to(state.tokens.dtype, copy=True), state.readout.shape[1]
            readout = reads[:, -1, :kept].clone()
        else:
            last, readout = torch.zeros_like(state.tokens), torch.zeros_like(state.readout)
        fill = torch.full_like(state.fill, left)
        return m, placing, MemoryState(hidden, cell, last, fill, readout, aligned=left)

    def _forward_rows(
        self,
        x: Tensor,
        state: MemoryState,
        mask: Tensor | None,
        reset: Tensor | None,
        flush: Tensor | bool | int,
    ) -> tuple[Tensor, MemoryState]:
        """Rows differ in what is masked, reset, flushed or waiting."""
        B, N, d = x.shape
        K = self.config.chunk_size
        if N == 0:  # one masked token stands in, so that a flush has a place to happen
            masked = torch.zeros(B, 1, dtype=torch.bool, device=x.device)
            m, state = self._forward_rows(x.new_zeros(B, 1, d), state, masked, None, flush)
            return m[:, :0], state
        if mask is None:
            mask = torch.ones(B, N, dtype=torch.bool, device=x.device)
        place = assign(state.fill, mask, reset, flush, K)
        S = place.steps

        tokens = torch.cat([state.tokens, x.new_zeros(B, S * K + 1 - K, d)], dim=1)
        tokens = tokens.scatter(1, place.slot[..., None].expand_as(x), x)
        tokens = tokens[:, : S * K].reshape(B, S, K, d)

        reads, hidden, cell = self._scan(
            tokens,
            state.hidden,
            state.cell,
            writes=place.writes,
            resets=None if reset is None else place.resets,
        )
        if reset is not None:
            keep = ~place.reset_after.reshape(-1, *[1] * (hidden.ndim - 1))
            hidden, cell = hidden.where(keep, 0), cell.where(keep, 0)
        if self.config.reads == "chunk":
            begun_before = (state.fill > 0)[:, None]
            first = torch.where(begun_before, state.readout, reads[:, 0])
            reads = torch.cat([first[:, None], reads[:, 1:]], dim=1)

        m, repeat = self._readout(reads)
        taken = place.slot.clamp(max=S * K - 1) // repeat
        m = m.gather(1, taken[..., None].expand(B, N, d))
        waiting = place.fill > 0
        row, kept = torch.arange(B, device=x.device), state.readout.shape[1]
        return m.masked_fill(~mask[..., None], 0), MemoryState(
            hidden=hidden,
            cell=cell,
            tokens=tokens[row, place.last].where(waiting[:, None, None], 0),
            fill=place.fill,
            readout=reads[row, place.last, :kept].where(waiting[:, None], 0),
            aligned=0 if flush is True else None,
        )

    def _scan(
        self,
        tokens: Tensor,
        hidden: Tensor,
        cell: Tensor,
        writes: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B, S, K, d) -> reads (B, S, Q·C) with Q = R or K·R, hidden, cell."""
        config = self.config
        read_at, write_at, spread, content = self._steer(tokens)
        request = Request(
            read_at,
            write_at,
            spread,
            content,
            self.taps if config.mixing == "factorized" else None,
            self.mix.weight,
            self.mix.bias,
            hidden,
            cell,
            writes,
            resets,
        )
        products = products_of(tokens)
        every = config.checkpoint_every
        reads, hidden, cell = scan_checked(request, config.backend, every, products)
        assert reads is not None
        return reads.flatten(2), hidden, cell

    def _steer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """(B, S, K, d) -> where to read (B, S, Q, n) and write (B, S, M, n), how wide, and what.

        (B, S, M) and (B, S, M, C); in float32 even under autocast, but for what is written.
        """
        config = self.config
        spread = self.spread if config.write == "gaussian" else None
        layer = fused_layer(tokens, config.backend)
        heads = (self.write_proj, self.read_head, self.write_head, self.content)
        if layer is not None and layer.plain_heads(heads, spread):
            weights = layer.Heads(
                *(head.weight for head in heads),
                None if spread is None else spread.weight,
                None if spread is None else spread.bias,
            )
            every_token = config.reads == "token"
            return layer.steer(tokens, weights, config.axes, every_token, config.sigma_scale)
        summary = self.write_proj(tokens.flatten(2))  # (B, S, d)
        return (
            self._read_at(tokens),
            self._coordinates(self.write_head, summary),
            None if spread is None else self._spread(summary),
            self.content(summary).unflatten(-1, (config.write_heads, config.channels)),
        )

    def _check(
        self, x: Tensor, mask: Tensor | None, reset: Tensor | None, flush: Tensor | bool | int
    ) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x: expected a tensor of shape (B, N, {self.dim}), got {type(x).__name__}; "
                "convert it with torch.as_tensor()"
            )
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(
                f"x: expected tokens of shape (B, N, {self.dim}), got {tuple(x.shape)}; "
                f"this memory was built for width {self.dim}"
            )
        if not x.is_floating_point():
            raise TypeError(f"x: expected a float type, got {x.dtype}; embed token ids first")
        if not isinstance(self.mix, nn.Linear):
            raise TypeError(
                f"mix: expected an nn.Linear, whose weight goes into the recurrence, got "
                f"{type(self.mix).__name__}, whose own forward would never run; leave 'mix' out of "
                "what is adapted or replaced (target_modules)"
            )
        weight = self.output.weight
        if x.device != weight.device:
            raise ValueError(
                f"x: expected device {weight.device} like the memory's weights, got {x.device}; "
                "move one of them with .to()"
            )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x: expected {weight.dtype} like the memory's weights, got {x.dtype}; "
                "convert one of them with .to(), or run under torch.autocast"
            )
        reason = why_not(self.config.backend, x.device)
        if reason is not None:  # said here too, as a first, unfinished chunk needs no scan
            raise ValueError(f"backend {self.config.backend!r} cannot serve this request: {reason}")
        check_marks(x, mask, reset, flush)
