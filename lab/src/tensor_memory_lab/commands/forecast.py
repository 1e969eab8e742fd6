"""How long the runs of a sweep may take, guessed from runs that have been done."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from tensor_memory_lab.commands.grid import PlannedRun, training_work
from tensor_memory_lab.records import config_from_dict

Pace = dict[tuple[Any, ...], list[float]]
"""Seconds per unit of work, of every finished run of a kind."""


def forecast(runs: Sequence[PlannedRun], records: Iterable[Mapping[str, Any]], workers: int) -> str:
    """What to expect of `runs`, `workers` at a time, in words.

    A run is taken to keep the pace of those of its recipe and method, else of its task and method,
    else of its method. That holds where as many runs share a device as did then.
    """
    paces = _paces(records)
    guessed, unknown = [], 0
    for run in runs:
        kinds = _kinds(run.config.recipe, run.config)
        pace = next((paces[kind] for kind in kinds if kind in paces), None)
        if pace is None:
            unknown += 1
        else:
            guessed.append(run.work * statistics.median(pace))
    if not guessed:
        return "nothing is known of their time" if unknown else "nothing is left to do"
    seconds = max(sum(guessed) / workers, max(guessed))
    told = f"about {timedelta(seconds=round(seconds))} at the pace of runs that are there"
    return told + (f", and {unknown} of which nothing is known" if unknown else "")


def _paces(records: Iterable[Mapping[str, Any]]) -> Pace:
    paces: Pace = {}
    for record in records:
        if not record["finished"] or not record.get("wall_seconds"):
            continue
        try:
            config = config_from_dict(record["config"])
        except ValueError:  # of another version, or of a class that is not known here
            continue
        for kind in _kinds(record["recipe"], config):
            pace = record["wall_seconds"] / training_work(config)
            paces.setdefault(kind, []).append(pace)
    return paces


def _kinds(recipe: str, config: Any) -> tuple[tuple[Any, ...], ...]:
    """What runs of a like pace share, the likest first."""
    method = config.model.method
    return (recipe, method), (type(config.task), method), (method,)
