"""How much of the gap between local and full attention a method closes, and at what step time.

Of `local` with the same window and `base`, whose attention sees everything, both with positions of
the same kind: the share is (local - row) / (local - base) in perplexity, 0 % for local and 100 %
for base, over the seeds that all three have. Where full attention is no better than local there is
no gap, and no share. Variants are chosen on "valid", so that the share on test stays clean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensor_memory_lab.models.language import LanguageModelConfig
from tensor_memory_lab.records.comparison import Comparison, Record
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.tables import Table
from tensor_memory_lab.records.wording import bytes_text, estimate_text

PERPLEXITY = "perplexity"

Group = tuple[str, Sequence[Record]]
"""A row's label and its runs, one per seed."""


@dataclass(frozen=True)
class GapRow:
    """A method beside the two ends of the gap."""

    label: str
    runs: Sequence[Record]
    share: float | None
    """Part of the gap that is closed; None where there is none, or an end of it was not run with a
    seed of the row."""
    valid_share: float | None
    """The same on "valid"."""
    step_ms: float | None
    """Median time of a step, over the runs that had the device to themselves."""
    step_ratio: float | None
    """The same over that of local."""

    @property
    def window(self) -> int:
        """Tokens that local attention sees."""
        return _window(self.runs)


def gap_rows(groups: Sequence[Group]) -> list[GapRow]:
    """Every group beside `base` and the `local` of its window, both with its positions."""
    bases: dict[str, Sequence[Record]] = {}
    locals_: dict[tuple[str, int], Sequence[Record]] = {}
    for _, runs in groups:
        if runs[0]["method"] == "base":
            bases.setdefault(_positions(runs), runs)
        if runs[0]["method"] == "local":
            locals_.setdefault((_positions(runs), _window(runs)), runs)
    rows = []
    for label, runs in groups:
        base = bases.get(_positions(runs))
        local = locals_.get((_positions(runs), _window(runs)))
        time, local_time = step_ms(runs), None if local is None else step_ms(local)
        rows.append(
            GapRow(
                label,
                runs,
                _share(runs, local, base, "test"),
                _share(runs, local, base, "valid"),
                time,
                time / local_time if time and local_time else None,
            )
        )
    return rows


def gap_table(comparison: Comparison) -> Table:
    """The shares of a comparison of perplexities; empty where it lacks `base` or `local`."""
    methods = {row.method for row in comparison.rows}
    if comparison.metric != PERPLEXITY or not {"base", "local"} < methods:
        return []
    table = []
    for setting in dict.fromkeys(_apart(row.setting) for row in comparison.rows):
        groups = [(r.label, r.records) for r in comparison.rows if _apart(r.setting) == setting]
        for row in gap_rows(groups):
            table.append({
                **{name.rpartition(".")[2]: str(value) for name, value in setting},
                "method": row.label,
                "window": str(row.window),
                "perplexity": _text(row.runs),
                "gap closed": share_text(row.share),
                "step time of local": ratio_text(row.step_ratio),
                "state": bytes_text(row.runs[0]["state_bytes"]),
            })  # fmt: skip
    return table


def step_ms(runs: Sequence[Record]) -> float | None:
    """Mean of the runs' median step times; None where all of them shared their device."""
    alone = [r["step_ms"] for r in runs if not r.get("shared_device") and r.get("step_ms")]
    return sum(alone) / len(alone) if alone else None


def share_text(share: float | None) -> str:
    """A share in percent.

    >>> share_text(0.5), share_text(-0.031), share_text(None)
    ('50 %', '-3 %', '–')
    """
    return "–" if share is None else f"{100 * share:.0f} %"


def ratio_text(ratio: float | None) -> str:
    """A ratio of times.

    >>> ratio_text(1.254), ratio_text(None)
    ('1.25×', '–')
    """
    return "–" if ratio is None else f"{ratio:.2f}×"


def _apart(setting: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """A row's setting less the window, which `gap_rows` matches itself."""
    return tuple(pair for pair in setting if pair[0] != "model.window")


def _window(runs: Sequence[Record]) -> int:
    return runs[0]["config"]["model"]["window"]


def _positions(runs: Sequence[Record]) -> str:
    return runs[0]["config"]["model"].get("positions", LanguageModelConfig.positions)


def _share(
    runs: Sequence[Record],
    local: Sequence[Record] | None,
    base: Sequence[Record] | None,
    split: str,
) -> float | None:
    found = runs, local or (), base or ()
    common = set.intersection(*({run["seed"] for run in some} for some in found))
    values = [_values([run for run in some if run["seed"] in common], split) for some in found]
    if not all(values):
        return None
    row, low, high = (sum(some) / len(some) for some in values)
    return (low - row) / (low - high) if low > high else None


def _values(runs: Sequence[Mapping[str, Any]], split: str) -> list[float]:
    tests = [run if split == "valid" else run["test"] for run in runs]
    found = [measures.get(split, {}).get(PERPLEXITY) for measures in tests]
    return [] if any(value is None for value in found) else found


def _text(runs: Sequence[Record]) -> str:
    found = _values(runs, "test")
    return estimate_text(estimate(found), PERPLEXITY) if found else "–"
