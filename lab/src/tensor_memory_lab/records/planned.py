"""What a plan of `tensor-memory sweep` holds, for tables that show what has not been run too.

A table that left out the rows without a record would hide what is missing.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

NOT_RUN = "not run yet"
"""What a table says where a plan asks for a row and no record answers."""


def planned_values(plan: Path, recipe: str | None = None) -> Iterator[dict[str, Any]]:
    """What each run of a plan, or each run of a recipe in it, sets: fields and their values."""
    for stage in tomllib.loads(plan.read_text(encoding="utf-8"))["stage"]:
        over, recipes = stage.get("over", {}), stage["recipes"]
        if recipe not in (None, *([recipes] if isinstance(recipes, str) else recipes)):
            continue
        for values in itertools.product(*over.values()):
            yield stage.get("set", {}) | dict(zip(over, values, strict=True))


def with_values(usual: Any, chosen: Mapping[str, Any]) -> Any:
    """A model's config with what a run of a plan sets of it and of its memory."""
    fields: dict[str, dict[str, Any]] = {"model": {}, "model.memory": {}}
    for name, value in chosen.items():
        group, _, last = name.rpartition(".")
        if group in fields:
            kept = tuple(value) if isinstance(value, list) else value
            fields[group][last.replace("-", "_")] = kept
    memory = replace(usual.memory, **fields["model.memory"])
    return replace(usual, memory=memory, **fields["model"])
