"""The tables and the figure of docs/language.md, made from the records of runs.

    python -m tensor_memory.experiments.results.language_page results/language docs/language.md

The folder holds `fresh` (recipes language and language-paper), `carried` and `search` (recipe
language-carried) and `positions`. What stands between `<!-- NAME -->` and `<!-- /NAME -->` of the
page is replaced; a table without records stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensor_memory.experiments.results.comparison import FUTURE, Record, compare, method_rank
from tensor_memory.experiments.results.gap import (
    PERPLEXITY,
    gap_rows,
    ratio_text,
    share_text,
    step_ms,
)
from tensor_memory.experiments.results.intervals import estimate
from tensor_memory.experiments.results.pages import fill_page
from tensor_memory.experiments.results.paper import published
from tensor_memory.experiments.results.positions import (
    draw_positions,
    positions_table,
    read_positions,
)
from tensor_memory.experiments.results.records import read_results
from tensor_memory.experiments.results.tables import Table, caption, markdown
from tensor_memory.experiments.results.vision_runs import Group, grouped
from tensor_memory.experiments.results.wording import bytes_text, estimate_text


def fresh_table(records: Sequence[Record]) -> Table:
    """The paper's table with causal models: perplexities, counts, time and memory of a step."""
    table = []
    for label, runs in in_order(records):
        paper = published(runs[0], "test", PERPLEXITY)
        table.append(
            {
                "method": label,
                "parameters": f"{runs[0]['parameters']:,}",
                "state": bytes_text(runs[0]["state_bytes"]),
                "seeds": str(len(runs)),
                "valid": _text([run["valid"].get(PERPLEXITY) for run in runs]),
                "test": _measured(runs, "test"),
                "test, memory off": _without_memory(runs),
                "paper": "–" if paper is None else f"{paper.value:.2f}",
                "step": _time(runs),
                "peak memory": _peak(runs),
            }
        )
    return table


def carried_table(records: Sequence[Record]) -> Table:
    """Streams: what is carried, what of the gap it closes, what it costs."""
    return [
        {
            "method": row.label,
            "context": row.runs[0]["labels"].get("context", "–"),
            "state": bytes_text(row.runs[0]["state_bytes"]),
            "seeds": str(len(row.runs)),
            "test": _measured(row.runs, "test"),
            "test, nothing carried": _measured(row.runs, "test@fresh"),
            "gap closed": share_text(row.share),
            "step": _time(row.runs),
            "of local": ratio_text(row.step_ratio),
            "peak memory": _peak(row.runs),
        }
        for row in gap_rows(in_order(records))
    ]


def search_table(records: Sequence[Record]) -> Table:
    """Every variant that was run, by the share of the gap it closes; the best first."""
    rows = gap_rows(in_order(records))
    rows.sort(key=lambda row: (row.window, -(row.share if row.share is not None else -9.0)))
    return [
        {
            "variant": row.label,
            "state": bytes_text(row.runs[0]["state_bytes"]),
            "seeds": str(len(row.runs)),
            "test": _measured(row.runs, "test"),
            "nothing carried": _measured(row.runs, "test@fresh"),
            "memory off": _without_memory(row.runs),
            "gap closed": share_text(row.share),
            "step": _time(row.runs),
            "of local": ratio_text(row.step_ratio),
        }
        for row in rows
    ]


def in_order(records: Sequence[Record]) -> list[Group]:
    """Rows by method, then by what departs from its defaults."""
    groups = [(_named(label, runs), runs) for label, runs in grouped(records)]
    return sorted(groups, key=lambda group: (method_rank(group[1][0]["method"]), group[0]))


def blocks(folder: Path, figures: Path) -> dict[str, str]:
    """Markdown by the name of its place in the page, of what there are records for."""
    texts: dict[str, str] = {}
    fresh = _finished(folder / "fresh")
    for recipe in ("language-paper", "language"):
        runs = [record for record in fresh if record["recipe"] == recipe]
        if runs:
            texts[recipe] = _with_caption(fresh_table(runs), runs)
    if carried := _finished(folder / "carried"):
        texts["carried"] = _with_caption(carried_table(carried), carried)
    if search := _finished(folder / "search"):
        texts["search"] = _with_caption(search_table(search), search)
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
        module="tensor_memory.experiments.results.language_page",
        results="fresh, carried, search and positions",
    )


def _finished(folder: Path) -> list[Record]:
    if not folder.is_dir():
        return []
    return [record for record in read_results([folder]) if record["finished"]]


def _with_caption(table: Table, records: Sequence[Record]) -> str:
    notes = [caption(comparison) for comparison in compare(records, split_budgets=True)]
    return markdown(table) + "\n" + "\n".join(notes) + "\n"


def _named(label: str, runs: Sequence[Record]) -> str:
    return f"{label}, {FUTURE}" if runs[0]["labels"].get("non_causal") else label


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
