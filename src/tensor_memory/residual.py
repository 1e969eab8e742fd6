"""The gated residual that puts a memory into a Transformer.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory.chunking import aligned_calls
from tensor_memory.ops.scan.memory_scan import fused_layer
from tensor_memory.state import MemoryState
from tensor_memory.tensor import TensorMemory


class MemoryResidual(nn.Module):
    """x̂ = x + σ(γ)·D(memory(LayerNorm(x))): one per layer; several may share one memory.

    Args:
        memory: the memory to read and write.
        gate_init: initial γ; 0 opens the gate half, the paper's vision models start at −2.
        norm: LayerNorm before the memory.
        dropout: probability of dropping single features of the readout.
        drop_path: probability of dropping a row's whole readout (stochastic depth).
        own_memory: register `memory` as a part of this module. False keeps a plain reference, for
            layers that share a memory registered elsewhere: safetensors refuses tensors that are
            registered under several names.

    >>> from tensor_memory import MemoryConfig
    >>> memory = TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3, 3)), zero_init=True)
    >>> layer = MemoryResidual(memory)
    >>> x = torch.randn(2, 5, 8)
    >>> y, state = layer(x)
    >>> torch.equal(x, y)  # zero_init: nothing changes until the memory has been trained
    True
    """

    def __init__(
        self,
        memory: TensorMemory,
        *,
        gate_init: float = 0.0,
        norm: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        own_memory: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(memory, TensorMemory):
            raise TypeError(
                f"memory: expected a TensorMemory, got {type(memory).__name__}; "
                "make one with TensorMemory(dim, config)"
            )
        for name, rate in (("dropout", dropout), ("drop_path", drop_path)):
            if not _is_number(rate) or not 0 <= rate < 1:
                raise ValueError(
                    f"{name}: expected a probability in [0, 1), got {rate!r}; 0 drops nothing"
                )
        if not _is_number(gate_init) or not math.isfinite(gate_init):
            raise ValueError(
                f"gate_init: expected a finite number, got {gate_init!r}; 0 opens the gate half"
            )
        for name, choice in (("norm", norm), ("own_memory", own_memory)):
            if not isinstance(choice, bool):
                raise TypeError(
                    f"{name}: expected True or False, got {choice!r}; leave it out for True"
                )
        if own_memory:
            self.memory = memory
        else:
            self.__dict__["memory"] = memory  # nn.Module registers what it is given by name
        self.norm = nn.LayerNorm(memory.dim) if norm else nn.Identity()
        self.gate = nn.Parameter(torch.tensor([float(gate_init)]))
        self.dropout, self.drop_path = dropout, drop_path

    def extra_repr(self) -> str:  # noqa: D102
        return f"dropout={self.dropout}, drop_path={self.drop_path}"

    def forward(
        self,
        x: Tensor,
        state: MemoryState | None = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        flush: Tensor | bool | int = False,
    ) -> tuple[Tensor, MemoryState]:
        """x (B, N, d) -> x̂ (B, N, d), state; the options are `TensorMemory.forward`'s."""
        if mask is None and reset is None and not isinstance(flush, Tensor):
            fused = self._fused(x, state, flush)
            if fused is not None:
                return fused
        self.memory._check(x, mask, reset, flush)  # before the norm, whose own words say less
        # Garbage under the mask would reach the LayerNorm's gradient as 0 · NaN.
        source = x if mask is None else x.masked_fill(~mask[..., None], 0)
        m, after = self.memory(self.norm(source), state, mask=mask, reset=reset, flush=flush)
        m = F.dropout(m, self.dropout, self.training)
        if self.training and self.drop_path:
            kept = torch.rand(m.shape[0], 1, 1, device=m.device) >= self.drop_path
            m = m * (kept.to(m.dtype) / (1 - self.drop_path))
        return x + (self.gate.sigmoid() * m).to(x.dtype), after

    def _fused(
        self, x: Tensor, state: MemoryState | None, flush: bool | int
    ) -> tuple[Tensor, MemoryState] | None:
        """The same in fewer passes, where all rows stand at one place and nobody looks inside."""
        memory, norm = self.memory, self.norm
        layer = fused_layer(x, memory.config.backend) if isinstance(x, Tensor) else None
        if layer is None or type(memory).forward is not TensorMemory.forward:
            return None
        if not layer.plain_norm(norm, memory.dim) or layer.watched(memory):
            return None
        state = memory._begin(x, state, None, None, flush)
        if state.aligned is None:
            return None
        calls = aligned_calls(x.shape[1], state.aligned, flush)
        if len(calls) != 1:
            return None
        rates = (self.dropout, self.drop_path) if self.training else (0.0, 0.0)
        if flush is False and not any(rates) and self._takes_token(layer, x, state):
            return self._token(layer, x, state, state.aligned)
        _, waiting, frame, flushed = calls[0]
        if waiting == 0 and (flushed or x.shape[1] % memory.config.chunk_size == 0):
            whole = self._whole(layer, x, state, frame, rates)
            if whole is not None:
                return whole
        normed, x = layer.norm_and_through(x, norm)
        m, placing, state = memory._forward_aligned(normed, state, waiting, frame, flushed)
        return layer.add_gated(x, m, self.gate, placing, *rates), state

    def _whole(
        self,
        layer: Any,
        x: Tensor,
        state: MemoryState,
        frame: int,
        rates: tuple[float, float],
    ) -> tuple[Tensor, MemoryState] | None:
        """A call that leaves no chunk unfinished and that somebody learns from, in one function."""
        memory, norm, config = self.memory, self.norm, self.memory.config
        assert isinstance(norm, nn.LayerNorm)
        spread = memory.spread if config.write == "gaussian" else None
        heads = (memory.write_proj, memory.read_head, memory.write_head, memory.content)
        if not torch.is_grad_enabled() or not layer.plain_heads((*heads, memory.output), spread):
            return None
        weights = layer.Weights(
            norm=norm.weight,
            norm_bias=norm.bias,
            gate=self.gate,
            write_proj=memory.write_proj.weight,
            read_coordinate=memory.read_head.weight,
            write_coordinate=memory.write_head.weight,
            content=memory.content.weight,
            spread=None if spread is None else spread.weight,
            spread_bias=None if spread is None else spread.bias,
            taps=memory.taps if config.mixing == "factorized" else None,
            mix=memory.mix.weight,
            bias=memory.mix.bias,
            output=memory.output.weight,
        )
        tensors = (x, state.hidden, state.cell, *weights)
        learns = any(t is not None and t.requires_grad for t in tensors)
        if not learns or not layer.serves_whole(state.hidden, state.cell, weights):
            return None
        options = layer.Options(
            epsilon=norm.eps,
            chunk_size=config.chunk_size,
            frame=frame,
            every_token=config.reads == "token",
            sigma_scale=float(config.sigma_scale),
            checkpoint_every=config.checkpoint_every or 0,
            dropout=rates[0],
            drop_path=rates[1],
        )
        out, hidden, cell = layer.whole(x, state.hidden, state.cell, weights, options)
        kept = (state.tokens, state.fill, state.readout)
        return out, MemoryState(hidden, cell, *kept, aligned=0)

    def _takes_token(self, layer: Any, x: Tensor, state: MemoryState) -> bool:
        """Whether x is a single token that nobody learns from, for one launch to take."""
        if x.shape[1] != 1 or (torch.is_grad_enabled() and self._learns(x, state)):
            return False
        memory = self.memory
        return layer.plain_heads((memory.output, memory.read_head)) and layer.serves_token(
            state.hidden, memory.output.weight
        )

    def _learns(self, x: Tensor, state: MemoryState) -> bool:
        parameters = (*self.parameters(), *self.memory.parameters())
        return any(t.requires_grad for t in (x, state.hidden, state.tokens, *parameters))

    def _token(
        self, layer: Any, x: Tensor, state: MemoryState, waiting: int
    ) -> tuple[Tensor, MemoryState]:
        """One token in one launch, and a write where it completes its chunk."""
        memory = self.memory
        done = layer.token_step(
            x,
            self.norm,
            memory.read_head.weight,
            memory.output.weight,
            self.gate,
            state.hidden,
            state.tokens,
            state.fill,
            state.readout,
            waiting,
            memory.config.reads == "token",
        )
        hidden, cell = state.hidden, state.cell
        if done.chunk is not None:
            _, hidden, cell = memory._scan(done.chunk[:, None], hidden, cell)
        aligned = 0 if done.chunk is not None else waiting + 1
        state = MemoryState(hidden, cell, done.tokens, done.fill, done.readout, aligned=aligned)
        return done.out, state


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
