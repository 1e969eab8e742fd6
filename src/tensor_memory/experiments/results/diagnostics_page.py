"""The tables and figures of docs/diagnostics.md, made from the records of runs.

    python -m tensor_memory.experiments.results.diagnostics_page results/diagnostics \\
        docs/diagnostics.md

What stands between `<!-- RECIPE -->` and `<!-- /RECIPE -->` of the page is replaced by the tables
and figures of that recipe; a recipe without records stays as it is, or says that nothing was
measured where nothing stands, and records without a place are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tensor_memory.experiments.results import tables
from tensor_memory.experiments.results.comparison import Comparison, compare
from tensor_memory.experiments.results.figures import draw_all, figure_titles
from tensor_memory.experiments.results.pages import FIGURES, fill_page
from tensor_memory.experiments.results.records import read_results


def blocks(folder: Path, figures: Path | None = None) -> dict[str, str]:
    """What the page shows of each recipe; its figures are drawn where a folder is given."""
    texts: dict[str, list[str]] = {}
    for comparison in compare(read_results([folder]), split_budgets=True):
        texts.setdefault(comparison.recipe, []).extend(_section(comparison))
        if figures is not None:
            draw_all(comparison, figures / _name(comparison))
    return {recipe: "\n".join(parts) for recipe, parts in texts.items()}


def _section(comparison: Comparison) -> Iterable[str]:
    if comparison.told_apart:
        yield f"{comparison.title}:\n"
    yield tables.markdown(tables.result_table(comparison))
    yield tables.caption(comparison) + "\n"
    memory = tables.memory_table(comparison)
    if memory:
        yield "What the memory does at test, and what is left without it:\n"
        yield tables.markdown(memory)
    for end, told in figure_titles(comparison).items():
        yield f"![{told}]({FIGURES}/{_name(comparison)}-{end}.png)\n"


def _name(comparison: Comparison) -> str:
    return f"diagnostics-{comparison.file_name}"


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
