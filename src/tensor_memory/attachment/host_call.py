"""One call of the host: the modules entered, the mask of its tokens, the states it leaves.

The 2-D mask is taken where the caller gave it: at the host's entry, or at the innermost module
around the blocks that still has one (a PEFT model calls its base model directly in `generate`, and
may lengthen the mask on the way in). A block is asked where that mask is of other tokens.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment.arguments import (
    ArgumentOf,
    TokenArguments,
    blocked_starts,
    changes,
    columns_of_call,
    document_starts,
    length_starts,
    lengths_of,
    mask_of_block,
    refuse_mask,
)
from tensor_memory.attachment.cache_memory import CacheMemory
from tensor_memory.attachment.caches import UNTRACED, LentCache, StateHolder, tokens_in
from tensor_memory.attachment.places import PlaceSource
from tensor_memory.attachment.rollback import ROLLBACK, Call
from tensor_memory.attachment.stream import OpenStream, Stream
from tensor_memory.build import AnyState
from tensor_memory.ops.autograd import can_ask
from tensor_memory.ops.prepared import holding

DEPTH = "depth"
"""The scope in which one state goes through all blocks."""


@dataclass
class HostCall:
    """One call of the host, from its outermost entry to its return."""

    levels: list[tuple[object, TokenArguments]] = field(default_factory=list)
    """The modules around the blocks entered so far, outermost first, with their arguments."""

    states: dict[str, AnyState] = field(default_factory=dict)
    """States that live for this call alone."""

    results: list[tuple[StateHolder, str, AnyState, int, Call | None]] = field(default_factory=list)
    """States for their holders, each with its slot, its number of tokens, and what is remembered
    to take them back. They are handed over when the call succeeds, so that a call that fails can
    be made again."""

    returned: object | None = None
    """The module that returned last; one that is left and is not this one has raised."""

    caches: list[Any] = field(default_factory=list)
    """Caches found to hold what the memory has seen, before this call lengthened them."""

    lengths: dict[int, int | None] = field(default_factory=dict)
    """Tokens that each cache held when this call brought it, by its `id`."""

    visits: dict[str, int] = field(default_factory=dict)
    """How often each block has run: a block used twice in depth keeps one state per use."""

    found: tuple[Tensor | None, Tensor | None] | None = None
    """What `mask_and_reset` found for the rows and tokens in `found_for`."""

    found_for: tuple[int, int] = (-1, -1)

    warned: bool = False
    """Whether this call has warned of padding in a mask that is not of a block's tokens."""

    made: tuple[int, Any] | None = None
    """What `where=` made of the arguments of the modules entered; how many levels deep that was."""

    prepared: dict[Any, Any] = field(default_factory=dict)
    """What was made of the weights of the memory, which blocks share."""

    placed: tuple[list[Any], Tensor] | None = None
    """The places found for the block before, and all that they were found from."""

    def inside(self, entry: object) -> bool:
        """Whether that module has been entered and not left."""
        return any(other is entry for other, _ in self.levels)

    def enter(self, entry: object, arguments: TokenArguments) -> None:
        """A module around the blocks is entered; what an outer one said may not hold inside."""
        self.levels.append((entry, arguments))
        self.found = None

    def held_before(self, cache: Any) -> int | None:
        """Tokens that a cache held when this call brought it: blocks lengthen it one by one."""
        if id(cache) not in self.lengths:
            self.lengths[id(cache)] = tokens_in(cache)
        return self.lengths[id(cache)]

    def admitted(self, cache: Any) -> bool:
        """Whether the memory is known to have seen what a cache held before this call."""
        return any(cache is other for other in self.caches)

    def cache_around(self) -> Any | None:
        """The cache of the module around a block, for a part of a block that is given none."""
        return self.levels[-1][1].cache if self.levels else None

    def make_places(self, source: PlaceSource) -> None:
        """Let `where=` see its arguments before the host changes them, where all are given.

        A cache, say, is longer once the first block has run.
        """
        given = self._named()
        if self.made is None and not source.missing(given):
            self.made = len(self.levels), source.make(given)

    def leave(self, entry: object) -> bool:
        """Whether it was the innermost one, which is then left."""
        if not self.levels or self.levels[-1][0] is not entry:
            return False
        self.levels.pop()
        self.found = None
        if self.made is not None and len(self.levels) < self.made[0]:
            self.made = None
        return True

    def hand_over(self) -> None:
        """Give every holder its states."""
        for holder, slot, state, tokens, call in self.results:
            holder.put(slot, state, tokens, call)

    def fixed_weights(self) -> AbstractContextManager[None]:
        """For every block: the memory's weights do not change during a call."""
        return nullcontext() if torch.compiler.is_compiling() else holding(self.prepared)

    def slot(self, path: str) -> str:
        """Name of the state that the next run of block `path` uses."""
        visit = self.visits.get(path, 0)
        self.visits[path] = visit + 1
        return f"{path}#{visit}" if visit else path

    def require_rows_first(self, path: str, x: Tensor) -> None:
        """Raise where hidden states x of ids (B, N) come as (N, B, d): rows would be mixed."""
        ids = next((given.ids for _, given in reversed(self.levels) if given.ids), x.shape[:2])
        if x.shape[:2] == ids[::-1] != ids:
            raise ValueError(
                f"attach: expected block '{path}' to return hidden states of shape (B, N, d) for "
                f"ids of shape (B, N) = {ids}, got {tuple(x.shape)}: tokens come first in this "
                "host, and its memory would take them for rows; attach with batch_first=False"
            )

    def mask_and_reset(
        self, path: str, x: Tensor, before: int | None, of_block: ArgumentOf
    ) -> tuple[Tensor | None, Tensor | None]:
        """`mask` and `reset` (B, N) for hidden states x (B, N, d); None where they say nothing.

        `before` counts the tokens in the cache before this call, None where that is not known. What
        the block itself did not have to say is looked up once per call for each number of tokens,
        since the CPU waits for the device then.
        """
        B, N = x.shape[:2]
        if self.found is None or self.found_for != (B, N):
            mask, shared = self._mask(path, x, before, of_block)
            resets, shared_too = self._resets(path, x, mask, of_block)
            reset = functools.reduce(torch.logical_or, resets) if resets else None
            if reset is not None and can_ask(reset) and not bool(reset.any()):
                reset = None
            if mask is not None and can_ask(mask) and bool(mask.all()):
                mask = None  # every row stands at the same place: no bookkeeping per row
            if not (shared and shared_too):
                return mask, reset
            self.found, self.found_for = (mask, reset), (B, N)
        return self.found

    def _mask(
        self, path: str, x: Tensor, before: int | None, of_block: ArgumentOf
    ) -> tuple[Tensor | None, bool]:
        """The mask, and whether it serves other blocks too."""
        B, N = x.shape[:2]
        given, same, near = self._innermost("mask")
        if given is None:
            return None, True
        found = columns_of_call(given, B, N, before) if same else None
        if found is not None:
            return found, True
        found = mask_of_block(of_block, B, N)
        if found is None and same:
            refuse_mask(given, path, B, N, before)
        elif found is None and near and len(given) in (1, B) and can_ask(given):
            self._warn_of_padding(given, path, N)
        return found, False

    def _warn_of_padding(self, mask: Tensor, path: str, N: int) -> None:
        """Warn, once per call, of padding in a mask of more or fewer tokens than the block's.

        The host may add or drop tokens. Or they are others: queries of an image beside a text.
        """
        if self.warned or bool(mask.all()):
            return
        self.warned = True
        warnings.warn(
            f"attention_mask: it marks padding among {mask.shape[1]} tokens, and block '{path}' "
            f"sees {N} and is given no mask of them: the memory takes all of them as real. Ignore "
            "this if they are not the tokens of the mask",
            stacklevel=2,
        )

    def _resets(
        self, path: str, x: Tensor, mask: Tensor | None, of_block: ArgumentOf
    ) -> tuple[list[Tensor], bool]:
        """Where documents or images start, and whether that serves other blocks too."""
        B, N = x.shape[:2]
        packed, shared = self._packed(path, x, of_block)
        found = [packed]
        positions, same, _ = self._innermost("positions")
        if positions is not None and same:
            by_caller = self.levels[0][1].positions is not None
            # The positions of several axes that a host makes itself are those of one document.
            if positions.ndim < 3 or by_caller:
                starts = document_starts(positions, mask, B, N)
                if starts is not None and not by_caller:  # one position for all packs nothing
                    starts = starts & (positions.diff() > 0).any(-1, keepdim=True)
                found.append(starts)
        documents, same, _ = self._innermost("documents")
        if documents is not None and same:
            found.append(changes(documents, B, N))
        return [starts for starts in found if starts is not None], shared

    def _packed(self, path: str, x: Tensor, of_block: ArgumentOf) -> tuple[Tensor | None, bool]:
        """Where the parts of a packed row start, and whether that serves other blocks too.

        A tower knows its images. Its blocks know what attends to itself alone: a frame, a window.
        """
        B, N = x.shape[:2]
        lengths, same, _ = self._innermost("lengths")
        lengths = lengths if same else None
        starts = None if lengths is None else length_starts(lengths, B, N)
        if starts is not None:
            return starts, True
        of_attention = lengths_of(of_block)
        if of_attention is not None:
            lengths, starts = of_attention, length_starts(of_attention, B, N)
        if starts is None and lengths is not None:
            raise ValueError(
                f"cu_seqlens: expected the lengths of the {B * N} tokens that block '{path}' sees, "
                f"got {int(lengths.sum())} tokens in all; pass the lengths of these tokens"
            )
        if starts is None and B == 1 and self._images > 1:
            starts = blocked_starts(of_block, N)
            if starts is None:
                raise ValueError(
                    f"attach: block '{path}' sees {self._images} images in one row, and expected "
                    "an argument that says where one ends (grid_thw, cu_seqlens, a mask of pairs), "
                    "got none; give the host one image per call"
                )
        return starts, starts is None

    @property
    def _images(self) -> int:
        """Images given to the innermost module that was given any."""
        return next((given.images for _, given in reversed(self.levels) if given.images), 0)

    def places(
        self,
        source: PlaceSource,
        of_block: Mapping[str, Any],
        x: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """The places of hidden states x (B, N, d), from arguments as the caller gave them.

        One that the caller did not give is taken from the next module inwards that was given it,
        the block last: position ids, say, which a host makes itself.
        """
        given = {**of_block, **self._named()}
        made = list(given.values()) if self.made is None else [self.made[1]]
        found_from = [*x.shape[:2], x.device, mask, *made]
        if self.placed is None or not _are_same(self.placed[0], found_from):
            places = source.make_in_block(given) if self.made is None else self.made[1]
            self.placed = found_from, source.checked(places, x, mask)
        return self.placed[1]

    def _named(self) -> dict[str, Any]:
        """The arguments that places are made of; an outer module's come before an inner one's."""
        found: dict[str, Any] = {}
        for _, given in reversed(self.levels):
            found |= given.named
        return found

    def _innermost(self, name: str) -> tuple[Tensor | None, bool, bool]:
        """What the innermost level says that says anything, whether it was given the same tokens,
        and whether it was given tokens at all, the same or more or fewer.

        A text's mask says nothing about the patches of an image in the same call, nor a source's
        about its target.
        """
        inner: tuple[int, ...] | None = None
        near = True
        for outward, (_, given) in enumerate(reversed(self.levels)):
            if outward and given.two_sided:
                break
            value = getattr(given, name)
            if value is not None:
                same = None in (inner, given.tokens) or inner == given.tokens
                return value, near and same, near
            near = near and given.holds_tokens
            inner = inner or given.tokens
        return None, False, False


class HostCalls:
    """The calls of one host: the one under way, and who keeps the state between calls."""

    def __init__(
        self,
        host: nn.Module,
        memory: Any,
        *,
        scope: str,
        refuse_causal: bool,
        place_source: PlaceSource | None,
    ) -> None:
        self.host, self.memory, self.place_source = host, memory, place_source
        self.scope, self.refuse_causal = scope, refuse_causal
        self.opened = OpenStream()
        self.rollback = ROLLBACK
        """Tokens that can be taken back out of a cache."""
        self._threads = _CallOfThread()

    @property
    def current(self) -> HostCall | None:
        """The call under way in this thread."""
        return self._threads.slot.call

    @current.setter
    def current(self, call: HostCall | None) -> None:
        self._threads.slot.call = call

    def holder(self, call: HostCall, tokens: int, cache: Any | None) -> StateHolder | None:
        """Who keeps the state from call to call: the open stream, else the cache, else nobody."""
        stream = self.opened.stream
        if cache is None:
            return stream
        if stream is None and self.scope == DEPTH:
            raise ValueError(
                "attach: scope='depth' has no state to keep on a cache: a host that generates "
                "with one attends causally; use scope='layer'"
            )
        return UNTRACED.hold(cache, stream, tokens, call.caches)


def tokens_before(holder: StateHolder | None, slot: str) -> int | None:
    """Tokens of the cache before this call; None while it is traced, and for a static cache.

    A traced number would be compiled in, and every step would compile again.
    """
    if holder is None or isinstance(holder, Stream):
        return 0
    if torch.compiler.is_compiling():
        return None
    memory = holder.memory if isinstance(holder, LentCache) else holder
    return memory.tokens_before(slot)


def can_go_back(holder: StateHolder | None, x: Tensor) -> bool:
    """Whether tokens with hidden states x are remembered, to be taken back out of a cache.

    Not where gradients go through them, which would be kept alive, and not in traced code. A
    static cache has no `crop`, and a stream has snapshots instead.
    """
    learns = torch.is_grad_enabled() and x.requires_grad
    return type(holder) is CacheMemory and not learns and not torch.compiler.is_compiling()


def _are_same(one: list[Any], other: list[Any]) -> bool:
    """Equal numbers and devices, and the same objects."""
    return len(one) == len(other) and all(
        a is b or (isinstance(a, int | torch.device) and a == b)
        for a, b in zip(one, other, strict=True)
    )


@dataclass
class _Slot:
    call: HostCall | None = None


class _CallOfThread(threading.local):
    """The call under way in each thread; copies and pickles hold none.

    It stands in an object of its own: dynamo drops what is assigned to a `threading.local` at a
    graph break, and does not drop what is assigned to an object found there.
    """

    def __init__(self) -> None:  # runs once per thread
        self.slot = _Slot()

    def __reduce__(self) -> tuple[type[_CallOfThread], tuple[()]]:
        return _CallOfThread, ()
