"""The layers of a compared model, whatever the method: blocks, their side paths, their state.

Every method is a choice of attention, of side path and of slots. What a method carries from one
call to the next is flat, `"3.side.hidden"`, so that a training loop can keep it without knowing
what it is.

Letters: B batch, N tokens, K tokens per chunk, m slots, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, MemoryResidual, MemoryState, TensorMemory
from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import Block, LayerState, Place
from tensor_memory_lab.models.linear_attention import (
    LinearAttention,
    LinearMemory,
    sizes_for,
)
from tensor_memory_lab.models.matched import FLOAT_BYTES
from tensor_memory_lab.models.repeated import repeated
from tensor_memory_lab.models.side import (
    TAPS,
    ShortConvolution,
    SideMemory,
    SideResidual,
)
from tensor_memory_lab.models.slots import RecurrentSlots, Registers
from tensor_memory_lab.models.xl import PositionBias, RelativeAttention


@dataclass(frozen=True)
class StackConfig:
    """The choices of a method, spelled out."""

    dim: int
    layers: int
    heads: int
    length: int
    """Tokens per call that masks are prepared for."""
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    attention: Literal["softmax", "linear", "relative"] = "softmax"
    attention_out_norm: bool = False
    window: int | None = None
    """Tokens that softmax attention sees, itself included; None sees the whole past."""
    rotary: bool = False
    """Whether softmax attention turns queries and keys by their place."""
    segment: int | None = None
    """Tokens that relative attention or recurrent slots take at once; None takes a whole call."""
    cache: int = 0
    """Tokens before the segment that relative attention sees."""
    side: Literal["none", "tensor", "linear", "convolution"] = "none"
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory, or for the linear side path the size of its state."""
    side_layers: tuple[int, ...] = ()
    side_place: Place = "after_mlp"
    gate_init: float = 0.0
    share_weights: bool = True
    """One set of weights for the side paths of all layers; norm and gate are each layer's own."""
    thread_depth: bool = False
    """Start each layer's memory from where the layer below ended: it has seen the future then."""
    registers: int = 0
    recurrent_slots: int = 0
    carried: bool = False
    """Whether calls continue each other."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers: expected 1 or more, got {self.layers}")


class Stack(nn.Module):
    """The blocks of a model, from embedded tokens to what the final norm takes."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        if config.attention == "relative":
            self.position_bias = PositionBias(config.dim)
        self.blocks = nn.ModuleList(self._block() for _ in range(config.layers))
        if config.registers:
            self.registers = Registers(config.registers, config.dim)
        if config.recurrent_slots:
            self.slots = RecurrentSlots(config.recurrent_slots, config.dim, config.segment)
        # Last, so that what is above draws the same random numbers for every side path.
        if config.side != "none":
            shared = self._memory() if config.share_weights else None
            if shared is not None:
                self.memory = shared
            for layer in config.side_layers:
                self.blocks[layer].side = self._side(shared)

    def forward(
        self, x: Tensor, carry: Carry | None = None, fresh: Tensor | None = None
    ) -> tuple[Tensor, Carry | None]:
        """x (B, N, d), fresh (B,) rows whose carry is to be forgotten -> x, carry (detached)."""
        config = self.config
        if carry is not None and fresh is not None:
            carry = {name: _emptied(tensor, fresh) for name, tensor in carry.items()}
        if config.registers:
            return self.registers(x, lambda y: self._run(y, None)[0]), None
        if config.recurrent_slots:
            slots = None if carry is None else carry["slots"].to(x.dtype)
            if slots is not None and fresh is not None:
                slots = torch.where(fresh[:, None, None], self.slots.start(x), slots)
            with repeated(self, x):
                x, slots = self.slots(x, lambda y: self._run(y, None)[0], slots)
            return x, {"slots": slots.detach()} if config.carried else None
        states = None if carry is None else self._unpack(carry, x)
        N = x.shape[1]
        x, after = self._run(x, states)
        return x, self._pack(after, N, carry) if config.carried else None

    def advance(
        self, x: Tensor, states: list[LayerState] | None = None
    ) -> tuple[Tensor, list[LayerState]]:
        """Some tokens of a window, after those that `states` holds: x (B, N, d) -> x, states.

        For generation: reading a window in parts gives what reading it at once gives, and the
        states hold keys and values instead of what a window's end would carry.
        """
        if not self.advances:
            raise ValueError("expected attention whose past can be cached, without slots")
        return self._run(x, self.next_window(None, x) if states is None else states)

    @property
    def advances(self) -> bool:
        """Whether a window can be read in parts (`advance`)."""
        config = self.config
        slots = config.registers or config.recurrent_slots
        return config.attention != "relative" and not slots and not config.thread_depth

    def next_window(self, states: list[LayerState] | None, like: Tensor) -> list[LayerState]:
        """What a window starts from after one that ended in `states`: softmax attention anew."""
        found: list[LayerState] = []
        for index, block in enumerate(self.blocks):
            cache, side = (None, None) if states is None else states[index]
            attention: Any = block.attention
            if isinstance(attention, SelfAttention):
                cache = attention.empty_cache(like.shape[0], like)
            found.append((cache, side))
        return found

    def empty_carry(self, rows: int, like: Tensor) -> Carry:
        """What to start from where every row is marked fresh: zeros of the right shapes."""
        if not self.config.carried:
            return {}
        if self.config.recurrent_slots:
            return {"slots": like.new_zeros(rows, self.config.recurrent_slots, self.config.dim)}
        states: list[LayerState] = []
        for block in self.blocks:
            assert isinstance(block, Block)
            side: Any = block.side
            if isinstance(side, SideResidual):
                side = side.zeros(rows, like)
            elif isinstance(side, MemoryResidual):
                side = MemoryState.zeros(
                    self.config.memory, self.config.dim, rows, dtype=like.dtype, device=like.device
                )
            attention: Any = block.attention
            states.append((attention.zeros(rows, like), side))
        return self._pack(states, 0, None)

    def state_bytes(self) -> int:
        """Bytes one row carries past what attention sees."""
        config, width = self.config, self.config.dim
        layers, heads = config.layers, config.heads
        values = 0
        if config.side == "tensor":
            kept = 1 if config.thread_depth else len(config.side_layers)
            values += kept * config.memory.state_values
        if config.side == "linear":
            key, value = sizes_for(config.memory.state_values, heads)
            values += len(config.side_layers) * heads * key * (value + 1)
        if config.side == "convolution":
            values += len(config.side_layers) * (TAPS - 1) * width
        if config.attention == "linear":
            head = width // heads
            values += layers * heads * head * (head + 1)
        values += layers * config.cache * width if config.attention == "relative" else 0
        values += layers * config.registers * width  # each layer holds its own view of them
        values += config.recurrent_slots * width
        return FLOAT_BYTES * values

    def _run(self, x: Tensor, states: list[LayerState] | None) -> tuple[Tensor, list[LayerState]]:
        after: list[LayerState] = []
        threaded = None
        for index, block in enumerate(self.blocks):
            state = (None, None) if states is None else states[index]
            if self.config.thread_depth and index in self.config.side_layers:
                x, (_, threaded) = block(x, (None, threaded), flush=True)
            else:
                x, state = block(x, state)
                after.append(state)
        return x, after

    def _block(self) -> Block:
        config = self.config
        return Block(
            config.dim,
            attention=self._attention(),
            mlp_ratio=config.mlp_ratio,
            dropout=config.dropout,
            side_place=config.side_place,
            attention_out_norm=config.attention_out_norm,
        )

    def _attention(self) -> nn.Module:
        config = self.config
        if config.attention == "linear":
            return LinearAttention(config.dim, config.heads)
        if config.attention == "relative":
            return RelativeAttention(
                config.dim,
                config.heads,
                self.position_bias,
                segment=config.segment,
                cache=config.cache,
                carried=config.carried,
            )
        slots = config.recurrent_slots
        return SelfAttention(
            config.dim,
            config.heads,
            window=config.window,
            length=self._lengths() if slots else config.length,
            read_slots=slots + config.registers,
            write_slots=slots,
            rotary=config.rotary,
        )

    def _lengths(self) -> tuple[int, ...]:
        """Tokens of the segments of a call: all but the last one are as long."""
        segment = self.config.segment or self.config.length
        return min(segment, self.config.length), self.config.length % segment or segment

    def _memory(self) -> TensorMemory | SideMemory:
        config = self.config
        if config.side == "tensor":
            return TensorMemory(config.dim, config.memory)
        if config.side == "convolution":
            return ShortConvolution(config.dim)
        sizes = sizes_for(config.memory.state_values, config.heads)
        return LinearMemory(config.dim, config.heads, *sizes, gain=config.memory.gain)

    def _side(self, shared: TensorMemory | SideMemory | None) -> nn.Module:
        config = self.config
        memory = self._memory() if shared is None else shared
        kind: Any = MemoryResidual if config.side == "tensor" else SideResidual
        return kind(
            memory,
            gate_init=config.gate_init,
            dropout=config.dropout,
            own_memory=shared is None,
        )

    def _pack(self, states: list[LayerState], N: int, before: Carry | None) -> Carry:
        """States by name. A chunk that waits is carried only where one can be waiting."""
        waiting = N % self.config.memory.chunk_size != 0
        carry: Carry = {}
        for index, (cache, side) in enumerate(states):
            for name, tensor in (cache or {}).items():
                carry[f"{index}.attention.{name}"] = tensor.detach()
            if isinstance(side, MemoryState):
                names = ["hidden", "cell"]
                if waiting or (before is not None and f"{index}.side.fill" in before):
                    names += ["tokens", "fill", "readout"]
                side = {name: getattr(side, name) for name in names}
            for name, tensor in (side or {}).items():
                carry[f"{index}.side.{name}"] = tensor.detach()
        return carry

    def _unpack(self, carry: Carry, x: Tensor) -> list[LayerState]:
        states: list[LayerState] = []
        for index in range(self.config.layers):
            cache = _inside(carry, f"{index}.attention.")
            side: Any = _inside(carry, f"{index}.side.")
            if side and self.config.side == "tensor":
                side = self._memory_state(side, x)
            states.append((cache or None, side or None))
        return states

    def _memory_state(self, parts: Carry, x: Tensor) -> MemoryState:
        """Without a waiting chunk all rows stand at the start of one: the scan's fast path."""
        if "fill" in parts:
            return MemoryState(**parts, aligned=None)
        memory, B = self.config.memory, x.shape[0]
        reads = memory.read_heads * memory.channels if memory.reads == "chunk" else 0
        return MemoryState(
            hidden=parts["hidden"],
            cell=parts["cell"],
            tokens=x.new_zeros(B, memory.chunk_size, x.shape[2]),
            fill=torch.zeros(B, dtype=torch.long, device=x.device),
            readout=parts["hidden"].new_zeros(B, reads),
            aligned=0,
        )


def _inside(carry: Carry, prefix: str) -> Carry:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in carry.items()
        if name.startswith(prefix)
    }


def _emptied(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.masked_fill(rows.reshape(-1, *[1] * (tensor.ndim - 1)), 0)
