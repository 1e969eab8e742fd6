"""`tensor-memory-lab positions RUN_FOLDER …`: loss against position in a text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tensor_memory_lab.commands.option_types import count
from tensor_memory_lab.files import make_folder_of
from tensor_memory_lab.terminal import print_table
from tensor_memory_lab.wording import counted


def positions_command(arguments: Sequence[str]) -> int:
    """Measure every run, write a record of each and one figure of all."""
    options = _parser().parse_args(arguments)
    # Imported here, since torch takes seconds: --help is told at once.
    import torch

    from tensor_memory_lab.language_runs import load_text_run, loss_by_position
    from tensor_memory_lab.records import append
    from tensor_memory_lab.records.figure import figure
    from tensor_memory_lab.records.store import check_study, frame, parts
    from tensor_memory_lab.records.table import column, table
    from tensor_memory_lab.train.processes import find_device

    device = find_device(options.device)
    records = []
    for folder in options.folders:
        config, vocabulary, model, step = load_text_run(
            folder, options.which, device=device, carried=True
        )
        make_folder_of(options.output, "positions")  # now, not after everything is measured
        check_study(options.output)
        given = config.task
        if options.data_dir is not None:
            given = replace(given, data_dir=str(options.data_dir))
        task = given.build(config.seed).to(torch.device(device))
        if task.vocabulary != vocabulary:
            raise ValueError(
                f"{folder}: expected the text this run was trained on, got one with other words; "
                "name its folder with --data-dir"
            )
        record = loss_by_position(
            config, task, model, step=step, windows=options.times, size=options.rows
        )
        append(options.output, record)
        records.append(record)
    windows = frame(part for record in records for part in parts(record, "windows.*"))
    ends = windows[windows["history"].isin([0, windows["history"].max()])]
    print_table(table(ends, [column("loss")], rows=["label", "seed"], across="history"))
    drawn = figure(windows, options.output.with_suffix(".png"), x="history", y="loss")
    print(f"{counted(len(records), 'run')}, written to {options.output}; figure {drawn}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory-lab positions",
        description="Loss against position in the test text, up to many times the training length, "
        "the state carried from window to window. The same tokens are scored at every distance. "
        "Writes a line of JSON per run and one figure.",
    )
    add = parser.add_argument
    runs = "language runs with checkpoints"
    add("folders", nargs="+", type=Path, metavar="run_folder", help=runs)
    times = "read up to N windows in a row, each as long as in training (default 16)"
    add("--times", type=count, default=16, metavar="N", help=times)
    rows = (
        "windows in one batch; the whole text is read in any case, so that N costs memory and "
        "saves time (default 32)"
    )
    add("--rows", type=count, default=32, metavar="N", help=rows)
    moved = "the text, where it has moved since training"
    add("--data-dir", type=Path, metavar="FOLDER", help=moved)
    output = "gets a line per run, the figure goes beside it (default positions.jsonl)"
    add("--output", type=Path, default=Path("positions.jsonl"), metavar="FILE", help=output)
    add("--which", choices=("best", "last"), default="best", help="checkpoint (default best)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, … (default auto)")
    return parser
