"""A stretch of calls that belong together: the memory continues from one to the next."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from tensor_memory.build import AnyState


class StreamState(dict[str, AnyState]):
    """States by the path of their block, and the moment of the stream they were taken at."""

    def __init__(self, states: Mapping[str, AnyState], moment: tuple[str, int]) -> None:
        super().__init__(states)
        self.moment = moment


class Stream:
    """Open with `with attachment.stream() as s:`; while open it owns the memory's state.

    The state stays readable after the stream has closed, and `attachment.stream(s.state)`
    continues from it.
    """

    def __init__(self, opened: OpenStream, state: Mapping[str, AnyState] | None = None) -> None:
        self._opened = opened
        self._states = dict(state or {})
        self._puts = 0
        self.name = uuid.uuid4().hex
        """Tells the caches filled in this stream from those of others."""
        self.continues = state.moment if isinstance(state, StreamState) else None
        """The moment of another stream that this one started from."""

    @property
    def state(self) -> StreamState:
        """The state of every memory layer by the path of its block; empty before the first call."""
        return StreamState(self._states, self.moment)

    @property
    def moment(self) -> tuple[str, int]:
        """The stream and how far it has come."""
        return self.name, self._puts

    @property
    def nbytes(self) -> int:
        """Bytes held; does not depend on how much has been streamed."""
        return sum(state.nbytes for state in self._states.values())

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Empty the memory of all rows, or of those named by index or by a (B,) bool mask."""
        self._states = {slot: state.reset(rows) for slot, state in self._states.items()}

    def detach(self) -> None:
        """Cut the state off from the graph: truncated back-propagation through time."""
        self._states = {slot: state.detach() for slot, state in self._states.items()}

    def get(self, slot: str) -> AnyState | None:
        """The state of one memory layer, None before its first call."""
        return self._states.get(slot)

    def put(self, slot: str, state: AnyState, tokens: int) -> None:
        """Continue that layer from `state` in the next call."""
        self._states[slot] = state
        self._puts += 1

    def __enter__(self) -> Stream:
        self._opened.open(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()


class OpenStream:
    """Which stream of an attached memory is open: one at a time."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.detached = False
        """Whether the memory has been taken off its model, so that no stream can open."""

    def __getstate__(self) -> dict[str, Any]:
        return {"stream": None, "detached": self.detached}  # a copied model is inside no stream

    def open(self, stream: Stream) -> None:
        """Give the state to `stream`."""
        if self.stream is not None:
            raise RuntimeError("stream: another stream of this model is open; close it first")
        if self.detached:
            raise RuntimeError(
                "stream: this memory has been taken off its model, whose calls no longer reach "
                "it; open a stream of what attach(model, ...) returned last"
            )
        self.stream = stream

    def close(self) -> None:
        """Take the state from the open stream."""
        self.stream = None
