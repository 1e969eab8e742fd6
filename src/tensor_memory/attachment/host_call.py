"""One call of the host: the modules entered, the mask of its tokens, the states it leaves.

The 2-D mask is taken where the caller gave it: at the host's entry, or at the innermost module
around the blocks that still has one (a PEFT model calls its base model directly in `generate`, and
may lengthen the mask on the way in).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment.arguments import TokenArguments, document_starts, last_columns
from tensor_memory.attachment.caches import UNTRACED, StateHolder
from tensor_memory.attachment.places import PlaceSource
from tensor_memory.attachment.stream import OpenStream
from tensor_memory.build import AnyState

DEPTH = "depth"
"""The scope in which one state goes through all blocks."""


@dataclass
class HostCall:
    """One call of the host, from its outermost entry to its return."""

    levels: list[tuple[object, TokenArguments]] = field(default_factory=list)
    """The modules around the blocks entered so far, outermost first, with their arguments."""

    states: dict[str, AnyState] = field(default_factory=dict)
    """States that live for this call alone."""

    results: list[tuple[StateHolder, str, AnyState, int]] = field(default_factory=list)
    """States for their holders, each with its slot and its number of tokens. They are handed over
    when the call succeeds, so that a call that fails can be made again."""

    returned: object | None = None
    """The module that returned last; one that is left and is not this one has raised."""

    caches: list[Any] = field(default_factory=list)
    """Caches found to hold what the memory has seen, before this call lengthened them."""

    visits: dict[str, int] = field(default_factory=dict)
    """How often each block has run: a block used twice in depth keeps one state per use."""

    found: tuple[Tensor | None, Tensor | None] | None = None
    """What `mask_and_reset` found for the rows and tokens in `found_for`."""

    found_for: tuple[int, int] = (-1, -1)

    made: tuple[int, Any] | None = None
    """What `where=` made of the arguments of the modules entered; how many levels deep that was."""

    placed: tuple[list[Any], Tensor] | None = None
    """The places found for the block before, and all that they were found from."""

    def inside(self, entry: object) -> bool:
        """Whether that module has been entered and not left."""
        return any(other is entry for other, _ in self.levels)

    def enter(self, entry: object, arguments: TokenArguments) -> None:
        """A module around the blocks is entered; what an outer one said may not hold inside."""
        self.levels.append((entry, arguments))
        self.found = None

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
        for holder, slot, state, tokens in self.results:
            holder.put(slot, state, tokens)

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

    def mask_and_reset(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """`mask` and `reset` (B, N) for hidden states x (B, N, d); None where they say nothing.

        Looked up once per call for each number of tokens, since the CPU waits for the device then.
        """
        B, N = x.shape[:2]
        if self.found is None or self.found_for != (B, N):
            mask = last_columns(self._innermost("mask"), B, N)
            reset = document_starts(self._innermost("positions"), mask, B, N)
            if not torch.compiler.is_compiling() and mask is not None and bool(mask.all()):
                mask = None  # every row stands at the same place: no bookkeeping per row
            self.found, self.found_for = (mask, reset), (B, N)
        return self.found

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

    def _innermost(self, name: str) -> Tensor | None:
        """What the innermost level says, or one around it that was given the same tokens.

        A text's mask says nothing about the patches of an image in the same call, nor a source's
        about its target.
        """
        inner: tuple[int, ...] | None = None
        for outward, (_, given) in enumerate(reversed(self.levels)):
            if outward and given.two_sided:
                return None
            value = getattr(given, name)
            if value is not None:
                same = inner is None or given.tokens is None or inner == given.tokens
                return value if same else None
            if not given.holds_tokens:
                return None
            inner = inner or given.tokens
        return None


class HostCalls:
    """The calls of one host: the one under way, and who keeps the state between calls."""

    def __init__(
        self,
        host: nn.Module,
        memory: nn.Module,
        *,
        scope: str,
        refuse_causal: bool,
        place_source: PlaceSource | None,
    ) -> None:
        self.host, self.memory, self.place_source = host, memory, place_source
        self.scope, self.refuse_causal = scope, refuse_causal
        self.opened = OpenStream()
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
