"""What the search for a memory that pays says: the gap against its price, limit by limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensor_memory.experiments.models.language import LanguageModelConfig
from tensor_memory.experiments.results.comparison import flatten
from tensor_memory.experiments.results.gap import PERPLEXITY, GapRow, share_text
from tensor_memory.experiments.results.plots import LOOKS, _figure, _legend, _save
from tensor_memory.experiments.results.records import config_dict
from tensor_memory.experiments.results.rows import Row, shown
from tensor_memory.experiments.results.tables import Table

Found = Sequence[tuple[Row, GapRow | None]]
"""Rows of the search and what they close of the gap; None where a row was not run."""

LIMITS = {
    "reads and writes": (
        "memory.reads",
        "memory.read_heads",
        "memory.write_heads",
        "memory.chunk_size",
    ),
    "decay": ("memory.forget_bias", "memory.input_bias", "memory.feedback", "memory.gain"),
    "addressing": ("memory.spread_bias", "memory.channels", "memory.grid"),
    "layers": ("memory_layers", "placement"),
}
"""What may hold a memory back, and the fields that loosen it."""

KIND = ("method", "window", "positions")
"""What a row must share with the published form to be compared with it."""

PUBLISHED_LAYERS = (0, 1)
"""Where the published form stands that the others are compared with."""

AIM_SHARE, AIM_TIME = 0.5, 1.3
"""Half of the gap, at no more than so many times the step of local attention."""


def limits_table(found: Found) -> Table:
    """What each change to the published form is worth on "valid", by the limit it loosens.

    Empty where the published form was not run.
    """
    published = next((pair for pair in found if _is_published(pair)), None)
    if published is None:
        return []
    start, before = published[0].model, _valid(published[0])
    lines: list[tuple[tuple[Any, ...], dict[str, str]]] = []
    for row, gap in found:
        same_kind = all(row.model[name] == start[name] for name in KIND)
        changed = {k: v for k, v in row.model.items() if v != start[k]}
        limits = [limit for limit, fields in LIMITS.items() if changed.keys() & set(fields)]
        if gap is None or not same_kind or not limits:
            continue
        gain = before - _valid(row)
        line = {
            "limit": limits[0] if len(limits) == 1 else "several",
            "change": ", ".join(
                f"{_short(name)} {shown(name, value)}" for name, value in changed.items()
            ),
            "perplexity": f"{-gain:+.2f}",
            "gap closed, valid": share_text(gap.valid_share),
            "gap closed, test": share_text(gap.share),
        }
        order = list(LIMITS).index(limits[0]) if len(limits) == 1 else len(LIMITS)
        lines.append(((order, -gain, line["change"]), line))
    return [line for _, line in sorted(lines, key=lambda entry: entry[0])]


def draw_search(found: Found, path: Path) -> list[Path]:
    """The share of the gap on "valid" against the step time over that of local; the files written.

    Hollow marks have a window of their own, wider than the others'; marks with a black rim have
    rotary positions, and so have both ends of their gap. The corner between the dashed lines is the
    aim.
    """
    rows = [(row, gap) for row, gap in found if gap and gap.valid_share is not None]
    narrow = min((row.model["window"] for row, _ in rows), default=0)
    with _figure(1) as (figure, (axis,)):
        figure.set_size_inches(7, 3.6)
        named: set[str] = set()
        for row, gap in rows:
            if gap.step_ratio is None or gap.valid_share is None:
                continue
            method = row.model["method"]
            colour, _, marker = LOOKS[method]
            hollow = row.model["window"] != narrow
            rim = "black" if row.model["positions"] == "rotary" else colour
            axis.plot(gap.step_ratio, 100 * gap.valid_share, marker, color=colour, markersize=6,
                      markeredgecolor=rim,
                      fillstyle="none" if hollow else "full", linestyle="none",
                      label=None if method in named else method)  # fmt: skip
            named.add(method)
        if any(row.model["positions"] == "rotary" for row, _ in rows):
            axis.plot([], [], "o", color="white", markeredgecolor="black", label="rotary positions")
        if any(row.model["window"] != narrow for row, _ in rows):
            axis.plot([], [], "o", color="#555555", fillstyle="none", label="wider window")
        axis.axhline(100 * AIM_SHARE, color="#555555", linestyle=(0, (4, 3)), linewidth=0.8)
        axis.axvline(AIM_TIME, color="#555555", linestyle=(0, (4, 3)), linewidth=0.8)
        axis.annotate("aim", (AIM_TIME, 100 * AIM_SHARE), (-4, 4), textcoords="offset points",
                      ha="right", color="#555555")  # fmt: skip
        axis.set_xlabel("step time over that of local attention")
        axis.set_ylabel("gap to full attention closed, valid, %")
        _legend(figure, [axis])
        return _save(figure, path)


def _is_published(pair: tuple[Row, GapRow | None]) -> bool:
    model = LanguageModelConfig(method="tensor-local", memory_layers=PUBLISHED_LAYERS)
    return pair[1] is not None and pair[0].model == flatten(config_dict(model))


def _valid(row: Row) -> float:
    values = [run["valid"][PERPLEXITY] for run in row.runs]
    return sum(values) / len(values)


def _short(name: str) -> str:
    return name.rpartition(".")[2]
