"""What the memories of a model did while `record` was watching, and the file that keeps it.

The file is one safetensors file: the arrays of every layer as `layers.NUMBER.NAME`, the frames,
and a description in JSON, stored as bytes.

Letters: T chunks kept, B rows, F frames, h and w their height and width.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig, PlaceConfig, is_int
from tensor_memory.files import checked_path, load_tensors, save_tensors, write_text
from tensor_memory.inspect.annotations import checked_texts, thumbnails
from tensor_memory.inspect.chunk_history import ChunkHistory
from tensor_memory.inspect.figure_files import write_figures
from tensor_memory.inspect.layer_recording import LayerRecording, float_shapes, require_index
from tensor_memory.inspect.page import LIMIT_MB, AnyLayer, page
from tensor_memory.inspect.place_history import PlaceHistory
from tensor_memory.inspect.place_layer import PlaceLayerRecording, place_shapes
from tensor_memory.wording import counted

if TYPE_CHECKING:
    import numpy

KIND = "tensor-memory recording"
FORMAT = 1
HISTORY = "history."
"""Before the names of a layer's history in a file."""

PAGE_START = b"<!doctype html>"


@dataclass(eq=False)
class Recording:
    """Every memory layer of a model while `record` was watching.

    `recording[0]` or `recording["blocks.0.memory"]` is a layer, `recording[layer, t, b]` one
    `Chunk` or `PlaceToken` of it. Layers share their rows: row b is the same sequence everywhere.
    """

    layers: list[AnyLayer] = field(default_factory=list)
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

    def __iter__(self) -> Iterator[AnyLayer]:
        """The layers, in the model's order."""
        return iter(self.layers)

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
        require_index(at, len(self.layers), "layer")
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
        """Chunks or tokens, counted in every layer and row, that were seen and not kept."""
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
        if not is_int(tokens_per_frame) or tokens_per_frame < 1:
            raise ValueError(
                f"tokens_per_frame: expected an integer of at least 1, got {tokens_per_frame!r:.80}"
                "; leave it out for 1"
            )
        if texts is not None:
            self.texts = checked_texts(texts, self.rows)
        if frames is not None:
            self.frames = thumbnails(frames, self.rows)
            self.tokens_per_frame = tokens_per_frame
        return self

    def text(self, layer: int | str, chunk: int, row: int = 0) -> str | None:
        """The text of one chunk's tokens, or of one token; None where nothing is known of them."""
        start, stop = self._span(layer, chunk, row)
        if self.texts is None or row >= len(self.texts):
            return None
        return "".join(self.texts[row][start:stop])

    def frame(self, layer: int | str, chunk: int, row: int = 0) -> Tensor | None:
        """(h, w, 3) uint8: the frame of one chunk's first token, None where there is none."""
        at = self._span(layer, chunk, row)[0] // self.tokens_per_frame
        if self.frames is None or row >= len(self.frames) or at >= self.frames.shape[1]:
            return None
        return self.frames[row, at]

    def _span(self, layer: int | str, chunk: int, row: int) -> list[int]:
        found = self[layer]
        require_index(chunk, len(found), found.unit)
        require_index(row, found.rows, "row")
        return found.span[chunk, row].tolist()

    def to_numpy(self) -> dict[str, dict[str, numpy.ndarray]]:
        """Every array of every layer, by the layer's name and the array's."""
        return {layer.name: layer.to_numpy() for layer in self.layers}

    def summary(self) -> str:
        """A table with one line per layer, and what was not kept."""
        table = _table(self.layers)
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        return "\n".join([*lines, self._extent()])

    def save_page(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "Tensor Memory recording",
        every: int = 1,
        rows: int | None = None,
        limit_mb: float = LIMIT_MB,
        beside: Recording | None = None,
        image: Tensor | None = None,
    ) -> None:
        """Write the interactive viewer: one HTML file that opens from disk, without a network.

        Args:
            path: the file; one that is there must be an earlier page.
            title: heading of the page.
            every: put one recorded chunk in so many on the page, which then says so.
            rows: put only the first so many rows on the page, which then says so.
            limit_mb: refuse a page larger than this.
            beside: another recording of the same rows, such as one of another memory. The page
                shows both at the same token; the texts and frames are those of this one.
            image: a uint8 tensor (h, w, 3), or one for each row, to lie under the grids of a place
                memory with two axes whose places are given. Its first line is y = -1, its last
                y = 1, its first column x = -1: y then grows downwards on the page, as in photos.
        """
        options: dict[str, Any] = {"title": title, "every": every, "rows": rows, "image": image}
        _require_page(checked_path(path))
        write_text(path, self._page(beside, limit_mb=limit_mb, **options))

    def show(self, *, height: int = 800, **options: Any) -> InlinePage:
        """The same page inside a notebook, so many pixels high; options as of `save_page`."""
        return InlinePage(self._page(**options), height)

    def _page(self, beside: Recording | None = None, **options: Any) -> str:
        if beside is not None and not isinstance(beside, Recording):
            raise TypeError(
                f"beside: expected another Recording, got {type(beside).__name__}; load a file "
                "with Recording.load"
            )
        shown = self if beside is None else _both(self, beside)
        first = None if beside is None else len(self)
        return page(shown, first=first, **options)

    def save_figures(
        self,
        folder: str | os.PathLike[str],
        *,
        row: int = 0,
        layers: Sequence[int | str] | None = None,
        chunks: slice = slice(None),
        themes: Sequence[str] = ("light",),
        kinds: Sequence[str] | None = None,
    ) -> list[Path]:
        """Draw PNG figures: `KIND-LAYER-THEME.png`, or `KIND-THEME.png` of all layers together.

        Args:
            folder: made where it does not exist.
            row: the row that figures of one row show.
            layers: numbers or names of the layers to draw one by one; all by default.
            chunks: the kept chunks to show, such as `slice(0, 12)`.
            themes: "light", "dark" or both.
            kinds: names of the figures to draw, such as "projection"; all by default.

        Returns:
            The files written.
        """
        options: dict[str, Any] = {"row": row, "layers": layers, "chunks": chunks}
        return write_figures(self.layers, folder, themes=themes, kinds=kinds, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, whole or not at all."""
        described = {
            "format": FORMAT,
            "layers": [
                {"name": layer.name, "config": layer.config.to_dict(), "gate": layer.gate}
                | ({"memory": "places"} if isinstance(layer, PlaceLayerRecording) else {})
                for layer in self.layers
            ],
            "every": self.every,
            "asked_every": self.asked_every,
            "rows_left_out": self.rows_left_out,
            "texts": self.texts,
            "tokens_per_frame": self.tokens_per_frame,
        }
        text = json.dumps(described, ensure_ascii=True).encode()
        tensors = {"description": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
        if self.frames is not None:
            tensors["frames"] = self.frames
        for number, layer in enumerate(self.layers):
            for name, array in _all_arrays(layer).items():
                # A copy: safetensors refuses tensors that share memory, as slices of a layer do.
                tensors[f"layers.{number}.{name}"] = array.clone()
        save_tensors(path, tensors, kind=KIND)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read what `save` wrote; a truncated or foreign file is a `ValueError`."""
        tensors = load_tensors(path, kind=KIND)
        described = _description(tensors.pop("description", torch.empty(0)), path)
        frames = tensors.pop("frames", None)
        try:
            layers = [
                _layer(number, tensors, **values)
                for number, values in enumerate(described["layers"])
            ]
            if tensors:
                raise ValueError(f"unknown tensors {', '.join(sorted(tensors))}")
            if len({layer.rows for layer in layers}) > 1:
                raise ValueError("its layers differ in their rows")
            recording = cls(
                layers,
                every=int(described["every"]),
                asked_every=int(described["asked_every"]),
                rows_left_out=int(described["rows_left_out"]),
            )
            recording.annotate(
                texts=described["texts"],
                frames=frames,
                tokens_per_frame=described["tokens_per_frame"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a complete {KIND}, got a damaged one ({error}); save it again"
            ) from error
        return recording

    def __repr__(self) -> str:
        kept = max((len(layer) for layer in self.layers), default=0)
        layers, rows = counted(len(self), "layer"), counted(self.rows, "row")
        unit = self.layers[0].unit if self.layers else "chunk"
        return f"Recording({layers}, {rows}, {counted(kept, unit)} kept)"

    def _repr_html_(self) -> str:
        head, *lines = (
            "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line)
            for tag, line in zip(("th", *["td"] * len(self)), _table(self.layers), strict=True)
        )
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{escape(self._extent())}</p>"
        )

    def _extent(self) -> str:
        """How much was recorded, and what was left out."""
        rows, layers = counted(self.rows, "row"), counted(len(self), "layer")
        if self.rows_left_out:
            rows += f" ({counted(self.rows_left_out, 'more was', 'more were')} left out)"
        extent = f"{rows}, {layers}, {self.nbytes / 2**20:.1f} MiB"
        if self.every > 1:
            others = counted(self.dropped, "was", "were")
            units = " or ".join(dict.fromkeys(layer.unit for layer in self.layers))
            extent += f"\none {units} in {self.every} was kept, {others} not"
        return extent


@dataclass(frozen=True)
class InlinePage:
    """A page that a notebook shows; it can reach neither the notebook nor a network."""

    text: str
    height: int

    def __repr__(self) -> str:
        return f"InlinePage({len(self.text) / 1e6:.1f} MB)"

    def _repr_html_(self) -> str:
        return (
            '<iframe sandbox="allow-scripts allow-downloads" width="100%" '
            f'height="{int(self.height)}" style="border: 0" srcdoc="{escape(self.text)}"></iframe>'
        )


def _require_page(path: Path) -> None:
    """Refuse to write a page over what is none, such as the recording itself."""
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(PAGE_START))
        if start not in (b"", PAGE_START):
            raise FileExistsError(
                f"{path}: expected a new file or an earlier page, got a file of other content; "
                "name another, such as page.html"
            )


