"""Record every memory of a model, through hooks that exist only while recording.

Letters: B batch, N tokens, K tokens per chunk, S chunks of a call, P chunks kept of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensor_memory.attachment import Attachment
from tensor_memory.attachment.recompute import in_backward
from tensor_memory.inspect.recording import Recording
from tensor_memory.inspect.replay import CallArguments, replay_chunks, replay_unfinished
from tensor_memory.inspect.store import LayerStore
from tensor_memory.inspect.streams import Stream, Streams
from tensor_memory.residual import MemoryResidual
from tensor_memory.state import MemoryState
from tensor_memory.tensor import TensorMemory

_Module = TypeVar("_Module", bound=nn.Module)

DTYPES = (torch.float16, torch.float32, torch.float64)


@contextmanager
def record(
    model: nn.Module,
    *,
    every: int = 1,
    max_chunks: int = 512,
    max_rows: int = 16,
    dtype: torch.dtype = torch.float16,
    texts: Sequence[Sequence[str]] | None = None,
    frames: Tensor | None = None,
    tokens_per_frame: int = 1,
) -> Iterator[Recording]:
    """Record what every memory in `model` does inside the `with` block.

    The recording is filled when the block is left, also by an error. No output changes by a bit.
    What a fast scan never exposes is recomputed by the readable reference, chunk by chunk, so
    calls are slower while recording; outside the block nothing is left behind.

    Args:
        model: a `TensorMemory`, a `MemoryResidual`, a host that `attach` was called on, or any
            module that holds one of them. A memory inside a `MemoryResidual` is recorded where the
            residual is called; calls of that memory itself, past its residual, are not.
        every: keep one chunk in so many.
        max_chunks: chunks kept per row and layer. One more, and every second is forgotten and
            `every` doubled, as `Recording.every` then says.
        max_rows: rows kept; `Recording.rows_left_out` counts the others. A call that starts from
            an empty memory starts new rows, one that continues a state goes on in its rows.
        dtype: float type the values are kept in, on the CPU.
        texts: the text of every token, see `Recording.annotate`.
        frames: the frames the tokens were cut from, see there.
        tokens_per_frame: tokens of one frame.

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
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    if dtype not in DTYPES:
        raise ValueError(
            f"dtype: expected one of {', '.join(map(str, DTYPES))}, got {dtype}; "
            "float16 keeps three digits"
        )
    recorder = _Recorder(_layers_of(model), every, max_chunks, max_rows, dtype)
    recording = Recording(every=every, asked_every=every)
    recorder.install()
    try:
        yield recording
    finally:
        recorder.remove()
        recorder.finish(recording)
    recording.annotate(texts=texts, frames=frames, tokens_per_frame=tokens_per_frame)


