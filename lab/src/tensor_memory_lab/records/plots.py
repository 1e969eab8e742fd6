"""Learning curves and sweeps of comparisons, as PNG and SVG.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; a method has the same
colour, dash and marker in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensor_memory_lab.files import write_whole
from tensor_memory_lab.records.comparison import Comparison, Row, short_names, show
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.wording import PERCENT, bound_name

BLACK, SKY, ORANGE, GREEN = "#000000", "#56B4E9", "#E69F00", "#009E73"
PURPLE, VERMILLION, BLUE, GREY = "#CC79A7", "#D55E00", "#0072B2", "#888888"

LOOKS = {
    "base": (BLACK, "-", "o"),
    "base-sln": (GREY, "--", "o"),
    "wide": (SKY, "--", "s"),
    "local": (GREY, "-", "<"),
    "wide-local": (GREY, "--", ">"),
    "linear": (ORANGE, "-.", "^"),
    "linear-local": (ORANGE, ":", ">"),
    "conv-local": (VERMILLION, "--", "1"),
    "xl": (GREEN, "--", "v"),
    "slots": (VERMILLION, "-.", "D"),
    "slots-matched": (VERMILLION, ":", "d"),
    "recurrent-slots": (PURPLE, ":", "P"),
    "tensor": (BLUE, "-", "X"),
    "tensor-local": (BLUE, "--", "x"),
    "tensor-xl": (BLUE, ":", "v"),
    "tensor-depth": (PURPLE, "--", "+"),
    "frames": (GREY, "-.", "h"),
}
"""Colour, dash and marker of a method."""

SAME = {"joint": "base", "registers": "slots", "spatial": "tensor"}
"""Methods that images and video call otherwise."""

OTHERS = tuple(
    (colour, dash, marker)
    for dash in ("-", "--", ":")
    for colour, marker in zip(
        (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY), "XDvP^sod", strict=True
    )
)
"""Looks of variants and of methods that are not named above, in the order they come."""

STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "svg.hashsalt": "tensor-memory",  # the same figure is the same file
    "svg.fonttype": "none",
}
PANELS_ACROSS = 3
MANY_LINES = 8
"""A panel with more lines shows no intervals: they would cover each other."""
MOST_LINES = 12
"""A panel with more lines shows no seeds either."""
APART = 0.2
"""Half an interval of a share, at the end of a curve, from which on its seeds are drawn instead:
some of them learned the task and some did not, and a band would show neither."""


def draw_curves(comparison: Comparison, path: Path) -> list[Path]:
    """The metric on "valid" against steps, a panel per setting; the files written.

    Lines are means over seeds, bands their 95 % intervals in panels of few lines, or thin lines the
    seeds themselves where they end far apart and are not too many; the dotted line is the ceiling.
    """
    panels: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in comparison.rows:
        panels.setdefault(row.setting, []).append(row)
    found = looks(comparison)
    with _figure(len(panels), list(found)) as (figure, axes):
        for axis, (setting, rows) in zip(axes, panels.items(), strict=True):
            for row in rows:
                steps, means, halves = _curve(row, comparison.metric)
                at_end = (halves[-1] if halves else None) or 0.0
                apart = comparison.metric in PERCENT and at_end > APART
                if apart or len(rows) > MANY_LINES:
                    halves = [None] * len(halves)
                colour, dash, _ = found[row.label]
                look = (colour, dash, None)
                if apart and len(rows) <= MOST_LINES:
                    _draw_seeds(axis, row, comparison.metric, look)
                _line(axis, steps, means, halves, row.label, look, comparison.metric)
            _ceiling(axis, rows[0], comparison)
            axis.set_title(_title(setting) or rows[0].records[0]["task"], fontsize=9)
            axis.set_xlabel("steps")
        axes[0].set_ylabel(_axis_name(comparison.metric, "valid"))
        _legend(figure, axes, list(found))
        return _save(figure, path)


def swept_fields(comparison: Comparison) -> list[str]:
    """Numeric fields with three values or more for some row's method: what a sweep can show."""
    found = []
    for name in comparison.fields:
        values: dict[str, set[Any]] = {}
        for row in comparison.rows:
            values.setdefault(row.label, set()).add(dict(row.setting)[name])
        every = set().union(*values.values())
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in every)
        if numbers and max(len(some) for some in values.values()) >= 3:
            found.append(name)
    return found


