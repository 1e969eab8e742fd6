"""`tensor-memory sweep`: a grid of runs, several at once, finished ones skipped."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensor_memory_lab.commands.arguments import count
from tensor_memory_lab.commands.forecast import forecast
from tensor_memory_lab.commands.grid import (
    PlannedRun,
    Stage,
    expand,
    parse_over,
    read_plan,
)
from tensor_memory_lab.commands.run import RUNS, make_folder, protocol_text
from tensor_memory_lab.commands.workers import Job, Outcome, run_jobs
from tensor_memory_lab.interruption import terminated_as_interrupted
from tensor_memory_lab.progress import progress
from tensor_memory_lab.records import (
    append,
    config_from_dict,
    read_records,
    read_result,
    run_name,
)
from tensor_memory_lab.records.text import measure_text
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.train import RunOptions, train
from tensor_memory_lab.train.processes import find_device
from tensor_memory_lab.wording import counted

Train = Callable[[RunConfig[Any, Any], RunOptions], dict[str, Any]]


def sweep_command(arguments: Sequence[str], *, trainer: Train = train) -> int:
    """Run a grid; 0 when all of it is done, 1 when a run failed, 130 when interrupted."""
    split = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    recipes = list(arguments[:split])
    options, flags = _parser().parse_known_args(arguments[split:])
    stages = _stages(recipes, options, flags)
    runs = expand(stages)
    kept = options.results
    records = read_records([kept]) if kept is not None and kept.exists() else []
    finished = set(_finished_names(records))
    states = {run.name: _state(run, options.output, finished) for run in runs}
    todo = [run for run in runs if states[run.name] != "finished"]
    skipped = len(runs) - len(todo)
    expected = f"{len(todo)} to do with --jobs {options.jobs}: "
    expected += forecast(todo, records, options.jobs)
    if options.dry_run:
        for run in runs:
            print(f"{states[run.name]:<10} {run.name}  {' '.join(run.changes)}".rstrip())
        print(f"{counted(len(runs), 'run')}, {skipped} of them finished")
        print(expected)
        return 0
    for device in options.device.split(","):
        find_device(device)  # wrong for one run is wrong for all
    make_folder(options.output, "runs")
    if options.results is not None:
        make_folder(options.results.parent, "results")
    print(f"{counted(len(runs), 'run')}, {skipped} of them finished already")
    print(f"{expected}; metrics.jsonl in a run's folder tells how it goes", flush=True)
    for run in runs:
        if states[run.name] == "finished" and options.results is not None:
            _copy_result(options.output / run.name, options.results)
    try:
        with terminated_as_interrupted():  # running ones are saved
            failures = _run_all(todo, states, options, trainer)
    except KeyboardInterrupt:
        print("sweep: interrupted; the same command continues it", file=sys.stderr)
        return 130
    done = counted(len(todo) - len(failures), "run")
    print(f"{done} done, {skipped} skipped, {len(failures)} failed")
    for failed in failures:
        print(f"failed: {failed.job.name}: {failed.error}", file=sys.stderr)
    return 1 if failures else 0


def _stages(recipes: list[str], options: argparse.Namespace, flags: list[str]) -> list[Stage]:
    if options.plan is not None:
        if recipes or options.over:
            raise ValueError(
                "sweep: expected recipes and --over, or --plan, got both; put them into the plan"
            )
        stages = read_plan(options.plan, flags)
    elif recipes:
        stages = [Stage(recipes, parse_over(options.over), flags)]
    else:
        raise ValueError(
            "sweep: expected the names of recipes first, or --plan; "
            "`tensor-memory sweep --help` shows examples"
        )
    if options.timeout is not None:
        stages = [replace(stage, timeout=options.timeout) for stage in stages]
    return stages


def _run_all(
    runs: Sequence[PlannedRun],
    states: dict[str, str],
    options: argparse.Namespace,
    trainer: Train,
) -> list[Outcome]:
    """Do the runs; those that failed."""
    if not runs:
        return []
    devices = options.device.split(",")
    workers = min(options.jobs, len(runs))
    settings = RunOptions(
        output=options.output,
        trackers=tuple(options.tracker),
        shared_device=workers > len(devices),
        keep_checkpoints=options.keep_checkpoints,
        quiet=True,
    )
    jobs = [
        Job(
            run.name,
            functools.partial(
                _train_on,
                trainer=trainer,
                config=run.config,
                options=replace(
                    settings,
                    output=options.output / run.name,
                    resume=states[run.name] == "unfinished",
                ),
            ),
            log=options.output / f"{run.name}.log",
            timeout=run.timeout,
        )
        for run in runs
    ]
    failures = []
    with progress("sweep", len(jobs), unit="runs") as advance:
        for ended in map(_judged, run_jobs(jobs, workers=workers, devices=devices)):
            outcome = ended if options.results is None else _kept(ended, options.results)
            if outcome.record is None:
                failures.append(outcome)
            if outcome.record is not None and outcome.job.log.stat().st_size == 0:
                outcome.job.log.unlink()
            print(_line(outcome), flush=True)
            advance(note=f"{len(failures)} failed" if failures else "")
    return failures


def _train_on(
    device: str, *, trainer: Train, config: RunConfig[Any, Any], options: RunOptions
) -> dict[str, Any]:
    return trainer(config, replace(options, device=device))


def _judged(outcome: Outcome) -> Outcome:
    """A run that was told to stop has a record too, but has not been done."""
    if outcome.record is None or outcome.record["finished"]:
        return outcome
    return replace(outcome, record=None, error="interrupted; the same command continues it")


def _kept(outcome: Outcome, results: Path) -> Outcome:
    """A run whose result cannot be copied to the others failed in that, and the others go on."""
    if outcome.record is None:
        return outcome
    try:
        append(results, outcome.record)
    except OSError as error:
        told = f"its result could not be written into {results} ({error}); its own folder has it"
        return replace(outcome, record=None, error=told)
    return outcome


def _line(outcome: Outcome) -> str:
    name, seconds = outcome.job.name, f"{outcome.seconds:.0f} s"
    if outcome.record is None:
        return f"{name}: failed after {seconds}: {outcome.error}"
    tests = "; ".join(
        f"{split} "
        + ", ".join(f"{key} {measure_text(value, key)}" for key, value in measures.items())
        for split, measures in outcome.record["test"].items()
    )
    protocol = protocol_text(outcome.record)
    return f"{name}: {seconds}, {tests}" + (f" ({protocol})" if protocol else "")


def _state(run: PlannedRun, output: Path, finished: set[str]) -> str:
    """Whether a run is "finished", "unfinished" (its folder is there) or "new"."""
    folder = output / run.name
    if run.name in finished or _is_finished(folder / "result.json"):
        return "finished"
    return "unfinished" if folder.exists() else "new"


def _finished_names(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The names that the runs of these records have today, whatever version made them."""
    for record in records:
        if record["finished"]:
            try:
                yield run_name(config_from_dict(record["config"]))
            except ValueError:  # a config that today's classes refuse is nobody's
                continue


