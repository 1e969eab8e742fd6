"""Whole runs by name: a recipe is a function that returns a full `RunConfig`.

The decorator `recipe` beside the function declares its name, what it takes, and which fields of
the config are settings and which are the method. `tensor-memory-lab run NAME --seed 1` changes
single values.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tensor_memory_lab.run_config import RunConfig


@dataclass(frozen=True)
class Recipe:
    """A recipe and what it declares about itself. Calling it makes the config.

    A name in `settings` or `method` is a field of the config with dots, such as `task.writes`. It
    stands for all fields inside it too, and the longer of two names that fit a field counts.
    """

    name: str
    make: Callable[[], RunConfig[Any, Any]]
    about: str = ""
    """What `--help` shows; its first line is what `list` shows."""
    expected: str = ""
    """What a run takes, such as "10 s on one H200"."""
    settings: tuple[str, ...] = ()
    """What methods are compared under: a table has one group of rows for each of their values."""
    method: tuple[str, ...] = ("model",)
    """What is compared: a table has one row for each of their values."""

    @property
    def summary(self) -> str:
        """The first line of `about`."""
        return self.about.partition("\n")[0]

    def __call__(self) -> RunConfig[Any, Any]:
        """The config."""
        return self.make()


def recipe(
    name: str,
    *,
    expected: str = "",
    settings: tuple[str, ...] = (),
    method: tuple[str, ...] = ("model",),
) -> Callable[[Callable[[], RunConfig[Any, Any]]], Recipe]:
    """Declare a function as the recipe `name`. In this package all values must be literals."""

    def declare(make: Callable[[], RunConfig[Any, Any]]) -> Recipe:
        return Recipe(name, make, (make.__doc__ or "").strip(), expected, settings, method)

    return declare


@cache
def load_recipes() -> dict[str, Recipe]:
    """The recipes of this package by name.

    They are read from the source and imported when they are called, so that `list` needs no torch.
    """
    found: dict[str, Recipe] = {}
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        for declared in _declared_in(file):
            if declared.name in found:
                raise ValueError(f"{file}: expected a new name for a recipe, got {declared.name!r}")
            found[declared.name] = declared
    return found


def _declared_in(file: Path) -> Iterator[Recipe]:
    """The recipes of one module of this package."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(decorator_list=[ast.Call(ast.Name("recipe"), [name], keywords)]):
                values = {str(word.arg): ast.literal_eval(word.value) for word in keywords}
                make = _imported_when_called(f"{__name__}.{file.stem}", node.name)
                about = ast.get_docstring(node) or ""
                yield Recipe(ast.literal_eval(name), make, about, **values)


def _imported_when_called(module: str, function: str) -> Callable[[], RunConfig[Any, Any]]:
    return lambda: getattr(importlib.import_module(module), function)()


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or `package.module:function` of your own.

    The current folder is on the path for the latter.
    """
    if ":" in name:
        return _own_recipe(name)
    known = load_recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"recipe {name!r}: no such recipe; {hint}`tensor-memory-lab list` shows all, and "
            "package.module:function names one of your own"
        )
    return known[name]


def _own_recipe(name: str) -> Recipe:
    module, _, function = name.partition(":")
    # Under `python -m` the current folder is on the path, in a command it is not. It stays there:
    # the module may import its neighbours late.
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(
            f"{module}: no module named {error.name!r}; expected a Python file of the current "
            "folder, or an installed package",
            name=error.name,
        ) from error
    if isinstance(found, Recipe):
        return replace(found, name=name)  # as the command line finds it
    needed = _needed_arguments(found) if callable(found) else []
    if needed or not callable(found):
        got = f"one that needs {', '.join(needed)}" if needed else repr(found)
        raise ValueError(
            f"recipe {name!r}: expected a function {function!r} in {module}, got {got}; "
            "name one that takes no arguments and returns a RunConfig"
        )
    return Recipe(name, cast(Any, found), (found.__doc__ or "").strip())


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function, or a class, cannot be called without."""
    return [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
