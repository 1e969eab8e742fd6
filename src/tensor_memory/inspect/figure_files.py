"""Every figure of a recording, written as files at the width of a paper."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensor_memory.files import write_whole
from tensor_memory.inspect import figures, grid_figures
from tensor_memory.inspect.layer_recording import LayerRecording
from tensor_memory.inspect.recording import Recording
from tensor_memory.inspect.theme import WIDTH, theme

THEMES = ("light", "dark")
DPI = 160


class Picture(NamedTuple):
    """How one figure is drawn, and how high it is, in inches, for a layer or for all of them."""

    draw: Callable[..., None]
    height: Callable[[LayerRecording], float]
    solid: bool = False


def _moments_height(layer: LayerRecording) -> float:
    return grid_figures.height(layer.config.grid, columns=grid_figures.TILES)


def _mask_height(layer: LayerRecording) -> float:
    lines = layer.config.write_heads
    return grid_figures.height(layer.config.grid, lines=lines)


OF_A_LAYER = {
    "slices": Picture(grid_figures.draw_slices, _moments_height),
    "projection": Picture(grid_figures.draw_projection, _moments_height),
    "mask": Picture(grid_figures.draw_mask, _mask_height),
    "trajectories": Picture(figures.draw_trajectories, lambda _: 4.0, solid=True),
    "gates": Picture(figures.draw_gates, lambda _: 1.9),
    "occupancy": Picture(figures.draw_occupancy, lambda _: 1.9),
    "saturation": Picture(figures.draw_saturation, lambda _: 1.9),
}

OF_ALL = {
    "use": Picture(figures.draw_use, lambda _: 0),
    "state-norm": Picture(figures.draw_state_norm, lambda _: 1.9),
}

KINDS = (*OF_A_LAYER, *OF_ALL)


def write_figures(
    recording: Recording,
    folder: str | os.PathLike[str],
    *,
    row: int = 0,
    layers: Sequence[int | str] | None = None,
    chunks: slice = slice(None),
    themes: Sequence[str] = ("light",),
    kinds: Sequence[str] | None = None,
) -> list[Path]:
    """Draw everything into `folder` as PNG: `NAME-LAYER-THEME.png`, or `NAME-THEME.png` of all.

    Args:
        recording: what to draw.
        folder: made where it does not exist.
        row: the row that pictures of one row show.
        layers: numbers or names of the layers to draw one by one; all by default.
        chunks: the kept chunks to show, such as `slice(0, 12)`.
        themes: "light", "dark" or both.
        kinds: names of the figures to draw, such as "projection"; all by default.

    Returns:
        The files written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "figures need matplotlib; install it with: pip install 'tensor-memory[experiments]'"
        )
    if recording.rows and not -recording.rows <= row < recording.rows:
        raise ValueError(f"row: expected one of 0 to {recording.rows - 1}, got {row}")
    chosen = range(len(recording)) if layers is None else [_number(recording, n) for n in layers]
    shown = Recording([layer[chunks] for layer in recording.layers], every=recording.every)
    wanted = KINDS if kinds is None else tuple(kinds)
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise ValueError(f"kinds: expected some of {', '.join(KINDS)}, got {unknown[0]!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in themes:
        with theme(dark=name == "dark"):
            for number in chosen:
                layer = shown.layers[number]
                for kind, picture in OF_A_LAYER.items():
                    if kind not in wanted:
                        continue
                    options = {} if kind == "saturation" else {"row": row}
                    if kind == "mask":
                        chunk = _first_written(layer, row)
                        if chunk is None:
                            continue
                        options["chunk"] = chunk
                    at = folder / f"{kind}-{number}-{name}.png"
                    written.append(_write(at, picture, layer, layer, options))
            for kind, picture in OF_ALL.items():
                if not shown.layers or kind not in wanted:
                    continue
                options = {} if kind == "use" else {"row": row}
                at = folder / f"{kind}-{name}.png"
                written.append(_write(at, picture, shown.layers[0], shown, options))
    return written


def _write(
    path: Path, picture: Picture, layer: LayerRecording, drawn: Any, options: dict[str, Any]
) -> Path:
    from matplotlib.figure import Figure  # draws without any display

    height = picture.height(layer) or 0.8 + 0.4 * len(drawn)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axis = figure.add_subplot(projection="3d" if picture.solid else None)
    picture.draw(axis, drawn, **options)
    metadata = {"Software": None}  # the file then depends on what is drawn alone
    write_whole(path, lambda at: figure.savefig(at, format="png", dpi=DPI, metadata=metadata))
    return path


def _first_written(layer: LayerRecording, row: int) -> int | None:
    written = layer.written[:, row].nonzero().flatten().tolist() if layer.rows else []
    return written[0] if written else None


def _number(recording: Recording, layer: int | str) -> int:
    names = recording.names
    if isinstance(layer, str) and layer in names:
        return names.index(layer)
    if isinstance(layer, int) and 0 <= layer < len(names):
        return layer
    raise ValueError(
        f"layer: expected a number below {len(names)} or one of {', '.join(names)}, got {layer!r}"
    )