def _both(first: Recording, second: Recording) -> Recording:
    """Two recordings as one, whose layers say of which they are."""
    if first.rows != second.rows or first.every != second.every:
        raise ValueError(
            f"beside: expected a recording of {counted(first.rows, 'row')} with every="
            f"{first.every}, got {counted(second.rows, 'row')} with every={second.every}; "
            "record the same rows with the same max_chunks"
        )
    pairs = (("A", first), ("B", second))
    layers = [replace(one, name=f"{of}: {one.name}") for of, each in pairs for one in each.layers]
    return replace(first, layers=layers)


def _table(layers: Sequence[AnyLayer]) -> list[tuple[str, ...]]:
    """A head and one line per layer: what was kept, and the means over chunks and rows."""
    measured = [_means(layer) for layer in layers]
    names = dict.fromkeys(name for means in measured for name in means)
    if not layers:
        names = dict.fromkeys(("gate", "use"))
    table: list[tuple[str, ...]] = [("layer", "grid", "kept", "seen", *names)]
    for layer, means in zip(layers, measured, strict=True):
        values = [means.get(name, torch.nan) for name in names]
        table.append(
            (
                layer.name,
                "x".join(map(str, layer.config.grid)),
                str(int(layer.present.sum())),
                str(int(layer.seen.sum())),
                *("-" if math.isnan(value) else f"{value:.3f}" for value in values),
            )
        )
    return table


