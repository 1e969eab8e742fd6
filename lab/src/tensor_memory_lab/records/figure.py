"""From records to a figure: lines of means over seeds with their 95 % intervals.

One style: one width, names at the ends of lines, shares from 0 to 100 %, on white or on dark.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.records.table import Frame, check_alike, check_columns, interval
from tensor_memory_lab.records.text import bytes_text, is_percent, order_key, short_name, value_text

COLOURS = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#888888",
)  # fmt: skip
"""Those of Okabe and Ito, which colour-blind readers tell apart."""

MEMORY, MEMORIES = "#0072B2", ("tensor", "spatial", "place")
"""The memory's own colour in every figure, and how the names of its methods begin."""

PEERS = {"gla": "#CC79A7", "deltanet": "#D55E00", "gated-deltanet": "#009E73"}
"""The colours of the peers that stand in several figures."""

ON_DARK = {"#000000": "#F2F2F2", MEMORY: "#4C9BFF", "#56B4E9": "#A6E1FF", "#888888": "#9A9A9A"}
"""What colours become that would be lost on a dark page."""

Theme = Literal["light", "dark"]
INK = {"light": "#1B1F24", "dark": "#E3E6EA"}
PAPER = {"light": "#FFFFFF", "dark": "#15181D"}
GRID = {"light": "#E2E4E8", "dark": "#30353D"}

