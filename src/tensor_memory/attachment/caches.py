"""The memory's state on a Hugging Face cache: it moves, is copied and dies with the cache.

A cache that carries a state becomes an instance of a subclass of its own class, so that every
operation on its rows moves the state along, and a copy of the cache is a copy of the state.
Nothing here imports transformers: a cache can only come from a caller who has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from tensor_memory.attachment.stream import Stream
from tensor_memory.build import AnyState
from tensor_memory.wording import counted

_ATTRIBUTE = "_tensor_memory"


class CacheMemory:
    """States of all memory layers for the rows of one cache."""

    def __init__(self) -> None:
        self.states: dict[str, AnyState] = {}
        self.seen: dict[str, int] = {}
        """Tokens each layer has seen, padding included: the length the cache must have."""
        self.moment: tuple[str, int] | None = None
        """The stream that held the state while this cache was filled, and how far it had come."""

    def get(self, slot: str) -> AnyState | None:
        """The state of one memory layer, None before its first call."""
        return self.states.get(slot)

    def put(self, slot: str, state: AnyState, tokens: int) -> None:
        """Continue that layer from `state` in the next call, after `tokens` more."""
        self.states[slot] = state
        self.seen[slot] = self.seen.get(slot, 0) + tokens

    def change(self, change: Callable[[AnyState], AnyState]) -> None:
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


def refuse_foreign_cache(module: Any, arguments: Callable[[str], Any]) -> None:
    """Raise where a Hugging Face host is given its past in something that carries no memory.

    Reformer, RWKV, xLSTM and older recurrent hosts have a class of their own, or a list.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not hasattr(getattr(module, "config", None), "model_type"):
        return
    for name in ("past_key_values", "cache_params", "past_buckets_states", "mems", "state"):
        given = arguments(name)
        if given is not None and not isinstance(given, caches.Cache):
            raise ValueError(
                f"attach: {name}: expected a cache of transformers (Cache), got "
                f"{type(given).__name__}, which cannot carry the memory's state, so that the "
                "memory would start empty; pass use_cache=False, or open a stream: "
                "with attachment.stream(): ..."
            )


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


class LentCache:
    """A cache in an open stream: the stream keeps the states, the cache counts the tokens."""

    def __init__(self, memory: CacheMemory, stream: Stream) -> None:
        self.memory, self.stream = memory, stream

    def get(self, slot: str) -> AnyState | None:
        """The state of one memory layer, None before its first call."""
        return self.stream.get(slot)

    def put(self, slot: str, state: AnyState, tokens: int) -> None:
        """Continue that layer from `state` in the next call, after `tokens` more."""
        self.stream.put(slot, state, tokens)
        self.memory.seen[slot] = self.memory.seen.get(slot, 0) + tokens
        self.memory.moment = self.stream.moment


StateHolder = Stream | CacheMemory | LentCache
"""Who keeps the state of every memory layer from one call of the host to the next."""


def admit(cache: Any, stream: Stream | None, added: int = 0) -> None:
    """Raise where the memory has not seen what a cache holds.

    Asked where a call enters the host, before its attention puts anything into the cache. A cache
    that the host made itself is first met after a block: `added` tokens later, or none where no
    block so far has lengthened it (one without attention, or one that training drops).
    """
    memory, held = carry(cache), tokens_in(cache)
    seen = max(memory.seen.values(), default=0)
    if stream is not None and memory.states:
        raise ValueError(
            "stream: the cache carries a state of the memory, and so does the open stream; start "
            "the stream with an empty cache, or leave it and let the cache carry the state"
        )
    if held - seen not in (0, added):
        before = max(held - added, 0)
        raise ValueError(
            f"attach: the cache holds {counted(before, 'token')}, of which the memory has "
            f"seen {seen}: it was filled before attach(), with the memory disabled, by a call that "
            "failed, or changed by hand; start from an empty cache"
        )
    if seen and memory.moment is not None:
        _require_stream(memory.moment, seen, stream)


def _require_stream(moment: tuple[str, int], seen: int, stream: Stream | None) -> None:
    if stream is None:
        raise ValueError(
            f"attach: the cache holds {counted(seen, 'token')}, and it was filled inside a stream, "
            "which owned the state; start from an empty cache, or go on in that stream"
        )
    if stream.name != moment[0] and stream.continues != moment:
        raise ValueError(
            f"stream: the cache holds {counted(seen, 'token')} that another stream has seen and "
            "this one has not; start from an empty cache, or open this stream with the other's "
            "state: attachment.stream(s.state)"
        )


def hold(cache: Any, stream: Stream | None, tokens: int, admitted: list[Any]) -> StateHolder:
    """Who keeps the state of a call with this cache; one the host made itself is checked here."""
    if not any(cache is other for other in admitted):
        admit(cache, stream, tokens)
        admitted.append(cache)
    memory = carry(cache)
    return memory if stream is None else LentCache(memory, stream)


def tokens_in(cache: Any) -> int:
    """Tokens a cache holds: the most that a layer counts, as not all count them in hybrid hosts.

    The first layer may count and hold nothing: one without attention keeps its state elsewhere.
    """
    layers = _layers(cache)
    if not layers:
        return int(cache.get_seq_length())
    counted = [int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")]
    if not counted:
        raise ValueError(
            "attach: no layer of the cache counts its tokens (a host without attention), so the "
            "memory cannot tell what the cache holds; pass use_cache=False"
        )
    return max(counted)


def _layers(cache: Any) -> list[Any]:
    return list(getattr(getattr(cache, "self_attention_cache", cache), "layers", ()))


class _Untraced:
    """`admit` and `hold` for the hooks: dynamo, which cannot trace a change of class, skips them.

    Importing dynamo takes seconds, so they are wrapped only after something else has imported it.
    transformers, where caches come from, does.
    """

    def __init__(self) -> None:
        self.admit: Callable[..., Any] = admit
        self.hold: Callable[..., Any] = hold

    def update(self) -> None:
        """Wrap the functions where dynamo has been imported since."""
        if "torch._dynamo" in sys.modules and self.hold is hold:
            self.admit, self.hold = torch.compiler.disable(admit), torch.compiler.disable(hold)


UNTRACED = _Untraced()


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
                torch.arange(state.batch_size, device=indices.device)[indices]
            )
        )

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        memory = carry(self)
        memory.states, memory.seen, memory.moment = {}, {}, None

    def crop(self, *args: Any, **kwargs: Any) -> None:
        held = int(self.get_seq_length())  # type: ignore[attr-defined]
        amount = int(next(iter((*args, *kwargs.values())), 0))
        if held and amount and amount < held:  # below 0: so many go; in older caches: what stays
            raise ValueError(
                f"attach: crop({amount}) would take tokens out of a cache whose memory has "
                "already written them, and a memory cannot be rolled back; copy the cache before "
                "the tokens that may have to go (copy.deepcopy), and generate without assisted "
                "decoding (assistant_model, prompt_lookup_num_tokens)"
            )
        super().crop(*args, **kwargs)  # type: ignore[misc]

    def _require_own_state(self, operation: str) -> None:
        if carry(self).moment is not None:
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
