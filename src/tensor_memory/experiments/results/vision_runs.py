"""Records of vision runs, put together by method, variant and number of frames.

What a plan holds and no record answers is a row too, so that a table never hides what was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor_memory.experiments.results.comparison import Record, flatten, show
from tensor_memory.experiments.results.planned import Row, planned_values, with_values
from tensor_memory.experiments.results.records import config_dict, config_from_dict
from tensor_memory.experiments.results.wording import listing

SHORT = {"memory.chunk_size": "K", "memory.channels": "C", "memory_layers": "layers"}
"""Names of fields in labels, where they are not the last part of the field."""

ORDER = ("base", "joint", "frames", "wide", "local", "registers", "spatial")
"""Of methods in tables and figures."""

Group = tuple[str, list[Record]]
"""A row's label and its runs, one per seed."""


def grouped(records: Sequence[Record]) -> list[Group]:
    """Runs that differ in their seed alone, under what tells them from the others.

    The label is the method, and what of its model is not as the model's config has it by default;
    a departure that all records share goes without saying.
    """
    departures = [_departures(record["config"]["model"]) for record in records]
    shared = set.intersection(*(set(found.items()) for found in departures))
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Record]] = {}
    for record, found in zip(records, departures, strict=True):
        apart = tuple(pair for pair in found.items() if pair not in shared)
        groups.setdefault((record["method"], apart), []).append(record)
    named = []
    for (method, apart), runs in groups.items():
        label = f"{method} ({', '.join(' '.join(pair) for pair in apart)})" if apart else method
        seeds = [run["seed"] for run in runs]
        if len(set(seeds)) != len(seeds):
            raise ValueError(
                f"{label}: expected one run per seed, got seeds {listing(sorted(seeds))}"
            )
        named.append((label, runs))
    return sorted(named, key=lambda group: (_rank(group[1][0]["method"]), group[0]))


def rows(records: Sequence[Record]) -> list[Row]:
    """Rows of a table; among the records may be `planned_runs`, which count where none was run."""
    done = {_identity(record) for record in records if not record.get("planned")}
    wanted = {_identity(run): run for run in records if run.get("planned")}
    missing = [run for identity, run in wanted.items() if identity not in done]
    found = []
    for label, members in grouped([r for r in records if not r.get("planned")] + missing):
        runs = [run for run in members if not run.get("planned")]
        found.append(Row(label, runs, len(members)))
    return found


def planned_runs(plan: Path, usual: Any, frames: int | None = None) -> list[Record]:
    """The runs of a plan as far as a table names them: model, T and seed.

    Args:
        plan: a TOML file of `tensor-memory sweep`.
        usual: the model's config where the plan does not say otherwise.
        frames: T where the plan does not say; None for images.
    """
    runs: list[Record] = []
    for chosen in planned_values(plan):
        model = with_values(usual, chosen)
        runs.append(
            {
                "planned": True,
                "method": model.method,
                "seed": chosen.get("seed", 0),
                "facts": {"frames": chosen.get("task.frames", frames)},
                "config": {"model": config_dict(model)},
            }
        )
    return runs


def _identity(record: Record) -> tuple[Any, ...]:
    """What tells a run from others; a field younger than its record counts as the default."""
    model = sorted(_departures(record["config"]["model"]).items())
    return record["method"], *model, record["facts"].get("frames"), record["seed"]


def _departures(model: Mapping[str, Any]) -> dict[str, str]:
    """Fields of a model's config that are not the default of its class, as they are shown."""
    usual = flatten(config_dict(type(config_from_dict(model))()))
    return {
        SHORT.get(name, name.rpartition(".")[2]): shown(name, value)
        for name, value in flatten(model).items()
        if name != "method" and value != usual.get(name)
    }


def shown(name: str, value: Any) -> str:
    """A value in a label: layers as a sum, since 2×5 would read as a size.

    >>> shown("memory_layers", (2, 5)), shown("memory.grid", (8, 8))
    ('2+5', '8×8')
    """
    if name == "memory_layers" and value is not None:
        return "+".join(str(layer) for layer in value)
    return show(value)


def by_frames(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Records by T, the shortest first."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["facts"]["frames"]):
        found.setdefault(record["facts"]["frames"], []).append(record)
    return found


def measured_alone(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """By label and T, a run that had its device to itself: what may tell time and memory."""
    found: dict[str, dict[int, Record]] = {}
    for frames, part in by_frames(_alone(records)).items():
        for label, runs in grouped(part):
            found.setdefault(label, {})[frames] = runs[0]
    return found


def lengths(records: Sequence[Record], planned: Sequence[Record]) -> dict[str, list[int]]:
    """By label the T that were measured alone or are planned to be."""
    found: dict[str, list[int]] = {}
    for frames, part in by_frames([*_alone(records), *planned]).items():
        for row in rows(part):
            found.setdefault(row.label, []).append(frames)
    return found


def _alone(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record["shared_device"] and record["step_ms"]]


def peak(record: Record) -> int:
    """Peak bytes on the device less the clips that lie there, which no method needs there."""
    return max(record["peak_memory_bytes"] - record["facts"].get("resident_bytes", 0), 0)


def _rank(method: str) -> int:
    return ORDER.index(method) if method in ORDER else len(ORDER)