def _is_finished(path: Path) -> bool:
    return path.is_file() and read_result(path)["finished"]


def _copy_result(folder: Path, results: Path) -> None:
    """Bring a result that an earlier sweep left in its run folder into the results folder."""
    path = folder / "result.json"
    if path.is_file():
        append(results, read_result(path))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory sweep",
        usage="tensor-memory sweep RECIPE [RECIPE ...] [--over field=a,b ...] [--field value ...]\n"
        "       tensor-memory sweep --plan FILE [--field value ...]",
        description="Run a grid. Finished runs are skipped and unfinished ones resumed, so the "
        "same command continues after a crash. Fields are those of `tensor-memory run RECIPE "
        "--help`; given plainly they apply to every run.",
        epilog="example: tensor-memory sweep binding --over model.method=base,tensor "
        "--over seed=0,1,2 --budget.steps 500 --jobs 2 --results results/binding.jsonl",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="values of one field; several make a grid. A value of several numbers is written "
        "with spaces: 'model.memory.grid=4 4 4,6 6 6'",
    )
    parser.add_argument("--plan", type=Path, help="a TOML or JSON file with stages of grids")
    parser.add_argument(
        "--jobs",
        type=count,
        default=1,
        help="runs at once (default 1); on a shared device their timings are marked as such",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list the runs, which of them are finished and what time the others may take",
    )
    parser.add_argument("--timeout", type=_seconds, help="seconds that one run may take")
    parser.add_argument(
        "--output", type=Path, default=RUNS, help="parent of the run folders (default runs)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="a study's file, which gets a line for every finished run (results/NAME.jsonl)",
    )
    parser.add_argument(
        "--device", default="auto", help="where to run; cuda:0,cuda:1 spreads the jobs over two"
    )
    parser.add_argument(
        "--tracker", action="append", default=[], help="log to this tracker; may be repeated"
    )
    parser.add_argument(
        "--keep-checkpoints", action="store_true", help="do not drop those of finished runs"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # NaN is not
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text}")
    return seconds
