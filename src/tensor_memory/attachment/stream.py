"""A stretch of calls that belong together: the memory continues from one to the next."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from tensor_memory.state import MemoryState

if TYPE_CHECKING:
    from tensor_memory.attachment.attachment import Attachment


class StreamState(dict[str, MemoryState]):
    """States by the path of their block, and the moment of the stream they were taken at."""

    def __init__(self, states: Mapping[str, MemoryState], moment: tuple[str, int]) -> None:
        super().__init__(states)
        self.moment = moment


class Stream:
    """Open with `with attachment.stream() as s:`; while open it owns the memory's state.

    The state stays readable after the stream has closed, and `attachment.stream(s.state)`
    continues from it.
    """

    def __init__(
        self, attachment: Attachment, state: Mapping[str, MemoryState] | None = None
    ) -> None:
        self._attachment = attachment
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

    def get(self, slot: str) -> MemoryState | None:
        """The state of one memory layer, None before its first call."""
        return self._states.get(slot)

    def put(self, slot: str, state: MemoryState, tokens: int) -> None:
        """Continue that layer from `state` in the next call."""
        self._states[slot] = state
        self._puts += 1

    def __enter__(self) -> Stream:
        self._attachment.open_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._attachment.close_stream()
