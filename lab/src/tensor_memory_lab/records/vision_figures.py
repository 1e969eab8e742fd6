"""Figures of docs/vision.md: accuracy against missing frames, cost against T."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.plots import (
    BLACK,
    BLUE,
    GREY,
    OTHERS,
    SKY,
    STYLE,
    VERMILLION,
    _legend,
    _save,
)
from tensor_memory_lab.records.rows import grouped
from tensor_memory_lab.records.vision_runs import (
    Record,
    by_frames,
    measured_alone,
    peak,
)

LOOKS = {
    "joint": (BLACK, "-", "o"),
    "frames": (GREY, "-", "s"),
    "wide": (SKY, "--", "^"),
    "registers": (VERMILLION, "-.", "D"),
    "spatial": (BLUE, "-", "X"),
}
"""Colour, dash and marker of a method; variants take what is left."""

APART = 0.012
"""Between the methods of a panel, in parts of its width: intervals side by side can be read."""


def draw_missing(records: Sequence[Record], path: Path) -> list[Path]:
    """Top-1 against the number of missing frames: a column per T, above somewhere, below last.

    Methods alone: with their variants nothing could be told apart.
    """
    lengths = by_frames(records)
    with _style():
        figure, axes = _panels(2, len(lengths))
        for column, (frames, part) in enumerate(lengths.items()):
            for row, kind in enumerate(("missing", "last")):
                axis = axes[row][column]
                for label, runs in grouped(part):
                    if label not in LOOKS:
                        continue
                    counts, means, halves = _against_missing(runs, kind)
                    colour, dash, marker = LOOKS[label]
                    aside = APART * frames * (list(LOOKS).index(label) - len(LOOKS) // 2)
                    axis.errorbar(
                        [count + aside for count in counts], means, yerr=halves, fmt=dash,
                        color=colour, marker=marker, markersize=4, linewidth=1.2, elinewidth=0.9,
                        capsize=2, label=label,
                    )  # fmt: skip
                    axis.set_xticks(counts)
                chance = 100 * part[0]["facts"]["chance"]
                axis.axhline(chance, color="#555555", linestyle=":", linewidth=1, label="chance")
                axis.set_xlabel(f"{'last ' if kind == 'last' else ''}frames missing of {frames}")
                axis.set_ylim(0, 100)
        for row in axes:
            row[0].set_ylabel("top-1, %")
        _legend(figure, list(axes.flatten()), list(LOOKS))
        return _save(figure, path)


def draw_cost(records: Sequence[Record], path: Path) -> list[Path]:
    """Step time and peak memory against T, both axes logarithmic; dotted: proportional to T."""
    lines = measured_alone(records)
    lengths = sorted({frames for found in lines.values() for frames in found})
    values = (
        ("step time, ms", lambda r: r["step_ms"]),
        ("peak memory, GiB", lambda r: peak(r) / 2**30),
    )
    with _style():
        figure, axes = _panels(1, 2)
        for axis, (name, value) in zip(axes[0], values, strict=True):
            for number, (label, found) in enumerate(lines.items()):
                colour, dash, marker = _look(label, number)
                axis.plot(
                    list(found), [value(record) for record in found.values()], dash, color=colour,
                    marker=marker, markersize=6, linewidth=1.5, label=label,
                    markerfacecolor="none" if label == "frames" else colour,  # joint lies beneath
                )  # fmt: skip
            measured = [value(record) for found in lines.values() for record in found.values()]
            _proportional(axis, lengths, measured)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(lengths, [str(frames) for frames in lengths])
            axis.set_xlabel("frames per clip, T")
            axis.set_ylabel(name)
        _legend(figure, list(axes.flatten()), list(lines))
        return _save(figure, path)


def _against_missing(
    runs: Sequence[Record], kind: str
) -> tuple[list[int], list[float], list[float]]:
    """Missing frames, mean top-1 and half interval, both in percent; 0 is the whole clip."""
    prefix = f"test@{kind}="
    splits = {0: "test"} | {
        int(split.removeprefix(prefix)): split for split in runs[0]["test"] if prefix in split
    }
    counts = sorted(splits)
    found = [estimate([run["test"][splits[c]]["accuracy"] for run in runs]) for c in counts]
    means = [100 * one.mean for one in found]
    return counts, means, [100 * (one.half_width or 0.0) for one in found]


def _proportional(axis: Any, lengths: list[int], values: list[float]) -> None:
    """Lines of slope 1 through the picture, to hold the measured ones against."""
    low, high = min(value for value in values if value > 0), max(values)
    start = low / 10
    while start < high:
        along = [start * length / lengths[0] for length in lengths]
        look = {"color": "#bbbbbb", "linewidth": 1, "label": "proportional to T"}
        axis.plot(lengths, along, ":", zorder=0, **look)
        start *= 10**0.5
    axis.set_ylim(0.8 * low, 1.25 * high)


def _look(label: str, number: int) -> tuple[str, str, str]:
    return LOOKS.get(label) or OTHERS[(number + 2) % len(OTHERS)]


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(STYLE)  # pyright: ignore[reportArgumentType]


def _panels(down: int, across: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.6 + 2.8 * across, 0.5 + 2.5 * down), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False)
