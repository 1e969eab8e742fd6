"""What a memory did, chunk by chunk: plain tensors on the CPU, to look at, save and draw.

Letters: T chunks kept, B rows, n axes, C channels, Q reads and M writes per chunk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensor_memory.config import MemoryConfig
from tensor_memory.inspect.annotations import checked_texts, thumbnails
from tensor_memory.ops.reference import gaussian_mask, nearest_mask

if TYPE_CHECKING:
    import numpy

FLOATS = (
    "read_at",
    "write_at",
    "spread",
    "content_norm",
    "gates",
    "hidden_norm",
    "readout",
    "use",
)
"""The arrays of a `LayerRecording` that hold measured values, in its float type."""

ARRAYS = (*FLOATS, "span", "written", "present", "chunk", "seen")
"""All arrays of a `LayerRecording`."""


@dataclass(frozen=True, eq=False)
class LayerRecording:
    """One memory layer: everything its equations made of each chunk that was kept.

    The first two dimensions of an array are T chunks and B rows. Where `present` is false the row
    has no such chunk, and every float there is NaN. Where `written` is false the chunk has read
    but was never written (it still waited at the end, or a new document dropped it), and what
    only a write has (`write_at`, `spread`, `content_norm`, `gates`) is NaN.
    """

    name: str
    """The path of the block the layer follows, else of the layer itself, in the model."""

    config: MemoryConfig
    """What the memory is."""

    gate: float | None
    """σ(γ) at the last call; None where a `TensorMemory` was used without `MemoryResidual`."""

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
    """(T, B, 3) input, forget and output gate, averaged over voxels and channels."""

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
    def rows(self) -> int:
        """B, rows."""
        return self.seen.shape[0]

    @property
    def dropped(self) -> int:
        """Chunks of all rows that were seen and not kept."""
        return int(self.seen.sum()) - int(self.present.sum())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, Tensor]:
        """Every array by name; no `spread` where there is none."""
        named = {name: getattr(self, name) for name in ARRAYS}
        return {name: array for name, array in named.items() if array is not None}

    def mask(self, chunk: int, row: int = 0) -> Tensor:
        """(M, *grid) float32: the weight each write gave each voxel; NaN where none happened."""
        at = self.write_at[chunk, row][None].float()
        if self.spread is None:
            grid = (1,) * self.config.axes
            missing = at.sum(-1).isnan().unflatten(-1, (-1, *grid))
            return nearest_mask(at, self.config.grid).masked_fill(missing, float("nan"))[0]
        return gaussian_mask(at, self.spread[chunk, row][None].float(), self.config.grid)[0]

    def __getitem__(self, at: Any) -> Any:
        """`layer[t, b]` is one `Chunk`; slices, `layer[3:9]` or `layer[:, :2]`, are layers."""
        chunks, rows = at if isinstance(at, tuple) else (at, slice(None))
        if isinstance(chunks, slice) or isinstance(rows, slice):
            chunks, rows = _as_slice(chunks, len(self), "chunk"), _as_slice(rows, self.rows, "row")
            cut = {name: array[chunks, rows] for name, array in self._per_chunk().items()}
            return replace(self, **cut, chunk=self.chunk[chunks], seen=self.seen[rows])
        _require_index(chunks, len(self), "chunk")
        _require_index(rows, self.rows, "row")
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

    def to_numpy(self) -> dict[str, numpy.ndarray]:
        """Every array by name, for a notebook."""
        return {name: array.numpy() for name, array in self.arrays().items()}


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of one row in one layer: `LayerRecording` without its first two dimensions."""

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


