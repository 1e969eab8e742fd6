"""Rows of the language tables: runs by method and variant, their step times, and what is not run.

Runs that shared their device tell no time. Short runs of the same models, one at a time, do
(`lab/plans/language-cost.toml`), and lend theirs. What a plan holds and no record answers is a row
too, so that a table never hides what was left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.models.language import LanguageModelConfig
from tensor_memory_lab.records.comparison import (
    FUTURE,
    NEUTRAL,
    Record,
    flatten,
)
from tensor_memory_lab.records.planned import planned_values, with_values
from tensor_memory_lab.records.records import config_dict, current
from tensor_memory_lab.records.rows import Row, grouped

COSTS = ("step_ms", "steps_per_second", "peak_memory_bytes")
"""What a run measured alone lends to others."""

STARTS = (
    "model.gate_init",
    "model.memory.spread_bias",
    "model.memory.forget_bias",
    "model.memory.input_bias",
    "model.memory.feedback",
    "model.memory.gain",
)
"""Values that weights start from: a step takes as long from any."""

RECIPE_METHODS = {
    "language-carried": "tensor-local",
    "language-leak": "tensor-depth",
}
"""Methods of recipes where a plan does not say; `base` in the others."""


def table_rows(records: Sequence[Record], planned: Iterable[Record] = ()) -> list[Row]:
    """Rows by method, then by what departs from its defaults; planned ones without a run too."""
    done = {(_model_key(record), record["seed"]) for record in records}
    missing = [run for run in planned if (_model_key(run), run["seed"]) not in done]
    rows = []
    for label, members in grouped([*records, *missing]):
        runs = [run for run in members if not run.get("planned")]
        future = any(run["labels"].get("non_causal") for run in runs)
        rows.append(
            Row(
                f"{label}, {FUTURE}" if future else label,
                runs,
                len(members),
                flatten(current(members[0]["config"]["model"])),
            )
        )
    return rows


def planned_runs(plan: Path, recipe: str) -> list[Record]:
    """The runs of a recipe in a plan, as far as a table names them: model and seed.

    None where the plan's file is not there.
    """
    runs: list[Record] = []
    for chosen in planned_values(plan, recipe) if plan.is_file() else ():
        method = chosen.get("model.method", RECIPE_METHODS.get(recipe, "base"))
        usual = LanguageModelConfig(method=method, non_causal=method == "tensor-depth")
        model = with_values(usual, chosen)
        runs.append(
            {
                "planned": True,
                "method": model.method,
                "seed": chosen.get("seed", 0),
                "config": {"model": config_dict(model)},
            }
        )
    return runs


def timed(records: Iterable[Record], costs: Iterable[Record]) -> list[Record]:
    """Records with what a step of the same model costs alone on the device, where that is known.

    Also those that were alone: what a table compares is then measured by the same code.
    """
    alone = {_work(run): run for run in costs if not run["shared_device"] and run["step_ms"]}
    found = []
    for record in records:
        lender = alone.get(_work(record))
        if lender is not None:
            lent = {name: lender[name] for name in COSTS}
            record = {**record, **lent, "shared_device": False, "timed_by": lender}
        found.append(record)
    return found


def _model_key(record: Record) -> tuple[Any, ...]:
    flat = flatten(current(record["config"]["model"]))
    return tuple(sorted(flat.items(), key=lambda item: item[0]))


def _work(record: Record) -> tuple[Any, ...]:
    """Everything a step's time depends on."""
    names = ("budget.batch_size", "budget.accumulate", "precision", "speed")
    flat = flatten(current(record["config"]))
    kept = {
        name: value
        for name, value in flat.items()
        if name in names
        or (name.startswith(("task.", "model.")) and name not in (*NEUTRAL, *STARTS))
    }
    return tuple(sorted(kept.items(), key=lambda item: item[0]))
