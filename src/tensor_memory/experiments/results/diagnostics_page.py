"""The tables and figures of docs/diagnostics.md, made from the records of runs.

    python -m tensor_memory.experiments.results.diagnostics_page results/diagnostics \\
        docs/diagnostics.md

What stands between `<!-- RECIPE -->` and `<!-- /RECIPE -->` of the page is replaced by the tables
and figures of that recipe; a recipe without records stays as it is, and records without a place are
an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tensor_memory.experiments.results import plots, tables
from tensor_memory.experiments.results.comparison import Comparison, compare
from tensor_memory.experiments.results.pages import FIGURES, fill_page
from tensor_memory.experiments.results.records import read_results


def blocks(folder: Path, figures: Path | None = None) -> dict[str, str]:
    """What the page shows of each recipe; its figures are drawn where a folder is given."""
    texts: dict[str, list[str]] = {}
    for comparison in compare(read_results([folder]), split_budgets=True):
        texts.setdefault(comparison.recipe, []).extend(_section(comparison))
        if figures is not None:
            _draw(comparison, figures)
    return {recipe: "\n".join(parts) for recipe, parts in texts.items()}


def _draw(comparison: Comparison, folder: Path) -> None:
    plots.draw_curves(comparison, folder / f"{_name(comparison)}-curves")
    for field in plots.swept_fields(comparison):
        plots.draw_sweep(comparison, field, folder / f"{_name(comparison)}-{_short(field)}")


def _section(comparison: Comparison) -> Iterable[str]:
    if comparison.told_apart:
        yield f"{comparison.title}:\n"
    yield tables.markdown(tables.result_table(comparison))
    yield tables.caption(comparison) + "\n"
    memory = tables.memory_table(comparison)
    if memory:
        yield "What the memory does at test, and what is left without it:\n"
        yield tables.markdown(memory)
    figures = {"steps": f"{_name(comparison)}-curves"}
    for field in plots.swept_fields(comparison):
        figures[_short(field)] = f"{_name(comparison)}-{_short(field)}"
    for against, name in figures.items():
        yield f"![{comparison.metric} against {against}]({FIGURES}/{name}.png)\n"


def _name(comparison: Comparison) -> str:
    return "diagnostics-" + re.sub(r"[^\w.@+-]+", "-", comparison.title).strip("-")


def _short(field: str) -> str:
    return field.rpartition(".")[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the page from a folder of results."""
    return fill_page(
        argv,
        blocks,
        module="tensor_memory.experiments.results.diagnostics_page",
        results="results of runs",
    )


if __name__ == "__main__":
    raise SystemExit(main())
