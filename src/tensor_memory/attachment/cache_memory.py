"""States of all memory layers for the rows of one cache, and how to take tokens back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tensor_memory.attachment.rollback import Call, History, Run, select_rows
from tensor_memory.attachment.stream import Moment
from tensor_memory.build import AnyState
from tensor_memory.state import MemoryState
from tensor_memory.wording import counted


class CacheMemory:
    """States of all memory layers for the rows of one cache."""

    def __init__(self) -> None:
        self.states: dict[str, AnyState] = {}
        self.seen: dict[str, int] = {}
        """Tokens each layer has seen, padding included: the length the cache must have."""
        self.moments: dict[str, Moment] = {}
        """Where the stream that owns the states stood when this cache was filled, by layer."""
        self.virtual = 0
        """Tokens in the cache that prefix tuning put there, and no layer sees."""
        self.asked = self.asked_seen = 0
        """How often hosts asked the cache for the state of a layer without attention, and how often
        in calls that the memory has seen."""
        self.histories: dict[str, History] = {}
        """What each layer has seen last, so that tokens can be taken back."""
        self.to_read: dict[str, Call] = {}
        """What layers must read again to have their state, after tokens were taken back."""

    def get(self, slot: str, run: Run) -> AnyState | None:
        """The state of one memory layer, None before its first call; `run` runs that layer."""
        call = self.to_read.pop(slot, None)
        if call is not None:
            state = run(call.x, call.given)[1] if call.tokens else call.given.state
            self.states.pop(slot, None)
            if state is not None:
                self.states[slot] = state
        return self.states.get(slot)

    def put(self, slot: str, state: AnyState, tokens: int, call: Call | None) -> None:
        """Continue that layer from `state` in the next call, after `tokens` more."""
        self.states[slot] = state
        self.count(slot, tokens)
        if call is not None:
            self.histories.setdefault(slot, History()).add(call)
        elif self.histories:
            self.histories = {}

    def count(self, slot: str, tokens: int) -> None:
        """A layer has seen so many more tokens."""
        self.seen[slot] = self.seen.get(slot, 0) + tokens
        self.asked_seen = self.asked

    def ask(self) -> None:
        """A host asks for the state of a layer; traced code, which would recompile, counts none."""
        if not torch.compiler.is_compiling():
            self.asked += 1

    def tokens_seen(self) -> int:
        """Tokens that the memory has seen."""
        return max(self.seen.values(), default=0)

    def tokens_before(self, slot: str) -> int | None:
        """Tokens of the cache before the next call of a layer; None where a device knows it."""
        return self.seen.get(slot, 0) + self.virtual

    def reset(self) -> None:
        """Start empty."""
        self.states, self.seen, self.moments, self.virtual = {}, {}, {}, 0
        self.asked = self.asked_seen = 0
        self.histories, self.to_read = {}, {}

    def take_back(self, tokens: int) -> None:
        """Put every layer back to where it was before its last tokens."""
        for slot, history in self.histories.items():
            call = history.take_back(tokens)
            if call is not None:
                self.to_read[slot] = call
                self.seen[slot] -= tokens

    def require_history(self, tokens: int, wish: str) -> None:
        """Raise unless so many tokens can be taken back."""
        held = (self.histories[slot].tokens for slot in self.states if slot in self.histories)
        reach = min(held, default=0) if len(self.histories) == len(self.states) else 0
        if tokens > reach:
            raise ValueError(
                f"attach: {wish} takes {counted(tokens, 'token')} out of a cache, and its memory "
                f"can go back by {reach}; set attachment.rollback = {tokens} before they are read "
                "(without gradients, and not compiled), or copy the cache before tokens that may "
                "have to go: copy.deepcopy"
            )

    def select(self, rows: Callable[[int], Tensor]) -> None:
        """Keep these rows: indices (B,) of the number of rows there are."""
        self.states = {
            slot: state.select(rows(state.batch_size)) for slot, state in self.states.items()
        }
        self.to_read = {
            slot: select_rows(call, rows(call.x.shape[0])) for slot, call in self.to_read.items()
        }
        self.histories = {}  # of other rows


class StaticCacheMemory(CacheMemory):
    """The same for a static cache: in tensors that stay where they are.

    A compiled step reads and writes them in place, so that it is compiled once and a CUDA graph
    can replay it. For the same reason nothing here is a number that changes from call to call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Tensor] = {}
        """Tokens each layer has seen, padding included."""

    def put(self, slot: str, state: AnyState, tokens: int, call: Call | None) -> None:
        """Continue that layer from `state` in the next call, after `tokens` more."""
        held = self.states.get(slot)
        if held is None or held.batch_size != state.batch_size:
            self.states[slot] = _fixed(state)
        else:
            for old, new in zip(tree_leaves(held), tree_leaves(state), strict=True):
                old.copy_(new)
        self.count(slot, tokens)

    def count(self, slot: str, tokens: int) -> None:
        """A layer has seen so many more tokens."""
        if slot not in self.counts:
            held = self.states.get(slot)
            device = None if held is None else tree_leaves(held)[0].device
            self.counts[slot] = _at_fixed_address(torch.zeros((), dtype=torch.long, device=device))
        self.counts[slot].add_(tokens)

    def tokens_seen(self) -> int:
        """Tokens that the memory has seen."""
        return max((int(count) for count in self.counts.values()), default=0)

    def tokens_before(self, slot: str) -> int | None:
        """Tokens of the cache before the next call of a layer; None where a device knows it."""
        return None

    def reset(self) -> None:
        """Start empty."""
        self.moments = {}
        for tensor in tree_leaves((self.states, self.counts)):  # an empty memory holds zeros alone
            tensor.zero_()

    def select(self, rows: Callable[[int], Tensor]) -> None:
        """Keep these rows: indices (B,) of the number of rows there are."""
        for slot, state in self.states.items():
            self.put(slot, state.select(rows(state.batch_size)), 0, None)

    def require_length(self, cache: Any) -> None:
        """`admit` in a compiled step, where the device compares and nobody waits for it."""
        counting = [one for one in cache_layers(cache) if hasattr(one, "get_seq_length")]
        lengths = [layer.get_seq_length() for layer in counting]
        held = [length for length in lengths if isinstance(length, Tensor)]
        if held and self.counts:
            torch.ops.aten._assert_async.msg(
                next(iter(self.counts.values())) == held[0],
                "attach: the cache holds tokens that the memory has not seen; start from an empty "
                "cache",
            )


def _fixed(state: AnyState) -> AnyState:
    """A copy in tensors of its own, whose rows may stand anywhere in their chunks."""
    copied = tree_map(lambda tensor: _at_fixed_address(tensor.clone()), state)
    return replace(copied, aligned=None) if isinstance(copied, MemoryState) else copied


def _at_fixed_address(tensor: Tensor) -> Tensor:
    """The tensor, which compiled code need not copy to where its CUDA graph reads it."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and not torch.compiler.is_compiling():
        dynamo.mark_static_address(tensor)
    return tensor


def cache_layers(cache: Any) -> list[Any]:
    """The layers of a cache of transformers, of its decoder where it has two sides."""
    return list(getattr(getattr(cache, "self_attention_cache", cache), "layers", ()))
