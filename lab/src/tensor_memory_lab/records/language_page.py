"""The tables and figures of docs/language.md, made from the records of runs.

    python -m tensor_memory_lab.records.language_page results/language docs/language.md

The folder holds `fresh` (recipes language and language-paper), `carried` (language-carried),
`search` (the same with a smaller budget), `rate` (base under several learning rates), `cost`
(short runs, one at a time) and `positions`. What stands between `<!-- NAME -->` and
`<!-- /NAME -->` of the page is replaced; a table without records stays as it is. Rows that the
plans in `grids`, two folders up, hold and no record answers say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.records.comparison import Record, compare, show
from tensor_memory_lab.records.gap import (
    PERPLEXITY,
    GapRow,
    gap_rows,
    ratio_text,
    share_text,
    step_ms,
)
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.language_rows import (
    planned_runs,
    table_rows,
    timed,
)
from tensor_memory_lab.records.language_search import (
    ENDS,
    draw_search,
    limits_table,
    valid_perplexity,
)
from tensor_memory_lab.records.pages import fill_page
from tensor_memory_lab.records.paper import published
from tensor_memory_lab.records.planned import NOT_RUN
from tensor_memory_lab.records.positions import (
    draw_positions,
    positions_table,
    read_positions,
)
from tensor_memory_lab.records.records import read_finished
from tensor_memory_lab.records.rows import Row
from tensor_memory_lab.records.tables import Table, caption, commits, markdown
from tensor_memory_lab.records.wording import bytes_text, estimate_text, listing

PLANS = {
    "language-paper": ("language-1-fresh", "language-4-rest"),
    "language": ("language-1-fresh",),
    "language-carried": ("language-2-carried", "language-3-best"),
    "search": ("language-3-search",),
}
"""Plans whose runs a table shows."""


def rate_table(records: Sequence[Record]) -> Table:
    """Perplexities by recipe and learning rate, the lowest rate first."""
    rates: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        key = record["recipe"], record["config"]["optimizer"]["lr"]
        rates.setdefault(key, []).append(record)
    return [
        {
            "recipe": recipe,
            "learning rate": show(rate),
            "method": listing(sorted({run["method"] for run in runs})),
            "seeds": str(len(runs)),
            "valid": _text([run["valid"].get(PERPLEXITY) for run in runs]),
            "test": _measured(runs, "test"),
        }
        for (recipe, rate), runs in sorted(rates.items())
    ]


def fresh_table(records: Sequence[Record], planned: Sequence[Record] = ()) -> Table:
    """The paper's table with causal models: perplexities, counts, time and memory of a step."""
    table = []
    for row in table_rows(records, planned):
        line = {"method": row.label, "seeds": row.seeds}
        if row.runs:
            runs, paper = row.runs, published(row.runs[0], "test", PERPLEXITY)
            line |= {
                "context": runs[0]["labels"].get("context", "–"),
                "parameters": f"{runs[0]['parameters']:,}",
                "state": bytes_text(runs[0]["state_bytes"]),
                "valid": _text([run["valid"].get(PERPLEXITY) for run in runs]),
                "test": _measured(runs, "test"),
                "test, memory off": _without_memory(runs),
                "paper": "–" if paper is None else f"{paper.value:.2f}",
                "step": _time(runs),
                "peak memory": _peak(runs),
            }
        table.append(line)
    return _whole(table)


def carried_table(records: Sequence[Record], planned: Sequence[Record] = ()) -> Table:
    """Streams: what is carried, what of the gap it closes, what it costs."""
    table = []
    for row, gap in _gaps(table_rows(records, planned)):
        line = {"method": row.label, "seeds": row.seeds}
        if gap is not None:
            line |= {
                **_carried(row.runs),
                "test": _measured(row.runs, "test"),
                "test, nothing carried": _measured(row.runs, "test@fresh"),
                "gap closed": share_text(gap.share),
                **_cost(row.runs, gap),
            }
        table.append(line)
    return _whole(table)


def search_table(records: Sequence[Record], planned: Sequence[Record] = ()) -> Table:
    """Every variant, by its perplexity on "valid", the best first; then those that were not run."""
    table = []
    for row, gap in searched(records, planned):
        line = {"variant": row.label, "seeds": row.seeds}
        if gap is not None:
            line |= {
                **_carried(row.runs),
                "gap closed, valid": share_text(gap.valid_share),
                "test": _measured(row.runs, "test"),
                "gap closed": share_text(gap.share),
                "nothing carried": _measured(row.runs, "test@fresh"),
                "memory off": _without_memory(row.runs),
                **_cost(row.runs, gap),
            }
        table.append(line)
    return _whole(table)


def searched(
    records: Sequence[Record], planned: Sequence[Record] = ()
) -> list[tuple[Row, GapRow | None]]:
    """Variants by positions and window, then by their perplexity on "valid"."""

    def order(pair: tuple[Row, GapRow | None]) -> tuple[Any, ...]:
        row = pair[0]
        valid = valid_perplexity(row) if row.runs else math.inf
        return row.model["positions"], row.model["window"], valid

    return sorted(_gaps(table_rows(records, planned)), key=order)


