"""The tables and figures of docs/diagnostics.md, made from the records of runs.

    python -m tensor_memory_lab.records.diagnostics_page results/diagnostics \\
        docs/diagnostics.md

What stands between `<!-- RECIPE -->` and `<!-- /RECIPE -->` of the page is replaced by the tables
and figures of that recipe; a recipe without records stays as it is, or says that nothing was
measured where nothing stands, and records without a place are an error. The place `cost` shows the
short runs alone on their device of the folder beside, `results/diagnostics-cost`. Methods that the
plans in `grids`, two folders up, hold and no record answers are named below a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tensor_memory_lab.records import tables
from tensor_memory_lab.records.comparison import (
    Comparison,
    Record,
    Row,
    compare,
    method_rank,
)
from tensor_memory_lab.records.figures import draw_all, figure_titles
from tensor_memory_lab.records.pages import FIGURES, fill_page
from tensor_memory_lab.records.paired import paired_table
from tensor_memory_lab.records.planned import NOT_RUN, planned_values
from tensor_memory_lab.records.records import read_finished, read_results
from tensor_memory_lab.records.wording import bytes_text, listing


def blocks(folder: Path, figures: Path | None = None) -> dict[str, str]:
    """What the page shows of each recipe; its figures are drawn where a folder is given."""
    texts: dict[str, list[str]] = {}
    plans = sorted((folder.parent.parent / "grids").glob("[1-5]-*.toml"))  # less those of cost
    for comparison in compare(read_results([folder]), split_budgets=True):
        texts.setdefault(comparison.recipe, []).extend(_section(comparison, plans))
        if figures is not None:
            draw_all(comparison, figures / _name(comparison))
    costs = read_finished(folder.with_name(f"{folder.name}-cost"))
    if alone := [record for record in costs if not record["shared_device"] and record["step_ms"]]:
        texts["cost"] = [tables.markdown(cost_table(alone)), _cost_caption(alone)]
    return {recipe: "\n".join(parts) for recipe, parts in texts.items()}


def cost_table(records: Sequence[Record]) -> tables.Table:
    """A row per method, a column per recipe: step time, times that of base, rate, peak memory."""
    found: dict[str, dict[str, Row]] = {}
    for comparison in compare(records):
        for row in comparison.rows:
            found.setdefault(row.label, {})[comparison.recipe] = row
    recipes = dict.fromkeys(recipe for rows in found.values() for recipe in rows)
    ordered = sorted(
        found.items(), key=lambda item: method_rank(next(iter(item[1].values())).method)
    )
    return [
        {"method": label}
        | {recipe: _cost(rows.get(recipe), found.get("base", {}).get(recipe)) for recipe in recipes}
        for label, rows in ordered
    ]


def _cost(row: Row | None, base: Row | None) -> str:
    if row is None:
        return "–"
    times = f" ({_mean(row, 'step_ms') / _mean(base, 'step_ms'):.1f}×)" if base else ""
    return (
        f"{_mean(row, 'step_ms'):.2f} ms{times}, {_mean(row, 'steps_per_second'):,.0f} per s, "
        f"{bytes_text(round(_mean(row, 'peak_memory_bytes')))}"
    )


def _mean(row: Row, name: str) -> float:
    return sum(record[name] for record in row.records) / len(row.records)


def _cost_caption(records: Sequence[Record]) -> str:
    steps = sorted({record["steps"] for record in records})
    return (
        f"{listing([f'{count:,}' for count in steps])} steps, each run alone on its device. "
        f"Hardware: {listing(tables.hardware(records))}. "
        f"Commit: {listing(tables.commits(records))}.\n"
    )


def _section(comparison: Comparison, plans: Sequence[Path]) -> Iterable[str]:
    if comparison.told_apart:
        yield f"{comparison.title}:\n"
    yield tables.markdown(tables.result_table(comparison))
    missing = _not_run(comparison, plans)
    yield tables.caption(comparison) + (f" {missing}" if missing else "") + "\n"
    if differences := paired_table(comparison):
        yield "The memory less another method, seed by seed, in points of accuracy:\n"
        yield tables.markdown(differences)
    memory = tables.memory_table(comparison)
    if memory:
        yield "What the memory does at test, and what is left without it:\n"
        yield tables.markdown(memory)
    for end, told in figure_titles(comparison).items():
        yield f"![{told}]({FIGURES}/{_name(comparison)}-{end}.png)\n"


def _not_run(comparison: Comparison, plans: Sequence[Path]) -> str:
    """Methods that a plan holds for this recipe and no record of it answers."""
    values = [chosen for plan in plans for chosen in planned_values(plan, comparison.recipe)]
    planned = {chosen["model.method"] for chosen in values if "model.method" in chosen}
    missing = sorted(planned - {row.method for row in comparison.rows}, key=method_rank)
    return f"Planned, {NOT_RUN}: {listing(missing)}." if missing else ""


def _name(comparison: Comparison) -> str:
    return f"diagnostics-{comparison.file_name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the page from a folder of results."""
    return fill_page(
        argv,
        blocks,
        module="tensor_memory_lab.records.diagnostics_page",
        results="results of runs",
    )


if __name__ == "__main__":
    raise SystemExit(main())
