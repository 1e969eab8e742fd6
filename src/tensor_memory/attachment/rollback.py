"""Take tokens back out of a memory: a state from before them, and what was read since.

A memory cannot unread a token. It can start again from an earlier state and read the tokens after
it that stay. So the last tokens of every layer are kept, and a state from before them.

Letters: B batch, N tokens, d width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tensor_memory.attachment.recompute import Given
from tensor_memory.build import AnyState

ROLLBACK = 64
"""Tokens that can be taken back unless the attachment says otherwise; a draft has about 20."""

Run = Callable[[Tensor, Given], tuple[Tensor, AnyState]]
"""Runs one memory layer on hidden states (B, N, d)."""


@dataclass
class Call:
    """What one memory layer was given in one call."""

    x: Tensor
    """(B, N, d) hidden states."""

    given: Given
    """The state before them, and their marks and places."""

    keep: int
    """How many tokens, those of this call included, can be taken back after it."""

    has_state: bool = True
    """Whether `given` still holds that state; None is one too, an empty memory."""

    @property
    def tokens(self) -> int:
        """N."""
        return self.x.shape[1]

    def first(self, tokens: int) -> Call:
        """The same call with its first tokens alone."""
        return replace(self, x=self.x[:, :tokens], given=_cut(self.given, slice(None, tokens)))


class History:
    """The last calls of one memory layer, oldest first; the oldest has its state."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.tokens = 0
        """Tokens that can be taken back."""
        self.reach = 0
        """Tokens that calls of `take_back` have shown to be needed."""
        self._since_state = 0  # tokens since the last call that has its state, that one included
        self._since_take = 0  # tokens read since tokens were last taken back

    def add(self, call: Call) -> None:
        """Note a call, and let go of what is no longer needed."""
        keep, N = max(call.keep, self.reach), call.tokens
        if keep >= N:  # a prompt says nothing about how long drafts are
            self._since_take += N
        if self.calls and self._since_state < keep:
            # A state for each call would take many times the bytes.
            call = replace(call, given=replace(call.given, state=None), has_state=False)
        else:
            self._since_state = 0
        self.calls.append(call)
        self.tokens += N
        self._since_state += N
        if call.has_state:  # the one before may be enough now, without what lies before it
            self._let_go(keep)

    def _let_go(self, keep: int) -> None:
        reached = 0
        for place in range(len(self.calls) - 1, -1, -1):
            reached += self.calls[place].tokens
            if reached >= keep and self.calls[place].has_state:
                del self.calls[:place]
                self.tokens = reached
                break

    def take_back(self, tokens: int) -> Call | None:
        """Forget the last tokens: the call that leads to the state before them.

        None where nothing was taken, so that the state now is the right one.
        """
        # A draft that was right so far grows: be ready for one of twice the length.
        self.reach, self._since_take = max(self.reach, 2 * self._since_take), 0
        if tokens == 0:
            return None
        left = self.tokens - tokens
        kept: list[Call] = []
        for call in self.calls:
            if call.tokens >= left:  # N = 0 is left where a call begins at the cut
                kept.append(call.first(left))
                break
            kept.append(call)
            left -= call.tokens
        start = max(place for place, call in enumerate(kept) if call.has_state)
        again = _joined(kept[start:])
        self.calls = [call for call in kept if call.tokens]
        self.tokens -= tokens
        self._since_state = sum(call.tokens for call in kept[start:])
        return again


def run_and_remember(
    run: Run, x: Tensor, given: Given, *, chunk: int, keep: int
) -> tuple[Tensor, AnyState, Call | None]:
    """Run a layer on x (B, N, d): its outputs, its state, and the call to remember, if any.

    Of a long call the end alone is remembered. It then runs in two parts, cut at the end of a
    chunk where the call starts with one: complete chunks are the fast ones.
    """
    N = x.shape[1]
    at = (N - keep) // chunk * chunk if 2 * keep < N else 0
    if not keep:
        return *run(x, given), None
    if at <= 0:
        return *run(x, given), Call(x, given, keep)
    first, state = run(x[:, :at], _cut(given, slice(None, at)))
    # A copy: a view would keep all of x alive.
    rest = Call(x[:, at:].clone(), replace(_cut(given, slice(at, None)), state=state), keep)
    second, state = run(rest.x, rest.given)
    return torch.cat([first, second], dim=1), state, rest


def select_rows(call: Call, rows: Tensor) -> Call:
    """The same call of other rows (B,)."""
    given = call.given
    picked = Given(
        None if given.state is None else given.state.select(rows),
        *(m if m is None else m[rows.to(m.device)] for m in (given.mask, given.reset, given.where)),
    )
    return replace(call, x=call.x[rows.to(call.x.device)], given=picked)


def _cut(given: Given, tokens: slice) -> Given:
    marks = (given.mask, given.reset, given.where)
    return Given(given.state, *(m if m is None else m[:, tokens] for m in marks))


def _joined(calls: list[Call]) -> Call:
    """Several calls as one, which is faster to run."""
    if len(calls) == 1:
        return calls[0]
    x = torch.cat([call.x for call in calls], dim=1)
    where = [call.given.where for call in calls]
    given = Given(
        calls[0].given.state,
        _joined_marks([(call.x, call.given.mask) for call in calls], unmarked=True),
        _joined_marks([(call.x, call.given.reset) for call in calls], unmarked=False),
        None if where[0] is None else torch.cat([w for w in where if w is not None], dim=1),
    )
    return Call(x, given, calls[-1].keep)


def _joined_marks(marks: list[tuple[Tensor, Tensor | None]], *, unmarked: bool) -> Tensor | None:
    """(B, N) of calls together; a call without marks counts as marked with `unmarked`."""
    if all(mark is None for _, mark in marks):
        return None
    whole = [
        torch.full(x.shape[:2], unmarked, dtype=torch.bool, device=x.device) if m is None else m
        for x, m in marks
    ]
    return torch.cat(whole, dim=1)
