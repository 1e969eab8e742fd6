"""What the memories of a model did while `record` was watching: to look at, save and draw.

Letters: B rows, F frames, h and w their height and width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensor_memory.inspect.annotations import checked_texts, thumbnails
from tensor_memory.inspect.layer_recording import LayerRecording, require_index
from tensor_memory.wording import counted

if TYPE_CHECKING:
    import numpy


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
        require_index(chunk, len(found), "chunk")
        require_index(row, found.rows, "row")
        return found.span[chunk, row].tolist()

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
        chunks = counted(kept, "chunk")
        return f"Recording({self._size()}, {chunks} kept)"

    def _size(self) -> str:
        return f"{counted(len(self.layers), 'layer')}, {counted(self.rows, 'row')}"

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
        left = f", {counted(self.rows_left_out, 'more row')} left out" if self.rows_left_out else ""
        return (
            f"<p>Recording of {self._size()}{left}{kept}, "
            f"{self.nbytes / 2**20:.1f} MiB</p>"
            f"<table><thead><tr>{header}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )


def _mean(values: Tensor) -> list[float]:
    return values.double().nanmean(0).tolist()