def draw_sweep(comparison: Comparison, field: str, path: Path) -> list[Path]:
    """The metric on the test split against a swept field, a panel per rest of the setting.

    Rows that stand at one value of the field alone are no sweep and left out.
    """
    split = comparison.splits[0]
    values: dict[str, set[Any]] = {}
    for row in comparison.rows:
        values.setdefault(row.label, set()).add(dict(row.setting)[field])
    panels: dict[tuple[tuple[str, Any], ...], dict[str, list[Row]]] = {}
    for row in comparison.rows:
        if len(values[row.label]) > 1:
            rest = tuple(pair for pair in row.setting if pair[0] != field)
            panels.setdefault(rest, {}).setdefault(row.label, []).append(row)
    look = looks(comparison)
    labels = [label for label in look if len(values[label]) > 1]
    with _figure(len(panels), labels) as (figure, axes):
        for axis, (rest, methods) in zip(axes, panels.items(), strict=True):
            for label, rows in methods.items():
                places = [dict(row.setting)[field] for row in rows]
                found = [row.measure(split, comparison.metric) for row in rows]
                means = [math.nan if one is None else one.mean for one in found]
                halves = [None if one is None else one.half_width for one in found]
                _line(axis, places, means, halves, label, look[label], comparison.metric)
            axis.set_title(_title(rest), fontsize=9)
            _draw_ceilings(axis, [row for rows in methods.values() for row in rows], field,
                           split, comparison.metric)  # fmt: skip
            places = sorted({dict(row.setting)[field] for row in comparison.rows})
            if min(places) > 0 and max(places) / min(places) >= 8:
                axis.set_xscale("log", base=2)
                axis.set_xticks(places, [show(place) for place in places])
                axis.minorticks_off()
            axis.set_xlabel(short_names(comparison.fields)[field])
        axes[0].set_ylabel(_axis_name(comparison.metric, split))
        _legend(figure, axes, labels)
        return _save(figure, path)


def _curve(row: Row, metric: str) -> tuple[list[int], list[float], list[float | None]]:
    """Steps, means and half intervals, as far as all seeds have come: one that stopped early would
    leave a mean of the others."""
    points: dict[int, list[float | None]] = {}
    for record in row.records:
        for entry in record["curve"]:
            if metric in (entry.get("valid") or {}):
                points.setdefault(entry["step"], []).append(entry["valid"][metric])
    found = [
        (step, estimate(values))
        for step, values in sorted(points.items())
        if len(values) == len(row.records)
    ]
    return (
        [step for step, _ in found],
        [one.mean for _, one in found],
        [one.half_width for _, one in found],
    )


def _draw_seeds(axis: Any, row: Row, metric: str, look: tuple[str, str, None]) -> None:
    for record in row.records:
        at = [entry for entry in record["curve"] if metric in (entry.get("valid") or {})]
        steps, values = [e["step"] for e in at], [100.0 * e["valid"][metric] for e in at]
        axis.plot(steps, values, look[1], color=look[0], linewidth=0.7, alpha=0.8)


def _line(
    axis: Any,
    places: Sequence[float],
    means: Sequence[float],
    halves: Sequence[float | None],
    label: str,
    look: tuple[str, str, str | None],
    metric: str,
) -> None:
    """Means with their intervals: a band, or a bar at each marker, since nothing ran between."""
    scale = 100.0 if metric in PERCENT else 1.0
    colour, dash, marker = look
    order = sorted(range(len(places)), key=lambda index: places[index])
    at = [places[index] for index in order]
    middle = [scale * means[index] for index in order]
    width = [scale * (halves[index] or 0.0) for index in order]
    axis.plot(at, middle, dash, color=colour, label=label, linewidth=1.5, marker=marker,
              markersize=4)  # fmt: skip
    low = [m - w for m, w in zip(middle, width, strict=True)]
    high = [m + w for m, w in zip(middle, width, strict=True)]
    if metric in PERCENT:
        low, high = [max(v, 0.0) for v in low], [min(v, 100.0) for v in high]
    if marker is None:
        axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    else:
        axis.vlines(at, low, high, color=colour, alpha=0.4, linewidth=4)


