"""Grids of runs: the product of `--over` values, or the stages of a plan file.

A plan is TOML, its stages are done in the order of the file:

    timeout = 600                        # seconds a run may take
    recipes = ["windowed-binding", "windowed-map"]
    over = { seed = [0, 1, 2] }
    [[stage]]
    set = { "budget.steps" = 4000 }
    over = { "model.method" = ["base", "tensor"] }
    tries = { "optimizer.lr" = [1e-3, 3e-3] }   # see `tries`

What stands before the first stage are defaults of all stages. A field that a stage names in a table
replaces the plan's field in the same table; the other fields of the plan's table come after it.
"""

from __future__ import annotations

import difflib
import itertools
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensor_memory_lab.commands.arguments import RunSettings, parse_run
from tensor_memory_lab.recipes import Recipe, find_recipe
from tensor_memory_lab.records import run_name
from tensor_memory_lab.records.config import PLACES
from tensor_memory_lab.run_config import RunConfig

TABLES = ("set", "tried", "over", "tries")
DEFAULTS = ("recipes", *TABLES, "timeout")
"""What a plan may say for all of its stages."""
RECIPES = 'recipes = ["name", ...]'


@dataclass(frozen=True)
class Stage:
    """Some recipes, the product of some values, and flags that all of its runs get."""

    recipes: Sequence[str]
    over: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values per field, the field as in its flag: `model.method`, `seed`."""
    flags: Sequence[str] = ()
    timeout: float | None = None
    """Seconds that a run may take."""
    where: str = ""
    """The plan and the number in it, for messages; empty for a grid of the command line."""
    tries: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of which each combination of `over` gets the best on "valid"."""
    tried: Sequence[str] | None = None
    """The flags of the tries, where they are made in another setting than the runs that count."""
    seconds: float | None = None
    """How long a run should train, in place of the recipe's steps."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What the records of its runs say about what was tried."""
    distinct: bool = False
    """Whether two of its combinations of values may not be the same run."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid."""

    config: RunConfig[Any, Any]
    arguments: tuple[str, ...]
    """What `tensor-memory-lab run` takes to make it: the recipe and the flags."""
    changes: tuple[str, ...]
    """What tells it from the others, as `field=value`."""
    timeout: float | None = None
    told: Mapping[str, Any] = field(default_factory=dict)
    """What its record says about what was tried."""

    @property
    def name(self) -> str:
        """The name of its folder and of its result."""
        return run_name(self.config)


def parse_over(texts: Iterable[str], flag: str = "--over") -> dict[str, list[str]]:
    """The values of `--over field=a,b` arguments, or of another flag that takes the same.

    >>> parse_over(["model.method=base,tensor", "model.memory.grid=4 4 4,6 6 6"])
    {'model.method': ['base', 'tensor'], 'model.memory.grid': ['4 4 4', '6 6 6']}
    """
    over: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        found = [value.strip() for value in values.split(",")]
        if not equals or not name or not all(found):
            raise ValueError(
                f"{flag}: expected field=value,value such as seed=0,1,2, got {text!r}; "
                "quote values that hold spaces"
            )
        _check_once([*over, name], flag)
        over[name.lstrip("-")] = found
    return over


def _check_once(names: Sequence[str], where: str) -> None:
    for number, name in enumerate(names):
        if field_name(name) in map(field_name, names[:number]):
            raise ValueError(f"{where} {name}: expected each field once, got it twice")


def field_name(flag: str) -> str:
    """The field that a flag or a key of `over` names, however it is written.

    The task's may go without its group.

    >>> field_name("--data_dir=here"), field_name("task.data-dir"), field_name("--budget.no-test")
    ('data-dir', 'data-dir', 'budget.test')
    """
    name = flag.lstrip("-").partition("=")[0].replace("_", "-").removeprefix("task.")
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}{last.removeprefix('no-')}"


def expand(stages: Sequence[Stage]) -> list[PlannedRun]:
    """The runs of all stages in their order, each once.

    A run that an earlier stage has already is left out (the baseline of several ablations).
    """
    runs: dict[str, PlannedRun] = {}
    for stage in stages:
        fixed = {field_name(flag) for flag in stage.flags if flag.startswith("--")}
        for name in stage.over:
            if field_name(name) in fixed:
                raise ValueError(
                    f"{stage.where or 'sweep'}: {name}: expected one value for all runs, or several"
                    f" to go over, got both; leave out --{field_name(name)}, or what goes over it"
                )
        of_stage: dict[str, PlannedRun] = {}
        for run in (run for name in stage.recipes for run in _runs(name, stage)):
            same = of_stage.setdefault(run.name, run)
            if stage.distinct and same is not run:
                raise ValueError(
                    f"{stage.where or 'sweep'}: expected tries that are different runs, got the "
                    f"same run twice, as {' '.join(same.changes)} and as {' '.join(run.changes)}; "
                    "leave one of them out"
                )
            first = runs.setdefault(run.name, run)
            if first.config != run.config:
                raise ValueError(
                    f"{run.name}: expected runs that differ in more than speed and where their "
                    f"data lies, got speed {first.config.speed} with {first.config.task} and speed "
                    f"{run.config.speed} with {run.config.task}; use two output folders"
                )
    return list(runs.values())


