"""Record every memory of a model, through hooks that exist only while recording.

Letters: B batch, N tokens, K tokens per chunk, S chunks of a call, P chunks kept of them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensor_memory.attachment import MemoryLayer, memory_inside, memory_layers
from tensor_memory.attachment.recompute import in_backward
from tensor_memory.build import AnyMemory, AnyState
from tensor_memory.chunking import packed_resets
from tensor_memory.config import is_int
from tensor_memory.files import checked_path
from tensor_memory.inspect.chunk_history import ChunkHistoryStore, steered_arrays
from tensor_memory.inspect.layer_recording import LayerRecording, float_shapes
from tensor_memory.inspect.place_layer import PlaceLayerRecording, place_shapes
from tensor_memory.inspect.place_recorder import PlaceLayerRecorder
from tensor_memory.inspect.progress import LongWork
from tensor_memory.inspect.recording import Recording
from tensor_memory.inspect.replay import (
    CallArguments,
    SteeredChunks,
    replay_chunks,
    replay_unfinished,
    steer_chunks,
)
from tensor_memory.inspect.store import LayerStore
from tensor_memory.inspect.streams import LayerProgress, PlaceProgress, Stream, Streams
from tensor_memory.place import PlaceMemory
from tensor_memory.place_state import PlaceState, watching_moves
from tensor_memory.residual import MemoryResidual
from tensor_memory.state import MemoryState, at_least_float32
from tensor_memory.tensor import TensorMemory
from tensor_memory.wording import counted

DTYPES = (torch.float16, torch.float32, torch.float64)


@contextmanager
def record(
    model: nn.Module,
    *,
    every: int = 1,
    max_chunks: int = 512,
    max_rows: int = 16,
    max_tokens: int = 16384,
    dtype: torch.dtype = torch.float16,
    texts: Sequence[Sequence[str]] | None = None,
    frames: Tensor | None = None,
    tokens_per_frame: int = 1,
    live: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Iterator[Recording]:
    """Record what every memory in `model` does inside the `with` block.

    The recording is filled when the block is left, also by an error. No output changes by a bit.
    What a fast scan never exposes is recomputed, chunk by chunk or token by token, so calls are
    slower while recording; outside the block nothing is left behind.

    Args:
        model: a `TensorMemory` or `PlaceMemory`, a `MemoryResidual`, a host that `attach` was
            called on, or any module that holds one of them. A memory inside a `MemoryResidual` is
            recorded where the residual is called; calls of that memory itself, past its residual,
            are not.
        every: keep one chunk in so many; a chunk of a place memory is one token.
        max_chunks: chunks kept per row and layer. One more, and every second is forgotten and
            `every` doubled, as `Recording.every` then says.
        max_rows: rows kept; `Recording.rows_left_out` counts the others. A call that starts from
            an empty memory starts new rows, one that continues a state goes on in its rows.
        max_tokens: tokens per row whose inputs of the recurrence are kept, all of them and in
            the type they were computed in, so that reads can be traced to writes. One more, and
            the older half is forgotten. 0 keeps none.
        dtype: float type all other values are kept in, on the CPU.
        texts: the text of every token, see `Recording.annotate`.
        frames: the frames the tokens were cut from, see there.
        tokens_per_frame: tokens of one frame.
        live: a file to save the recording to while it is made, at most once a second, and at its
            end; `tensor-memory watch FILE` follows it. Texts may be lists that grow meanwhile.
        progress: say on standard error how far a recording has come that takes long.

    >>> from tensor_memory import MemoryConfig
    >>> memory = TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2))
    >>> with record(memory) as recording:
    ...     m, state = memory(torch.randn(1, 5, 8))
    >>> layer = recording[0]
    >>> layer.write_at.shape, layer.hidden_norm.shape
    (torch.Size([3, 1, 1, 3]), torch.Size([3, 1, 3, 3, 3]))
    >>> layer.written[:, 0].tolist()  # the fifth token has read and waits for a sixth
    [True, True, False]
    """
    for name, value in (("every", every), ("max_chunks", max_chunks), ("max_rows", max_rows)):
        if not is_int(value) or value < 1:
            raise ValueError(
                f"{name}: expected an integer of at least 1, got {value!r:.80}; leave it out for "
                "the default"
            )
    if not is_int(max_tokens) or max_tokens < 0:
        raise ValueError(
            f"max_tokens: expected an integer of at least 0, got {max_tokens!r:.80}; 0 keeps none"
        )
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(
            f"dtype: expected one of {', '.join(map(str, DTYPES))}, got {dtype!r:.80}; "
            "float16 keeps three digits"
        )
    # What can be known before there are rows: an error at the end would come too late.
    Recording().annotate(texts=texts, frames=frames, tokens_per_frame=tokens_per_frame)
    layers = _layers_of(model)
    recorder = _Recorder(layers, every, max_chunks, max_rows, max_tokens, dtype)
    if progress:
        recorder.progress = LongWork("recording", f"steps of {counted(len(layers), 'layer')}")
    recording = Recording(every=every, asked_every=every)

    def save(made: Recording) -> None:
        """To the live file, with the texts of now."""
        if texts is not None and len(texts) >= made.rows:
            made.annotate(texts=texts)
        if live is not None:
            made.save(live)

    if live is not None:
        live = checked_path(live)
        recording.save(live)  # nothing yet, in place of what was there before
        recorder.live = _Live(save, every)
    recorder.install()
    try:
        yield recording
    finally:
        recorder.remove()
        recorder.finish(recording)
        if live is not None:
            save(recording)
    if not recording.rows:
        warnings.warn(
            f"record: expected calls of the memories of {type(model).__name__} inside, got none; "
            "memories that are disabled or in a copy, such as torch.compile makes, are not watched",
            stacklevel=3,
        )
    recording.annotate(texts=texts, frames=frames, tokens_per_frame=tokens_per_frame)
    if live is not None and frames is not None:
        recording.save(live)


def _layers_of(model: nn.Module) -> list[tuple[str, MemoryLayer]]:
    """Every memory of a model by the name it is recorded under."""
    layers = memory_layers(model, "record")
    if any(_is_compiled(part) for part in model.modules()):
        raise ValueError(
            f"record: expected a model that is not compiled, got {type(model).__name__}: compiled "
            "calls run past the hooks that watch; record the model it was compiled from "
            "(model._orig_mod)"
        )
    return layers


class _Live:
    """Saves what was recorded so far, now and then."""

    EVERY = 1.0  # seconds, and no more than a tenth of all time

    def __init__(self, save: Callable[[Recording], None], every: int) -> None:
        self.save, self.every, self._next = save, every, 0.0
        self._timer: threading.Timer | None = None

    def after_call(self, recorder: _Recorder) -> None:
        """A call was recorded: save now, or as soon as it is time to."""
        wait = self._next - time.monotonic()
        if wait <= 0:
            self._save(recorder)
        elif self._timer is None:
            self._timer = threading.Timer(wait, self._later, [recorder])
            self._timer.daemon = True
            self._timer.start()

    def _later(self, recorder: _Recorder) -> None:
        with recorder.one_at_a_time:
            if self._timer is not None:
                self._save(recorder)

    def _save(self, recorder: _Recorder) -> None:
        began, self._timer = time.monotonic(), None
        made = Recording(asked_every=self.every)
        recorder.fill(made)
        self.save(made)
        ended = time.monotonic()
        self._next = ended + max(self.EVERY, 9 * (ended - began))

    def close(self) -> None:
        """Save no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Recorder:
    """The hooks, and what they have gathered."""

    def __init__(
        self,
        layers: list[tuple[str, MemoryLayer]],
        every: int,
        max_chunks: int,
        max_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self.every, self.max_chunks = every, max_chunks
        self.streams = Streams(max_rows)
        self.modules = [module for _, module in layers]
        memories = [memory_inside(module) for module in self.modules]
        self.stores = [_store(name, memory_inside(m), dtype) for name, m in layers]
        self.place_layers = {
            number: PlaceLayerRecorder(memory, self.stores[number], max_tokens)
            for number, memory in enumerate(memories)
            if isinstance(memory, PlaceMemory)
        }
        self.chunk_memories = {
            number: memory
            for number, memory in enumerate(memories)
            if isinstance(memory, TensorMemory)
        }
        self.histories = {
            number: ChunkHistoryStore(memory, max_tokens)
            for number, memory in self.chunk_memories.items()
            if max_tokens
        }
        self.live: _Live | None = None
        self.progress: LongWork | None = None
        self._handles: list[RemovableHandle] = []
        self.one_at_a_time = threading.Lock()  # calls may come from several threads

    def install(self) -> None:
        # On the residual alone, not on the memory inside: a fused layer never calls that one.
        for number, module in enumerate(self.modules):
            hook = self._hook(number)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        watching_moves.append(self._moved)

    def remove(self) -> None:
        watching_moves.remove(self._moved)
        with self.one_at_a_time:
            if self.live is not None:
                self.live.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, layer: int) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            if module is not self.modules[layer]:  # a copy, which took the hook along
                return
            x = args[0] if args else kwargs["x"]
            # Checkpointing runs a block again: nothing new.
            if in_backward() or not x.shape[0] or getattr(module, "disabled", False):
                return
            cuda = [x.device] if x.is_cuda else []
            # The generators are the process's: dropout inside an adapted head would move them.
            with self.one_at_a_time, torch.no_grad(), torch.random.fork_rng(cuda):
                self._record_call(layer, output[1], *args, **kwargs)
                if self.live is not None:
                    self.live.after_call(self)

        return hook

    def _record_call(
        self,
        layer: int,
        after: AnyState,
        x: Tensor,
        state: Any = None,
        **marks: Any,
    ) -> None:
        """One call of a layer with x (B, N, d), and the state it returned."""
        module = self.modules[layer]
        source, cuts = x, marks.pop("cu_seqlens", None)
        if cuts is not None:
            marks["reset"] = packed_resets(x, marks.get("reset"), cuts)
        if isinstance(module, MemoryResidual):
            mask = marks.get("mask")
            source = module.norm(x if mask is None else x.masked_fill(~mask[..., None], 0))
            self.stores[layer].gate = float(module.gate.sigmoid())
        norm = x.norm(dim=-1, dtype=at_least_float32(x.dtype))
        inverse_norm = 1 / norm.double().cpu()
        if isinstance(after, PlaceState):
            self._record_places(layer, after, source, state, inverse_norm, **marks)
        else:
            self._record_chunks(layer, after, source, state, inverse_norm, **marks)

    def _record_places(
        self,
        layer: int,
        after: PlaceState,
        x: Tensor,
        state: PlaceState | None,
        inverse_norm: Tensor,
        mask: Tensor | None = None,
        group: Any = None,
        **marks: Any,
    ) -> None:
        """One call of a place memory with x (B, N, d)."""
        if group is not None:
            raise ValueError(
                "record: expected calls of whole sequences, got group=, which cuts one over "
                "processes; record a call without it"
            )
        recorder = self.place_layers[layer]
        inputs, given = recorder.memory.steer(x, state, mask=mask, **marks)
        stream = self.streams.find(layer, state, given)
        progress = stream.layers[layer]
        assert isinstance(progress, PlaceProgress)
        progress.expect(given)
        tell = None if self.progress is None else self.progress.add
        recorder.record_call(stream, progress, x, inputs, mask, inverse_norm, self._room_for, tell)
        progress.last = after.detach()

    def _moved(self, before: PlaceState, after: PlaceState, steps: Tensor, empty: bool) -> None:
        """A state of a place memory rolled; the calls to come may go on from it."""
        with self.one_at_a_time:
            self.streams.move(before, after, steps, empty)

    def _record_chunks(
        self,
        layer: int,
        after: MemoryState,
        x: Tensor,
        state: MemoryState | None,
        inverse_norm: Tensor,
        **marks: Any,
    ) -> None:
        """One call of a memory of chunks with x (B, N, d)."""
        memory = self.chunk_memories[layer]
        call = CallArguments.of(memory, x.to(after.tokens.dtype), state, **marks)
        stream = self.streams.find(layer, state, call.state)
        progress = _chunk_progress(stream, layer)
        self._keep_unfinished(layer, stream, (progress.fill > 0) & (call.state.fill.cpu() == 0))
        kept, history = stream.kept, self.histories.get(layer)
        if history is not None and kept:
            number = progress.done[:kept].tolist()
            history.begin(stream.first_row, number, _grids(call.state, kept))
        self._advance(layer, stream, call, inverse_norm)
        if history is not None and kept:
            history.leave(stream.first_row, _grids(after, kept))
        progress.last = after.detach()
        kind = x.device.type
        on = torch.is_autocast_enabled(kind)
        progress.autocast = torch.get_autocast_dtype(kind) if on else None

    def _advance(
        self, layer: int, stream: Stream, call: CallArguments, inverse_norm: Tensor
    ) -> None:
        """Count the call's chunks, and keep those that it finished: 1 / ‖x‖ is (B, N)."""
        progress, K = _chunk_progress(stream, layer), call.state.tokens.shape[1]
        B, N = call.mask.shape
        place = call.assign(K)
        S, mask, slot = place.steps, call.mask.cpu(), place.slot.cpu()
        chunk = slot // K  # (B, N), S where masked
        before = progress.fill > 0
        positions = (progress.position + torch.arange(N)).expand(B, N)

        # A chunk may go on from the call before, and the last one may wait for the next call.
        begun = torch.where(mask, chunk + 1, 0).amax(1).maximum(before.long())
        fill = place.fill.cpu()
        finished = begun - (fill > 0).long()  # (B,) chunks that this call ended
        # The first and the last position of each chunk; column S takes what is masked.
        start = torch.full((B, S + 1), torch.iinfo(torch.long).max)
        start = start.scatter_reduce(1, chunk, positions, "amin")
        start[:, 0] = torch.where(before, progress.start, start[:, 0])
        stop = torch.zeros(B, S + 1, dtype=torch.long)
        stop = stop.scatter_reduce(1, chunk, positions + 1, "amax")
        stop[:, 0] = torch.where(before, stop[:, 0].maximum(progress.stop), stop[:, 0])
        # 1 / ‖x‖ by slot: those of the waiting chunk first, then those of this call.
        measured = torch.full((B, S * K + 1), torch.nan, dtype=torch.double)
        measured[:, :K] = progress.inverse_norm
        if call.tokens:
            measured = measured.scatter(1, slot, inverse_norm)
        measured = measured[:, : S * K].unflatten(1, (S, K))

        number = progress.done[:, None] + torch.arange(S)  # (B, S)
        ended = torch.arange(S) < finished[:, None]
        ended[stream.kept :] = False
        if ended.any():
            self._room_for(int(number[ended].max()))
        kept = ended & (number % self.every == 0)
        span = torch.stack([start, stop], 2)
        if ended.any():
            chunks = steer_chunks(self.chunk_memories[layer], call.rows(stream.kept))
            if layer in self.histories:
                for row, count in enumerate(finished[: stream.kept].tolist()):
                    values = steered_arrays(chunks, row, slice(0, count))
                    self.histories[layer].put(stream.first_row + row, values)
            self._keep_finished(layer, stream, call, chunks, kept, number, span, measured)

        row, last = torch.arange(B), (begun - 1).clamp(min=0)
        progress.position += call.tokens
        progress.done, progress.fill = progress.done + finished, fill
        progress.start, progress.stop = start[row, last], stop[row, last]
        waits = (fill > 0)[:, None]
        progress.inverse_norm = torch.where(waits, measured[row, last], torch.nan)

    def _keep_finished(
        self,
        layer: int,
        stream: Stream,
        call: CallArguments,
        chunks: SteeredChunks,
        kept: Tensor,
        number: Tensor,
        span: Tensor,
        inverse_norm: Tensor,
    ) -> None:
        """Replay the call as far as a chunk of it is `kept` (B, S)."""
        wanted = kept.any(0).nonzero().flatten().tolist()
        if not wanted:
            return
        memory = self.chunk_memories[layer]
        replayed = replay_chunks(memory, call.rows(stream.kept), chunks, inverse_norm)
        for s, values in zip(range(wanted[-1] + 1), replayed, strict=False):
            rows = kept[:, s].nonzero().flatten()
            if self.progress is not None:
                self.progress.add(1)
            self._put(layer, stream, rows, number[rows, s], span[rows, s], values)

    def _keep_unfinished(self, layer: int, stream: Stream, dropped: Tensor) -> None:
        """Keep the unfinished chunks of these rows, (B,) bool, as read and never written."""
        progress = _chunk_progress(stream, layer)
        if not dropped.any():
            return
        recorded = dropped.clone()
        recorded[stream.kept :] = False
        rows = recorded.nonzero().flatten()
        if len(rows) and progress.last is not None:
            self._room_for(int(progress.done[rows].max()))
            kind, low = progress.last.cell.device.type, progress.autocast
            with torch.no_grad(), torch.autocast(kind, low, enabled=low is not None):
                memory = self.chunk_memories[layer]
                values = replay_unfinished(memory, progress.last, progress.inverse_norm)
            if layer in self.histories:
                states = _grids(progress.last, stream.kept)
                for row in rows.tolist():
                    read_at, state = values["read_at"][row], states[row]
                    self.histories[layer].put_unwritten(stream.first_row + row, read_at, state)
            rows = rows[progress.done[rows] % self.every == 0]
            span = torch.stack([progress.start[rows], progress.stop[rows]], dim=1)
            self._put(layer, stream, rows, progress.done[rows], span, values)
        progress.done = progress.done + dropped.long()
        progress.fill = progress.fill.where(~dropped, 0)

    def _put(
        self,
        layer: int,
        stream: Stream,
        rows: Tensor,
        number: Tensor,
        span: Tensor,
        values: dict[str, Tensor],
    ) -> None:
        """Store P chunks: their rows and numbers (P,), spans (P, 2), values of all rows."""
        store = self.stores[layer]
        values = {name: value.cpu()[rows] for name, value in values.items()}
        values["use"] *= 1.0 if store.gate is None else store.gate
        store.put(number // self.every, stream.first_row + rows, values | {"span": span})

    def _room_for(self, number: int) -> int:
        """Forget every second chunk until chunk `number` has room; one in how many is kept."""
        while number // self.every >= self.max_chunks:
            self.every *= 2
            for store in self.stores:
                store.thin()
        return self.every

    def finish(self, recording: Recording) -> None:
        """Fill the recording; what still waits is kept as read and never written."""
        for stream in self.streams:
            for layer, progress in stream.layers.items():
                if isinstance(progress, LayerProgress):
                    self._keep_unfinished(layer, stream, progress.fill > 0)
        self.fill(recording)
        if self.progress is not None:
            self.progress.close()

    def fill(self, recording: Recording) -> None:
        """Fill a recording with what was kept so far."""
        seen = torch.zeros(len(self.stores), self.streams.rows, dtype=torch.long)
        for stream in self.streams:
            for layer, progress in stream.layers.items():
                rows = slice(stream.first_row, stream.first_row + stream.kept)
                seen[layer, rows] = progress.done[: stream.kept]
        recording.layers += [self._finished(layer, seen[layer]) for layer in range(len(seen))]
        recording.every, recording.rows_left_out = self.every, self.streams.left_out

    def _finished(self, layer: int, seen: Tensor) -> LayerRecording | PlaceLayerRecording:
        """One layer as recorded: `seen` (B,) chunks or tokens of every row."""
        if layer in self.place_layers:
            return self.place_layers[layer].finish(self.every, seen)
        config, store = self.chunk_memories[layer].config, self.stores[layer]
        arrays = store.arrays(seen.shape[0])
        arrays = {"spread": None, **arrays, "chunk": torch.arange(store.chunks) * self.every}
        kept = self.histories.get(layer)
        history = None if kept is None else kept.finish(seen.shape[0])
        return LayerRecording(store.name, config, store.gate, **arrays, seen=seen, history=history)


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def _store(name: str, memory: AnyMemory, dtype: torch.dtype) -> LayerStore:
    if isinstance(memory, PlaceMemory):
        return LayerStore(name, place_shapes(memory.config), dtype, {})
    others = {"span": ((2,), torch.int64), "written": ((), torch.bool)}
    return LayerStore(name, float_shapes(memory.config), dtype, others)


def _grids(state: MemoryState, rows: int) -> Tensor:
    """(B, 2, C, *grid) hidden and cell of the first rows."""
    return torch.stack([state.hidden[:rows], state.cell[:rows]], dim=1)


def _chunk_progress(stream: Stream, layer: int) -> LayerProgress:
    progress = stream.layers[layer]
    assert isinstance(progress, LayerProgress)
    return progress