def looks(comparison: Comparison) -> dict[str, tuple[str, str, str]]:
    """Colour, dash and marker of every label of a comparison, no two of them alike.

    A method as it is has its own look, and so has a variant where it is the only one of its
    method; further variants take other dashes of their method's colour, then what is left.
    """
    found: dict[str, tuple[str, str, str]] = {}
    for row in sorted(comparison.rows, key=lambda row: bool(row.variant)):
        if row.label in found:
            continue
        own = LOOKS.get(SAME.get(row.method, row.method))
        kin = [] if own is None else [own, *((own[0], dash, own[2]) for dash in ("--", ":", "-."))]
        taken = {look[:2] for look in found.values()}
        free = [look for look in (*kin, *OTHERS) if look[:2] not in taken]
        found[row.label] = free[0] if free else OTHERS[len(found) % len(OTHERS)]
    return found


def _ceiling(axis: Any, row: Row, comparison: Comparison) -> None:
    ceiling = row.records[0]["ceiling"].get(comparison.splits[0])
    if ceiling is not None:
        scale = 100.0 if comparison.metric in PERCENT else 1.0
        name = bound_name(row.records[0])
        axis.axhline(scale * ceiling, color="#555555", linestyle=(0, (1, 2)), label=name)


def _draw_ceilings(axis: Any, rows: list[Row], field: str, split: str, metric: str) -> None:
    found = {
        dict(row.setting)[field]: ceiling
        for row in rows
        if (ceiling := row.records[0]["ceiling"].get(split)) is not None
    }
    if found:
        scale = 100.0 if metric in PERCENT else 1.0
        at = sorted(found)
        axis.plot(at, [scale * found[place] for place in at], color="#555555",
                  linestyle=(0, (1, 2)), label=bound_name(rows[0].records[0]))  # fmt: skip


def _title(setting: tuple[tuple[str, Any], ...]) -> str:
    names = short_names([name for name, _ in setting])
    return ", ".join(f"{names[name]} {show(value)}" for name, value in setting)


def _axis_name(metric: str, split: str) -> str:
    unit = ", %" if metric in PERCENT else ""
    return f"{metric} on {split}{unit}"


@contextmanager
def _figure(
    panels: int, labels: Sequence[str] = (), height: float = 2.6
) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with so many panels and labels, in our style, drawn without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    across = min(panels, PANELS_ACROSS)
    down = -(-panels // across)
    # Room for the labels, in inches: what is too small for them has no panels left.
    beside = max(1.4, 0.6 + 0.066 * max((len(label) for label in labels), default=0))
    tall = max(0.6 + height * down, 0.4 + 0.19 * len(labels))
    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        figure = Figure(figsize=(beside + 3.2 * across, tall), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False).flatten()
        for unused in grid[panels:]:
            unused.set_visible(False)
        yield figure, list(grid[:panels])


def _legend(figure: Any, axes: Sequence[Any], order: Sequence[str] = ()) -> None:
    """The labels of all panels, in this order; those that are not in it, the ceiling, last."""
    found: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = [label for label in order if label in found]
    labels += [label for label in found if label not in order]
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside right upper", frameon=False)


def _save(figure: Any, path: Path) -> list[Path]:
    """Write a figure as PNG and as SVG; the files."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        kind = file.suffix[1:]
        metadata = {"Date": None} if kind == "svg" else None

        def write(at: Path, kind: str = kind, metadata: Any = metadata) -> None:
            figure.savefig(at, format=kind, dpi=150, metadata=metadata)

        write_whole(file, write)
    return files
