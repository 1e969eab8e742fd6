"""Records of vision runs, put together by number of frames, and those that are only planned.

What a plan holds and no record answers is a row too, so that a table never hides what was left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.records.comparison import Record
from tensor_memory_lab.records.planned import planned_values, with_values
from tensor_memory_lab.records.records import config_dict
from tensor_memory_lab.records.rows import Row, departures, grouped


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
    model = sorted(departures(record["config"]["model"]).items())
    return record["method"], *model, record["facts"].get("frames"), record["seed"]


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
