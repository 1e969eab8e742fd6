"""Rows of the pages' tables: runs by method and by what departs from its defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensor_memory_lab.records.comparison import (
    NEUTRAL,
    Record,
    flatten,
    method_rank,
    show,
    varied,
)
from tensor_memory_lab.records.records import config_dict, config_from_dict, current
from tensor_memory_lab.records.wording import listing

SHORT = {
    "memory.chunk_size": "K",
    "memory.channels": "C",
    "memory_layers": "layers",
    "layers": "blocks",
}
"""Names of fields in labels, where they are not the last part of the field."""

Group = tuple[str, list[Record]]
"""A row's label and its runs, one per seed."""


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone."""

    label: str
    runs: list[Record]
    """Those there are; none where a plan asks for this row and it was not run."""
    wanted: int
    """Seeds that were run or are to be."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The config of its model, flat."""

    @property
    def seeds(self) -> str:
        """How many, and of how many where some are missing.

        >>> Row("base", [{}], 3).seeds, Row("base", [{}], 1).seeds
        ('1 of 3', '1')
        """
        done = len(self.runs)
        return str(done) if done == self.wanted else f"{done} of {self.wanted}"


def grouped(records: Sequence[Record]) -> list[Group]:
    """Runs that differ in their seed alone, under what tells them from the others.

    The label is the method, and what of its model is not as the model's config has it by default;
    a departure that all records share goes without saying.
    """
    apart_by = [departures(record["config"]["model"]) for record in records]
    shared = set.intersection(*(set(found.items()) for found in apart_by))
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[Record]] = {}
    for record, found in zip(records, apart_by, strict=True):
        apart = tuple(pair for pair in found.items() if pair not in shared)
        groups.setdefault((record["method"], apart), []).append(record)
    named = []
    for (method, apart), runs in groups.items():
        told = ", ".join(f"{_short(name)} {value}" for name, value in apart)
        label = f"{method} ({told})" if apart else method
        seeds = [run["seed"] for run in runs]
        if len(set(seeds)) != len(seeds):
            raise ValueError(
                f"{label}: expected one run per seed, got seeds {listing(sorted(seeds))}"
            )
        _check_alike(label, runs)
        named.append((label, runs))
    return sorted(named, key=lambda group: (method_rank(group[1][0]["method"]), group[0]))


def _check_alike(label: str, runs: Sequence[Record]) -> None:
    """Refuse runs of other data or budgets in one row; of a planned run only the model is known."""
    flats = [flatten(current(run["config"])) for run in runs if not run.get("planned")]
    names = [name for name in varied(flats) if name not in NEUTRAL]
    if names:
        raise ValueError(
            f"{label}: expected runs that differ in their seed alone, got several values of "
            f"{listing(names)}; put them into folders of their own"
        )


def departures(model: Mapping[str, Any]) -> dict[str, str]:
    """Fields of a model's config that are not the default of its class, as they are shown."""
    usual = flatten(config_dict(type(config_from_dict(model))()))
    return {
        name: shown(name, value)
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


def _short(name: str) -> str:
    return SHORT.get(name, name.rpartition(".")[2])
