"""Records of vision runs, put together by method, variant and number of frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensor_memory.experiments.results.comparison import Record
from tensor_memory.experiments.results.wording import listing

ORDER = ("base", "joint", "frames", "wide", "local", "registers", "spatial")
"""Of methods in tables and figures."""

Group = tuple[str, list[Record]]
"""A row's label and its runs, one per seed."""


def grouped(records: Sequence[Record]) -> list[Group]:
    """Runs that differ in their seed alone, under what tells them from the others.

    The label is the method, and the labels by which a row departs from the method's usual ones.
    """
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Record]] = {}
    for record in records:
        labels = tuple((name, _show(value)) for name, value in record["labels"].items())
        found.setdefault((record["method"], labels), []).append(record)
    usual: dict[str, dict[str, str]] = {}
    for method, labels in sorted(found, key=lambda key: -len(found[key])):
        usual.setdefault(method, dict(labels))
    groups = []
    for (method, labels), runs in found.items():
        apart = [f"{n} {v}" for n, v in labels if n != "frames" and v != usual[method].get(n)]
        seeds = [run["seed"] for run in runs]
        if len(set(seeds)) != len(seeds):
            raise ValueError(
                f"{method} {dict(labels)}: expected one run per seed, got seeds {listing(seeds)}"
            )
        groups.append((f"{method} ({', '.join(apart)})" if apart else method, runs))
    return sorted(groups, key=lambda group: (_rank(group[1][0]["method"]), group[0]))


def by_frames(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Records by T, the shortest first."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["facts"]["frames"]):
        found.setdefault(record["facts"]["frames"], []).append(record)
    return found


def measured_alone(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """By label and T, a run that had its device to itself: what may tell time and memory."""
    alone = [record for record in records if not record["shared_device"] and record["step_ms"]]
    found: dict[str, dict[int, Record]] = {}
    for frames, part in by_frames(alone).items():
        for label, runs in grouped(part):
            found.setdefault(label, {})[frames] = runs[0]
    return found


def peak(record: Record) -> int:
    """Peak bytes on the device less the clips that lie there, which no method needs there."""
    return max(record["peak_memory_bytes"] - record["facts"].get("resident_bytes", 0), 0)


def _rank(method: str) -> int:
    return ORDER.index(method) if method in ORDER else len(ORDER)


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
