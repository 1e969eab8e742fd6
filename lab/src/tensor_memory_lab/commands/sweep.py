"""`tensor-memory-lab sweep`: a grid of runs, many at once or on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.commands.option_types import count, seconds
from tensor_memory_lab.commands.run import RUNS


def sweep_command(arguments: Sequence[str]) -> int:
    """Run a grid; 0 when all of it is done, 1 when a run failed, 130 when interrupted."""
    split = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    options, flags = _parser().parse_known_args(arguments[split:])
    # Imported here, since torch takes seconds: --help is told at once.
    from tensor_memory_lab.commands.sweep_runs import do_sweep

    return do_sweep(arguments[:split], flags, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory-lab sweep",
        usage="tensor-memory-lab sweep RECIPE [RECIPE ...] [--over field=a,b ...] "
        "[--field value ...]\n       tensor-memory-lab sweep --plan FILE [--field value ...]",
        description="Run a grid. Finished runs are skipped and unfinished ones resumed, so the "
        "same command continues after a crash. Fields are those of `tensor-memory-lab run RECIPE "
        "--help`; given plainly they apply to every run.",
        epilog="example: tensor-memory-lab sweep binding --over model.method=base,tensor "
        "--over seed=0,1,2 --budget.steps 500 --jobs 2 --results results/binding.jsonl",
        allow_abbrev=False,
    )
    add = parser.add_argument
    several: Any = {"action": "append", "metavar": "FIELD=A,B"}
    over = (
        "values of one field; several make a grid. A value of several numbers is written with "
        "spaces: 'model.memory.grid=4 4 4,6 6 6'"
    )
    add("--over", **several, default=[], help=over)
    tries = (
        "values of which every combination gets the best, tried with seed 0 and chosen on the "
        "validation split; needs other seeds (--over seed=1,2,3). Their records in --results say "
        "what was tried"
    )
    add("--tries", **several, default=[], help=tries)
    add("--plan", type=Path, help="a TOML file with stages of grids")
    stage = "a stage of the plan, counted from 1, and no others; may be repeated"
    add("--stage", type=count, action="append", default=[], metavar="NUMBER", help=stage)
    jobs = (
        "runs at once (default 1, on a cluster all); on a shared device their timings are marked "
        "as such"
    )
    add("--jobs", type=count, help=jobs)
    slurm = (
        "run as jobs of this SLURM partition, with one GPU each unless --device is cpu; sbatch "
        "takes everything else from its environment (SBATCH_ACCOUNT, …)"
    )
    add("--slurm", metavar="PARTITION", help=slurm)
    add("--dry-run", action="store_true", help="list the runs and which of them are finished")
    add("--timeout", type=seconds, help="seconds that one run may take")
    add("--output", type=Path, default=RUNS, help="parent of the run folders (default runs)")
    results = "a study's file, which gets a line for every finished run (results/NAME.jsonl)"
    add("--results", type=Path, help=results)
    where = "where to run; cuda:0,cuda:1 spreads the jobs over two"
    add("--device", default="auto", help=where)
    add("--tracker", action="append", default=[], help="log to this tracker; may be repeated")
    add("--keep-checkpoints", action="store_true", help="do not drop those of finished runs")
    return parser
