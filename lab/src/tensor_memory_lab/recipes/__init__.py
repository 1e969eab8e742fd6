"""Whole runs by name: functions that return a `RunConfig`.

`RECIPES` maps a name to a function without arguments; its docstring's first line is what `list`
shows. `tensor-memory run NAME --model.method tensor --seed 1` changes single values. The modules
of this package register their recipes as they are imported, which `load_recipes` does.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, cast

from tensor_memory_lab.local_modules import find_modules_here
from tensor_memory_lab.run_config import RunConfig

Recipe = Callable[[], RunConfig[Any, Any]]

RECIPES: dict[str, Recipe] = {}
"""Filled by the modules of this package as they are imported (see `recipe`)."""

EXPECTED: dict[str, str] = {}
"""What a recipe says it takes, such as "3 min on one H200"."""


def recipe(name: str, *, expected: str = "") -> Callable[[Recipe], Recipe]:
    """Register a function as the recipe `name`; `expected` says what it takes, for `list`."""

    def register(make: Recipe) -> Recipe:
        if name in RECIPES:
            raise ValueError(f"recipe {name!r}: expected a new name, got one that exists")
        RECIPES[name] = make
        if expected:
            EXPECTED[name] = expected
        return make

    return register


def load_recipes() -> dict[str, Recipe]:
    """Import every module of this package, which registers its recipes; all of them by name."""
    for module in pkgutil.iter_modules(__path__):
        _import(f"{__name__}.{module.name}")
    return RECIPES


def find_recipe(name: str) -> Recipe:
    """The recipe of this name, or the function `package.module:function` of your own.

    The current folder is on the path for the latter.
    """
    if ":" in name:
        return _own_recipe(name)
    known = load_recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"recipe {name!r}: no such recipe; {hint}`tensor-memory list` shows all, and "
            "package.module:function names one of your own"
        )
    return known[name]


def _own_recipe(name: str) -> Recipe:
    module, _, function = name.partition(":")
    find_modules_here()
    make = getattr(_import(module), function, None)
    if not callable(make):
        raise ValueError(
            f"recipe {name!r}: expected a function {function!r} in {module}, got {make!r}; "
            "name one that takes no arguments and returns a RunConfig"
        )
    return cast(Recipe, make)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and f"{module}.".startswith(f"{missing}."):
            raise ModuleNotFoundError(
                f"{module}: no module named {missing!r}; expected a Python file of the current "
                "folder, or an installed package",
                name=missing,
            ) from error
        if missing.startswith("tensor_memory") or not missing:
            raise
        raise ModuleNotFoundError(
            f"{module} needs {missing}; install what experiments need with: "
            "pip install 'tensor-memory[experiments]'",
            name=missing,
        ) from error
