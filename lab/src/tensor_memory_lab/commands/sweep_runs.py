"""The runs of a sweep: which of them are finished, doing the others, what became of each."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensor_memory_lab.commands.grid import PlannedRun, Stage, parse_over, read_plan
from tensor_memory_lab.commands.jobs import Ended, Job, do_jobs
from tensor_memory_lab.commands.tries import (
    check_stages,
    chosen_runs,
    first_runs,
    in_lots,
    timing_runs,
    wrong_timing,
)
from tensor_memory_lab.files import make_folder, make_folder_of
from tensor_memory_lab.interruption import terminated_as_interrupted
from tensor_memory_lab.progress import progress
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import (
    append,
    config_from_dict,
    read_records,
    read_result,
    run_name,
)
from tensor_memory_lab.records.store import check_study, finite, replace_tries
from tensor_memory_lab.records.text import split_text
from tensor_memory_lab.terminal import print_table
from tensor_memory_lab.train.processes import find_device
from tensor_memory_lab.wording import counted


def do_sweep(recipes: Sequence[str], flags: Sequence[str], options: argparse.Namespace) -> int:
    """Do the runs that are not finished; the exit status."""
    lots = in_lots(_stages(recipes, flags, options))
    before = [(timing_runs(lot), first_runs(lot)) for lot in lots]  # a typo is told before all runs

    def find(run: PlannedRun) -> dict[str, Any] | None:
        return _read_finished(options.output / run.name) or known.get(run.name)

    known = _finished_records(options.results)
    for run in (run for timing, _ in before for run in timing):
        _check_timing(run, options, known)
    if options.dry_run:
        chosen = [chosen_runs(lot, find) for lot in lots]
        rounds = [
            (*timing, *first, *found)
            for (timing, first), (found, _) in zip(before, chosen, strict=True)
        ]
        runs = {run.name: run for part in rounds for run in part}
        _show(list(runs.values()), options, known)
        if waiting := sum(len(missing) for _, missing in chosen):
            told = counted(waiting, "combination has", "combinations have")
            print(f"{told} tries to finish first; the runs that count are listed when they have")
        return 0
    if options.slurm is not None and shutil.which("srun") is None:
        raise ValueError(
            "--slurm: expected a machine that has srun and sbatch, got none; start the sweep on "
            "the cluster's login node, or leave --slurm out"
        )
    if options.slurm is None:
        for device in options.device.split(","):
            find_device(device)  # wrong for one run is wrong for all
    make_folder(options.output, "runs")
    if options.results is not None:
        make_folder_of(options.results, "results")
    alone = argparse.Namespace(**vars(options) | {"jobs": 1})
    names: set[str] = set()
    done = skipped = 0
    failures: list[str] = []
    try:
        with terminated_as_interrupted():
            for lot, (timing, first) in zip(lots, before, strict=True):
                for runs, how in ((timing, alone), (first, options), (None, options)):
                    if runs is None:  # what was tried is known now
                        runs, missing = chosen_runs(lot, find)
                        failures += missing
                    runs = [run for run in runs if run.name not in names]
                    names |= {run.name for run in runs}
                    todo = [run for run in runs if _state(run, options.output, known) != "finished"]
                    _complete_study(runs, options, known)
                    skipped += len(runs) - len(todo)
                    if runs:
                        _print_header(todo, len(runs) - len(todo), how)
                    failed = _do(todo, how) if todo else []
                    done += len(todo) - len(failed)
                    failures += failed
    except KeyboardInterrupt:
        print("sweep: interrupted; the same command continues it", file=sys.stderr)
        return 130
    print(f"{counted(done, 'run')} done, {skipped} skipped, {len(failures)} failed")
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


def _check_timing(
    run: PlannedRun, options: argparse.Namespace, known: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise where a finished record stands in the way of a timing run.

    It cannot be made beside that one: its folder has the same name, and a study holds one record
    per config and seed.
    """
    folder = options.output / run.name
    found = {
        str(folder): _read_finished(folder),
        f"its line in {options.results}": known.get(run.name),
    }
    wrong = {place: wrong_timing(run, record) for place, record in found.items() if record}
    places = [place for place, why in wrong.items() if why]
    if places:
        raise ValueError(
            f"{wrong[places[0]]}; delete {' and '.join(places)}, or give another --output and "
            "--results"
        )


def _show(
    runs: Sequence[PlannedRun], options: argparse.Namespace, known: Mapping[str, Any]
) -> None:
    """List runs and which of them are finished."""
    states = [_state(run, options.output, known) for run in runs]
    print_table(
        [
            {"state": state, "run": run.name, "changes": " ".join(run.changes)}
            for run, state in zip(runs, states, strict=True)
        ]
    )
    print(f"{counted(len(runs), 'run')}, {states.count('finished')} of them finished")


def _complete_study(
    runs: Iterable[PlannedRun], options: argparse.Namespace, known: Mapping[str, Any]
) -> None:
    """Add to the study what an earlier sweep may have left in the runs' folders alone.

    The line of a run that is there says the tries of today, unless it says more of them.
    """
    if options.results is None:
        return
    for run in runs:
        there, now = known.get(run.name), finite(dict(run.told))
        if there is not None:
            before = there.get("tries", {})
            # What the tries' runs are called changes with every field that a config gets.
            new = any(before.get(key) != value for key, value in now.items() if key != "runs")
            if new and len(before.get("valid", ())) <= len(now.get("valid", ())):
                replace_tries(options.results, there, now)
        elif (record := _read_finished(options.output / run.name)) is not None:
            append(options.results, record | _told(run))


