"""The memory's state on a Hugging Face cache: it moves, is copied and dies with the cache.

A cache that carries a state becomes an instance of a subclass of its own class, so that every
operation on its rows moves the state along, and a copy of the cache is a copy of the state.
Nothing here imports transformers: a cache can only come from a caller who has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tensor_memory.state import MemoryState

_ATTRIBUTE = "_tensor_memory"


class CacheMemory:
    """States of all memory layers for the rows of one cache."""

    def __init__(self) -> None:
        self.states: dict[str, MemoryState] = {}
        self.seen: dict[str, int] = {}
        """Tokens each layer has seen, padding included: the length the cache must have."""
        self.streamed = False
        """A stream held the state while this cache was filled."""

    def get(self, slot: str) -> MemoryState | None:
        """The state of one memory layer, None before its first call."""
        return self.states.get(slot)

    def put(self, slot: str, state: MemoryState) -> None:
        """Continue that layer from `state` in the next call."""
        self.states[slot] = state

    def change(self, change: Callable[[MemoryState], MemoryState]) -> None:
        """Replace every state by what `change` makes of it."""
        self.states = {slot: change(state) for slot, state in self.states.items()}


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The cache among a block's arguments; caches that cannot carry a memory raise."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None:
        return None
    paged = sys.modules.get("transformers.generation.continuous_batching.cache")
    for value in (*args, *kwargs.values()):
        if paged is not None and isinstance(value, paged.PagedAttentionCache):
            raise ValueError(
                "attach: continuous batching packs the requests of many users into one row and "
                "keeps no state per request, so a memory cannot be served there; use generate()"
            )
        if isinstance(value, module.Cache):
            parts = (value, getattr(value, "self_attention_cache", None))
            if any(isinstance(part, module.StaticCache) for part in parts):
                raise ValueError(
                    "attach: a static cache is filled in place by a compiled step and cannot "
                    "carry the memory's state; use the default dynamic cache "
                    "(cache_implementation=None)"
                )
            return value
    return None


def memory_of(cache: Any) -> CacheMemory | None:
    """The memory a cache carries, or None."""
    return vars(cache).get(_ATTRIBUTE)


def carry(cache: Any) -> CacheMemory:
    """The memory a cache carries, after giving it an empty one where it has none."""
    memory = memory_of(cache)
    if memory is None:
        memory = CacheMemory()
        cache.__class__ = _carrying(type(cache))
        setattr(cache, _ATTRIBUTE, memory)
    return memory


def hold(cache: Any, slot: str, tokens: int) -> CacheMemory:
    """The memory a cache carries, for the next `tokens` of one layer."""
    memory = carry(cache)
    advance(cache, memory, slot, tokens)
    return memory


def lend(cache: Any) -> None:
    """Note that an open stream owns the state while this cache is filled."""
    memory = carry(cache)
    if memory.states:
        raise ValueError(
            "stream: the cache carries a state of the memory, and so does the open stream; start "
            "the stream with an empty cache, or leave it and let the cache carry the state"
        )
    memory.streamed = True


@dataclass
class _Ways:
    """How the hooks of a host reach `hold` and `lend`."""

    hold: Callable[..., Any] = hold
    lend: Callable[..., Any] = lend


WAYS = _Ways()


def stay_out_of_graphs() -> None:
    """Let compiled hosts call `WAYS`: dynamo cannot trace a change of class.

    Importing dynamo takes seconds, and transformers, where caches come from, has done so already.
    """
    if "torch._dynamo" in sys.modules and WAYS.hold is hold:
        WAYS.hold, WAYS.lend = torch.compiler.disable(hold), torch.compiler.disable(lend)


def advance(cache: Any, memory: CacheMemory, slot: str, tokens: int) -> None:
    """Count `tokens` that cache and memory have just both seen; raise where they differ.

    Called after the block's attention has put its tokens into the cache.
    """
    seen, held = memory.seen.get(slot, 0), int(cache.get_seq_length()) - tokens
    if seen != held:
        why = (
            "it was filled inside a stream, which owned the state"
            if memory.streamed
            else "it was filled before attach(), with the memory disabled, or changed by hand"
        )
        raise ValueError(
            f"attach: the cache holds {held} tokens, of which the memory has seen {seen}: {why}; "
            "start from an empty cache"
        )
    memory.seen[slot] = seen + tokens


class _Carries:
    """Mixed into the class of a cache that carries a memory."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._require_own_state("reorder_cache")
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        carry(self).change(lambda state: state.select(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._require_own_state("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        carry(self).change(
            lambda state: state.select(torch.arange(state.batch_size).repeat_interleave(repeats))
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._require_own_state("batch_select_indices")
        super().batch_select_indices(indices)  # type: ignore[misc]
        carry(self).change(
            lambda state: state.select(
                torch.arange(state.batch_size, device=state.hidden.device)[indices]
            )
        )

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        memory = carry(self)
        memory.states, memory.seen, memory.streamed = {}, {}, False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        held = int(self.get_seq_length())  # type: ignore[attr-defined]
        amount = int(next(iter((*args, *kwargs.values())), 0))
        removed = -amount if amount < 0 else max(held - amount, 0)  # older caches: what stays
        if held and removed and amount:
            raise ValueError(
                f"attach: crop({amount}) would take tokens out of a cache whose memory has "
                "already written them, and a memory cannot be rolled back; copy the cache before "
                "the tokens that may have to go (copy.deepcopy), and generate without assisted "
                "decoding (assistant_model, prompt_lookup_num_tokens)"
            )
        super().crop(*args, **kwargs)  # type: ignore[misc]

    def _require_own_state(self, operation: str) -> None:
        if carry(self).streamed:
            raise ValueError(
                f"attach: {operation} moves rows of a cache whose memory is owned by a stream; "
                "leave the stream first, so that the state lives on the cache (beam search)"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:  # the subclass exists in this process alone
        return _revive, (type(self).__mro__[2],), dict(vars(self))


@functools.cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (_Carries, kind), {"__module__": kind.__module__})


def _revive(kind: type) -> Any:
    return object.__new__(_carrying(kind))
