"""The figures of a comparison: curves, sweeps, and the variants of a method side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensor_memory_lab.records.comparison import Comparison, short_names
from tensor_memory_lab.records.plots import (
    GREY,
    _axis_name,
    _figure,
    _save,
    _title,
    draw_curves,
    draw_sweep,
    looks,
    swept_fields,
)
from tensor_memory_lab.records.wording import PERCENT

MANY_VARIANTS = 5
"""So many departures of one method from itself are read off a figure of their own."""


def figure_titles(comparison: Comparison) -> dict[str, str]:
    """The figures that a comparison has: the end of the file's name, and what it shows."""
    found = {}
    if any(len(record["curve"]) > 1 for record in comparison.records):
        found["curves"] = f"{comparison.metric} against steps"
    names = _sweep_names(comparison)
    for field in swept_fields(comparison):
        found[names[field]] = f"{comparison.metric} against {names[field]}"
    if varied_settings(comparison):
        found["variants"] = f"{comparison.metric} of every variant"
    return found


def draw_all(comparison: Comparison, stem: Path) -> list[Path]:
    """Draw the `figure_titles` of a comparison as `<stem>-<end>`; the files written."""
    drawn = []
    swept = {short: field for field, short in _sweep_names(comparison).items()}
    for end in figure_titles(comparison):
        path = stem.with_name(f"{stem.name}-{end}")
        if end == "curves":
            drawn += draw_curves(comparison, path)
        elif end == "variants":
            drawn += draw_variants(comparison, path)
        else:
            drawn += draw_sweep(comparison, swept[end], path)
    return drawn


def _sweep_names(comparison: Comparison) -> dict[str, str]:
    return short_names(comparison.fields, taken=("curves", "variants"))


def varied_settings(comparison: Comparison) -> list[tuple[tuple[str, Any], ...]]:
    """Settings in which one method stands in many variants, which `draw_variants` can show."""
    counts: dict[tuple[Any, ...], int] = {}
    for row in comparison.rows:
        key = (row.setting, row.method)
        counts[key] = counts.get(key, 0) + bool(row.variant)
    found = [setting for (setting, _), count in counts.items() if count >= MANY_VARIANTS]
    return list(dict.fromkeys(found))


def draw_variants(comparison: Comparison, path: Path) -> list[Path]:
    """The metric on the test split of every row of `varied_settings`, a line of the figure each.

    Bars are 95 % intervals over seeds; the thin line is the method as it is.
    """
    split, metric = comparison.splits[0], comparison.metric
    settings = varied_settings(comparison)
    scale = 100.0 if metric in PERCENT else 1.0
    most = max(sum(row.setting == setting for row in comparison.rows) for setting in settings)
    found = looks(comparison)
    with _figure(len(settings), list(found), height=0.8 + 0.2 * most) as (figure, axes):
        for axis, setting in zip(axes, settings, strict=True):
            rows = [row for row in comparison.rows if row.setting == setting]
            for place, row in enumerate(rows):
                one = row.measure(split, metric)
                if one is None:
                    continue
                colour = found[row.label][0] if not row.variant else GREY
                axis.errorbar(scale * one.mean, place, xerr=scale * (one.half_width or 0.0),
                              fmt="o", color=colour, markersize=4, capsize=2)  # fmt: skip
                if not row.variant:
                    axis.axvline(scale * one.mean, color=colour, linewidth=0.6)
            axis.set_yticks(range(len(rows)), [row.label for row in rows])
            axis.invert_yaxis()
            axis.set_title(_title(setting) or rows[0].records[0]["task"], fontsize=9)
            axis.set_xlabel(_axis_name(metric, split))
            if metric in PERCENT:
                low, high = axis.get_xlim()
                axis.set_xlim(max(low, -2.0), min(high, 102.0))
        return _save(figure, path)
