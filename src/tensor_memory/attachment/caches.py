"""The memory's state on a Hugging Face cache: it moves, is copied and dies with the cache.

A cache that carries a state becomes an instance of a subclass of its own class, so that every
operation on its rows moves the state along, and a copy of the cache is a copy of the state.
Nothing here imports transformers: a cache can only come from a caller who has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tensor_memory.attachment.cache_memory import CacheMemory, StaticCacheMemory, cache_layers
from tensor_memory.attachment.rollback import Call, Run
from tensor_memory.attachment.stream import Moment, Stream
from tensor_memory.build import AnyState
from tensor_memory.wording import counted

_ATTRIBUTE = "_tensor_memory"


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
            return value
    return None


def is_static(cache: Any) -> bool:
    """Whether a cache of transformers is filled in place, as compiled steps need it."""
    kind = sys.modules["transformers.cache_utils"].StaticCache
    return isinstance(getattr(cache, "self_attention_cache", cache), kind)


def real_tokens(mask: Tensor | Mapping[str, Tensor | None], cache: Any) -> Tensor | None:
    """(B, N) true where a token is real, from the 4-D mask that generate() makes.

    It makes one (B, 1, N, keys) for static caches, or several by the kind of their layers. A
    token is real where it attends to itself. None: all are.
    """
    layers = [layer for layer in cache_layers(cache) if hasattr(layer, "get_mask_sizes")]
    index = next((i for i, layer in enumerate(layers) if not _is_sliding(layer)), 0)
    kind = "sliding_attention" if _is_sliding(layers[index]) else "full_attention"
    pairs = mask.get(kind) if isinstance(mask, Mapping) else mask
    if pairs is None:
        return None
    attends = pairs[:, 0] if pairs.dtype == torch.bool else pairs[:, 0] >= 0  # (B, N, keys)
    B, N, _ = attends.shape
    _, first_key = layers[index].get_mask_sizes(N)
    own = torch.arange(N, device=attends.device) + layers[index].get_seq_length() - first_key
    real = attends.gather(2, own[None, :, None].expand(B, N, 1))[..., 0]
    if not torch.compiler.is_compiling() and N > 1 and not _is_sliding(layers[index]):
        _require_causal(attends, real)
    return real


def _is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _require_causal(attends: Tensor, real: Tensor) -> None:
    """Raise where tokens do not attend to all the real ones before them: documents, say."""
    earlier = attends.sum(-1) - real.cumsum(1)  # (B, N) real tokens before this call
    most = earlier.masked_fill(~real, 0).amax(1, keepdim=True)
    if bool((real & (earlier != most)).any()):
        raise ValueError(
            f"attention_mask: expected each token to attend to all real tokens before it, got a "
            f"mask {tuple(attends.shape)} of other pairs, from which the memory cannot tell where "
            "documents start; pass the 2-D mask (packed rows are told apart by position_ids)"
        )


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
        memory = StaticCacheMemory() if is_static(cache) else CacheMemory()
        cache.__class__ = _carrying(type(cache))
        setattr(cache, _ATTRIBUTE, memory)
    return memory


class LentCache:
    """A cache in an open stream: the stream keeps the states, the cache counts the tokens."""

    def __init__(self, memory: CacheMemory, stream: Stream) -> None:
        self.memory, self.stream = memory, stream

    def get(self, slot: str, run: Run) -> AnyState | None:
        """The state of one memory layer, None before its first call."""
        return self.stream.get(slot, run)

    def put(self, slot: str, state: AnyState, tokens: int, call: Call | None) -> None:
        """Continue that layer from `state` in the next call, after `tokens` more."""
        self.stream.put(slot, state, tokens, call)
        self.memory.count(slot, tokens)
        self.memory.moments[slot] = self.stream.moments[slot]


StateHolder = Stream | CacheMemory | LentCache
"""Who keeps the state of every memory layer from one call of the host to the next."""


def admit(
    cache: Any, stream: Stream | None, virtual: int = 0, added: int = 0, held: int | None = None
) -> None:
    """Raise where the memory has not seen what a cache holds.

    Asked where a call enters the host, before its attention puts anything into the cache, or with
    what it `held` then. A cache that the host made itself is first met after a block: `added`
    tokens later, or none where no block so far has lengthened it (one without attention, or one
    that training drops). A new one may hold `virtual` tokens, of prefix tuning.
    """
    memory, held = carry(cache), tokens_in(cache) if held is None else held
    if virtual and held == virtual and not memory.tokens_seen():
        memory.virtual = virtual
    seen = memory.tokens_seen()
    if stream is not None and memory.states:
        raise ValueError(
            "stream: the cache carries a state of the memory, and so does the open stream; start "
            "the stream with an empty cache, or leave it and let the cache carry the state"
        )
    if held is None:
        _require_all_seen(cache, memory, added)
    elif held - memory.virtual - seen not in (0, added):
        before = max(held - memory.virtual - added, 0)
        raise ValueError(f"attach: the cache holds {counted(before, 'token')}, {_UNSEEN % seen}")
    if seen and memory.moments:
        _require_stream(memory.moments, seen, stream)


_UNSEEN = (
    "of which the memory has seen %s: it was filled before attach(), with the memory disabled, by "
    "a call that failed, by prefix tuning around the host (attach to the PEFT model then), or "
    "changed by hand; start from an empty cache"
)


def _require_all_seen(cache: Any, memory: CacheMemory, added: int) -> None:
    """`admit` for a cache none of whose layers counts its tokens, as Mamba's.

    Its last layer knows whether it holds any, and its layers' states are asked for in every call.
    Of one that the host made itself the first block has filled its own layer.
    """
    if is_static(cache):
        raise ValueError(
            "attach: expected a static cache whose layers count their tokens, got one of a host "
            "without attention, of which a compiled step cannot tell what it holds; use the "
            "default dynamic cache (cache_implementation=None)"
        )
    holds_any = bool(cache.has_previous_state())
    new = not memory.tokens_seen() and (not holds_any or (added and len(cache_layers(cache)) == 1))
    if memory.asked != memory.asked_seen or not (new or (holds_any and memory.tokens_seen())):
        seen = memory.tokens_seen()
        raise ValueError(f"attach: the cache holds tokens, {_UNSEEN % (seen or 'none')}")


def _require_stream(moments: dict[str, Moment], seen: int, stream: Stream | None) -> None:
    if stream is None:
        raise ValueError(
            f"attach: the cache holds {counted(seen, 'token')}, and it was filled inside a stream, "
            "which owned the state; start from an empty cache, or go on in that stream"
        )
    if any(stream.moments.get(slot) != moment for slot, moment in moments.items()):
        raise ValueError(
            f"stream: the cache holds {counted(seen, 'token')} and was filled in another stream, "
            "or at another moment of this one; start from an empty cache, open the stream with "
            "the other's state (attachment.stream(s.state)), or restore the snapshot that belongs "
            "to the cache (s.restore(snapshot))"
        )


def hold(cache: Any, stream: Stream | None, tokens: int, admitted: list[Any]) -> StateHolder:
    """Who keeps the state of a call with this cache; one the host made itself is checked here."""
    if not any(cache is other for other in admitted):
        admit(cache, stream, added=tokens)
        admitted.append(cache)
    memory = carry(cache)
    return memory if stream is None else LentCache(memory, stream)


def tokens_in(cache: Any) -> int | None:
    """Tokens a cache holds: the most that a layer counts, as not all count them in hybrid hosts.

    The first layer may count and hold nothing: one without attention keeps its state elsewhere.
    None where no layer counts, in a host without attention.
    """
    layers = cache_layers(cache)
    if not layers:
        return int(cache.get_seq_length())
    counted = [int(layer.get_seq_length()) for layer in layers if hasattr(layer, "get_seq_length")]
    return max(counted, default=None)


class _Untraced:
    """`admit` and `hold` for the hooks: dynamo, which cannot trace a change of class, skips them.

    Importing dynamo takes seconds, so they are wrapped only after something else has imported it.
    transformers, where caches come from, does. A static cache that carries a memory already is
    traced, since its compiled steps are.
    """

    def __init__(self) -> None:
        self._admit: Callable[..., Any] = admit
        self._hold: Callable[..., Any] = hold

    def admit(self, cache: Any, stream: Stream | None, virtual: int, held: int | None) -> None:
        """`admit`, where a call enters the host."""
        memory = _traced_memory(cache, stream)
        if memory is not None:
            memory.require_length(cache)
        else:
            self._admit(cache, stream, virtual, held=held)

    def hold(
        self, cache: Any, stream: Stream | None, tokens: int, admitted: list[Any]
    ) -> StateHolder:
        """`hold`, after a block."""
        return _traced_memory(cache, stream) or self._hold(cache, stream, tokens, admitted)

    def update(self) -> None:
        """Wrap the functions where dynamo has been imported since."""
        if "torch._dynamo" in sys.modules and self._hold is hold:
            self._admit, self._hold = torch.compiler.disable(admit), torch.compiler.disable(hold)


def _traced_memory(cache: Any, stream: Stream | None) -> StaticCacheMemory | None:
    if not torch.compiler.is_compiling() or stream is not None:
        return None
    memory = getattr(cache, _ATTRIBUTE, None)
    return memory if isinstance(memory, StaticCacheMemory) else None


UNTRACED = _Untraced()


class _Carries:
    """Mixed into the class of a cache that carries a memory."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._require_own_state("reorder_cache")
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        carry(self).select(lambda rows: beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._require_own_state("batch_repeat_interleave")
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        carry(self).select(lambda rows: torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._require_own_state("batch_select_indices")
        super().batch_select_indices(indices)  # type: ignore[misc]
        carry(self).select(lambda rows: torch.arange(rows, device=indices.device)[indices])

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        carry(self).reset()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        held = tokens_in(self)
        amount = int(next(iter((*args, *kwargs.values())), 0))
        wish = f"crop({amount})"
        if held is None:
            raise ValueError(
                f"attach: {wish} takes tokens out of a cache none of whose layers counts them (a "
                "host without attention), so that its memory cannot go back; copy the cache before "
                "tokens that may have to go: copy.deepcopy"
            )
        # Below 0: so many go. Above, in older caches: so many stay.
        taken = min(-amount, held) if amount <= 0 else max(held - amount, 0)
        if taken:
            self._require_own_state(wish)
            carry(self).require_history(taken, wish)
        super().crop(*args, **kwargs)  # type: ignore[misc]
        carry(self).take_back(held - (tokens_in(self) or 0))

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        carry(self).ask()
        return super().get_conv_state(*args, **kwargs)  # type: ignore[misc]

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        carry(self).ask()
        return super().get_recurrent_state(*args, **kwargs)  # type: ignore[misc]

    def _require_own_state(self, operation: str) -> None:
        if carry(self).moments:
            raise ValueError(
                f"attach: {operation} changes a cache whose memory is owned by a stream; leave the "
                "stream first, so that the state lives on the cache (beam search, assisted "
                "decoding), or go back with stream.snapshot() and stream.restore()"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:  # the subclass exists in this process alone
        return _revive, (type(self).__mro__[2],), dict(vars(self))


@functools.cache
def _carrying(kind: type) -> type:
    return type(kind.__name__, (_Carries, kind), {"__module__": kind.__module__})


def _revive(kind: type) -> Any:
    return object.__new__(_carrying(kind))