@dataclass(eq=False)
class Recording:
    """Every memory layer of a model while `record` was watching.

    `recording[0]` or `recording["blocks.0.memory"]` is a layer, `recording[layer, t, b]` one
    `Chunk` of it. Layers share their rows: row b is the same sequence everywhere.
    """

    layers: list[LayerRecording] = field(default_factory=list)
    """In the model's order."""

    every: int = 1
    """Every so many chunks one was kept; `record` doubles it where its bound is met."""

    asked_every: int = 1
    """What `record` was asked for."""

    rows_left_out: int = 0
    """Rows that came after `max_rows` others and were not recorded."""

    texts: list[list[str]] | None = None
    """Per row, the text of every token by its position in the stream; set with `annotate`."""

    frames: Tensor | None = None
    """(B, F, h, w, 3) uint8 thumbnails; set with `annotate`."""

    tokens_per_frame: int = 1
    """The frame of a token is its position // this."""

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.layers)

    def __getitem__(self, at: Any) -> Any:
        """A layer by number or name; `[layer, chunk, row]` as in `LayerRecording`."""
        if isinstance(at, tuple):
            layer, *inside = at
            return self[layer][tuple(inside) if len(inside) > 1 else inside[0]]
        if isinstance(at, str):
            named = {layer.name: layer for layer in self.layers}
            if at not in named:
                raise KeyError(f"no layer {at!r}; there are {', '.join(named) or 'none'}")
            return named[at]
        _require_index(at, len(self.layers), "layer")
        return self.layers[at]

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return [layer.name for layer in self.layers]

    @property
    def rows(self) -> int:
        """B, rows; the same in every layer."""
        return self.layers[0].rows if self.layers else 0

    @property
    def dropped(self) -> int:
        """Chunks, counted in every layer and row, that were seen and not kept."""
        return sum(layer.dropped for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes held, frames included."""
        frames = 0 if self.frames is None else self.frames.nbytes
        return frames + sum(layer.nbytes for layer in self.layers)

    def annotate(
        self,
        *,
        texts: Sequence[Sequence[str]] | None = None,
        frames: Tensor | None = None,
        tokens_per_frame: int = 1,
    ) -> Recording:
        """Say what the tokens were: a text each, or the frames they were cut from.

        Args:
            texts: per row, the text of every token by position, such as
                `[tokenizer.batch_decode(row) for row in ids[..., None]]`.
            frames: (B, F, h, w, 3) uint8; kept at no more than 96 pixels a side.
            tokens_per_frame: positions one frame stands for.
        """
        if texts is not None:
            self.texts = checked_texts(texts, self.rows)
        if frames is not None:
            self.frames = thumbnails(frames, self.rows)
            if tokens_per_frame < 1:
                raise ValueError(f"tokens_per_frame: expected at least 1, got {tokens_per_frame}")
            self.tokens_per_frame = tokens_per_frame
        return self

    def text(self, layer: int | str, chunk: int, row: int = 0) -> str | None:
        """The text of one chunk's tokens, None where nothing is known of them."""
        start, stop = self[layer].span[chunk, row].tolist()
        if self.texts is None or row >= len(self.texts):
            return None
        return "".join(self.texts[row][start:stop])

    def frame(self, layer: int | str, chunk: int, row: int = 0) -> Tensor | None:
        """(h, w, 3) uint8: the frame of one chunk's first token, None where there is none."""
        at = int(self[layer].span[chunk, row, 0]) // self.tokens_per_frame
        if self.frames is None or row >= len(self.frames) or at >= self.frames.shape[1]:
            return None
        return self.frames[row, at]

    def to_numpy(self) -> dict[str, dict[str, numpy.ndarray]]:
        """Every array of every layer, by the layer's name and the array's."""
        return {layer.name: layer.to_numpy() for layer in self.layers}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all, the description in it as JSON."""
        from tensor_memory.inspect.saved import save_recording

        save_recording(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read what `save` wrote; a truncated or foreign file is a `ValueError`."""
        from tensor_memory.inspect.saved import load_recording

        return load_recording(path)

    def __repr__(self) -> str:
        kept = max((len(layer) for layer in self.layers), default=0)
        return f"Recording({len(self.layers)} layers, {self.rows} rows, {kept} chunks kept)"

    def _repr_html_(self) -> str:
        head = ("layer", "grid", "chunks kept", "chunks seen", "σ(γ)", "use", "i", "f", "o")
        lines = []
        for layer in self.layers:
            gates = _mean(layer.gates.flatten(0, 1)) if layer.present.any() else [None] * 3
            use = _mean(layer.use.reshape(-1, 1))[0] if layer.present.any() else None
            cells = (
                layer.name,
                "×".join(map(str, layer.config.grid)),
                str(int(layer.present.sum())),
                str(int(layer.seen.sum())),
                *("–" if value is None else f"{value:.3f}" for value in (layer.gate, use, *gates)),
            )
            lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        header = "".join(f"<th>{escape(name)}</th>" for name in head)
        kept = f", one chunk in {self.every} kept" if self.every > 1 else ""
        left = f", {self.rows_left_out} more rows left out" if self.rows_left_out else ""
        return (
            f"<p>Recording of {len(self.layers)} layers, {self.rows} rows{left}{kept}, "
            f"{self.nbytes / 2**20:.1f} MiB</p>"
            f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )


def _mean(values: Tensor) -> list[float]:
    return values.double().nanmean(0).tolist()


def _as_slice(at: Any, size: int, what: str) -> slice:
    if isinstance(at, slice):
        return at
    _require_index(at, size, what)
    return slice(at % size, at % size + 1)


def _require_index(at: Any, size: int, what: str) -> None:
    if not isinstance(at, int) or isinstance(at, bool):
        raise TypeError(f"{what}: expected an integer or a slice, got {at!r}")
    if not -size <= at < size:
        raise IndexError(f"{what} {at}: this recording has {size} {what}s")
