"""The tables and figures of docs/diagnostics.md, made from the records of runs.

    python -m tensor_memory.experiments.results.diagnostics_page results/diagnostics \\
        docs/diagnostics.md

What stands between `<!-- RECIPE -->` and `<!-- /RECIPE -->` of the page is replaced by the tables
and figures of that recipe; a recipe without records stays as it is, and records without a place are
an error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tensor_memory.experiments.results import plots, tables
from tensor_memory.experiments.results.comparison import Comparison, Record, compare
from tensor_memory.experiments.results.records import read_results
from tensor_memory.experiments.results.vision_page import fill
from tensor_memory.experiments.results.wording import listing
from tensor_memory.files import write_whole

FIGURES = "images"
"""Folder of the figures, beside the page."""


def blocks(records: Sequence[Record]) -> dict[str, str]:
    """What the page shows of each recipe: tables, captions, links to figures."""
    texts: dict[str, list[str]] = {}
    for comparison in compare(records, split_budgets=True):
        texts.setdefault(comparison.recipe, []).extend(_section(comparison))
    return {recipe: "\n".join(parts) for recipe, parts in texts.items()}


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every figure that `blocks` links to; the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for comparison in compare(records, split_budgets=True):
        written += plots.draw_curves(comparison, folder / f"{_name(comparison)}-curves")
        for field in plots.swept_fields(comparison):
            path = folder / f"{_name(comparison)}-{_short(field)}"
            written += plots.draw_sweep(comparison, field, path)
    return written


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
    """Fill a page from a folder of results."""
    parser = argparse.ArgumentParser(
        prog="python -m tensor_memory.experiments.results.diagnostics_page",
        description="Fill the tables and figures of the diagnostics page from results.",
    )
    parser.add_argument("results", type=Path, help="folder with results of runs")
    parser.add_argument("page", type=Path, help="Markdown file with marked places")
    options = parser.parse_args(argv)
    records = read_results([options.results])
    texts = blocks(records)
    filled = fill(options.page.read_text(encoding="utf-8"), texts)
    draw(records, options.page.parent / FIGURES)

    def write(at: Path) -> None:
        at.write_text(filled, encoding="utf-8")

    write_whole(options.page, write)
    print(f"{options.page}: filled {listing(list(texts)) or 'nothing'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
