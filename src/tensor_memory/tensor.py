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

from tensor_memory.chunking import (
    aligned_calls,
    assign,
    check_marks,
    check_tokens,
    packed_resets,
)
from tensor_memory.config import MemoryConfig
from tensor_memory.forgetting import warn_of_forgetting
from tensor_memory.ops import Steering, memory_read, memory_scan, scan_backend, why_not
from tensor_memory.ops.inputs import checked_device, checked_float
from tensor_memory.state import MemoryState, at_least_float32, check_memory, trusted

SIGMA_FLOOR = 1e-4  # keeps the Gaussian from collapsing to a point


class TensorMemory(nn.Module):
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

    def __init__(
        self, dim: int, config: MemoryConfig | None = None, *, zero_init: bool = False
    ) -> None:
        super().__init__()
        config = MemoryConfig() if config is None else config
        check_memory("TensorMemory", dim, config, MemoryConfig, zero_init)
        self.dim, self.config, self.zero_init = dim, config, zero_init
        C, K, n = config.channels, config.chunk_size, config.axes
        R, M = config.read_heads, config.write_heads

        self.write_proj = nn.Linear(K * dim, dim, bias=False)
        if config.share_coordinates:
            self.coordinate = nn.Linear(dim, R * n, bias=False)
        else:
            self.read_coordinate = nn.Linear(dim, R * n, bias=False)
            self.write_coordinate = nn.Linear(dim, M * n, bias=False)
        self.content = nn.Linear(dim, M * C, bias=False)
        if config.write == "gaussian":
            self.spread = nn.Linear(dim, M)
        if config.mixing == "factorized":
            self.taps = nn.Parameter(torch.empty(n, 2 * C, 3))
        self.mix = nn.Linear(2 * C, 4 * C)
        self.output = nn.Linear(R * C, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise everything, as the constructor does."""
        for layer in self.children():
            assert isinstance(layer, nn.Linear)
            layer.reset_parameters()
        C = self.config.channels
        nn.init.xavier_uniform_(self.mix.weight)
        self.mix.weight[:, C:] *= self.config.feedback  # inputs in the order U, h
        for layer in (self.content, self.output):
            layer.weight *= self.config.gain
        self.mix.bias.zero_()  # gates in the order i, f, o, g
        self.mix.bias[:C] = self.config.input_bias
        self.mix.bias[C : 2 * C] = self.config.forget_bias
        if self.config.write == "gaussian":
            self.spread.bias.fill_(self.config.spread_bias)
        if self.config.mixing == "factorized":
            self.taps.copy_(torch.tensor([0.0, 1.0, 0.0]))
        if self.zero_init:
            self.output.weight.zero_()

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.dim}, {self.config}"

    def backend_on(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
        """The backend that serves this memory on a device, for tokens of a type.

        >>> TensorMemory(8).backend_on("cpu")
        'torch'
        """
        state = torch.Size((1, self.config.channels, *self.config.grid))
        dtype = at_least_float32(checked_float("backend_on", dtype))
        device = checked_device("backend_on", device)
        return scan_backend(self.config.backend, state, device, dtype)

    @property
    def read_head(self) -> nn.Linear:
        """W_coord of reads; of writes too where coordinates are shared."""
        return self.coordinate if self.config.share_coordinates else self.read_coordinate

    @property
    def write_head(self) -> nn.Linear:
        """W_coord of writes."""
        return self.coordinate if self.config.share_coordinates else self.write_coordinate

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        flush: Tensor | bool | int = False,
        cu_seqlens: Tensor | None = None,
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
            cu_seqlens: (documents + 1,) int, where documents packed into one row begin and end:
                0, ..., N, as in variable-length attention; B is 1. Every document but the first
                starts with an empty memory; the first goes on from `state`. A document without
                tokens changes nothing.

        Returns:
            m (B, N, d) in x's type, and the state to continue from, differentiable until
            `state.detach()`.
        """
        if cu_seqlens is not None:
            check_tokens(x, self.dim, self.output.weight)
            reset = packed_resets(x, reset, cu_seqlens)
        self.check(x, state, mask=mask, reset=reset, flush=flush)
        if state is None:
            state = self.empty_state(x)
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
            m, state = self._forward_aligned(x[:, tokens], state, *how)
            parts.append(m)
        m = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return m.to(x.dtype), state

    def empty_state(self, x: Tensor) -> MemoryState:
        """The state before the first of tokens like x (B, N, d)."""
        return MemoryState.zeros(self.config, self.dim, x.shape[0], dtype=x.dtype, device=x.device)

    def check(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        flush: Tensor | bool | int = False,
    ) -> None:
        """Raise unless `forward` can take these arguments; warn where nothing can be learned."""
        check_tokens(x, self.dim, self.output.weight)
        if not isinstance(self.mix, nn.Linear):
            raise TypeError(
                f"mix: expected an nn.Linear, whose weight goes into the recurrence, got "
                f"{type(self.mix).__name__}, whose own forward would never run; leave 'mix' out of "
                "what is adapted or replaced (target_modules)"
            )
        reason = why_not(self.config.backend, x.device)
        if reason is not None:  # said here too, as a first, unfinished chunk needs no scan
            raise ValueError(f"backend {self.config.backend!r} cannot serve this request: {reason}")
        check_marks(x, mask, reset, flush)
        learns = self.training and torch.is_grad_enabled() and reset is None
        if learns and not torch.compiler.is_compiling():
            warn_of_forgetting(self.config, self.mix.bias, x.shape[1])
        if state is None:
            return
        if not isinstance(state, MemoryState):
            raise TypeError(
                f"state: expected a MemoryState, got {type(state).__name__}; "
                "pass what the previous call returned, and mask, reset and flush by name"
            )
        state.require(self.config, x)

    def _forward_aligned(
        self, x: Tensor, state: MemoryState, waiting: int, frame: int, flush: bool | int
    ) -> tuple[Tensor, MemoryState]:
        """All rows stand at the same place in their chunk, and the host knows which.

        x (B, N, d) are frames of `frame` tokens; `waiting` tokens come before the first.
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

        # Complete chunks go through the scan; an unfinished one reads and waits.
        hidden, cell, parts = state.hidden, state.cell, []
        if written:
            reads, hidden, cell = self.scan(tokens[:, :written], hidden, cell)
            parts.append(reads)
        if left:
            begun_before = self.config.reads == "chunk" and waiting and not written
            parts.append(
                state.readout[:, None]
                if begun_before
                else memory_read(self.read_coordinates(tokens[:, written:]), hidden).flatten(2)
            )
        reads = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if self.config.reads == "chunk" and waiting and written:
            reads = torch.cat([state.readout[:, None], reads[:, 1:]], dim=1)

        # A readout for every token of every frame, without those that waited and the padding.
        m, repeat = self._readout(reads)
        if repeat > 1:
            m = m[:, :, None].expand(-1, -1, repeat, -1).flatten(1, 2)
        m = m.unflatten(1, (frames, padded))[:, :, waiting : waiting + frame].flatten(1, 2)

        if not (waiting or left):  # nothing was kept of an unfinished chunk, and nothing is
            return m, replace(state, hidden=hidden, cell=cell)
        if left:
            last, kept = tokens[:, -1].to(state.tokens.dtype, copy=True), state.readout.shape[1]
            readout = reads[:, -1, :kept].clone()
        else:
            last, readout = torch.zeros_like(state.tokens), torch.zeros_like(state.readout)
        fill = torch.full_like(state.fill, left)
        return m, trusted(MemoryState(hidden, cell, last, fill, readout, aligned=left))

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
        S, tokens = place.steps, place.chunks(state.tokens, x)

        reads, hidden, cell = self.scan(
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
        after = MemoryState(
            hidden=hidden,
            cell=cell,
            tokens=tokens[row, place.last].where(waiting[:, None, None], 0),
            fill=place.fill,
            readout=reads[row, place.last, :kept].where(waiting[:, None], 0),
            aligned=0 if flush is True else None,
        )
        return m.masked_fill(~mask[..., None], 0), trusted(after)

    def scan(
        self,
        tokens: Tensor,
        hidden: Tensor,
        cell: Tensor,
        *,
        writes: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read and write S chunks: (B, S, K, d) -> reads (B, S, Q·C), hidden, cell."""
        config = self.config
        read_at, write_at, spread, content = self.steer(tokens)
        reads, hidden, cell = memory_scan(
            read_at,
            write_at,
            spread,
            content,
            self.taps if config.mixing == "factorized" else None,
            self.mix.weight,
            self.mix.bias,
            hidden,
            cell,
            writes=writes,
            resets=resets,
            backend=config.backend,
            checkpoint_every=config.checkpoint_every,
        )
        assert reads is not None
        return reads.flatten(2), hidden, cell

    def steer(self, tokens: Tensor) -> Steering:
        """Where chunks (B, S, K, d) read and write, how wide, and what.

        In float32 even under autocast, but for what is written.
        """
        config = self.config
        summary = self.write_proj(tokens.flatten(2))  # (B, S, d)
        content = self.content(summary).unflatten(-1, (config.write_heads, config.channels))
        return Steering(
            read_at=self.read_coordinates(tokens),
            write_at=self._coordinates(self.write_head, summary),
            spread=self._spread(summary) if config.write == "gaussian" else None,
            content=content,
        )

    def read_coordinates(self, tokens: Tensor) -> Tensor:
        """(B, S, K, d) -> (B, S, Q, n): the chunk's first token asks, or every token does."""
        queries = tokens[:, :, :1] if self.config.reads == "chunk" else tokens
        return self._coordinates(self.read_head, queries).flatten(2, 3)

    def _coordinates(self, head: nn.Linear, source: Tensor) -> Tensor:
        """μ = tanh(W_coord ·): (..., d) -> (..., heads, n)."""
        at = head(source)
        return at.to(at_least_float32(at.dtype)).tanh().unflatten(-1, (-1, self.config.axes))

    def _spread(self, summary: Tensor) -> Tensor:
        """σ = α (softplus(W_σ · + b_σ) + 1e-4): (B, S, d) -> (B, S, M)."""
        raw = self.spread(summary)
        raw = raw.to(at_least_float32(raw.dtype))
        return self.config.sigma_scale * (F.softplus(raw) + SIGMA_FLOOR)

    def _readout(self, reads: Tensor) -> tuple[Tensor, int]:
        """m = W_out r, and for how many tokens each: reads (B, S, Q·C) -> (B, S or S·K, d)."""
        K = self.config.chunk_size
        reads = reads.to(self.output.weight.dtype)  # a host in half precision multiplies in it
        if self.config.reads == "token":
            return self.output(reads.unflatten(-1, (K, -1))).flatten(1, 2), 1
        return self.output(reads), K
