"""A stretch of calls that belong together: the memory continues from one to the next."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import Tensor

from tensor_memory.attachment.rollback import Call, Run
from tensor_memory.build import AnyState

Moment = tuple[str, int]
"""A stream, and how many states it had been given: no other moment of any stream is the same."""


class StreamState(dict[str, AnyState]):
    """States by the path of their block, and the moments of a stream that they come from."""

    def __init__(self, states: Mapping[str, AnyState], moments: Mapping[str, Moment]) -> None:
        super().__init__(states)
        self.moments = dict(moments)

    def select(self, rows: Tensor | Sequence[int]) -> StreamState:
        """The rows named by index, repeats allowed: one prompt for many requests.

        >>> import torch
        >>> from torch import nn
        >>> from tensor_memory import MemoryConfig, attach
        >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
        >>> attachment = attach(model, MemoryConfig(channels=4, grid=(3, 3), chunk_size=2))
        >>> with attachment.stream() as s, torch.no_grad():
        ...     _ = model(torch.randn(1, 7, 16))  # the prompt, once
        ...     prompt = s.snapshot()
        ...     for _ in range(2):  # each request goes on from the prompt
        ...         s.restore(prompt.select([0, 0, 0]))
        ...         _ = model(torch.randn(3, 5, 16))
        """
        chosen = {slot: state.select(rows) for slot, state in self.items()}
        return StreamState(chosen, self.moments)


class Stream:
    """Open with `with attachment.stream() as s:`; while open it owns the memory's state.

    The state stays readable after the stream has closed, and `attachment.stream(s.state)`
    continues from it. `snapshot` and `restore` go back inside a stream: a prompt is read once and
    continued many times.
    """

    def __init__(
        self,
        opened: OpenStream,
        state: Mapping[str, AnyState] | None = None,
        *,
        require: Callable[[Mapping[str, AnyState]], None],
    ) -> None:
        self._opened, self._require = opened, require
        self._states: dict[str, AnyState] = {}
        self._name, self._puts = uuid.uuid4().hex, 0
        self.moments: dict[str, Moment] = {}
        """Where each memory layer stands; a cache filled in a stream must stand there too."""
        if state is not None:
            self.restore(state)

    @property
    def state(self) -> StreamState:
        """The state of every memory layer by the path of its block; empty before the first call."""
        return StreamState(self._states, self.moments)

    def snapshot(self) -> StreamState:
        """The state of every memory layer now, to come back to: `restore`.

        States are values, so that nothing is copied and no later call changes a snapshot.
        """
        return self.state

    def restore(self, snapshot: Mapping[str, AnyState]) -> None:
        """Go back to a snapshot, of this stream or of another one of the same model.

        A Hugging Face cache in use must go back too: go on with a copy that was made together
        with the snapshot (`copy.deepcopy(cache)`). Any other is refused.
        """
        self._require(snapshot)
        self._states = dict(snapshot)
        self.moments = dict(snapshot.moments) if isinstance(snapshot, StreamState) else {}

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

    def get(self, slot: str, run: Run) -> AnyState | None:
        """The state of one memory layer, None before its first call."""
        return self._states.get(slot)

    def put(self, slot: str, state: AnyState, tokens: int, call: Call | None) -> None:
        """Continue that layer from `state` in the next call."""
        self._puts += 1
        self._states[slot], self.moments[slot] = state, (self._name, self._puts)

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
