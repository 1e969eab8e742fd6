"""Differences between methods, seed by seed.

Runs of one seed start from the same weights and see the same batches, so their difference is what
counts. Bold is what is shown: a difference whose 95 % interval leaves zero out.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensor_memory_lab.records.comparison import Comparison, Record, Row
from tensor_memory_lab.records.intervals import Estimate, estimate
from tensor_memory_lab.records.tables import Table, setting_cells
from tensor_memory_lab.records.wording import PERCENT

MEMORY = "tensor"


def paired_table(comparison: Comparison) -> Table:
    """Every row of the memory less the other methods, and less the memory as it is by default.

    Empty where no two rows share two seeds.
    """
    memories = [row for row in comparison.rows if row.method == MEMORY]
    others = [row for row in comparison.rows if row.method != MEMORY or not row.variant]
    labels = dict.fromkeys(row.label for row in others)
    table = []
    for memory in memories:
        at = {row.label: row for row in others if row.setting == memory.setting}
        differences = {
            f"less {label}": _difference(memory, at[label], comparison) if label in at else "–"
            for label in labels
        }
        if any(text != "–" for text in differences.values()):
            table.append(setting_cells(memory) | {"method": memory.label} | differences)
    empty = [name for name in labels if all(line[f"less {name}"] == "–" for line in table)]
    return [
        {name: text for name, text in line.items() if name.removeprefix("less ") not in empty}
        for line in table
    ]


def _difference(row: Row, other: Row, comparison: Comparison) -> str:
    """The task's own measure on test; a dash for a row beside itself, and for one seed."""
    pairs = paired(row.records, other.records)
    if row is other or len(pairs) < 2:
        return "–"
    name = comparison.metric
    values = [[run["test"]["test"][name] for run in pair] for pair in pairs]
    if any(value is None for pair in values for value in pair):
        return "diverged"
    return difference_text(estimate([a - b for a, b in values]), name)


def paired(runs: Sequence[Record], others: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Runs beside those of the same seed; seeds that one side lacks are left out."""
    by_seed = {run["seed"]: run for run in others}
    return [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]


def difference_text(difference: Estimate, measure: str) -> str:
    """A difference and its interval, bold where that leaves zero out; percent as points.

    >>> difference_text(Estimate(0.021, 0.012, 3), "accuracy")
    '**+2.1 ± 1.2**'
    >>> difference_text(Estimate(-0.104, 0.2, 3), "psnr")
    '-0.10 ± 0.20'
    >>> difference_text(Estimate(0.0002, 0.0001, 3), "accuracy")  # nothing in the digits shown
    '+0.0 ± 0.0'
    """
    scale, digits = (100.0, 1) if measure in PERCENT else (1.0, 2)
    if measure.startswith("ssim"):
        digits = 4
    mean, half_width = scale * difference.mean, difference.half_width
    text = f"{mean:+.{digits}f}"
    if half_width is None:
        return text
    shown = abs(difference.mean) > half_width and round(mean, digits) != 0
    text += f" ± {scale * half_width:.{digits}f}"
    return f"**{text}**" if shown else text
