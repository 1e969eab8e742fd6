"""From records to a figure: lines of means over seeds with their 95 % intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.records.table import Frame, interval
from tensor_memory_lab.records.text import is_percent, order_key, short_name, value_text

COLOURS = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#888888",
)  # fmt: skip
"""Those of Okabe and Ito, which colour-blind readers tell apart."""

MEMORY, MEMORIES = "#0072B2", ("tensor", "spatial")
"""The memory's own colour in every figure, and how the names of its methods begin."""

DASHES = ("-", "--", ":", "-.")
STYLE = {
    "figure.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "svg.hashsalt": "tensor-memory",  # the same figure is the same file
}
ACROSS = 3
"""Panels beside each other."""
MANY = 8
"""A panel with more lines shows no intervals: they would cover each other."""


def figure(
    runs: Frame,
    path: str | Path,
    *,
    y: str,
    x: str = "step",
    by: str = "label",
    panels: Sequence[str] = (),
    x_title: str = "",
    y_title: str = "",
) -> Path:
    """Draw a measure against steps, or against any column, a line for each value of `by`.

    Args:
        runs: records as `read` gives them.
        path: the file; its ending says which kind (png, svg, pdf).
        y: a column of the data frame, such as "test.accuracy"; against steps one of the curve's,
            such as "valid.accuracy".
        x: "step" for learning curves, or a column such as "task.writes".
        by: the column that tells lines apart.
        panels: columns that tell panels apart.
        x_title: what stands below; the name of `x` unless given.
        y_title: what stands beside; the name of `y` unless given.
    """
    keys = [tuple(value_text(run[name]) for name in panels) for _, run in runs.iterrows()]
    order = sorted(dict.fromkeys(keys), key=lambda key: [order_key(part) for part in key])
    looks = _looks(runs, by)
    lines = list(looks)
    across = min(len(order), ACROSS)
    down = -(-len(order) // across)
    beside = 0.7 + 0.066 * max(len(value_text(line)) for line in lines)
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        drawn = Figure(
            figsize=(beside + 3.2 * across, max(0.6 + 2.6 * down, 0.4 + 0.19 * len(lines))),
            layout="constrained",
        )
        axes = drawn.subplots(down, across, squeeze=False, sharey=True).flatten()
        for axis, key in zip(axes, order, strict=False):
            inside = runs[[one == key for one in keys]]
            for line in lines:
                some = inside[inside[by] == line]
                if len(some):
                    bands = len(set(inside[by])) <= MANY
                    _draw(axis, _points(some, x, y), value_text(line), looks[line], bands, x)
            titles = [
                f"{short_name(name)} {value}" if value[:1].isdigit() else value
                for name, value in zip(panels, key, strict=True)
            ]
            axis.set_title(", ".join(titles), fontsize=9)
            axis.set_xlabel(x_title or short_name(x))
        for unused in axes[len(order) :]:
            unused.set_visible(False)
        axes[0].set_ylabel(y_title or (f"{y}, %" if is_percent(y) else y))
        handles: dict[str, Any] = {}
        for axis in axes:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        names = [name for name in map(value_text, lines) if name in handles]
        drawn.legend(
            [handles[name] for name in names], names, loc="outside right upper", frameon=False,
            fontsize=8,
        )  # fmt: skip
        path = Path(path)
        kind = path.suffix[1:] or "png"
        metadata = {"Date": None} if kind == "svg" else None
        write_whole(path, lambda at: drawn.savefig(at, format=kind, dpi=150, metadata=metadata))
    return path


def _points(runs: Frame, x: str, y: str) -> Frame:
    """Mean, lower and upper end at every place on the axis that all seeds have come to."""
    scale = 100.0 if is_percent(y) else 1.0
    found: dict[float, list[float]] = {}
    for _, run in runs.iterrows():
        if x == "step":
            split, _, measure = y.rpartition(".")
            for entry in run["curve"]:
                measures = entry if not split else entry.get(split) or {}
                if measures.get(measure) is not None:
                    found.setdefault(entry["step"], []).append(scale * measures[measure])
        elif not pd.isna(run[y]):
            found.setdefault(float(run[x]), []).append(scale * float(run[y]))
    most = max((len(values) for values in found.values()), default=0)
    points = {at: interval(v) for at, v in found.items() if x != "step" or len(v) == most}
    rows = [(at, m, m - (half or 0.0), m + (half or 0.0)) for at, (m, half) in points.items()]
    ends = pd.DataFrame(rows, columns=["x", "mean", "low", "high"]).sort_values("x")
    if is_percent(y):  # an interval of a share may leave what a share can be
        ends[["low", "high"]] = ends[["low", "high"]].clip(0, 100)
    return ends


def _draw(axis: Any, points: Frame, label: str, look: tuple[str, str], bands: bool, x: str) -> None:
    colour, dash = look
    marker = None if x == "step" else "o"
    axis.plot(
        points["x"], points["mean"], dash, color=colour, label=label, linewidth=1.5, marker=marker,
        markersize=4,
    )  # fmt: skip
    if not bands:
        return
    if x == "step":
        axis.fill_between(
            points["x"], points["low"], points["high"], color=colour, alpha=0.15, linewidth=0
        )
    else:  # nothing ran between the points
        axis.vlines(
            points["x"], points["low"], points["high"], color=colour, alpha=0.4, linewidth=4
        )
    if x != "step" and points["x"].min() > 0 and points["x"].max() >= 8 * points["x"].min():
        axis.set_xscale("log", base=2)
        axis.set_xticks(points["x"], [f"{place:g}" for place in points["x"]])
        axis.minorticks_off()


def _looks(runs: Frame, by: str) -> dict[Any, tuple[str, str]]:
    """Colour and dash of every line: memories have one colour, as long as dashes tell them apart.

    The others, and further memories, take the other colours in their order.
    """
    lines = sorted(dict.fromkeys(runs[by]), key=lambda line: order_key(value_text(line)))
    memories = [line for line in lines if str(line).startswith(MEMORIES)][: len(DASHES)]
    found = {line: (MEMORY, DASHES[place]) for place, line in enumerate(memories)}
    colours = [colour for colour in COLOURS if colour != MEMORY]
    for place, line in enumerate(line for line in lines if line not in found):
        dash = DASHES[place // len(colours) % len(DASHES)]
        found[line] = colours[place % len(colours)], dash
    return {line: found[line] for line in lines}
