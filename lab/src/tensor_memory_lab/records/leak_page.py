"""The tables and figures of docs/leak.md, made from the records of runs.

    python -m tensor_memory_lab.records.leak_page results docs/leak.md

The folder holds `leak-demo` (throws of a die) and `language/leak` (WikiText-2). Each run was scored
in whole windows (`test`), at some tokens of them (`test@window`), and at the same tokens with
everything after them cut off (`test@prefix`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensor_memory_lab.records.comparison import Comparison, Row, compare
from tensor_memory_lab.records.language_rows import planned_runs
from tensor_memory_lab.records.pages import fill_page
from tensor_memory_lab.records.planned import NOT_RUN
from tensor_memory_lab.records.plots import (
    GREY,
    LOOKS,
    ORANGE,
    OTHERS,
    _figure,
    _legend,
    _save,
)
from tensor_memory_lab.records.records import read_finished
from tensor_memory_lab.records.tables import Table, caption, markdown
from tensor_memory_lab.records.wording import estimate_text

SPLITS = {
    "test": "all tokens, whole windows",
    "test@window": "some tokens, whole windows",
    "test@prefix": "the same tokens, the future cut off",
}
"""What the three scores are, by the split that holds them."""

SCORE = "score"
FLOOR = "floor of what sees only the past"


def leak_table(comparison: Comparison, planned: Sequence[str] = ()) -> Table:
    """A row per method, a column per way of scoring; the floor where it is known.

    Methods of `planned` that were not run say so.
    """
    table: Table = []
    for row in comparison.rows:
        line = {"method": row.label, "seeds": str(len(row.records))}
        for split, heading in SPLITS.items():
            found = row.measure(split, SCORE)
            line[heading] = "–" if found is None else estimate_text(found, SCORE)
        floor = row.records[0]["ceiling"].get("test")
        if floor is not None:
            line[FLOOR] = f"{floor:.2f}"
        table.append(line)
    ran = {row.method for row in comparison.rows}
    for method in dict.fromkeys(name for name in planned if name not in ran):
        missing = dict.fromkeys(table[0], "–") | {"method": method, "seeds": "0"}
        table.append(missing | {SPLITS["test"]: NOT_RUN})
    return table


def draw_leak(comparison: Comparison, path: Path) -> list[Path]:
    """Left the score while training, a line per run; right the same tokens with and without the
    future, means over seeds."""
    with _figure(2) as (figure, (left, right)):
        figure.set_size_inches(10.5, 3.4)
        for number, row in enumerate(comparison.rows):
            colour, dash, _ = LOOKS.get(row.method, OTHERS[number])
            for index, record in enumerate(row.records):
                points = [entry for entry in record["curve"] if SCORE in (entry["valid"] or {})]
                steps = [entry["step"] for entry in points]
                left.plot(steps, [entry["valid"][SCORE] for entry in points], dash, color=colour,
                          linewidth=1.2, label=row.label if index == 0 else None)  # fmt: skip
        floor = comparison.records[0]["ceiling"].get("test")
        if floor is not None:
            for axis in (left, right):
                axis.axhline(floor, color="#555555", linestyle=(0, (1, 2)), label=FLOOR)
        left.set_xlabel("steps")
        left.set_ylabel("score on valid, whole windows")
        # colours that no method of the left has
        for offset, (split, colour) in enumerate((("test@window", ORANGE), ("test@prefix", GREY))):
            heights = [_mean(row, split) for row in comparison.rows]
            places = [place + 0.38 * (offset - 0.5) for place in range(len(heights))]
            bars = right.bar(places, heights, 0.36, color=colour, label=SPLITS[split])
            right.bar_label(bars, fmt="%.3g", fontsize=8)
        names = [row.label.replace(" (", "\n(") for row in comparison.rows]
        right.set_xticks(range(len(names)), names)
        right.set_ylabel("score on test")
        for axis in (left, right):
            axis.set_yscale("log")
            axis.set_ylim(bottom=1)
            axis.yaxis.set_major_formatter("{x:g}")
        if left.get_ylim()[1] < 20:  # with several decades the labels would lie on each other
            left.yaxis.set_minor_formatter("{x:g}")
        right.set_ylim(top=1.5 * right.get_ylim()[1])  # room for the number above a bar
        _legend(figure, [left, right])
        return _save(figure, path)


def blocks(folder: Path, figures: Path) -> dict[str, str]:
    """Markdown by the name of its place in the page, of what there are records for."""
    texts: dict[str, str] = {}
    for name, where in (("dice", "leak-demo"), ("wikitext", "language/leak")):
        records = read_finished(folder / where)
        if not records:
            continue
        (comparison,) = compare(records)
        plan = folder.parent / "grids" / "language-5-leak.toml"
        wanted = planned_runs(plan, "language-leak") if name == "wikitext" else []
        planned = [run["method"] for run in wanted]
        files = draw_leak(comparison, figures / f"leak-{name}")
        texts[name] = (
            f"![Scores with the future and without it](images/{files[0].name})\n\n"
            f"{markdown(leak_table(comparison, planned))}\n{caption(comparison)}\n"
        )
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the page from a folder of results."""
    return fill_page(
        argv,
        blocks,
        module="tensor_memory_lab.records.leak_page",
        results="leak-demo and language/leak",
    )


def _mean(row: Row, split: str) -> float:
    found = row.measure(split, SCORE)
    return float("nan") if found is None else found.mean


if __name__ == "__main__":
    raise SystemExit(main())