DASHES = ("-", "--", ":", "-.")
WIDTH, HEIGHT, TALL = 7.2, 2.7, 2.1
"""Inches: of every figure; of a row of panels, where there is one row and where there are more."""
ACROSS = 2
"""Panels beside each other."""
MANY = 8
"""A panel with more lines shows no intervals: they would cover each other."""
THICK, THIN = 2.8, 1.3
"""Widths of the first and the last line of a panel: lines that coincide are all to be seen."""
NAME = 7.5
"""Points, size of the names at the ends of lines."""
LETTERS = 34
"""Letters in a row of such a name; half as many where two panels are beside each other."""


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
    names: Mapping[str, str] | None = None,
    even: bool = False,
    theme: Theme = "light",
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
        y_title: what stands beside; the last part of `y` unless given.
        names: what lines are called instead of the values of `by`.
        even: lines of one width, where none covers another.
        theme: "light", on white, or "dark".
    """
    check_columns(runs, [by, *panels, *([] if x == "step" else [x, y])])
    keys = [tuple(value_text(run[name]) for name in panels) for _, run in runs.iterrows()]
    order = sorted(dict.fromkeys(keys), key=lambda key: [order_key(part) for part in key])
    looks = _looks(runs, by, theme)
    across = min(len(order), ACROSS)
    down = -(-len(order) // across)
    with matplotlib.rc_context(style(theme)):
        size = (WIDTH, 0.4 + (HEIGHT if down == 1 else TALL) * down)
        drawn = Figure(figsize=size, layout="constrained")
        axes = drawn.subplots(down, across, squeeze=False, sharey=True).flatten()
        for axis, key in zip(axes, order, strict=False):
            inside = runs[[one == key for one in keys]]
            lines = [line for line in looks if (inside[by] == line).any()]
            ends, places = {}, []
            for place, line in enumerate(lines):
                where = ", ".join([*key, value_text(line)])
                points = _points(inside[inside[by] == line], x, y, where)
                above = 0.5 if even else (len(lines) - 1 - place) / max(1, len(lines) - 1)
                width = THIN + (THICK - THIN) * above
                _draw(axis, points, looks[line], width, len(lines) <= MANY, x)
                places += list(points["x"])
                if len(points):
                    ends[line] = float(points["mean"].iloc[-1])
            _scale(axis, places, x)
            if is_percent(y):  # the same for all, so that noise looks as small as it is
                axis.set_ylim(-2, 102)
            known = names or {}
            named = [
                (known.get(value_text(line), value_text(line)), looks[line][0], end)
                for line, end in ends.items()
            ]
            name_lines(axis, named, LETTERS // across, size[1] / down)
            titles = [
                f"{short_name(name)} {value}" if value[:1].isdigit() else value
                for name, value in zip(panels, key, strict=True)
            ]
            axis.set_title(", ".join(titles), fontsize=9, loc="left")
        for unused in axes[len(order) :]:
            unused.set_visible(False)
        drawn.supxlabel(x_title or short_name(x), fontsize=9)
        measure = short_name(y)
        drawn.supylabel(y_title or (f"{measure}, %" if is_percent(y) else measure), fontsize=9)
        path = Path(path)
        kind = path.suffix[1:] or "png"
        metadata = {"Date": None} if kind == "svg" else None
        write_whole(path, lambda at: drawn.savefig(at, format=kind, dpi=150, metadata=metadata))
    return path


def style(theme: Theme) -> Any:
    """Settings of matplotlib for all figures."""
    ink, paper = INK[theme], PAPER[theme]
    coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return {
        **dict.fromkeys(coloured, ink),
        **dict.fromkeys(papers, paper),
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID[theme],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "svg.hashsalt": "tensor-memory",  # the same figure is the same file
    }


def name_lines(
    axis: Any, names: Sequence[tuple[str, str, float]], letters: int, inches: float
) -> None:
    """Write (name, colour, end) right of an axis, at the line's end or next to it where it is full.

    Names longer than `letters` take several rows. `inches` is the height of the panel.
    """
    scale = axis.yaxis.get_transform().transform  # of logarithms, perhaps
    low, high = (float(scale(edge)) for edge in axis.get_ylim())
    rows = [
        ((float(scale(end)) - low) / (high - low), name, colour, number, text)
        for name, colour, end in names
        for number, text in enumerate(textwrap.wrap(name, letters)[::-1])
    ]
    rows.sort()
    apart = 1.3 * NAME / 72 / (inches - 0.6)  # in heights of the axis
    for at, row in zip(spread([row[0] for row in rows], apart), rows, strict=True):
        options = {"color": row[2], "fontsize": NAME, "va": "center", "transform": axis.transAxes}
        axis.text(1.02, at, row[-1], **options)


def spread(wanted: Sequence[float], apart: float) -> list[float]:
    """Places in rising order, at least `apart` from each other, near those wanted.

    Those that are too near form a group around their mean. None is beyond 0 or 1, unless there are
    too many.

    >>> [round(place, 2) for place in spread([0.1, 0.5, 0.5, 1.0, 1.0], 0.1)]
    [0.1, 0.45, 0.55, 0.9, 1.0]
    """
    groups: list[list[float]] = []

    def first(group: Sequence[float]) -> float:
        span = apart * (len(group) - 1)
        return max(0.0, min(sum(group) / len(group) - span / 2, 1 - span))

    for place in sorted(wanted):
        groups.append([place])
        while len(groups) > 1:
            before, last = groups[-2:]
            if first(last) - first(before) >= apart * len(before):
                break
            groups[-2:] = [before + last]
    return [first(group) + n * apart for group in groups for n in range(len(group))]


def _points(runs: Frame, x: str, y: str, where: str) -> Frame:
    """Mean, lower and upper end at every place on the axis that all seeds have come to.

    One that diverged has come to none: a mean of the others would hide it.
    """
    if x == "step":
        check_alike(where, runs)
    else:
        runs = runs[runs[y].notna().groupby(runs[x]).transform("all")]
        for at, some in runs.groupby(x):
            check_alike(f"{where}, {x} {value_text(at)}", some)
    scale = 100.0 if is_percent(y) else 1.0
    found: dict[float, list[float]] = {}
    known = x != "step" or not runs["curve"].astype(bool).any()
    for _, run in runs.iterrows():
        if x == "step":
            split, _, measure = y.rpartition(".")
            for entry in run["curve"]:
                measures = entry if not split else entry.get(split) or {}
                known |= measure in measures
                if measures.get(measure) is not None:
                    found.setdefault(entry["step"], []).append(scale * measures[measure])
        else:
            found.setdefault(_number(run, x), []).append(scale * _number(run, y))
    if not known:
        raise ValueError(
            f"{where}: expected a measure of the learning curves, such as valid.loss, got {y}"
        )
    points = {at: interval(v) for at, v in found.items() if x != "step" or len(v) == len(runs)}
    rows = [(at, m, m - (half or 0.0), m + (half or 0.0)) for at, (m, half) in points.items()]
    ends = pd.DataFrame(rows, columns=["x", "mean", "low", "high"], dtype=float).sort_values("x")
    if is_percent(y):  # an interval of a share may leave what a share can be
        ends[["low", "high"]] = ends[["low", "high"]].clip(0, 100)
    return ends


def _number(run: Any, name: str) -> float:
    if isinstance(run[name], str | bool | tuple):
        raise ValueError(f"{name}: expected a column of numbers for an axis, got {run[name]!r}")
    return float(run[name])


def _draw(
    axis: Any, points: Frame, look: tuple[str, str], width: float, bands: bool, x: str
) -> None:
    colour, dash = look
    marker = None if x == "step" else "o"
    axis.plot(
        points["x"], points["mean"], dash, color=colour, linewidth=width, marker=marker,
        markersize=width + 2.5,
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


def _scale(axis: Any, places: Sequence[float], x: str) -> None:
    """A logarithmic axis for bytes, and for whatever else grows eightfold or more."""
    low, high = min(places, default=0.0), max(places, default=0.0)
    if x == "step" or low <= 0 or not (x.endswith("bytes") or high >= 8 * low):
        return
    axis.set_xscale("log", base=2)
    if x.endswith("bytes"):  # every method keeps another number of them
        ticks = [2.0**power for power in range(int(math.log2(low)), int(math.log2(high)) + 1)]
        axis.set_xticks(ticks, [bytes_text(tick).replace(".0 ", " ") for tick in ticks])
    else:
        ticks = sorted(set(places))
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _looks(runs: Frame, by: str, theme: Theme) -> dict[Any, tuple[str, str]]:
    """Colour and dash of every line: memories have one colour, as long as dashes tell them apart.

    Known peers have their own. The others, and further memories, take what is left in its order.
    """
    lines = sorted(dict.fromkeys(runs[by]), key=lambda line: order_key(value_text(line)))
    memories = [line for line in lines if str(line).startswith(MEMORIES)][: len(DASHES)]
    found = {line: (MEMORY, DASHES[place]) for place, line in enumerate(memories)}
    found |= {line: (PEERS[line], "-") for line in lines if line in PEERS}
    taken = {MEMORY, *(colour for colour, _ in found.values())}
    colours = [colour for colour in COLOURS if colour not in taken]
    for place, line in enumerate(line for line in lines if line not in found):
        dash = DASHES[place // len(colours) % len(DASHES)]
        found[line] = colours[place % len(colours)], dash
    seen = ON_DARK if theme == "dark" else {}
    return {line: (seen.get(found[line][0], found[line][0]), found[line][1]) for line in lines}
