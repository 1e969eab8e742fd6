"""Grids of runs: the product of `--over` values, or the stages of a plan file.

A plan is TOML or JSON, its stages done in the order of the file:

    timeout = 600                        # seconds a run may take; a stage may say otherwise
    [[stage]]
    recipes = ["windowed-binding", "windowed-map"]
    set = { "budget.steps" = 4000 }
    over = { "model.method" = ["base", "tensor"], "seed" = [0, 1, 2] }
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensor_memory_lab.commands.arguments import RunSettings, apply_flags
from tensor_memory_lab.files import read_json
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import run_name
from tensor_memory_lab.records.config import PLACES
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks.synthetic import DrawnConfig

Over = Mapping[str, Sequence[Any]]
"""Values per field, the field as in its flag: `model.method`, `seed`."""


@dataclass(frozen=True)
class Stage:
    """Some recipes, the product of some values, and flags that all of its runs get."""

    recipes: Sequence[str]
    over: Over = field(default_factory=dict)
    flags: Sequence[str] = ()
    timeout: float | None = None
    """Seconds after which a run is ended and counts as failed."""
    where: str = ""
    """The plan and the number in it, for messages; empty for a grid of the command line."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid."""

    config: RunConfig[Any, Any]
    changes: tuple[str, ...]
    """What tells it from the others, as `field=value`."""
    timeout: float | None = None

    @property
    def name(self) -> str:
        """The name of its folder and of its result."""
        return run_name(self.config)

    @property
    def work(self) -> int:
        """What its time is guessed from."""
        return training_work(self.config)


STEP = 3000
"""Tokens whose time a step of a drawn task takes beside that of its own: launches. Fitted to runs
of 1,792 to 18,944 tokens per step, 12 at once on one H200: 11 % off, from one to another."""


def training_work(config: RunConfig[Any, Any]) -> int:
    """What training takes, in tokens; in rows, where a task does not say how long they are.

    >>> from tensor_memory_lab.recipes.binding import binding
    >>> training_work(binding())  # 2,000 steps of 128 rows of 20 writes and 4 queries
    12144000
    """
    steps, rows = config.budget.steps, config.budget.batch_size
    drawn = isinstance(config.task, DrawnConfig)  # others read data to be built
    return steps * (rows * config.task.build(config.seed).length + STEP if drawn else rows)


def parse_over(texts: Iterable[str]) -> dict[str, list[str]]:
    """The values of `--over field=a,b` arguments.

    >>> parse_over(["model.method=base,tensor", "model.memory.grid=4 4 4,6 6 6"])
    {'model.method': ['base', 'tensor'], 'model.memory.grid': ['4 4 4', '6 6 6']}
    """
    over: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        found = [value.strip() for value in values.split(",")]
        if not equals or not name or not all(found):
            raise ValueError(
                f"--over: expected field=value,value such as seed=0,1,2, got {text!r}; "
                "quote values that hold spaces"
            )
        if _field(name) in map(_field, over):
            raise ValueError(f"--over {name}: expected each field once, got it twice")
        over[name.lstrip("-")] = found
    return over


def _field(flag: str) -> str:
    """The field that a flag or a key of `over` names, however it is written.

    >>> _field("--data_dir=here") == _field("task.data-dir")  # the task's may go without its group
    True
    """
    return flag.lstrip("-").partition("=")[0].replace("_", "-").removeprefix("task.")


def expand(stages: Sequence[Stage]) -> list[PlannedRun]:
    """The runs of all stages in their order, the longest first within one, each once.

    A run that an earlier stage has already is left out (the baseline of several ablations).
    """
    runs: dict[str, PlannedRun] = {}
    for stage in stages:
        _refuse_fixed_and_varied(stage)
        planned = [run for name in stage.recipes for run in _runs(name, stage)]
        # The sort is stable: equal ones keep their order.
        for run in sorted(planned, key=lambda run: -run.work):
            first = runs.setdefault(run.name, run)
            if first.config != run.config:
                raise ValueError(
                    f"{run.name}: expected runs that differ in more than where their data lies, "
                    f"got {first.config.task} and {run.config.task}; use two output folders"
                )
    return list(runs.values())


def _refuse_fixed_and_varied(stage: Stage) -> None:
    fixed = {_field(flag) for flag in stage.flags if flag.startswith("--")}
    for name in stage.over:
        if _field(name) in fixed:
            where = f"{stage.where}: " if stage.where else ""
            raise ValueError(
                f"{where}{name}: expected a value for all runs or several to go over, got both; "
                f"leave out --{_field(name)}, or what goes over it"
            )


