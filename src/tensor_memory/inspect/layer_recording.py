"""What one memory layer did to a grid over time, chunk by chunk: plain tensors on the CPU.

Letters: T chunks kept, B rows, n axes, C channels, Q reads and M writes per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from tensor_memory.config import GridConfig, MemoryConfig, is_int
from tensor_memory.inspect.chunk_history import ChunkHistory
from tensor_memory.inspect.chunk_trace import ChunkTrace, follow_chunks, follow_cost, trace_chunks
from tensor_memory.inspect.history import LayerArrays
from tensor_memory.inspect.place_lives import WriteLives
from tensor_memory.ops.scan.reference import gaussian_mask, nearest_mask
from tensor_memory.wording import counted


def float_shapes(config: MemoryConfig) -> dict[str, tuple[int, ...]]:
    """Every array of measured values by name, and its shape after (T, B).

    >>> float_shapes(MemoryConfig(channels=4, grid=(3, 3), chunk_size=2))["readout"]
    (1, 4)
    """
    M, n = config.write_heads, config.axes
    Q = config.read_heads * (config.chunk_size if config.reads == "token" else 1)
    shapes = {
        "read_at": (Q, n),
        "write_at": (M, n),
        "spread": (M,),
        "content_norm": (M,),
        "gates": (3,),
        "hidden_norm": config.grid,
        "readout": (Q, config.channels),
        "use": (),
    }
    if config.write == "nearest":
        del shapes["spread"]
    return shapes


@dataclass(frozen=True, eq=False, repr=False)
class GridRecording(LayerArrays):
    """One grid over time: what figures and pages draw.

    The first two dimensions of an array are T chunks and B rows. Where `present` is false the row
    has no such chunk, and every float there is NaN. Where `written` is false the chunk has read
    but was never written (it still waited at the end, or a new document dropped it), and what
    only a write has (`write_at`, `spread`, `content_norm`, `gates`) is NaN.
    """

    gate_names: ClassVar[tuple[str, ...]]
    """What `gates` holds."""

    norm_name: ClassVar[str]
    """What `hidden_norm` holds."""

    unit: ClassVar[str]
    """What one step in time is."""

    name: str
    """The path of the block the layer follows, else of the layer itself, in the model."""

    config: GridConfig
    """What the memory is."""

    gate: float | None
    """σ(γ) at the last call; None where a memory was used without `MemoryResidual`."""

    read_at: Tensor
    """(T, B, Q, n) where the chunk read: Q = R heads, or K·R when every token reads (NaN where a
    slot of the chunk held no token). Coordinate 0 addresses the last grid axis."""

    write_at: Tensor
    """(T, B, M, n) where it wrote."""

    spread: Tensor | None
    """(T, B, M) σ, how widely; None where the nearest voxel alone is written."""

    content_norm: Tensor
    """(T, B, M) ‖content‖, how strongly."""

    gates: Tensor
    """(T, B, ...) the gates in `gate_names`, averaged over voxels and channels."""

    hidden_norm: Tensor
    """(T, B, *grid) ‖h‖ of every voxel after the chunk was written; of an unwritten chunk, of the
    state it read."""

    readout: Tensor
    """(T, B, Q, C) what it read, before W_out."""

    use: Tensor
    """(T, B) ‖σ(γ)·m‖ / ‖x‖ averaged over the chunk's tokens (σ(γ) = 1 without a residual)."""

    span: Tensor
    """(T, B, 2) int64: the chunk's tokens are [start, stop) in the row's stream, counted from its
    first recorded position; masked positions count, so that they index the row's texts."""

    written: Tensor
    """(T, B) bool."""

    present: Tensor
    """(T, B) bool."""

    chunk: Tensor
    """(T,) int64: the number of the chunk in its row's stream, 0, every, 2·every, ..."""

    seen: Tensor
    """(B,) int64: chunks the row went through, kept or not."""

    def __len__(self) -> int:
        """T, chunks kept."""
        return self.chunk.shape[0]

    @property
    def read_heads(self) -> int:
        """Reads that go on from one token to the next; the others are of other tokens."""
        return self.read_at.shape[2]

    @property
    def norms(self) -> Tensor:
        """(T, B, ...) the norms of everything that is held."""
        return self.hidden_norm

    def views(self) -> list[GridRecording]:
        """What is drawn of this layer: itself."""
        return [self]

    def mask(self, chunk: int, row: int = 0) -> Tensor:
        """(M, *grid) float32: the weight each write gave each voxel; NaN where none happened."""
        raise NotImplementedError

    def __getitem__(self, at: Any) -> Any:
        """`layer[t, b]` is one `Chunk`; slices, `layer[3:9]` or `layer[:, :2]`, are layers."""
        chunks, rows = at if isinstance(at, tuple) else (at, slice(None))
        if isinstance(chunks, slice) or isinstance(rows, slice):
            chunks, rows = _as_slice(chunks, len(self), "chunk"), _as_slice(rows, self.rows, "row")
            cut = {name: array[chunks, rows] for name, array in self._per_chunk().items()}
            return replace(self, **cut, chunk=self.chunk[chunks], seen=self.seen[rows])
        require_index(chunks, len(self), "chunk")
        require_index(rows, self.rows, "row")
        values = {name: array[chunks, rows] for name, array in self._per_chunk().items()}
        start, stop = values.pop("span").tolist()
        return Chunk(
            layer=self.name,
            row=rows % self.rows,
            chunk=int(self.chunk[chunks]),
            start=start,
            stop=stop,
            present=bool(values.pop("present")),
            written=bool(values.pop("written")),
            use=float(values.pop("use")),
            mask=self.mask(chunks, rows),
            spread=values.pop("spread", None),
            **values,
        )

    def _per_chunk(self) -> dict[str, Tensor]:
        return {k: array for k, array in self.arrays().items() if k not in ("chunk", "seen")}


