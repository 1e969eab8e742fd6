"""Record the calls of one place memory: what its tokens did, and the inputs of its recurrence.

Letters: B rows of a call, N tokens, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tensor_memory.inspect.place_history import HistoryStore
from tensor_memory.inspect.place_layer import PlaceLayerRecording
from tensor_memory.inspect.store import LayerStore
from tensor_memory.inspect.streams import PlaceProgress, Stream
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.place_scan import run_places
from tensor_memory.place import PlaceMemory


class PlaceLayerRecorder:
    """What one layer of a place memory has shown so far; becomes a `PlaceLayerRecording`."""

    def __init__(self, memory: PlaceMemory, store: LayerStore, max_tokens: int) -> None:
        self.memory, self.store = memory, store
        self.history = HistoryStore(memory.config, max_tokens) if max_tokens else None

    def record_call(
        self,
        stream: Stream,
        progress: PlaceProgress,
        x: Tensor,
        inputs: PlaceInputs,
        mask: Tensor | None,
        inverse_norm: Tensor,
        every: Callable[[int], int],
        tell: Callable[[int], None] | None = None,
    ) -> None:
        """One call: x (B, N, d) as the memory was given it, 1 / ‖x‖ (B, N) of the residual's input.

        `every` makes room for a position, and says which positions are kept. `tell` is told how
        many tokens more were computed again.
        """
        B, N = x.shape[:2]
        if not N:
            return
        present = torch.ones(B, N, dtype=torch.bool) if mask is None else mask.cpu()
        kept, start = stream.kept, progress.position
        if kept:
            rows = stream.first_row + torch.arange(kept)
            part = _rows(inputs.prepared(), kept)
            step = every(start + N - 1)
            if self.history is not None:
                self._keep_inputs(rows, progress, part, present[:kept])
            reads = self._keep_steps(rows, start, part, present[:kept], step, tell)
            if self.history is not None:
                self.history.bound(rows)
            m = self.memory.output_of(reads, x[:kept], None if mask is None else mask[:kept])
            use = m.double().norm(dim=-1).cpu() * inverse_norm[:kept]
            self._put(rows, start, present[:kept], step, {"use": use, **_measured(part, reads)})
        progress.position += N
        progress.calls += 1
        progress.done = progress.done + present.sum(1)
        progress.source, progress.moves, progress.foreign = None, [], False

    def _keep_inputs(
        self, rows: Tensor, progress: PlaceProgress, inputs: PlaceInputs, present: Tensor
    ) -> None:
        """The call's tokens, and how its rows (B,) came to the state before the first of them."""
        history, position = self.history, progress.position
        assert history is not None
        filled = inputs.state.flatten(1).any(1).cpu()
        known = history.has(int(rows[0])) and not progress.foreign
        if known and progress.source is not None:
            source = progress.source[: len(rows)]
            unrecorded = source >= len(rows)
            entering = unrecorded & filled
            history.join(rows[~unrecorded], position, rows[source[~unrecorded]])
        else:
            entering = filled & (not known)
        if known:
            for steps, empty in progress.moves:
                history.move(rows, position, steps[: len(rows)], empty)
        history.enter(rows[entering], position, inputs.state[entering.to(inputs.state.device)])
        history.put(rows, position, inputs, present, progress.calls)
        history.empty(rows[~filled], position)
        if position % history.cut == 0:
            history.save(rows, position, inputs.state)

    def _keep_steps(
        self,
        rows: Tensor,
        start: int,
        inputs: PlaceInputs,
        present: Tensor,
        step: int,
        tell: Callable[[int], None] | None,
    ) -> Tensor:
        """Compute the call again for the states at the steps kept; -> reads (B, N, H, C)."""
        history, N = self.history, present.shape[1]
        stops = {n + 1 for n in range(N) if (start + n) % step == 0}
        saves = set[int]()
        if history is not None:
            saves = {n for n in range(1, N + 1) if (start + n) % history.cut == 0}
        reads = []
        for stop, read, state in _replayed(inputs, sorted({N, *stops, *saves})):
            reads.append(read)
            if tell is not None:
                tell(read.shape[1])
            if stop in stops:
                norm = state.norm(dim=-1)  # (B, H, *grid)
                here = slice(stop - 1, stop)
                values = {"state_norm": norm[:, None]}
                self._put(rows, start + stop - 1, present[:, here], step, values)
            if history is not None and stop in saves:
                history.save(rows, start + stop, state)
        return torch.cat(reads, 1)

    def _put(
        self, rows: Tensor, start: int, present: Tensor, step: int, values: dict[str, Tensor]
    ) -> None:
        """Store those of a stretch of positions, (B, N, ...), that are kept and not masked."""
        position = start + torch.arange(present.shape[1])
        chosen = present & (position % step == 0)
        row, at = chosen.nonzero().unbind(1)
        found = {name: value.cpu()[row, at] for name, value in values.items()}
        if "use" in found and self.store.gate is not None:
            found["use"] = found["use"] * self.store.gate
        self.store.put(position[at] // step, rows[row], found)

    def finish(self, every: int, seen: Tensor) -> PlaceLayerRecording:
        """The layer as recorded: `seen` (B,) tokens of every row."""
        arrays = self.store.arrays(seen.shape[0])
        history = None if self.history is None else self.history.finish(seen.shape[0])
        token = torch.arange(self.store.chunks) * every
        return PlaceLayerRecording(
            name=self.store.name,
            config=self.memory.config,
            gate=self.store.gate,
            **{"width": None, **arrays},
            token=token,
            seen=seen,
            history=history,
        )


def _rows(inputs: PlaceInputs, count: int) -> PlaceInputs:
    """The first rows alone."""
    if count == inputs.content.shape[0]:
        return inputs
    cut = {
        name: None if value is None else value[:count]
        for name, value in inputs._asdict().items()
        if name not in ("width", "rule", "wrap")
    }
    return inputs._replace(**cut)


def _measured(inputs: PlaceInputs, reads: Tensor) -> dict[str, Tensor]:
    values = {
        "write_at": inputs.write_at,
        "read_at": inputs.asked_at,
        "content_norm": inputs.content.norm(dim=-1),
        "rate": inputs.rate,
        "keep": inputs.log_keep.exp(),
        "readout": reads,
    }
    if inputs.width is not None:
        values["width"] = inputs.width.expand_as(inputs.rate)
    return values


def _replayed(inputs: PlaceInputs, stops: list[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The recurrence in pieces: for each stop the reads since the last one, and the state."""
    start = 0
    for stop in stops:
        read, state = run_places(inputs.tokens(start, stop), "torch", inputs.dtype)
        yield stop, read, state
        inputs, start = inputs._replace(state=state), stop
