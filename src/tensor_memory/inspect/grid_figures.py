"""Pictures of what a grid holds: planes cut through it or thrown onto a wall, side by side.

Grid axes are named as coordinates are: the last is x, then y, z and w.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tensor_memory.inspect.layer_recording import GridRecording, require_index
from tensor_memory.inspect.theme import VOLUME, WIDTH, ink

NAMES = "wzyx"
TILES = 6
"""Moments of the stream shown, at most."""


def draw_slices(axis: Any, layer: GridRecording, *, row: int = 0, tiles: int = TILES) -> None:
    """Orthogonal slices of ‖h‖ over the stream, through the voxel that held most of it.

    One column per moment, one line per pair of grid axes. `axis` is a plain 2-D axis.
    """
    chunks = moments(layer, row, tiles)
    if not chunks:
        nothing(axis)
        return
    volumes = layer.hidden_norm[chunks, row].float()  # (T, *grid)
    grid = layer.config.grid
    at = [int(index) for index in torch.unravel_index(volumes.sum(0).argmax(), grid)]
    planes = [_plane(volumes, pair, at) for pair in _pairs(len(grid))]
    norm = layer.norm_name
    place = ", ".join(f"{n} {i}" for n, i in zip(_names(grid)[::-1], at[::-1], strict=True))
    _draw_tiles(axis, planes, layer, row, chunks, f"slices of {norm} through voxel {place}", norm)


def draw_projection(axis: Any, layer: GridRecording, *, row: int = 0, tiles: int = TILES) -> None:
    """Maximum-intensity projections of ‖h‖ over the stream, along each grid axis."""
    chunks = moments(layer, row, tiles)
    if not chunks:
        nothing(axis)
        return
    volumes = layer.hidden_norm[chunks, row].float()
    planes = [_plane(volumes, pair, None) for pair in _pairs(len(layer.config.grid))]
    norm = layer.norm_name
    _draw_tiles(axis, planes, layer, row, chunks, f"largest {norm} along the line of sight", norm)


def draw_mask(axis: Any, layer: GridRecording, *, chunk: int = 0, row: int = 0) -> None:
    """The mask of one chunk's writes: slices through the peak of each write head."""
    if not len(layer):
        nothing(axis)
        return
    masks = layer.mask(chunk, row).nan_to_num()  # (M, *grid)
    grid = layer.config.grid
    pairs = _pairs(len(grid))
    lines = []
    for mask in masks:
        peak = [int(i) for i in torch.unravel_index(mask.flatten().argmax(), grid)]
        lines.append([_plane(mask[None], pair, peak)[0] for pair in pairs])
    one = layer[chunk, row]
    wide = "" if one.spread is None else f", σ = {_listed(one.spread)}"
    what = f"{_tokens(one.start, one.stop)}{wide}" if one.written else "nothing was written"
    labels = [f"write {m}" for m in range(len(masks))] if len(masks) > 1 else [""]
    _tile(axis, lines, labels, [_label(grid, pair) for pair in pairs], "mask", top=1.0)
    axis.set_title(f"mask of {layer.unit} {one.chunk}, {what}", loc="left", pad=16)


def height(grid: tuple[int, ...], *, columns: int = 0, lines: int = 0) -> float:
    """Inches for tiles at a paper's width: `columns` moments of each pair of axes, or `lines`."""
    pairs = _pairs(len(grid))
    high = [1 if len(grid) == 1 else grid[down] for down, _ in pairs]
    cells = sum(high) if columns else lines * max(high)
    cell = (WIDTH - 1.2) / ((columns or len(pairs)) * max(grid[across] for _, across in pairs))
    return min(0.7 + max(cells * cell, 0.7), 0.8 * WIDTH)


def moments(layer: GridRecording, row: int, count: int) -> list[int]:
    """At most `count` chunks of a row, evenly spaced from its first to its last."""
    if not layer.rows:
        return []
    require_index(row, layer.rows, "row")
    present = layer.present[:, row].nonzero().flatten()
    if len(present) > count:
        present = present[torch.linspace(0, len(present) - 1, count).round().long()]
    return present.tolist()


