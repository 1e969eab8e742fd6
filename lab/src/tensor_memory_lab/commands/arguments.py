"""Flags of a run, made from the dataclasses of its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from tensor_memory_lab.recipes import Recipe
from tensor_memory_lab.run_config import M, RunConfig, T


@dataclass(frozen=True)
class RunSettings:
    """What does not decide a number: where a run is kept and how it is shown."""

    output: Path | None = None
    """Folder of the run; runs/<name of the run> unless given."""
    resume: bool = False
    """Continue the run in its folder from its last checkpoint."""
    from_previous: bool = False
    """With --resume: use the checkpoint before a broken last one."""
    keep_checkpoints: bool = True
    """Keep the checkpoints of a finished run, which `generate`, `positions` and `inspect` need."""
    tracker: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Also log to this tracker (tensorboard, or any that Accelerate knows); may be repeated."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    shared_device: bool = False
    """Other work shares the device: tables leave the timings of this run out."""
    results: Path | None = None
    """Add the record to this study's file too, such as results/mine.jsonl."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True)
class RunFlags(RunConfig[T, M]):
    """A `RunConfig`, whose recipe the command names and no flag, and the settings."""

    recipe: tyro.conf.Suppress[tyro.conf.Fixed[str]]
    settings: Annotated[RunSettings, tyro.conf.arg(name="")] = field(default_factory=RunSettings)


CONFIG_FIELDS = tuple(field.name for field in fields(RunConfig))


def parse_run(recipe: Recipe, arguments: Sequence[str]) -> tuple[RunConfig[Any, Any], RunSettings]:
    """The config of a recipe with `arguments` applied, and the settings among them.

    A field of the task may go without its group: `--data-dir` is `--task.data-dir`. An unknown
    flag, a value that does not fit and a config that refuses itself end the program with status 2
    and a message, as `--help` ends it with status 0.
    """
    config = recipe()
    if not isinstance(config, RunConfig):
        raise ValueError(
            f"recipe {recipe.name}: expected a function that returns a RunConfig, got one that "
            f"returns {type(config).__name__}; return one, such as replace(binding(), seed=1)"
        )
    flags = tyro.cli(
        RunFlags[type(config.task), type(config.model)],
        args=[_in_full(word, config.task) for word in arguments],
        default=RunFlags(**{name: getattr(config, name) for name in CONFIG_FIELDS}),
        prog=f"tensor-memory-lab run {recipe.name}",
        description=recipe.about,
        # A field that is a dataclass or None stays what the recipe made it, without subcommands.
        config=(tyro.conf.AvoidSubcommands,),
    )
    values = {name: getattr(flags, name) for name in CONFIG_FIELDS}
    return RunConfig(**values), flags.settings


def _in_full(word: str, task: Any) -> str:
    """A word of the command line, a flag of the task with its group.

    >>> from tensor_memory_lab.tasks.language import LanguageTaskConfig
    >>> [_in_full(word, LanguageTaskConfig()) for word in ("--data-dir=here", "--seed", "paper")]
    ['--task.data-dir=here', '--seed', 'paper']
    """
    name = word.removeprefix("--").partition("=")[0].removeprefix("no-").replace("-", "_")
    taken = {*CONFIG_FIELDS, *(f.name for f in fields(RunSettings))}
    bare = word.startswith("--") and name in {f.name for f in fields(task)} - taken
    return f"--task.{word[2:]}" if bare else word