def _runs(name: str, stage: Stage) -> Iterable[PlannedRun]:
    try:
        config = find_recipe(name)()
    except ValueError as error:
        if not stage.where:
            raise
        raise ValueError(f"{stage.where}: {error}") from error
    filled: dict[tuple[str, ...], RunConfig[Any, Any]] = {}
    for values in itertools.product(*stage.over.values()):
        chosen = dict(zip(stage.over, values, strict=True))
        # Flags take tens of milliseconds: once for all seeds.
        seed = chosen.get("seed") if _text(chosen.get("seed")).isdecimal() else None
        varied = [item for item in chosen.items() if item[0] != "seed" or seed is None]
        flags = tuple(flag for field, value in varied for flag in _flag(field, value))
        if flags not in filled:
            filled[flags] = _filled(config, [*stage.flags, *flags], stage, name)
        run = filled[flags] if seed is None else replace(filled[flags], seed=int(seed))
        changes = tuple(f"{field}={_text(value)}" for field, value in chosen.items())
        yield PlannedRun(run, changes, stage.timeout)


def _filled(
    config: RunConfig[Any, Any], flags: Sequence[str], stage: Stage, name: str
) -> RunConfig[Any, Any]:
    """A recipe's config with the flags of one of its runs."""
    with _told_where(stage, name):
        # `run`, since its --help is the one that shows a recipe's fields.
        filled, settings = apply_flags(config, flags, prog=f"tensor-memory run {name}")
    if settings != RunSettings():
        raise ValueError(
            "sweep: expected fields of the runs' config, got --resume, --from-previous or "
            "--quiet, which are flags of `run`; a sweep resumes what is unfinished by itself, "
            "and a run whose last checkpoint is broken is continued by `tensor-memory run` "
            "with its fields, --output FOLDER and --resume --from-previous"
        )
    return filled


@contextlib.contextmanager
def _told_where(stage: Stage, name: str) -> Iterator[None]:
    """Below what is wrong with a flag: the stage of a plan that it may have come from."""
    try:
        yield
    except SystemExit:
        if stage.where:
            print(
                f"{stage.where}: expected fields of {name}, got what is named above; mend the "
                "stage's set or over, or the flags beside --plan",
                file=sys.stderr,
            )
        raise


def _flag(field: str, value: Any) -> list[str]:
    """A field and its value as on the command line of `run`."""
    if _text(value).lower() in ("true", "false"):
        group, dot, name = field.rpartition(".")
        return [f"--{group}{dot}{'' if _text(value).lower() == 'true' else 'no-'}{name}"]
    place = field.rpartition(".")[2].replace("-", "_") in PLACES  # a path may hold blanks
    return [f"--{field}", *([_text(value)] if place else _text(value).split())]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value)


def read_plan(path: str | Path, flags: Sequence[str] = ()) -> list[Stage]:
    """The stages of a TOML or JSON plan; `flags` are added to every run."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a plan in TOML or JSON")
    try:
        plan = (
            read_json(path, "a plan", "mend it there")
            if path.suffix == ".json"
            else tomllib.loads(path.read_text(encoding="utf-8"))
        )
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"{path}: expected a plan as TOML, or as JSON in a .json file ({error}); mend it there"
        ) from error
    _check_keys(plan, ("stage", "timeout"), str(path))
    stages = plan.get("stage")
    if not isinstance(stages, list) or not stages:
        raise ValueError(f"{path}: expected at least one [[stage]], got {stages!r}")
    return [
        _stage(values, f"{path}, stage {number}", plan.get("timeout"), flags)
        for number, values in enumerate(stages, start=1)
    ]


def _stage(values: Any, where: str, timeout: float | None, flags: Sequence[str]) -> Stage:
    if not isinstance(values, dict):
        raise ValueError(f"{where}: expected a table, got {values!r}")
    _check_keys(values, ("recipes", "set", "over", "timeout"), where)
    recipes, over = values.get("recipes"), values.get("over", {})
    fixed, timeout = values.get("set", {}), values.get("timeout", timeout)
    for name, table in (("set", fixed), ("over", over)):
        if not isinstance(table, dict):
            raise ValueError(f"{where}: expected a table for {name!r}, got {table!r}")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise ValueError(f"{where}: expected timeout in seconds, got {timeout!r}")
    if isinstance(recipes, str):
        recipes = [recipes]
    if not isinstance(recipes, list) or not recipes or any(type(r) is not str for r in recipes):
        raise ValueError(f'{where}: expected recipes = ["name", ...], got {recipes!r}')
    for name, options in over.items():
        if not isinstance(options, list) or not options:
            raise ValueError(f"{where}: expected a list of values for {name!r}, got {options!r}")
    set_flags = [flag for name, value in fixed.items() for flag in _flag(name, value)]
    return Stage(recipes, over, [*set_flags, *flags], timeout, where)


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(
                f"{where}: unknown key {name!r}; did you mean {near[0]!r}? "
                f"known are {', '.join(known)}"
            )