def _told(run: PlannedRun) -> dict[str, Any]:
    """What a record says of the tries before the run."""
    return {"tries": dict(run.told)} if run.told else {}


def _stages(
    recipes: Sequence[str], flags: Sequence[str], options: argparse.Namespace
) -> list[Stage]:
    if options.plan is not None:
        if recipes or options.over or options.tries:
            raise ValueError(
                "sweep: expected recipes and --over, or --plan, got both; put them into the plan"
            )
        stages = read_plan(options.plan, flags)
        if options.stage and max(options.stage) > len(stages):
            raise ValueError(
                f"--stage: expected one of the {len(stages)} stages of {options.plan}, got "
                f"{max(options.stage)}"
            )
        stages = [stages[number - 1] for number in options.stage] or stages
    elif options.stage:
        raise ValueError("--stage: expected a --plan that it is of")
    elif recipes:
        tries = parse_over(options.tries, "--tries")
        stages = [Stage(recipes, parse_over(options.over), flags, tries=tries)]
    else:
        raise ValueError(
            "sweep: expected the names of recipes first, or --plan; "
            "`tensor-memory-lab sweep --help` shows examples"
        )
    check_stages(stages)
    if options.timeout is not None:
        stages = [replace(stage, timeout=options.timeout) for stage in stages]
    return stages


def _state(run: PlannedRun, output: Path, finished: Iterable[str]) -> str:
    """Whether a run is "finished", "unfinished" (it has been started) or "new"."""
    folder = output / run.name
    if run.name in finished or _read_finished(folder) is not None:
        return "finished"
    return "unfinished" if (folder / "config.json").exists() else "new"


def _read_finished(folder: Path) -> dict[str, Any] | None:
    """The record of a finished run; None where there is none."""
    path = folder / "result.json"
    record = read_result(path) if path.is_file() else None
    return record if record is not None and record["finished"] else None


def _finished_records(results: Path | None) -> dict[str, dict[str, Any]]:
    """The finished runs of a study by the names that they have today."""
    if results is not None:
        check_study(results)
    found = {}
    for record in read_records([results]) if results is not None and results.exists() else []:
        if record["kind"] == "run" and record["finished"]:
            try:
                found[run_name(config_from_dict(record["config"]))] = record
            except (ValueError, TypeError):  # today's classes refuse it: none of this sweep's
                continue
    return found


def _print_header(todo: Sequence[PlannedRun], skipped: int, options: argparse.Namespace) -> None:
    """Say on stderr what will be done, where, and where to look meanwhile."""
    where = f"SLURM partition {options.slurm}" if options.slurm else f"device {options.device}"
    lines = [f"{counted(len(todo), 'run')} to do on {where}, {skipped} finished already"]
    for name in dict.fromkeys(run.arguments[0] for run in todo):
        if expected := find_recipe(name).expected:
            lines.append(f"a run of {name}: {expected}")
    lines.append(f"{options.output}/NAME/metrics.jsonl shows how a run goes, log/ beside it more")
    print("\n".join(lines), file=sys.stderr, flush=True)


def _do(runs: Sequence[PlannedRun], options: argparse.Namespace) -> list[str]:
    """Do the runs; a line for each that failed."""
    devices = options.device.split(",")
    at_once = min(options.jobs or (len(runs) if options.slurm else 1), len(runs))
    flags = [flag for name in options.tracker for flag in ("--tracker", name)]
    flags.append("--keep-checkpoints" if options.keep_checkpoints else "--no-keep-checkpoints")
    if at_once > len(devices) and not options.slurm:
        flags.append("--shared-device")
    jobs = []
    for run in runs:
        folder = options.output / run.name
        arguments = (*run.arguments, "--output", str(folder), "--resume", *flags)
        jobs.append(Job(run.name, arguments, folder / "log", run.timeout))
    told = {run.name: _told(run) for run in runs}
    failures = []
    with progress("sweep", len(jobs), unit="runs") as advance:
        slots = [devices[number % len(devices)] for number in range(at_once)]
        for ended in do_jobs(jobs, devices=slots, slurm=options.slurm):
            failed, line = _outcome(ended, told[ended.job.name], options)
            if failed:
                failures.append(line)
            print(line, flush=True)
            advance(note=f"{len(failures)} failed" if failures else "")
    return failures


def _outcome(
    ended: Ended, told: Mapping[str, Any], options: argparse.Namespace
) -> tuple[bool, str]:
    """Whether a run failed, and a line that says what became of it."""
    name, took = ended.job.name, f"{ended.seconds:.0f} s"
    record = _read_finished(options.output / name)
    if record is None:
        why = ended.last_line()
        if ended.timed_out:
            why = "its time was over; the same command with a longer --timeout continues it"
        elif ended.killed:
            why = f"its process was killed or stopped; the last line of its log: {why}"
        return True, f"{name}: failed after {took}: {why} ({ended.log})"
    if options.results is not None:
        try:
            append(options.results, {**record, **told})
        except (OSError, ValueError) as error:  # the others go on
            why = f"its result could not be added to {options.results} ({error})"
            return True, f"{name}: failed after {took}: {why}; its own folder has it"
    return False, f"{name}: {took}, {_measures(record)}"


def _measures(record: Mapping[str, Any]) -> str:
    metric = record["metric"]
    last = record["curve"][-1].get("valid") if record["curve"] else None  # where none was best
    found = record["test"] or {"valid": record.get("valid") or last or {}}
    return ", ".join(
        f"{split} {metric} {split_text(measures, metric)}" for split, measures in found.items()
    )
