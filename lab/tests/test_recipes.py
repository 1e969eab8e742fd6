"""Every recipe runs: two steps through the command line, on data made here.

A new recipe is tested without a word here when it needs no data. One that does, or whose sizes are
too large for a CPU, gets an entry in SMALL: flags by the beginning of its name, `{data}` standing
for the folder that `data` fills.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache, reduce
from importlib import import_module
from itertools import pairwise
from operator import getitem
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from maze_data import write_layouts
from tensor_memory_lab.cli import main
from tensor_memory_lab.recipes import Recipe, load_recipes
from tensor_memory_lab.recipes import __name__ as PACKAGE
from tensor_memory_lab.recipes import __path__ as PATH
from tensor_memory_lab.records import config_dict, config_from_dict, read_result
from tiny_text import write_text
from vision_data import CLASSES, write_cub, write_ucf

TWO_STEPS = (
    "--budget.steps 2 --budget.batch-size 4 --budget.evaluate-every 2 "
    "--budget.evaluation-batches 1 --budget.evaluation-batch-size 4 --optimizer.warmup 1 "
    "--precision float32 --device cpu --quiet"
)

IMAGE = "--task.data-dir {data} --task.cache-dir {data}/decoded --model.dim 24 --model.layers 3 "
VIDEO = (
    IMAGE + f"--task.classes {' '.join(CLASSES)} --task.cached-frames 8 --model.place.grid 3 3 3 "
)
SMALL = {
    "language": "--task.data-dir {data} --task.corpus any --task.length 32 --model.dim 16 "
    "--model.layers 2 --model.heads 2",
    "cub": IMAGE + "--task.side 32 --task.crop 32 --task.patch 8 --model.decoder-dim 24",
    "images": IMAGE + "--task.side 32 --task.crop 32 --task.patch 8 --model.decoder-dim 24",
    "maze": "--task.cache-dir {data} --task.side 9 --task.steps 90 --task.layouts 2 "
    "--task.valid-rows 2 --task.test-rows 2 --model.dim 24 --model.layers 2 --model.heads 2 "
    "--model.memory-layers 1",
    "mqar": "--task.valid-rows 1 --task.test-rows 1 --task.train-rows 4 --task.vocabulary 520 "
    "--model.dim 8 --model.state-bytes 1024",
    "world": IMAGE.replace("layers 3", "layers 2 --model.heads 2 --model.memory-layers 1")
    + "--task.side 32 --task.patch 4 --task.glimpses 48 --task.valid-rows 4 --task.test-rows 4",
    "ucf101": VIDEO + "--task.height 32 --task.width 64 --task.crop 32 32 --model.heads 2",
}
DRAWN = "--task.valid-rows 4 --task.test-rows 4 --model.layers 2"
MEMORY = "--model.memory.grid 3 3 3 --model.memory.channels 4 --model.memory.chunk-size 8"
"""A chunk of one token is a step for each."""
OTHER_NUMBERS = ("-cost", "-long", "-valid", "-published", "-overwrite", "windowed", "demo")
"""In names of recipes that differ from another in numbers, most of which are made small here."""

PLACES_GIVEN = ("windowed-map", "windowed-occlusion", "windowed-binding-long", "ucf101-9")
"""Recipes whose tokens tell the place memory where they are."""


def data(name: str, folder: Path) -> None:
    """Write what a recipe reads."""
    if name.startswith("language"):
        write_text(folder)
    elif name.startswith(("cub", "images", "world")):
        write_cub(folder)
    elif name.startswith("maze"):
        write_layouts(folder, 9, 6)
    elif name.startswith("ucf101"):
        write_ucf(folder, groups=3, clips=1, frames=8)


def small(name: str, folder: Path) -> list[str]:
    """The flags that make a recipe small."""
    flags = next((flags for start, flags in SMALL.items() if name.startswith(start)), DRAWN)
    memory = MEMORY if hasattr(load_recipes()[name]().model, "memory") else ""
    return f"{TWO_STEPS} {memory} {flags}".format(data=folder).split()


def runs() -> list[Any]:
    """Every recipe with a memory, and, where it names another method, with that one."""
    found = []
    for name, recipe in load_recipes().items():
        default = recipe().model.method
        memory = "spatial" if name.startswith(("cub", "images", "ucf101")) else "tensor"
        memory = default if default.startswith("tensor") else memory
        again = name in PLACES_GIVEN or any(part in name for part in OTHER_NUMBERS)
        found.append(pytest.param(name, memory, marks=[pytest.mark.exhaustive] if again else []))
        if default != memory:
            found.append(pytest.param(name, default, marks=pytest.mark.exhaustive))
    return found + [(name, "place-given-delta") for name in PLACES_GIVEN]


@pytest.mark.filterwarnings("ignore::tensor_memory.ForgettingWarning")  # the published start
@pytest.mark.parametrize(("name", "method"), runs())
def test_two_steps_of_every_recipe(name, method, tmp_path, capsys):
    data(name, tmp_path)
    flags = [*small(name, tmp_path), "--model.method", method, "--output", f"{tmp_path}/run"]
    assert main(["run", name, *flags]) == 0
    record = read_result(tmp_path / "run" / "result.json")
    config = config_from_dict(record["config"])
    assert (config.recipe, config.model.method, config.budget.steps) == (name, method, 2)
    assert record["finished"]
    assert record["steps"] == 2
    for split, measures in record["test"].items():
        assert measures[record["metric"]] is not None, split
    assert f"{record['parameters']:,} parameters" in capsys.readouterr().out


def configs(config: Any) -> Iterator[Any]:
    """A config and those inside it."""
    yield config
    for field in fields(config):
        if is_dataclass(getattr(config, field.name)):
            yield from configs(getattr(config, field.name))


@cache
def described(kind: type) -> set[str]:
    """Fields of a dataclass, inherited ones too, with the docstring that `--help` shows."""
    found = set()
    for part in kind.__mro__[:-1]:
        body = ast.parse(inspect.getsource(part)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                found.add(ast.unparse(field.target))
    return found


def test_a_recipe_is_listed_as_it_declares_itself():
    modules = [import_module(f"{PACKAGE}.{module.name}") for module in iter_modules(PATH)]
    found = [value for module in modules for value in vars(module).values()]
    declared = {value.name: value for value in found if isinstance(value, Recipe)}
    assert declared.keys() == load_recipes().keys()
    for name, listed in load_recipes().items():
        assert replace(declared[name], make=listed.make, about=listed.about) == listed
        assert declared[name].summary == listed.summary != ""
        assert listed().recipe == name


def test_settings_and_method_are_fields_that_there_are():
    for recipe in load_recipes().values():
        plain = config_dict(recipe())
        assert recipe.method
        for name in (*recipe.settings, *recipe.method):
            reduce(getitem, name.split("."), plain)


@pytest.mark.parametrize("name", sorted(load_recipes()))
def test_help_says_what_every_flag_means(name):
    for config in configs(load_recipes()[name]()):
        plain = [f.name for f in fields(config) if not is_dataclass(getattr(config, f.name))]
        silent = set(plain) - described(type(config)) - {"recipe"}  # which is no flag
        assert not silent, f"{type(config).__name__}: {silent}"
