"""`tensor-memory report PATH …`: tables and figures of what runs have left."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tensor_memory_lab.commands.run import make_folder
from tensor_memory_lab.records import read_results
from tensor_memory_lab.records.report import write_report
from tensor_memory_lab.records.wording import listing
from tensor_memory_lab.wording import counted


def report_command(arguments: Sequence[str]) -> int:
    """Write the report of the runs in files and folders, and print it."""
    options = _parser().parse_args(arguments)
    records, unfinished = read_results(options.paths), unfinished_runs(options.paths)
    if not records:
        raise ValueError(
            f"report: expected results of runs, found none in {listing(options.paths)}; "
            "`tensor-memory run` and `sweep` write them, when a run ends"
            + (f" ({_left_out(unfinished)})" if unfinished else "")
        )
    make_folder(options.output, "the report")
    text = write_report(
        records,
        options.output,
        split_budgets=options.split_budgets,
        measures=options.measure,
        title=options.title,
        note=_left_out(unfinished) if unfinished else "",
    )
    print(text)
    if unfinished:
        print(_left_out(unfinished))
    print(f"{counted(len(records), 'run')}, written to {options.output / 'report.md'}")
    return 0


def unfinished_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs that have begun and left no result: interrupted, failed or still going."""
    begun = [config.parent for path in paths for config in sorted(path.rglob("config.json"))]
    return [
        folder
        for folder in begun
        if (folder / "metrics.jsonl").exists() and not (folder / "result.json").exists()
    ]


def _left_out(folders: Sequence[Path]) -> str:
    left = counted(len(folders), "run without a result is", "runs without a result are")
    return f"{left} left out, interrupted, failed or still going: {listing(folders)}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory report",
        description="Tables with means and 95 % intervals over seeds, learning curves, and plots "
        "over swept fields, one section per recipe. Runs of different budgets are not mixed.",
    )
    parser.add_argument("paths", nargs="+", type=Path, help="result files, or folders of them")
    parser.add_argument(
        "--output", type=Path, default=Path("report"), help="folder to write (default report)"
    )
    parser.add_argument(
        "--split-budgets",
        action="store_true",
        help="where budget or optimiser differ: one table each, instead of an error",
    )
    parser.add_argument(
        "--measure",
        action="append",
        default=[],
        help="show this measure besides the task's metric; may be repeated",
    )
    parser.add_argument("--title", default="Results", help="heading of the report")
    return parser
