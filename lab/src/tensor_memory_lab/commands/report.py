"""`tensor-memory-lab report PATH …`: tables and a figure of what runs have left."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensor_memory_lab.files import make_folder_of
from tensor_memory_lab.records.figure import figure
from tensor_memory_lab.records.store import frame, read_records
from tensor_memory_lab.records.table import (
    Frame,
    Table,
    caption,
    check_columns,
    column,
    markdown,
    select,
    table,
)
from tensor_memory_lab.records.text import bound_name, label_text, variant_text
from tensor_memory_lab.terminal import print_table
from tensor_memory_lab.wording import counted

FIGURES = (".png", ".svg", ".pdf")
"""What a figure's file may end in."""


def report_command(arguments: Sequence[str]) -> int:
    """Print a table for every recipe among the runs, and draw the figure that is asked for."""
    options = _parser().parse_intermixed_args(arguments)
    if options.figure is not None:
        _check_figure(options.figure)
    elif options.x or options.y:
        raise ValueError("report: expected --figure FILE beside --x and --y, got none; add it")
    chosen = _runs(options)
    tested = chosen["record"].map(lambda record: bool(record["test"]))
    runs = labelled(chosen[tested] if tested.any() else chosen)
    labels = list(dict.fromkeys(runs["label"]))
    if unknown := [name for name in options.less if name not in labels]:
        raise ValueError(
            f"--less: expected one of the methods {', '.join(labels)}, got {', '.join(unknown)}"
        )
    for recipe, some in runs.groupby("recipe", sort=True):
        lines = report_table(
            some, by=options.by, measures=options.measure, less=options.less, split=options.split
        )
        title = _title(str(recipe), some)
        if options.markdown:
            print(f"## {title}\n\n{markdown(lines)}\n{caption(some)}\n")
        else:
            print(title)
            print_table([{n: t.replace("**", "") for n, t in line.items()} for line in lines])
            print(f"{caption(some)}\n")
    if tries := len(chosen) - len(runs):
        print(f"without a test, as tries are, so left out: {counted(tries, 'run')}")
    if left := unfinished_runs([Path(path) for path in options.paths]):
        print(f"without a result, so left out: {', '.join(map(str, left))}")
    if options.figure is not None:
        metric = str(runs["metric"].iloc[0])
        x = options.x or "step"
        y = options.y or f"{'valid' if x == 'step' else options.split or 'test'}.{metric}"
        several = [*options.by, *_settings(runs)]
        several += ["recipe"] if runs["recipe"].nunique() > 1 else []
        panels = [name for name in dict.fromkeys(several) if name != x]
        print(figure(runs, options.figure, x=x, y=y, panels=panels))
    return 0


def report_table(
    runs: Frame,
    *,
    by: Sequence[str] = (),
    measures: Sequence[str] = (),
    less: Sequence[str] = (),
    split: str = "",
) -> Table:
    """The runs of one recipe, a row for each setting and method.

    Args:
        runs: records as `read` gives them.
        by: fields that make rows, besides those that depart from the recipe.
        measures: columns to show besides the task's metric.
        less: methods to show the difference from, seed by seed.
        split: the test split to show; all of them unless given.
    """
    metric = str(runs["metric"].iloc[0])
    splits = dict.fromkeys(name for record in runs["record"] for name in record["test"])
    if split and split not in splits:
        raise ValueError(
            f"--split: expected a test split of {runs['recipe'].iloc[0]} ({', '.join(splits)}), "
            f"got {split}; choose one of them, or other recipes (--where recipe=NAME)"
        )
    shown = [f"{name}.{metric}" for name in splits if split in ("", name)]
    check_columns(runs, [*shown, *measures])
    columns = [column("seeds")]
    columns += [column({"value": v, "title": v if len(shown) > 1 else metric}) for v in shown]
    columns += [column({"value": value, "title": value}) for value in measures]
    columns += [
        column({"value": value, "less": name, "title": f"{_short(value, shown)}less {name}"})
        for name in less
        if (runs["label"] == name).any()  # another recipe's, perhaps
        for value in shown
    ]
    bounds = [f"ceiling.{v.rpartition('.')[0]}" for v in shown]
    bounds = [name for name in bounds if name in runs and runs[name].notna().any()][:1]
    title = bound_name(runs["record"].iloc[0])
    columns += [column({"value": name, "title": title}) for name in bounds]
    columns += [column({"value": name, "kind": "text", "show": "first"}) for name in _tried(runs)]
    columns += [column(name) for name in ("parameters", "state_bytes", "steps_per_second")]
    return table(runs, columns, rows=[*dict.fromkeys((*by, *_settings(runs))), "label"])


