"""What the memory adds in vision: `spatial` less another method, paired by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensor_memory_lab.records.comparison import Record
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.paired import difference_text, paired
from tensor_memory_lab.records.rows import grouped
from tensor_memory_lab.records.tables import Table

MEMORY = "spatial"
BASELINES = ("base", "frames")
"""What a variant of the memory is held against; the plain memory, against every method."""

MEMORYS_OWN = ("method", "memory", "memory_layers", "scope", "gate_init")
"""Fields of a model that are nothing to one without a memory."""

Rows = Mapping[str, Sequence[Record]]
"""Runs by the label of their row."""

Columns = Mapping[str, tuple[str, str]]
"""Split and measure by the heading of their column."""


def gains(records: Sequence[Record], columns: Columns) -> Table:
    """A line per pair of methods, their mean difference and its interval in each cell."""
    rows = dict(grouped(records))
    table = []
    for label, runs in rows.items():
        if runs[0]["method"] != MEMORY:
            continue
        for other, against in (alike(label, rows) or baselines(label, rows)).items():
            pairs = paired(runs, against)
            if pairs:
                line = {"method": label, "against": other, "seeds": str(len(pairs))}
                table.append(line | _cells(pairs, columns))
    return table


def summary(table: Table) -> str:
    """One sentence: in how many comparisons the memory has more, less, or nothing is shown.

    >>> summary([{"against": "base", "PSNR": "**+0.10 ± 0.05**", "SSIM": "+0.01 ± 0.20"}])
    'Of 2 comparisons the memory has more in 1, less in 0, and in 1 no difference is shown.'
    """
    cells = [cell for line in table for cell in line.values() if "±" in cell]
    if not cells:
        return "One seed shows nothing."
    more = sum(cell.startswith("**+") for cell in cells)
    less = sum(cell.startswith("**-") for cell in cells)
    return (
        f"Of {len(cells)} comparisons the memory has more in {more}, less in {less}, and in "
        f"{len(cells) - more - less} no difference is shown."
    )


def alike(label: str, rows: Rows) -> Rows:
    """Rows of other methods that depart from their defaults just as this row of the memory does."""
    apart = label.removeprefix(MEMORY)
    return {
        other: runs
        for other, runs in rows.items()
        if runs[0]["method"] != MEMORY and other.removeprefix(runs[0]["method"]) == apart
    }


def baselines(label: str, rows: Rows) -> Rows:
    """Rows that carry nothing, and are in all but the memory's own like this row of the memory."""
    around = _around(rows[label][0])
    return {
        other: runs
        for other, runs in rows.items()
        if runs[0]["method"] in BASELINES and _around(runs[0]) == around
    }


def _around(record: Record) -> dict[str, Any]:
    """A model's config without what is the memory's own."""
    model = record["config"]["model"]
    return {name: value for name, value in model.items() if name not in MEMORYS_OWN}


def _cells(pairs: Sequence[tuple[Record, Record]], columns: Columns) -> dict[str, str]:
    cells = {}
    for heading, (split, measure) in columns.items():
        values = [[run["test"].get(split, {}).get(measure) for run in pair] for pair in pairs]
        if any(value is None for pair in values for value in pair):
            cells[heading] = "–"
        else:
            cells[heading] = difference_text(estimate([a - b for a, b in values]), measure)
    return cells
