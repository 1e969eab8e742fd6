"""The gated residual that puts a memory into a Transformer.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory.chunking import check_marks, check_tokens, packed_resets
from tensor_memory.config import MAX_NUMBER, is_number
from tensor_memory.fused_layer import fused_layer
from tensor_memory.place import PlaceMemory
from tensor_memory.tensor import TensorMemory


class Memory(Protocol):
    """What `MemoryResidual` needs of a memory; `TensorMemory` and `PlaceMemory` have it."""

    dim: int
    """d, width of the tokens."""

    config: Any

    output: Any
    """W_out, whose type and device tokens must have."""

    def __call__(self, x: Tensor, state: Any = None, **options: Any) -> tuple[Tensor, Any]:
        """x (B, N, d) -> m (B, N, d), and the state after; takes `mask` and `reset`."""
        ...

    def empty_state(self, x: Tensor) -> Any:
        """The state before the first of tokens like x (B, N, d)."""
        ...


class MemoryResidual(nn.Module):
    """x̂ = x + σ(γ)·D(memory(LayerNorm(x))): one per layer; several may share one memory.

    Args:
        memory: the memory to read and write: a `TensorMemory` or a `PlaceMemory`.
        gate_init: initial γ; 0 opens the gate half, the paper's vision models start at −2.
        norm: LayerNorm before the memory.
        dropout: probability of dropping single features of the readout.
        drop_path: probability of dropping a row's whole readout (stochastic depth).
        own_memory: register `memory` as a part of this module. False keeps a plain reference, for
            layers that share a memory registered elsewhere: safetensors refuses tensors that are
            registered under several names. A memory assigned later (`layer.memory = other`) is
            kept in the same way.

    >>> from tensor_memory import MemoryConfig, TensorMemory
    >>> memory = TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3, 3)), zero_init=True)
    >>> layer = MemoryResidual(memory)
    >>> x = torch.randn(2, 5, 8)
    >>> y, state = layer(x)
    >>> torch.equal(x, y)  # zero_init: nothing changes until the memory has been trained
    True
    """

    def __init__(
        self,
        memory: Memory,
        *,
        gate_init: float = 0.0,
        norm: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        own_memory: bool = True,
    ) -> None:
        super().__init__()
        # isinstance() of a protocol does not find submodules in Python 3.12.
        fits = all(hasattr(memory, name) for name in Memory.__annotations__)
        if not fits or not isinstance(memory, nn.Module) or isinstance(memory, type):
            raise TypeError(
                f"memory: expected a TensorMemory or a PlaceMemory, got {type(memory).__name__}; "
                "make one with TensorMemory(dim, config)"
            )
        for name, rate in (("dropout", dropout), ("drop_path", drop_path)):
            if not is_number(rate) or not 0 <= rate < 1:
                raise ValueError(
                    f"{name}: expected a probability in [0, 1), got {rate!r:.80}; 0 drops nothing"
                )
        if not is_number(gate_init) or not abs(gate_init) <= MAX_NUMBER:
            raise ValueError(
                f"gate_init: expected a finite number, got {gate_init!r:.80}; 0 opens the gate half"
            )
        for name, choice in (("norm", norm), ("own_memory", own_memory)):
            if not isinstance(choice, bool):
                raise TypeError(
                    f"{name}: expected True or False, got {choice!r:.80}; leave it out for True"
                )
        if own_memory:
            self.memory = memory
        else:
            self.__dict__["memory"] = memory  # nn.Module registers what it is given by name
        self.norm = nn.LayerNorm(memory.dim) if norm else nn.Identity()
        self.gate_init = float(gate_init)
        self.gate = nn.Parameter(torch.tensor([self.gate_init]))
        self.dropout, self.drop_path = dropout, drop_path
        self.disabled = False  # inside `memory_disabled`

    def __setattr__(self, name: str, value: Any) -> None:
        """As every module does, but another memory is not registered where the first was not."""
        if name == "memory" and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Set the gate to its start; memory and norm have methods of their own."""
        nn.init.constant_(self.gate, self.gate_init)

    def extra_repr(self) -> str:  # noqa: D102
        return f"dropout={self.dropout}, drop_path={self.drop_path}"

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """x (B, N, d) -> x̂ (B, N, d), state; the options are those of the memory's forward."""
        if options:
            _check_options(self.memory, options)
        if cu_seqlens is not None:
            check_tokens(x, self.memory.dim, self.memory.output.weight)
            reset = packed_resets(x, reset, cu_seqlens)
        if self.disabled:
            check_tokens(x, self.memory.dim, self.memory.output.weight)
            check_marks(x, mask, reset)
            if isinstance(self.memory, PlaceMemory):
                options.pop("group", None)  # nothing is exchanged
            if isinstance(self.memory, PlaceMemory | TensorMemory):
                with torch.no_grad():  # with gradients it may warn of what cannot be learned
                    self.memory.check(x, state, **options)
            return x, self.memory.empty_state(x) if state is None else state
        drop = (self.dropout, self.drop_path) if self.training else (0.0, 0.0)
        fused = fused_layer(
            self.memory, self.norm, self.gate, drop, x, state, mask=mask, reset=reset, **options
        )
        if fused is not None:
            return fused
        # Before the norm, whose own errors say less.
        check_tokens(x, self.memory.dim, self.memory.output.weight)
        check_marks(x, mask, reset)
        # Garbage under the mask would reach the LayerNorm's gradient as 0 · NaN.
        source = x if mask is None else x.masked_fill(~mask[..., None], 0)
        m, after = self.memory(self.norm(source), state, mask=mask, reset=reset, **options)
        dropout, drop_path = drop
        if dropout:
            m = F.dropout(m, dropout)
        if drop_path:
            kept = torch.rand(m.shape[0], 1, 1, device=m.device) >= drop_path
            m = m * (kept.to(m.dtype) / (1 - drop_path))
        return x + (self.gate.sigmoid() * m).to(x.dtype), after


OPTIONS: dict[type[Memory], tuple[str, ...]] = {
    TensorMemory: ("flush",),
    PlaceMemory: ("where", "group"),
}
"""What each memory of this library takes beside x, state, mask, reset and cu_seqlens."""


def _check_options(memory: Memory, options: dict[str, Any]) -> None:
    """Refuse what a memory does not take; one with a forward of its own takes what it likes."""
    for kind, known in OPTIONS.items():
        if type(memory).forward is not kind.forward:  # pyright: ignore[reportAttributeAccessIssue]
            continue
        for name in options:
            if name not in known:
                others = [other.__name__ for other, names in OPTIONS.items() if name in names]
                whose = f"which only a {others[0]} takes" if others else "which no memory takes"
                raise TypeError(
                    f"{name}: expected one of mask, reset, cu_seqlens, {', '.join(known)}, since "
                    f"the memory is a {kind.__name__}, got {name}=, {whose}; leave it out"
                )