def labelled(runs: Frame) -> Frame:
    """The runs, their labels without what all runs of a recipe have alike or was tried for each."""
    alike = {recipe: _alike(some, "variant") for recipe, some in runs.groupby("recipe")}
    labels = []
    for record in runs["record"]:
        left_out = {*alike[record["recipe"]], *record.get("tries", {})}
        variant = {n: v for n, v in record.get("variant", {}).items() if n not in left_out}
        labels.append(label_text({**record, "variant": variant}))
    return runs.assign(label=labels)


def unfinished_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs that have begun and left no result: interrupted, failed or still going."""
    begun = [config.parent for path in paths for config in sorted(path.rglob("config.json"))]
    return [
        folder
        for folder in begun
        if (folder / "metrics.jsonl").exists() and not (folder / "result.json").exists()
    ]


def _check_figure(path: Path) -> None:
    """Refuse a kind of file that cannot be drawn, and make the folder."""
    if path.suffix.lower() not in FIGURES:
        raise ValueError(
            f"--figure: expected a file that ends in {', '.join(FIGURES)}, got {path}; rename it"
        )
    make_folder_of(path, "the figure")


def _runs(options: argparse.Namespace) -> Frame:
    records = read_records(options.paths)
    runs = frame(one for one in records if one["kind"] == "run" and one["finished"])
    if runs.empty:
        raise ValueError(
            f"report: expected records of finished runs, found none in {', '.join(options.paths)}; "
            "`tensor-memory-lab run` and `sweep` leave them when a run ends"
        )
    where: dict[str, list[str | float]] = {}
    for condition in options.where:
        name, equals, value = condition.partition("=")
        if not equals:
            raise ValueError(f"report: expected --where FIELD=VALUE, got {condition!r}")
        where.setdefault(name, []).append(value)
        with suppress(ValueError):  # 3e-4 as 0.0003
            where[name].append(float(value))
    chosen = select(runs, where)
    if chosen.empty:
        raise ValueError(f"report: expected runs with {' '.join(options.where)}, found none")
    return chosen


def _settings(runs: Frame) -> list[str]:
    """Fields in which some of the runs depart from their recipe and from each other."""
    names = dict.fromkeys(n for record in runs["record"] for n in record.get("settings", {}))
    tried = _tried(runs)
    return [n for n in names if n not in tried and runs[n].map(str).nunique() > 1]


def _tried(runs: Frame) -> list[str]:
    """Fields that were tried for every run, each method with its best."""
    tries = [record.get("tries", {}) for record in runs["record"]]
    return [name for name in tries[0] if "." in name and all(name in other for other in tries)]


def _alike(runs: Frame, part: str) -> dict[str, Any]:
    """What a part of all records has in common."""
    first, *others = (record.get(part, {}) for record in runs["record"])
    return {n: v for n, v in first.items() if all(n in o and o[n] == v for o in others)}


def _title(recipe: str, runs: Frame) -> str:
    """The recipe, and how all of the runs depart from it alike."""
    alike = _alike(runs, "settings") | _alike(runs, "variant")
    return f"{recipe} ({variant_text(alike)})" if alike else recipe


def _short(value: str, shown: Sequence[str]) -> str:
    return f"{value} " if len(shown) > 1 else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory-lab report",
        description="A table for every recipe: means over seeds with their 95 % intervals, a row "
        "for each setting and method.",
        epilog="example: tensor-memory-lab report results/diagnostics.jsonl "
        "--where recipe=windowed-binding --less base --figure curves.png",
    )
    add = parser.add_argument
    add("paths", nargs="+", help="studies (results/NAME.jsonl or NAME), or folders of runs")
    add("--where", action="append", default=[], metavar="FIELD=VALUE", help="only such runs")
    add("--by", action="append", default=[], metavar="FIELD", help="rows, panels for this field")
    add("--measure", action="append", default=[], metavar="COLUMN", help="show this column too")
    add("--less", action="append", default=[], metavar="METHOD", help="differences from it by seed")
    add("--split", default="", help="this test split alone")
    add("--markdown", action="store_true", help="Markdown instead of tables for a terminal")
    add("--figure", type=Path, metavar="FILE", help="draw learning curves into a PNG, SVG or PDF")
    add("--x", default="", metavar="COLUMN", help="draw against this instead of steps")
    add("--y", default="", metavar="COLUMN", help="draw this instead of the task's metric")
    return parser
