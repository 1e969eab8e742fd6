"""Whole runs by name: functions that return a `RunConfig`.

`RECIPES` maps a name to a function without arguments; its docstring's first line is what `list`
shows. `tensor-memory run NAME --model.method tensor --seed 1` changes single values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensor_memory.experiments.run_config import RunConfig

RECIPES: dict[str, Callable[[], RunConfig[Any, Any]]] = {}
"""Filled by the modules of this package as they are imported (see `recipe`)."""


def recipe(name: str) -> Callable[[Callable[[], RunConfig]], Callable[[], RunConfig]]:
    """Register a function as the recipe `name`."""

    def register(make: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
        if name in RECIPES:
            raise ValueError(f"recipe {name!r}: expected a new name, got one that exists")
        RECIPES[name] = make
        return make

    return register