def _means(layer: AnyLayer) -> dict[str, float]:
    """The columns of a layer's kind, in order; NaN where there is no value."""
    gate = torch.nan if layer.gate is None else layer.gate
    if isinstance(layer, PlaceLayerRecording):
        arrays = {"use": layer.use, "rate": layer.rate, "keep": layer.keep, "width": layer.width}
    else:
        gates = dict(zip("ifo", layer.gates.unbind(-1), strict=True))
        arrays = {"use": layer.use, **gates, "sigma": layer.spread}
    means = {k: torch.nan if v is None else float(v.double().nanmean()) for k, v in arrays.items()}
    return {"gate": gate, **means}


def _all_arrays(layer: AnyLayer) -> dict[str, Tensor]:
    """Every array of a layer by name, those of a history too."""
    inputs = {} if layer.history is None else layer.history.arrays()
    return layer.arrays() | {HISTORY + name: array for name, array in inputs.items()}


def _description(stored: Tensor, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        described = json.loads(bytes(stored.tolist()))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected a description in JSON, got a damaged one ({error}); save it again"
        ) from error
    found = described.get("format") if isinstance(described, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{path}: expected format {FORMAT}, got {found!r}; it was written by another version "
            "of tensor-memory: load it with that one, or save it again"
        )
    return described


def _layer(
    number: int,
    tensors: dict[str, Tensor],
    name: str,
    config: dict[str, Any],
    gate: float | None,
    memory: str = "chunks",
) -> AnyLayer:
    """Take one layer's arrays out of `tensors`; wrong shapes and types are a `ValueError`."""
    if not isinstance(name, str):
        raise ValueError(f"a layer is named {name!r:.80}")
    if gate is not None and not isinstance(gate, int | float):
        raise ValueError(f"gate of {name} is {gate!r:.80}")
    prefix = f"layers.{number}."
    made = (PlaceConfig if memory == "places" else MemoryConfig).from_dict(config)
    if isinstance(made, PlaceConfig):
        shapes, time, others = place_shapes(made), "token", {}
    else:
        shapes, time = float_shapes(made), "chunk"
        others = {"span": ((2,), torch.int64), "written": ((), torch.bool)}
    T, B = (tensors[prefix + size].numel() for size in (time, "seen"))
    expected: dict[str, tuple[tuple[int, ...], torch.dtype | None]] = {
        array: ((T, B, *shape), None) for array, shape in shapes.items()
    }
    others["present"] = ((), torch.bool)
    expected |= {array: ((T, B, *shape), dtype) for array, (shape, dtype) in others.items()}
    expected |= {time: ((T,), torch.int64), "seen": ((B,), torch.int64)}
    arrays = {array: tensors.pop(prefix + array) for array in expected}
    for array, (shape, dtype) in expected.items():
        found = arrays[array]
        if found.shape != shape:
            raise ValueError(f"{array} of {name} has shape {tuple(found.shape)}, not {shape}")
        if not (found.is_floating_point() if dtype is None else found.dtype == dtype):
            raise ValueError(f"{array} of {name} holds {found.dtype}")
    found = {key for key in tensors if key.startswith(prefix + HISTORY)}
    inputs: dict[str, Any] = {key.removeprefix(prefix + HISTORY): tensors.pop(key) for key in found}
    if isinstance(made, MemoryConfig):
        history = ChunkHistory(**{"spread": None, "taps": None, **inputs}) if inputs else None
        layer = LayerRecording(name, made, gate, **{"spread": None, **arrays}, history=history)
    else:
        history = PlaceHistory(**{"read_at": None, "width": None, **inputs}) if inputs else None
        layer = PlaceLayerRecording(name, made, gate, **{"width": None, **arrays}, history=history)
    if history is not None:
        history.check(made)  # type: ignore[arg-type]
        if len(history.first) != B:
            raise ValueError(f"its history has {len(history.first)} rows, not {B}")
    return layer