def _layers_of(model: nn.Module) -> list[tuple[str, MemoryResidual | TensorMemory]]:
    """Every residual, every memory that none of them owns, and the name it is recorded under."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"record: expected a model (torch.nn.Module), got {type(model).__name__}")
    blocks = {}
    for path, part in model.named_modules():
        if isinstance(part, Attachment):
            host = path.rpartition(".")[0]
            for block, layer in zip(part.paths, part.layers, strict=True):
                blocks[layer] = f"{host}.{block}" if host else block
        if _is_compiled(part):
            raise ValueError(
                f"record: {type(model).__name__} is compiled, and compiled calls run past the "
                "hooks that watch; record the model it was compiled from (model._orig_mod)"
            )
    layers = [(blocks.get(m, path or "memory"), m) for path, m in _parts(model, MemoryResidual)]
    owned = {layer.memory for _, layer in layers}
    alone = [(path or "memory", m) for path, m in _parts(model, TensorMemory) if m not in owned]
    if not layers and not alone:
        raise ValueError(
            f"record: {type(model).__name__} holds no memory; attach(model, ...) one first"
        )
    order = {module: number for number, module in enumerate(model.modules())}
    return sorted([*layers, *alone], key=lambda found: order[found[1]])


def _parts(model: nn.Module, kind: type[_Module]) -> list[tuple[str, _Module]]:
    return [(path, part) for path, part in model.named_modules() if isinstance(part, kind)]


class _Recorder:
    """The hooks, and what they have gathered."""

    def __init__(
        self,
        layers: list[tuple[str, MemoryResidual | TensorMemory]],
        every: int,
        max_chunks: int,
        max_rows: int,
        dtype: torch.dtype,
    ) -> None:
        self.every, self.max_chunks = every, max_chunks
        self.streams = Streams(max_rows)
        self.modules = [module for _, module in layers]
        self.memories = [_memory_of(module) for module in self.modules]
        self.stores = [LayerStore(name, _memory_of(m).config, dtype) for name, m in layers]
        self._handles: list[RemovableHandle] = []
        self._one_at_a_time = threading.Lock()  # calls may come from several threads

    def install(self) -> None:
        # On the residual alone, not on the memory inside: a fused layer never calls that one.
        for number, module in enumerate(self.modules):
            hook = self._hook(number)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, layer: int) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            x = args[0] if args else kwargs["x"]
            if in_backward() or not x.shape[0]:  # checkpointing runs a block again: nothing new
                return
            cuda = [x.device] if x.is_cuda else []
            # The generators are the process's: dropout inside an adapted head would move them.
            with self._one_at_a_time, torch.no_grad(), torch.random.fork_rng(cuda):
                self._record_call(layer, output[1], *args, **kwargs)

        return hook

    def _record_call(
        self,
        layer: int,
        after: MemoryState,
        x: Tensor,
        state: MemoryState | None = None,
        **marks: Any,
    ) -> None:
        """One call of a layer with x (B, N, d), and the state it returned."""
        module, memory = self.modules[layer], self.memories[layer]
        source = x
        if isinstance(module, MemoryResidual):
            mask = marks.get("mask")
            source = module.norm(x if mask is None else x.masked_fill(~mask[..., None], 0))
            self.stores[layer].gate = float(module.gate.sigmoid())
        call = CallArguments.of(memory, source.to(after.tokens.dtype), state, **marks)
        stream = self.streams.find(layer, state, call.state)
        progress = stream.layers[layer]
        self._keep_unfinished(layer, stream, (progress.fill > 0) & (call.state.fill.cpu() == 0))
        norm = x.norm(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        self._advance(layer, stream, call, 1 / norm.double().cpu())
        progress.last = after.detach()
        kind = x.device.type
        on = torch.is_autocast_enabled(kind)
        progress.autocast = torch.get_autocast_dtype(kind) if on else None

    def _advance(
        self, layer: int, stream: Stream, call: CallArguments, inverse_norm: Tensor
    ) -> None:
        """Count the call's chunks, and keep those that it finished: 1 / ‖x‖ is (B, N)."""
        progress, K = stream.layers[layer], self.stores[layer].config.chunk_size
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
            self._thin_for(int(number[ended].max()))
        kept = ended & (number % self.every == 0)
        span = torch.stack([start, stop], 2)
        self._keep_finished(layer, stream, call, kept, number, span, measured)

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
        kept: Tensor,
        number: Tensor,
        span: Tensor,
        inverse_norm: Tensor,
    ) -> None:
        """Replay the call as far as a chunk of it is `kept` (B, S)."""
        wanted = kept.any(0).nonzero().flatten().tolist()
        if not wanted:
            return
        replayed = replay_chunks(self.memories[layer], call.rows(stream.kept), inverse_norm)
        for s, values in zip(range(wanted[-1] + 1), replayed, strict=False):
            rows = kept[:, s].nonzero().flatten()
            self._put(layer, stream, rows, number[rows, s], span[rows, s], values)

    def _keep_unfinished(self, layer: int, stream: Stream, dropped: Tensor) -> None:
        """Keep the unfinished chunks of these rows, (B,) bool, as read and never written."""
        progress = stream.layers[layer]
        if not dropped.any():
            return
        recorded = dropped.clone()
        recorded[stream.kept :] = False
        rows = recorded.nonzero().flatten()
        if len(rows):
            self._thin_for(int(progress.done[rows].max()))
            rows = rows[progress.done[rows] % self.every == 0]
        if len(rows) and progress.last is not None:
            kind, low = progress.last.cell.device.type, progress.autocast
            with torch.no_grad(), torch.autocast(kind, low, enabled=low is not None):
                memory = self.memories[layer]
                values = replay_unfinished(memory, progress.last, progress.inverse_norm)
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

    def _thin_for(self, number: int) -> None:
        """Forget every second chunk until there is room for chunk `number`."""
        while number // self.every >= self.max_chunks:
            self.every *= 2
            for store in self.stores:
                store.thin()

    def finish(self, recording: Recording) -> None:
        """Fill the recording; what still waits is kept as read and never written."""
        seen = torch.zeros(len(self.stores), self.streams.rows, dtype=torch.long)
        for stream in self.streams:
            for layer, progress in stream.layers.items():
                self._keep_unfinished(layer, stream, progress.fill > 0)
                rows = slice(stream.first_row, stream.first_row + stream.kept)
                seen[layer, rows] = progress.done[: stream.kept]
        recording.layers += [
            store.finish(self.every, seen[number]) for number, store in enumerate(self.stores)
        ]
        recording.every, recording.rows_left_out = self.every, self.streams.left_out


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None


def _memory_of(layer: MemoryResidual | TensorMemory) -> TensorMemory:
    memory = layer.memory if isinstance(layer, MemoryResidual) else layer
    assert isinstance(memory, TensorMemory)
    return memory