def _runs(name: str, stage: Stage) -> Iterator[PlannedRun]:
    try:
        recipe = find_recipe(name)
    except ValueError as error:
        raise ValueError(f"{stage.where}: {error}" if stage.where else str(error)) from error
    configs: dict[tuple[str, ...], RunConfig[Any, Any]] = {}
    for values in itertools.product(*stage.over.values()):
        chosen = {key: _text(value) for key, value in zip(stage.over, values, strict=True)}
        # Reading flags takes tens of milliseconds: once for all seeds.
        seed = chosen.get("seed", "")
        varied = [item for item in chosen.items() if item[0] != "seed" or not seed.isdecimal()]
        flags = (*stage.flags, *(flag for item in varied for flag in _flag(*item)))
        if flags not in configs:
            configs[flags] = _config(recipe, flags, stage)
        config = configs[flags]
        if seed.isdecimal():
            config, flags = replace(config, seed=int(seed)), (*flags, "--seed", seed)
        changes = tuple(f"{key}={value}" for key, value in chosen.items())
        yield PlannedRun(config, (name, *flags), changes, stage.timeout, stage.told)


def _config(recipe: Recipe, flags: Sequence[str], stage: Stage) -> RunConfig[Any, Any]:
    """A recipe's config with the flags of one of its runs."""
    try:
        config, settings = parse_run(recipe, flags)
    except SystemExit:
        if stage.where:  # the message above names the flag, but not where it came from
            print(
                f"{stage.where}: expected fields of {recipe.name}, got what is named above; mend "
                "the set or over of the stage or of the whole plan, or the flags beside --plan",
                file=sys.stderr,
            )
        raise
    if settings != RunSettings():
        raise ValueError(
            "sweep: expected fields of the runs' config, got flags of `run` such as --resume or "
            "--quiet; a sweep resumes what is unfinished by itself. A run whose last checkpoint is "
            "broken is continued by `tensor-memory-lab run` with --output FOLDER and --resume "
            "--from-previous"
        )
    return config


def _flag(field: str, value: str) -> list[str]:
    """A field and its value as on the command line of `run`."""
    if value.lower() in ("true", "false"):
        group, dot, name = field.rpartition(".")
        return [f"--{group}{dot}{'' if value.lower() == 'true' else 'no-'}{name}"]
    place = field.rpartition(".")[2].replace("-", "_") in PLACES  # a path may hold blanks
    return [f"--{field}", *([value] if place else value.split())]


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def read_plan(path: str | Path, flags: Sequence[str] = ()) -> list[Stage]:
    """The stages of a plan; `flags` are added to every run."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a plan in TOML")
    try:
        plan = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: expected a plan in TOML ({error}); mend it there") from error
    _check_keys(plan, ("stage", *DEFAULTS), str(path))
    stages = plan.pop("stage", None)
    _expect(isinstance(stages, list) and stages, str(path), "at least one [[stage]]", stages)
    _check_values(plan, str(path))
    return [
        _stage(values, f"{path}, stage {number}", plan, flags)
        for number, values in enumerate(stages or (), start=1)
    ]


def _stage(values: Any, where: str, defaults: Mapping[str, Any], flags: Sequence[str]) -> Stage:
    _expect(isinstance(values, dict), where, "a table", values)
    _check_keys(values, (*DEFAULTS, "seconds"), where)
    _check_values(values, where)
    fixed, tried, over, tries = (
        _with_defaults(values.get(key, {}), defaults.get(key, {})) for key in TABLES
    )
    values = {**defaults, **values}
    recipes = values.get("recipes")
    _expect(recipes is not None, where, RECIPES, recipes)
    recipes = [recipes] if isinstance(recipes, str) else recipes
    _expect(tries or not tried, where, "tries, since it has 'tried'", tries)
    set_flags, tried_flags = (
        [*(flag for name, value in table.items() for flag in _flag(name, _text(value))), *flags]
        for table in (fixed, fixed | tried)
    )
    tried_flags = tried_flags if tried else None
    timeout, duration = values.get("timeout"), values.get("seconds")
    return Stage(recipes, over, set_flags, timeout, where, tries, tried_flags, duration)


def _with_defaults(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stage's table, then those of the plan's that it does not name itself.

    >>> _with_defaults({"model.memory_layers": [0]}, {"model.memory-layers": [1], "seed": [0, 1]})
    {'model.memory_layers': [0], 'seed': [0, 1]}
    """
    named = set(map(field_name, own))
    rest = {key: value for key, value in defaults.items() if field_name(key) not in named}
    return {**own, **rest}


def _check_values(values: Mapping[str, Any], where: str) -> None:
    """Raise where a value of a stage, or of the whole plan, is not of its kind."""
    recipes = values.get("recipes")
    several = isinstance(recipes, list) and recipes and all(type(name) is str for name in recipes)
    _expect(recipes is None or isinstance(recipes, str) or several, where, RECIPES, recipes)
    for key in TABLES:
        table = values.get(key, {})
        _expect(isinstance(table, dict), where, f"a table for {key!r}", table)
        _check_once(list(table), f"{where}: {key}")
        for name, options in table.items() if key in ("over", "tries") else ():
            _expect(isinstance(options, list) and options, where, f"a list for {name!r}", options)
    for key in ("timeout", "seconds"):
        time = values.get(key)
        given = time is None or (type(time) in (int, float) and time > 0)
        _expect(given, where, f"{key} in seconds" if key == "timeout" else key, time)


def _expect(holds: object, where: str, expected: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"{where}: expected {expected}, got {got!r}")


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(
                f"{where}: unknown key {name!r}; did you mean {near[0]!r}? "
                f"known are {', '.join(known)}"
            )
