"""Tries: every method gets the same number of them, and the best on "valid" goes on.

A stage of a plan may name values to try and how long the runs that count should train:

    [[stage]]
    recipes = ["world"]
    over = { "model.method" = ["place", "linear"], seed = [1, 2, 3] }
    tries = { "optimizer.lr" = [1e-3, 3e-3] }
    seconds = 20

Each combination of `over` but the seed is first run with every value, with seed 0 and without its
test splits. The value with the best metric on "valid" is taken for the runs of `over`, whose
records say what was tried. Settings in `tried = { ... }` are those of the tries and not of the runs
that count: other worlds may take the rates that were best in the plain one. With `seconds` the
steps of the runs that count are as many as take that long, by the time of a step in a short run
that had the device to itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensor_memory_lab.commands.arguments import CONFIG_FIELDS
from tensor_memory_lab.commands.grid import PlannedRun, Stage, expand, field_name
from tensor_memory_lab.records import config_from_dict

Record = Mapping[str, Any]
Find = Callable[[PlannedRun], Record | None]
"""The record of a run that has finished, or None."""

SEED = 0
"""Of all tries: the runs that count have others, so that the choice favours none of them."""
TIMED_STEPS = 200
"""Steps of a short run that tells the time of a step."""
ROUND_STEPS = 50
"""Steps are a multiple of this: a time is not known more exactly."""


def check_stages(stages: Iterable[Stage]) -> None:
    """Raise where a choice would replace a value that a stage gives, or favour one of its seeds."""
    for stage in stages:
        where = stage.where or "sweep"
        over = set(map(field_name, stage.over))
        for name in stage.tries:
            if field_name(name) in over:
                raise ValueError(
                    f"{where}: {name}: expected it in over or in tries, got it in both; leave it "
                    "out of one of them"
                )
            if name in ("seed", "budget.test"):
                raise ValueError(
                    f"{where}: expected a field to choose a value of, got {name} in tries, which "
                    f"all have seed {SEED} and no test; leave it out of tries"
                )
        fixed = {field_name(flag) for flag in stage.flags if flag.startswith("--")}
        if stage.seconds and "budget.steps" in (*over, *stage.tries, *fixed):
            raise ValueError(
                f"{where}: expected budget.steps or seconds, got both; leave one of them out"
            )
        seeds = [str(seed) for seed in stage.over.get("seed", ())]
        if stage.tries and (not seeds or any(s.isdecimal() and int(s) == SEED for s in seeds)):
            raise ValueError(
                f"{where}: expected seeds other than {SEED} in over, since the tries have that one,"
                f" got {', '.join(seeds) or 'none'}; go over seeds such as 1, 2 and 3"
            )


def in_lots(stages: list[Stage]) -> list[list[Stage]]:
    """Stages that are run together: those after each other that choose nothing, each other alone.

    A sweep that is cut off has then done what its plan names first, from the tries to the end.
    """
    groups = itertools.groupby(
        enumerate(stages), key=lambda item: item[0] if _chooses(item[1]) else -1
    )
    return [[stage for _, stage in group] for _, group in groups]


def first_runs(stages: list[Stage]) -> list[PlannedRun]:
    """All that can be run before anything is chosen: tries, and stages that try nothing."""
    return expand([_tried(s) if s.tries else s for s in stages if s.tries or not _chooses(s)])


def timing_runs(stages: list[Stage]) -> list[PlannedRun]:
    """Short runs of what is to train for a given time; each must have the device to itself."""
    return expand([_timed(stage) for stage in stages if stage.seconds])


def wrong_timing(run: PlannedRun, record: Record) -> str | None:
    """Why a record does not tell the time of a step of a run, whose name leaves the speed out."""
    speed, shared = config_from_dict(record["config"]).speed, record.get("shared_device")
    if speed == run.config.speed and not shared:
        return None
    return (
        f"{run.name}: expected the time of a step with --speed {run.config.speed} on a device of "
        f"its own, got a record with --speed {speed}{' on a shared device' if shared else ''}"
    )


def chosen_runs(stages: list[Stage], find: Find) -> tuple[list[PlannedRun], list[str]]:
    """The runs that count, seed by seed, and a line for each combination that has no choice."""
    found, missing = [], []
    for stage in stages:
        for part in _combinations(stage) if _chooses(stage) else ():
            try:
                found.append(_choose(part, find))
            except LookupError as error:
                missing.append(str(error))
    runs = expand(found)
    return sorted(runs, key=lambda run: run.config.seed), missing


def _chooses(stage: Stage) -> bool:
    return bool(stage.tries or stage.seconds)


def _combinations(stage: Stage) -> Iterator[Stage]:
    """A stage for each recipe and each combination of its values but the seed."""
    varied = [name for name in stage.over if name != "seed"]
    seeds = {name: stage.over[name] for name in stage.over if name == "seed"}
    for recipe in stage.recipes:
        for values in itertools.product(*(stage.over[name] for name in varied)):
            fixed = {name: [value] for name, value in zip(varied, values, strict=True)}
            yield replace(stage, recipes=[recipe], over=fixed | seeds)


def _tried(stage: Stage) -> Stage:
    # All methods with the first value, then with the next: what runs side by side at the start
    # then compiles different code, and later runs find theirs compiled.
    over = dict(stage.tries) | dict(stage.over) | {"seed": [SEED]}
    flags = stage.flags if stage.tried is None else stage.tried
    over |= {"budget.test": ["False"]}  # whatever the runs that count do
    flags = _without(flags, {"budget.test"})
    # Of a run that is dropped, the choice would take the next one's value.
    return replace(stage, over=over, flags=flags, tries={}, tried=None, seconds=None, distinct=True)


def _timed(stage: Stage) -> Stage:
    short = {"budget.steps": [TIMED_STEPS], "budget.evaluate-every": [TIMED_STEPS]}
    short |= {"seed": [SEED], "budget.test": ["False"]}
    flags = _without(stage.flags, short)
    return replace(stage, over=dict(stage.over) | short, flags=flags, tries={}, seconds=None)


def _without(flags: Sequence[str], fields: Collection[str]) -> list[str]:
    """Flags but those of these fields, the words of their values among them."""
    kept, dropped = [], False
    for word in flags:
        if word.startswith("--"):
            dropped = field_name(word) in fields
        kept += [] if dropped else [word]
    return kept


def _choose(stage: Stage, find: Find) -> Stage:
    """A stage of one combination with the best of its tries, and steps for its seconds."""
    over: dict[str, Any] = dict(stage.over)
    told: dict[str, Any] = {}
    if stage.tries:
        runs = expand([_tried(stage)])
        known = {run.name: find(run) for run in runs}
        records = [record for record in known.values() if record is not None]
        if len(records) < len(runs):
            missing = [name for name, record in known.items() if record is None]
            raise LookupError(
                f"{', '.join(missing)}: a choice needs all {len(runs)} tries, and these have not "
                "finished; start the same sweep again to make them"
            )
        scores = [_score(record) for record in records]
        best = max(range(len(runs)), key=lambda i: scores[i])
        if scores[best] == -math.inf:
            raise LookupError(f"{runs[0].name}: expected a number on valid, got none of all tries")
        values = list(itertools.product(*stage.tries.values()))
        over |= {name: [value] for name, value in zip(stage.tries, values[best], strict=True)}
        # As records and tables call the field, however the flag was written.
        names = [n.replace("-", "_") for n in stage.tries]
        names = [n if "." in n or n in CONFIG_FIELDS else f"task.{n}" for n in names]
        told = {name: [v[i] for v in values] for i, name in enumerate(names)}
        told["valid"] = [_valid(record) for record in records]
        told["seed"] = SEED
        if stage.tried is not None:
            told["runs"] = [run.name for run in runs]
    if stage.seconds:
        (run,) = expand([_timed(stage)])
        record = find(run)
        if record is None or not record.get("step_ms"):
            raise LookupError(f"{run.name}: expected a run that tells the time of a step, got none")
        if wrong := wrong_timing(run, record):
            raise LookupError(wrong)
        steps = 1000 * stage.seconds / record["step_ms"] / ROUND_STEPS
        over["budget.steps"] = [max(round(steps), 1) * ROUND_STEPS]
        told |= {"seconds": stage.seconds, "step_ms": record["step_ms"]}
    return replace(stage, over=over, tries={}, seconds=None, told=told)


def _valid(record: Record) -> float | None:
    return (record.get("valid") or {}).get(record["metric"])


def _score(record: Record) -> float:
    """What the best try has most of; a try that diverged has least."""
    value = _valid(record)
    if value is None or math.isnan(value):
        return -math.inf
    return value if record["higher_is_better"] else -value