def blocks(folder: Path, figures: Path) -> dict[str, str]:
    """Markdown by the name of its place in the page, of what there are records for."""
    plans, costs = folder.parent.parent / "grids", read_finished(folder / "cost")
    whole = timed([*read_finished(folder / "fresh"), *read_finished(folder / "carried")], costs)
    texts: dict[str, str] = {}
    if rates := read_finished(folder / "rate"):
        texts["rate"] = markdown(rate_table(rates))
    for recipe in ("language-paper", "language", "language-carried"):
        runs = [record for record in whole if record["recipe"] == recipe]
        if runs:
            table = carried_table if recipe == "language-carried" else fresh_table
            text = _with_caption(table(runs, _planned(plans, recipe, recipe)), runs)
            texts["carried" if recipe == "language-carried" else recipe] = text
    if search := timed(read_finished(folder / "search"), costs):
        planned = _planned(plans, "search", "language-carried")
        texts["search"] = _with_caption(search_table(search, planned), search)
        found = searched(search)
        if any(gap and gap.step_ratio and row.model["method"] not in ENDS for row, gap in found):
            file = draw_search(found, figures / "language-search")[0]
            title = "Perplexity against the time of a step, by kind of positions"
            texts["search"] = f"![{title}](images/{file.name})\n\n{texts['search']}"
        if limits := limits_table(found):
            texts["limits"] = markdown(limits)
    if (folder / "positions").is_dir() and (found := read_positions(folder / "positions")):
        files = draw_positions(found, figures / "language-positions")
        shown = f"![Loss against position, up to 16 training lengths](images/{files[0].name})\n"
        texts["positions"] = shown + "\n" + markdown(positions_table(found))
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the page from a folder of results."""
    return fill_page(
        argv,
        blocks,
        module="tensor_memory_lab.records.language_page",
        results="fresh, carried, search, rate, cost and positions",
    )


def _planned(plans: Path, table: str, recipe: str) -> list[Record]:
    files = [plans / f"{name}.toml" for name in PLANS[table]]
    return [run for file in files for run in planned_runs(file, recipe)]


def _gaps(rows: Sequence[Row]) -> list[tuple[Row, GapRow | None]]:
    """Rows with what they close of the gap; None where a row was not run."""
    gaps = iter(gap_rows([(row.label, row.runs) for row in rows if row.runs]))
    return [(row, next(gaps) if row.runs else None) for row in rows]


def _whole(table: Table) -> Table:
    """The table with every column in every row, and the missing ones named."""
    columns = max((list(line) for line in table), key=len)
    missing = {"test": NOT_RUN}
    return [{name: line.get(name, missing.get(name, "–")) for name in columns} for line in table]


def _with_caption(table: Table, records: Sequence[Record]) -> str:
    notes = [caption(comparison) for comparison in compare(records, split_budgets=True)]
    lenders = [run["timed_by"] for run in records if "timed_by" in run]
    if lenders:
        steps = listing(sorted({f"{run['steps']:,}" for run in lenders}))
        at = listing(commits(lenders))
        others = any("timed_by" not in r and not r["shared_device"] for r in records)
        own = ", or where there are none the run itself" if others else ""
        notes.append(f"Step and peak memory: {steps} steps of the same alone, commit {at}{own}.")
    return markdown(table) + "\n" + "\n".join(notes) + "\n"


def _carried(runs: Sequence[Record]) -> dict[str, str]:
    """What a prediction can see, what is carried for it, and the score that chooses."""
    return {
        "context": runs[0]["labels"].get("context", "–"),
        "state": bytes_text(runs[0]["state_bytes"]),
        "valid": _text([run["valid"].get(PERPLEXITY) for run in runs]),
    }


def _cost(runs: Sequence[Record], gap: GapRow) -> dict[str, str]:
    times = {"step": _time(runs), "of local": ratio_text(gap.step_ratio)}
    return times | {"peak memory": _peak(runs)}


def _measured(runs: Sequence[Record], split: str) -> str:
    return _text([run["test"].get(split, {}).get(PERPLEXITY) for run in runs])


def _without_memory(runs: Sequence[Record]) -> str:
    found = [(run.get("memory") or {}).get("test_without_memory") or {} for run in runs]
    return _text([tests.get("test", {}).get(PERPLEXITY) for tests in found])


def _text(values: Sequence[float | None]) -> str:
    if all(value is None for value in values):
        return "–"
    return estimate_text(estimate(values), PERPLEXITY)


def _time(runs: Sequence[Record]) -> str:
    time = step_ms(runs)
    return "–" if time is None else f"{time:.1f} ms"


def _peak(runs: Sequence[Record]) -> str:
    return bytes_text(max(run["peak_memory_bytes"] for run in runs))


if __name__ == "__main__":
    raise SystemExit(main())
