"""The layers of a decoder, whatever the method: blocks, their side paths, their state.

A method is a choice of attention, of side path and of slots. Attention and side path are modules
`forward(x, state) -> (x, state)` with `zeros(rows, like)` for an empty state.
What a method carries from one call to the next is flat, `"3.side.hidden"`, so that a training loop
can keep it without knowing what it is.

Letters: B batch, N tokens, K tokens per chunk, m slots, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, PlaceConfig, PlaceMemory, TensorMemory, fixed_weights
from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import Block, LayerState, Place
from tensor_memory_lab.models.linear_attention import LinearAttention, LinearMemory, sizes_for
from tensor_memory_lab.models.peers import PEERS, Peer, PeerConfig
from tensor_memory_lab.models.relative_attention import (
    CACHE_BYTES,
    CacheType,
    PositionBias,
    RelativeAttention,
)
from tensor_memory_lab.models.side import (
    FLOAT_BYTES,
    ShortConvolution,
    SideMemory,
    carried_bytes,
    side_residual,
)
from tensor_memory_lab.models.slots import RecurrentSlots, Registers
from tensor_memory_lab.models.window_attention import WindowAttention


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
    extra_keys: int = 0
    """Tokens before the window that softmax attention sees too: what a state's bytes buy in keys
    and values. Where calls continue each other they may be of an earlier call."""
    cache_type: CacheType = "float32"
    """What relative attention's cache and the extra keys and values are kept in."""
    rotary: bool = False
    """Whether softmax attention turns queries and keys by their place."""
    segment: int | None = None
    """Tokens that relative attention or recurrent slots take at once; None takes a whole call."""
    cache: int = 0
    """Tokens before the segment that relative attention sees."""
    side: str = "none"
    """What stands beside attention: none, or a name in `SIDES`."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """The memory, or for the linear side path the size of its state."""
    place: PlaceConfig = field(default_factory=PlaceConfig)
    """The place memory, for the side path of that name."""
    peer: PeerConfig = field(default_factory=PeerConfig)
    """How much a peer keeps, for the side paths named in `PEERS`."""
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
        if self.side not in ("none", *SIDES):
            raise ValueError(f"side: expected none, {', '.join(SIDES)}, got {self.side!r}")
        windowed = self.attention == "softmax" and self.window is not None
        if self.extra_keys < 0 or (self.extra_keys and (not windowed or self.recurrent_slots)):
            raise ValueError(
                "extra_keys: expected 0 or more, and 0 without a window of softmax attention, got "
                f"{self.extra_keys}"
            )

    @property
    def takes_where(self) -> bool:
        """Whether the side path must be told where tokens stand."""
        return self.side == "place" and self.place.places != "learned"


def _linear_memory(config: StackConfig) -> LinearMemory:
    sizes = sizes_for(config.memory.state_values, config.heads)
    return LinearMemory(config.dim, config.heads, *sizes, gain=config.memory.gain)


def _peer(kind: Callable[[int, PeerConfig], Peer]) -> Callable[[StackConfig], Peer]:
    return lambda config: kind(config.dim, config.peer)


SIDES: dict[str, Callable[[StackConfig], TensorMemory | PlaceMemory | SideMemory]] = {
    "tensor": lambda config: TensorMemory(config.dim, config.memory),
    "place": lambda config: PlaceMemory(config.dim, config.place),
    "linear": _linear_memory,
    "convolution": lambda config: ShortConvolution(config.dim),
    **{name: _peer(kind) for name, kind in PEERS.items()},
}
"""What a side path may hold, by name: a mechanism to compare is one more line."""


class Stack(nn.Module):
    """The blocks of a model, from embedded tokens to what the final norm takes."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        if config.attention == "relative":
            self.position_bias = PositionBias(config.dim)
        self.blocks = nn.ModuleList(
            Block(
                config.dim,
                attention=self._attention(),
                mlp_ratio=config.mlp_ratio,
                dropout=config.dropout,
                side_place=config.side_place,
                attention_out_norm=config.attention_out_norm,
            )
            for _ in range(config.layers)
        )
        if config.registers:
            self.registers = Registers(config.registers, config.dim)
        if config.recurrent_slots:
            self.slots = RecurrentSlots(config.recurrent_slots, config.dim, config.segment)
        # Last, so that what is above draws the same random numbers for every side path.
        if config.side != "none":
            make = SIDES[config.side]
            shared = make(config) if config.share_weights else None
            if shared is not None:
                self.memory = shared
            for layer in config.side_layers:
                self.blocks[layer].side = side_residual(
                    make(config) if shared is None else shared,
                    gate_init=config.gate_init,
                    dropout=config.dropout,
                    own_memory=shared is None,
                )

    def forward(
        self,
        x: Tensor,
        carry: Carry | None = None,
        fresh: Tensor | None = None,
        where: Tensor | None = None,
    ) -> tuple[Tensor, Carry | None]:
        """x (B, N, d), fresh (B,) rows whose carry is to be forgotten -> x, carry (detached).

        where (B, N, n) are the tokens' places, for a place memory that does not learn them.
        """
        config = self.config
        if carry is not None and fresh is not None:
            carry = {name: _emptied(tensor, fresh) for name, tensor in carry.items()}
        if config.registers:
            return self.registers(x, lambda y: self._run(y, None)[0]), None
        if config.recurrent_slots:
            slots = None if carry is None else carry["slots"].to(x.dtype)
            if slots is not None and fresh is not None:
                slots = torch.where(fresh[:, None, None], self.slots.start(x), slots)
            x, slots = self.slots(x, lambda y: self._run(y, None)[0], slots)
            return x, {"slots": slots.detach()} if config.carried else None
        N = x.shape[1]
        x, after = self._run(x, None if carry is None else self._unpack(carry, x), where)
        return x, self._pack(after, N, carry or {}) if config.carried else None

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
        states = [
            (attention.zeros(rows, like), None if side is None else side.zeros(rows, like))
            for attention, side in self._mechanisms()
        ]
        return self._pack(states, 0, {})

    def state_bytes(self) -> int:
        """Bytes one row carries past what attention sees."""
        config = self.config
        # Registers see each other alone, so that they are the same for every row: weights.
        slots = FLOAT_BYTES * config.recurrent_slots * config.dim
        attention = [part.state_bytes() for part, _ in self._mechanisms()]
        whole = config.segment is None or config.segment >= config.length
        if config.attention == "relative" and whole and not config.carried:
            attention = []  # one segment that starts empty
        side = [carried_bytes(part.memory) for _, part in self._mechanisms() if part is not None]
        if config.thread_depth:
            side = side[:1]  # one state goes through all layers
        if config.extra_keys and not config.carried:
            kept = config.layers * config.extra_keys
            attention = [extra_bytes(config.dim, kept, config.cache_type)]
        return slots + sum(attention) + sum(side)

    def _mechanisms(self) -> list[tuple[Any, Any]]:
        """Attention and side path of every layer, None where there is none."""
        return [(block.attention, block.side) for block in self.blocks]

    def _run(
        self, x: Tensor, states: list[LayerState] | None, where: Tensor | None = None
    ) -> tuple[Tensor, list[LayerState]]:
        after: list[LayerState] = []
        threaded = None
        options = {"where": where} if self.config.takes_where else {}
        with fixed_weights():
            for index, block in enumerate(self.blocks):
                state = (None, None) if states is None else states[index]
                if self.config.thread_depth and index in self.config.side_layers:
                    x, (_, threaded) = block(x, (None, threaded), flush=True)
                else:
                    x, state = block(x, state, **options)
                    after.append(state)
        return x, after

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
                kept_in=config.cache_type,
            )
        window = config.window
        if config.extra_keys:
            assert window is not None
            window += config.extra_keys
            if config.carried:
                return WindowAttention(
                    config.dim,
                    config.heads,
                    window,
                    rotary=config.rotary,
                    kept_in=config.cache_type,
                )
        slots, length = config.recurrent_slots, config.length
        segment = (config.segment or length) if slots else length
        return SelfAttention(
            config.dim,
            config.heads,
            window=window,
            length=(min(segment, length), length % segment or segment),  # the last may be shorter
            read_slots=slots + config.registers,
            write_slots=slots,
            rotary=config.rotary,
        )

    def _pack(self, states: list[LayerState], N: int, before: Carry) -> Carry:
        """States by name after N tokens more than what `before` held."""
        carry: Carry = {}
        for index, (parts, (_, side)) in enumerate(zip(states, self._mechanisms(), strict=True)):
            named = {"attention": parts[0] or {}, "side": {}}
            if parts[1] is not None:
                held = _inside(before, f"{index}.side.")
                named["side"] = side.to_tensors(parts[1], N, held)
            for part, tensors in named.items():
                carry |= {f"{index}.{part}.{name}": t.detach() for name, t in tensors.items()}
        return carry

    def _unpack(self, carry: Carry, x: Tensor) -> list[LayerState]:
        states: list[LayerState] = []
        for index, (_, side) in enumerate(self._mechanisms()):
            held = _inside(carry, f"{index}.side.")
            state = side.from_tensors(held, x) if held else None
            states.append((_inside(carry, f"{index}.attention.") or None, state))
        return states


def extra_bytes(dim: int, tokens: int, cache_type: CacheType) -> int:
    """Bytes of the keys and values of so many tokens."""
    return CACHE_BYTES[cache_type] * 2 * dim * tokens


def _inside(carry: Carry, prefix: str) -> Carry:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in carry.items()
        if name.startswith(prefix)
    }


def _emptied(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.masked_fill(rows.reshape(-1, *[1] * (tensor.ndim - 1)), 0)