@dataclass(frozen=True, eq=False, repr=False)
class LayerRecording(GridRecording):
    """One layer of a `TensorMemory`: all that its equations made of each chunk that was kept."""

    gate_names = ("input", "forget", "output")
    norm_name = "‖h‖"
    unit = "chunk"

    config: MemoryConfig

    history: ChunkHistory | None = None
    """The inputs of the recurrence, exactly as they were; None where `record` kept none."""

    @property
    def read_heads(self) -> int:  # noqa: D102
        return self.config.read_heads

    def trace(self, chunks: Sequence[int] | Tensor, *, row: int = 0) -> ChunkTrace:
        """Where the reads of chunks came from: what each loses when one write is left out.

        Each write in turn is left out, and everything after it is computed again, in float64, from
        what was recorded. Gates are not linear, so the effects do not sum to the read: the
        difference is `joint`. It takes as many runs over the history as it has writes.

        Args:
            chunks: numbers of chunks in the row's stream.
            row: the row that read.

        >>> import torch
        >>> from tensor_memory import TensorMemory, record
        >>> memory = TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3), chunk_size=2))
        >>> with record(memory) as recording:
        ...     m, state = memory(torch.randn(1, 7, 8))
        >>> trace = recording[0].trace([3])
        >>> trace.effect.shape, trace.chunk.tolist()
        (torch.Size([1, 3, 1, 4]), [0, 1, 2])
        >>> torch.allclose(trace.effect.sum(1) + trace.rest + trace.joint, trace.read)
        True
        """
        require_index(row, self.rows, "row")
        return trace_chunks(self.traced_history(), chunks, row % self.rows)

    def follow(self, row: int, top: int) -> WriteLives | None:
        """What every write of a row gave to each read, `top` of them told; None without history."""
        return None if self.history is None else follow_chunks(self.history, row, top)

    def follow_work(self, row: int) -> int:
        """Multiplications that `follow` takes, about."""
        return 0 if self.history is None else follow_cost(self.history, self.config, row)

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        rows = at[1] if isinstance(at, tuple) else slice(None)
        if not isinstance(found, LayerRecording) or found.history is None:
            return found
        history = found.history.select(_as_slice(rows, self.rows, "row"))
        return replace(found, history=history)

    def mask(self, chunk: int, row: int = 0) -> Tensor:  # noqa: D102
        require_index(chunk, len(self), "chunk")
        require_index(row, self.rows, "row")
        at = self.write_at[chunk, row][None].float()
        if self.spread is None:
            grid = (1,) * self.config.axes
            missing = at.sum(-1).isnan().unflatten(-1, (-1, *grid))
            return nearest_mask(at, self.config.grid).masked_fill(missing, float("nan"))[0]
        return gaussian_mask(at, self.spread[chunk, row][None].float(), self.config.grid)[0]


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of one row in one layer: a recording without its first two dimensions."""

    layer: str
    row: int
    chunk: int
    start: int
    stop: int
    present: bool
    written: bool
    use: float
    read_at: Tensor
    write_at: Tensor
    spread: Tensor | None
    mask: Tensor
    content_norm: Tensor
    gates: Tensor
    hidden_norm: Tensor
    readout: Tensor


def _as_slice(at: Any, size: int, what: str) -> slice:
    if isinstance(at, slice):
        return at
    require_index(at, size, what)
    return slice(at % size, at % size + 1)


def require_index(at: Any, size: int, what: str) -> None:
    """Raise unless `at` is one of `size`, counted from the end where it is negative."""
    if not is_int(at):
        other = "a name" if what == "layer" else "a slice"
        raise TypeError(f"{what}: expected an integer or {other}, got {at!r}")
    if not -size <= at < size:
        filled = (
            "; `record` fills it when its block is left" if what == "layer" and not size else ""
        )
        raise IndexError(f"{what} {at}: this recording has {counted(size, what)}{filled}")