def _draw_tiles(
    axis: Any,
    planes: list[Tensor],
    layer: GridRecording,
    row: int,
    chunks: list[int],
    title: str,
    unit: str,
) -> None:
    if not any(bool(plane.isfinite().any()) for plane in planes):
        nothing(axis, f"no value of {unit} is finite")
        return
    grid = layer.config.grid
    spans = layer.span[chunks, row]
    heads = [f"after {int(stop)}" for stop in spans[:, 1]]
    lines = [list(plane) for plane in planes]
    _tile(axis, lines, [_label(grid, pair) for pair in _pairs(len(grid))], heads, unit)
    axis.set_title(f"{title}, after so many tokens", loc="left", pad=16)


def nothing(axis: Any, why: str = "nothing recorded") -> None:
    """Say that there is nothing to draw."""
    axis.text(0.5, 0.5, why, ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()


def _tile(
    axis: Any,
    lines: list[list[Tensor]],
    labels: list[str],
    heads: list[str],
    unit: str,
    top: float | None = None,
) -> None:
    """Lines of planes (high, wide) as tiles with gaps between, in one image."""
    sizes = [plane.shape for line in lines for plane in line]
    # Small grids are repeated, so that the gap of one cell stays thin beside them.
    gap, times = 1, max(1, round(16 / max(max(size) for size in sizes)))
    wide = times * max(size[1] for size in sizes)
    rows, middles, done = [], [], 0
    for line in lines:
        high = times * max(plane.shape[0] for plane in line)
        row = torch.full((high + gap, len(line) * (wide + gap) - gap), torch.nan)
        for column, plane in enumerate(line):
            start = column * (wide + gap)
            big = plane.repeat_interleave(times, 0).repeat_interleave(times, 1)
            row[: big.shape[0], start : start + big.shape[1]] = big
        rows.append(row)
        middles.append(done + high / 2 - 0.5)
        done += high + gap
    columns = len(lines[0])
    image = torch.cat(rows)[:-gap]
    known = image[image.isfinite()]
    most = top or max(float(known.max()), 1e-12)
    shown = axis.imshow(image.numpy(), cmap=VOLUME, vmin=0, vmax=most, interpolation="nearest")
    axis.set_anchor("W")
    axis.set_yticks(middles, labels)
    axis.set_xticks([c * (wide + gap) + wide / 2 - 0.5 for c in range(columns)], heads)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)
    bar = axis.figure.colorbar(shown, ax=axis, fraction=0.03, pad=0.02)
    bar.set_label(unit, color=ink(axis))
    bar.outline.set_visible(False)


def _pairs(axes: int) -> list[tuple[int, int]]:
    """Pairs of grid axes (down, across) to show, the last three at most: y-x first."""
    last = range(max(0, axes - 3), axes)
    return [(axes - 1, axes - 1)] if axes == 1 else list(itertools.combinations(last, 2))[::-1]


def _plane(volumes: Tensor, pair: tuple[int, int], at: list[int] | None) -> Tensor:
    """(T, *grid) -> (T, high, wide): cut at the voxel `at`, or the maximum along the rest."""
    axes = volumes.ndim - 1
    if axes == 1:
        return volumes[:, None]
    for axis in reversed(range(axes)):
        if axis not in pair:
            volumes = volumes.select(axis + 1, at[axis]) if at else volumes.amax(axis + 1)
    return volumes


def _names(grid: tuple[int, ...]) -> str:
    return NAMES[len(NAMES) - len(grid) :]


def _label(grid: tuple[int, ...], pair: tuple[int, int]) -> str:
    names = _names(grid)
    return names[0] if len(grid) == 1 else f"{names[pair[0]]}, {names[pair[1]]}"


def _tokens(start: int, stop: int) -> str:
    return f"token {start}" if stop - start == 1 else f"tokens {start} to {stop - 1}"


def _listed(values: Tensor) -> str:
    return ", ".join(f"{float(value):.2f}" for value in values)
