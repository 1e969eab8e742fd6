"""What the search for a memory that pays says: what forms are worth and cost, limit by limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.models.language import LanguageModelConfig
from tensor_memory_lab.records.comparison import flatten
from tensor_memory_lab.records.gap import PERPLEXITY, GapRow, share_text
from tensor_memory_lab.records.plots import LOOKS, _figure, _legend, _save
from tensor_memory_lab.records.records import config_dict
from tensor_memory_lab.records.rows import Row, shown
from tensor_memory_lab.records.tables import Table

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

ENDS = ("base", "local")
"""The two ends of the gap, which alone make no figure."""

AIM_SHARE, AIM_TIME = 0.5, 1.3
"""Half of the gap, at no more than so many times the step of local attention."""


def limits_table(found: Found) -> Table:
    """What each change to the published form is worth on "valid", by the limit it loosens.

    Empty where the published form was not run.
    """
    published = next((pair for pair in found if _is_published(pair)), None)
    if published is None:
        return []
    start, before = published[0].model, valid_perplexity(published[0])
    lines: list[tuple[tuple[Any, ...], dict[str, str]]] = []
    for row, gap in found:
        same_kind = all(row.model[name] == start[name] for name in KIND)
        changed = {k: v for k, v in row.model.items() if v != start[k]}
        limits = [limit for limit, fields in LIMITS.items() if changed.keys() & set(fields)]
        if gap is None or not same_kind or not limits:
            continue
        gain = before - valid_perplexity(row)
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


def valid_perplexity(row: Row) -> float:
    """Mean over a row's runs of the perplexity on "valid"."""
    values = [run["valid"][PERPLEXITY] for run in row.runs]
    return sum(values) / len(values)


def draw_search(found: Found, path: Path) -> list[Path]:
    """Perplexity on "valid" against the step time over that of local; the files written.

    A panel per kind of positions. Faint marks have a wider window than the others. The corner below
    the dashed lines is the aim.
    """
    rows = [(row, gap) for row, gap in found if gap and gap.step_ratio is not None]
    narrow = min((row.model["window"] for row, _ in rows), default=0)
    kinds = sorted({row.model["positions"] for row, _ in rows})
    with _figure(len(kinds), height=3.4) as (figure, axes):
        for axis in axes[1:]:
            axis.sharex(axes[0])
            axis.sharey(axes[0])
        for axis, kind in zip(axes, kinds, strict=True):
            ends: dict[str, float] = {}
            for row, gap in rows:
                if row.model["positions"] != kind:
                    continue
                method, faint = row.model["method"], row.model["window"] != narrow
                colour, _, marker = LOOKS[method]
                axis.plot(gap.step_ratio, valid_perplexity(row), marker, color=colour, markersize=6,
                          linestyle="none", alpha=0.3 if faint else 1.0,
                          label="wider window" if faint else method)  # fmt: skip
                if method in ENDS and not faint:
                    ends[method] = valid_perplexity(row)
            _draw_aim(axis, ends)
            axis.set_title(f"{kind} positions", fontsize=9)
            axis.set_xlabel("step time over that of local attention")
        axes[0].set_ylabel("perplexity on valid")
        _legend(figure, axes)
        return _save(figure, path)


def _draw_aim(axis: Any, ends: Mapping[str, float]) -> None:
    """The corner of rows that pay, where there is a gap to close."""
    if len(ends) < len(ENDS) or ends["local"] <= ends["base"]:
        return
    half = ends["local"] - AIM_SHARE * (ends["local"] - ends["base"])
    look = {"color": "#555555", "linestyle": (0, (4, 3)), "linewidth": 0.8}
    axis.axhline(half, **look)
    axis.axvline(AIM_TIME, **look)
    low = axis.get_xaxis_transform()  # steps across, the panel's height up
    axis.text(AIM_TIME, 0.02, "aim ", transform=low, ha="right", color="#555555")


def _is_published(pair: tuple[Row, GapRow | None]) -> bool:
    model = LanguageModelConfig(method="tensor-local", memory_layers=PUBLISHED_LAYERS)
    return pair[1] is not None and pair[0].model == flatten(config_dict(model))


def _short(name: str) -> str:
    return name.rpartition(".")[2]
