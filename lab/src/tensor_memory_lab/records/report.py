"""A folder that shows what runs came to: report.md, one CSV per comparison, figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tensor_memory_lab.files import write_text
from tensor_memory_lab.records import tables
from tensor_memory_lab.records.comparison import Comparison, Record, compare
from tensor_memory_lab.records.figures import draw_all, figure_titles
from tensor_memory_lab.records.gap import gap_table
from tensor_memory_lab.wording import counted


def write_report(
    records: Sequence[Record],
    folder: Path,
    *,
    split_budgets: bool = False,
    measures: Sequence[str] = (),
    title: str = "Results",
    note: str = "",
) -> str:
    """Write the report of these runs into a folder; the Markdown text of report.md.

    Args:
        records: runs as `read_results` gives them.
        folder: made where it does not exist.
        split_budgets: one table per budget where they differ, instead of an error.
        measures: shown besides each task's metric, in the tables that have them.
        title: first line of report.md.
        note: its last line, where there is one.
    """
    comparisons = compare(records, split_budgets=split_budgets)
    if not comparisons:
        raise ValueError(
            f"report: expected at least one finished run, got "
            f"{counted(len(records), 'unfinished one')}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}\n"]
    for comparison in comparisons:
        parts += _section(comparison, folder, measures)
    if note:
        parts.append(f"{note}\n")
    text = "\n".join(parts)
    write_text(folder / "report.md", text)
    return text


def _section(comparison: Comparison, folder: Path, measures: Sequence[str]) -> Iterable[str]:
    name = comparison.file_name
    yield f"## {comparison.title}\n"
    yield tables.markdown(tables.result_table(comparison, measures))
    yield tables.caption(comparison) + "\n"
    closed = gap_table(comparison)
    if closed:
        yield "What is closed of the gap between local and full attention:\n"
        yield tables.markdown(closed)
    memory = tables.memory_table(comparison)
    if memory:
        yield "What the memory does at test, and what is left without it:\n"
        yield tables.markdown(memory)
    write_text(folder / f"{name}.csv", tables.csv_text(comparison))
    draw_all(comparison, folder / name)
    for end, told in figure_titles(comparison).items():
        yield f"![{told}, {comparison.title}]({name}-{end}.png)\n"
