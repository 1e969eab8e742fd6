"""Every figure of a recording, written as files at the width of a paper."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensor_memory.files import write_whole
from tensor_memory.inspect import figures, grid_figures
from tensor_memory.inspect.figures import AnyLayer
from tensor_memory.inspect.layer_recording import GridRecording
from tensor_memory.inspect.theme import WIDTH, theme

THEMES = ("light", "dark")
DPI = 160


class FigureKind(NamedTuple):
    """How a figure is drawn of one layer, or of all layers together."""

    draw: Callable[..., None]
    height: Callable[[Any], float] = lambda _: 1.9
    """Inches, from what is drawn."""
    all_layers: bool = False
    solid: bool = False
    """Whether it needs a 3-D axis."""


def _moments_height(layer: GridRecording) -> float:
    return grid_figures.height(layer.config.grid, columns=grid_figures.TILES)


def _mask_height(layer: GridRecording) -> float:
    return grid_figures.height(layer.config.grid, lines=layer.write_at.shape[2])


KINDS = {
    "slices": FigureKind(figures.draw_slices, _moments_height),
    "projection": FigureKind(figures.draw_projection, _moments_height),
    "mask": FigureKind(figures.draw_mask, _mask_height),
    "trajectories": FigureKind(figures.draw_trajectories, lambda _: 4.0, solid=True),
    "gates": FigureKind(figures.draw_gates),
    "occupancy": FigureKind(figures.draw_occupancy),
    "saturation": FigureKind(figures.draw_saturation),
    "use": FigureKind(figures.draw_use, lambda layers: 0.8 + 0.4 * len(layers), all_layers=True),
    "state-norm": FigureKind(figures.draw_state_norm, all_layers=True),
}


def write_figures(
    recorded: Sequence[AnyLayer],
    folder: str | os.PathLike[str],
    *,
    row: int,
    layers: Sequence[int | str] | None,
    chunks: slice,
    themes: Sequence[str],
    kinds: Sequence[str] | None,
) -> list[Path]:
    """Draw layers into `folder`; `Recording.save_figures` explains the options."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "figures need matplotlib; install it with: pip install 'tensor-memory[inspect]'"
        )
    rows = recorded[0].rows if recorded else 0
    if rows and not -rows <= row < rows:
        raise ValueError(f"row: expected one of 0 to {rows - 1}, got {row}")
    names = [layer.name for layer in recorded]
    chosen = range(len(names)) if layers is None else [_number(names, layer) for layer in layers]
    shown = [layer[chunks] for layer in recorded]
    kept = max((len(recorded[n]) for n in chosen), default=0)
    if kept and not any(len(shown[n]) for n in chosen):
        asked = ":".join("" if end is None else str(end) for end in (chunks.start, chunks.stop))
        raise ValueError(
            f"chunks: expected START:STOP with some of the {kept} kept, 0:{kept}, got {asked}; "
            "leave it out for all"
        )
    grids = {}  # a layer's number, and a head's where it has several grids
    for n in chosen:
        views = shown[n].views()
        names = [f"{n}.{head}" for head in range(len(views))] if len(views) > 1 else [str(n)]
        grids |= dict(zip(names, views, strict=True))
    for name, given, known in (("themes", themes, THEMES), ("kinds", kinds or (), KINDS)):
        if unknown := [one for one in given if one not in known]:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {unknown[0]!r}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: expected a folder for the figures, got a file; name a folder, which is "
            "made where it does not exist"
        )
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for theme_name in themes:
        with theme(dark=theme_name == "dark"):
            for kind in KINDS if kinds is None else kinds:
                if KINDS[kind].all_layers:
                    drawn: dict[str, Any] = {f"{kind}-{theme_name}.png": shown} if shown else {}
                else:
                    drawn = {f"{kind}-{n}-{theme_name}.png": grid for n, grid in grids.items()}
                for file, what in drawn.items():
                    options = _options(kind, what, row)
                    if options is not None:
                        _write(folder / file, KINDS[kind], what, options)
                        written.append(folder / file)
    return written


def _options(kind: str, layer: Any, row: int) -> dict[str, int] | None:
    """What the drawing function is told; None where there is nothing to draw."""
    if kind in ("saturation", "use"):  # of all rows
        return {}
    if kind != "mask":
        return {"row": row}
    written = layer.written[:, row].nonzero().flatten().tolist() if layer.rows else []
    return {"row": row, "chunk": written[0]} if written else None


def _write(path: Path, kind: FigureKind, drawn: Any, options: dict[str, int]) -> None:
    from matplotlib.figure import Figure  # draws without any display

    figure = Figure(figsize=(WIDTH, kind.height(drawn)), layout="constrained")
    kind.draw(figure.add_subplot(projection="3d" if kind.solid else None), drawn, **options)
    metadata = {"Software": None}  # the file then depends on what is drawn alone
    write_whole(path, lambda at: figure.savefig(at, format="png", dpi=DPI, metadata=metadata))


def _number(names: Sequence[str], layer: int | str) -> int:
    if isinstance(layer, str) and layer in names:
        return names.index(layer)
    if isinstance(layer, int) and 0 <= layer < len(names):
        return layer
    raise ValueError(
        f"layer: expected a number below {len(names)} or one of {', '.join(names)}, got {layer!r}"
    )
