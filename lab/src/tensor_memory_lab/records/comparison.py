"""Runs put side by side: which of them may share a table, and what tells its rows apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensor_memory_lab.records.intervals import Estimate, estimate
from tensor_memory_lab.records.records import (
    CLASS,
    config_dict,
    config_from_dict,
    current,
    file_name,
    without_places,
)
from tensor_memory_lab.records.wording import listing

Record = Mapping[str, Any]

NEUTRAL = (
    "seed",
    "speed",
    "budget.checkpoint_every",
    "budget.accumulate",
    "budget.evaluation_batch_size",
    "model.non_causal",
)
"""Fields that change no number beyond rounding, are averaged over, or go with the method."""

FUTURE = "sees the future"
"""What stands beside the name of a method that is not causal, in every table and legend."""

METHODS = (
    "base", "joint", "frames", "base-sln", "wide", "local", "wide-local", "linear", "linear-local",
    "conv-local", "xl", "registers", "slots", "slots-matched", "recurrent-slots", "tensor",
    "spatial", "tensor-local", "tensor-xl", "tensor-depth",
)  # fmt: skip
"""The order of methods in tables and plots; others come after, by name."""


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone."""

    setting: tuple[tuple[str, Any], ...]
    """Fields that vary over the table, and their values here."""
    method: str
    variant: str
    """How this row's model departs from the others of its method; empty for most."""
    records: tuple[Record, ...] = field(repr=False)

    @property
    def label(self) -> str:
        """The method, the variant where there is one, and that it sees the future if it does."""
        parts = [self.variant] if self.variant else []
        if any(record["labels"].get("non_causal") for record in self.records):
            parts.append(FUTURE)
        return f"{self.method} ({', '.join(parts)})" if parts else self.method

    def measure(self, split: str, name: str) -> Estimate | None:
        """A measure over seeds; None where this row does not have it."""
        found = [record["test"].get(split, {}) for record in self.records]
        if not all(name in measures for measures in found):
            return None
        return estimate([measures[name] for measures in found])


@dataclass(frozen=True)
class Comparison:
    """Rows that may be compared: one recipe, one budget."""

    recipe: str
    budget: dict[str, Any]
    """Fields of optimiser and budget, the same for all rows."""
    told_apart: tuple[str, ...]
    """Budget fields that tell this comparison from its siblings, when they were split."""
    fields: tuple[str, ...]
    """Fields that make up the rows' settings."""
    rows: tuple[Row, ...]
    unfinished: int
    """Runs left out because they have not finished."""

    @property
    def records(self) -> list[Record]:
        """All runs of all rows."""
        return [record for row in self.rows for record in row.records]

    @property
    def metric(self) -> str:
        """The task's own measure."""
        return self.records[0]["metric"]

    @property
    def splits(self) -> list[str]:
        """Test splits of any row, in their order."""
        return list(dict.fromkeys(split for record in self.records for split in record["test"]))

    @property
    def title(self) -> str:
        """The recipe, with what tells its budget from others where that was split."""
        apart = ", ".join(f"{name}={show(self.budget[name])}" for name in self.told_apart)
        return f"{self.recipe} ({apart})" if apart else self.recipe

    @property
    def file_name(self) -> str:
        """The title as the beginning of a file's name."""
        return file_name(self.title)


def compare(records: Sequence[Record], *, split_budgets: bool = False) -> list[Comparison]:
    """One comparison per recipe; where budgets differ, an error, or one comparison for each."""
    recipes: dict[str, list[Record]] = {}
    for record in records:
        recipes.setdefault(record["recipe"], []).append(record)
    return [
        comparison
        for recipe, members in recipes.items()
        for comparison in _compare_recipe(recipe, members, split_budgets)
    ]


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """A config's dict as `field.field` to value, less classes and places.

    >>> flatten({"class": "a:B", "task": {"writes": 20, "data_dir": "x"}, "seed": 1})
    {'task.writes': 20, 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for name, value in without_places(config).items():
        if name == CLASS:
            continue
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = _hashable(value)
    return flat


def _hashable(value: Any) -> Any:
    """Lists, and lists in them, as tuples."""
    return tuple(_hashable(item) for item in value) if isinstance(value, list | tuple) else value


def show(value: Any) -> str:
    """A config value in a table: tuples as 8×8×8, floats short.

    >>> show((8, 8, 8)), show(0.0003), show(None), show(True)
    ('8×8×8', '0.0003', 'none', 'yes')
    """
    if isinstance(value, tuple):
        return "×".join(show(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def short_names(fields: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """The last part of every field's name, or all of it where that would name two things.

    >>> short_names(["task.dim", "model.dim", "task.writes"])
    {'task.dim': 'task.dim', 'model.dim': 'model.dim', 'task.writes': 'writes'}
    >>> short_names(["task.seeds"], taken=["seeds"])
    {'task.seeds': 'task.seeds'}
    """
    last = {name: name.rpartition(".")[2] for name in fields}
    every = [*last.values(), *taken]
    return {name: name if every.count(short) > 1 else short for name, short in last.items()}


def _compare_recipe(recipe: str, records: list[Record], split: bool) -> list[Comparison]:
    unfinished = sum(not record["finished"] for record in records)
    finished = [record for record in records if record["finished"]]
    if not finished:
        return []
    metrics = {record["metric"] for record in finished}
    if len(metrics) > 1:
        raise ValueError(f"{recipe}: expected runs of one metric, got {listing(sorted(metrics))}")
    flats = [flatten(current(record["config"])) for record in finished]
    budgets = [_budget(flat) for flat in flats]
    differing = varied(budgets)
    if differing and not split:
        differences = "; ".join(f"{name} {listing(_values(budgets, name))}" for name in differing)
        raise ValueError(
            f"{recipe}: expected runs of one budget in a table, got {differences}; name the runs "
            "to compare, or pass --split-budgets for one table each"
        )
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, budget in enumerate(budgets):
        groups.setdefault(tuple(budget.get(name) for name in differing), []).append(index)
    return [
        _comparison(
            recipe, [finished[i] for i in members], [flats[i] for i in members],
            budgets[members[0]], tuple(differing), unfinished,
        )
        for _, members in sorted(groups.items(), key=lambda item: _order(item[0]))
    ]  # fmt: skip


def _comparison(
    recipe: str,
    records: list[Record],
    flats: list[dict[str, Any]],
    budget: dict[str, Any],
    told_apart: tuple[str, ...],
    unfinished: int,
) -> Comparison:
    chosen = [
        {k: v for k, v in flat.items() if k not in budget and k not in (*NEUTRAL, "recipe")}
        for flat in flats
    ]
    apart = [name for name in varied(chosen) if name != "model.method"]
    settings = [name for name in apart if _is_setting(name, apart, chosen)]
    variants = [name for name in apart if name not in settings]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, flat in enumerate(chosen):
        key = (tuple(flat.get(name) for name in settings), flat["model.method"],
               tuple(flat.get(name) for name in variants))  # fmt: skip
        groups.setdefault(key, []).append(index)
    usual = {name: _usual(name, chosen, records) for name in variants}
    rows = []
    for (values, method, departures), members in groups.items():
        unusual = [
            f"{name.rpartition('.')[2]}={show(value)}"
            for name, value in zip(variants, departures, strict=True)
            if value != usual[name]
        ]
        found = sorted((records[i] for i in members), key=lambda record: record["seed"])
        _check_seeds(recipe, method, found, [flats[i] for i in members])
        setting = tuple(zip(settings, values, strict=True))
        rows.append(Row(setting, method, ", ".join(unusual), tuple(found)))
    rows.sort(key=lambda row: (
        _order(tuple(value for _, value in row.setting)), method_rank(row.method), row.variant
    ))  # fmt: skip
    return Comparison(recipe, budget, told_apart, tuple(settings), tuple(rows), unfinished)


def method_rank(method: str) -> tuple[int, str]:
    """Where a method stands in tables and legends."""
    return (METHODS.index(method) if method in METHODS else len(METHODS), method)


def _is_setting(name: str, apart: list[str], chosen: list[dict[str, Any]]) -> bool:
    """Whether a field that varies is what methods are compared under, or part of a method.

    What the task is asks every method alike. A field of the model is a setting where all methods
    were run with the same values of it; a table of one method has one at most, since several that
    vary are ablations, each a departure of its own.
    """
    if not name.startswith("model."):
        return True
    values: dict[str, set[Any]] = {}
    for flat in chosen:
        values.setdefault(flat["model.method"], set()).add(flat.get(name))
    if len(values) == 1:
        return sum(other.startswith("model.") for other in apart) == 1
    return len({frozenset(found) for found in values.values()}) == 1


def _check_seeds(
    recipe: str, method: str, records: list[Record], flats: Sequence[Mapping[str, Any]]
) -> None:
    seeds = [record["seed"] for record in records]
    if len(set(seeds)) != len(seeds):
        apart = [name for name in varied(flats) if name != "seed"]
        told = f", apart in {listing(apart)}, which should change no number" if apart else ""
        raise ValueError(
            f"{recipe}, {method}: expected one run per seed, got seeds {listing(seeds)}{told}; "
            "leave the repeated ones out"
        )


def _budget(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in flat.items()
        if name.startswith(("budget.", "optimizer.")) and name not in NEUTRAL
    }


def varied(flats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields of flat configs that do not have one value in all of them."""
    names = dict.fromkeys(name for flat in flats for name in flat)
    return [name for name in names if len({flat.get(name) for flat in flats}) > 1]


def _values(flats: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    found = {flat.get(name) for flat in flats}
    return [show(value) for value in sorted(found, key=lambda value: _order((value,)))]


def _usual(name: str, chosen: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> Any:
    """The value that goes without saying: what most methods have among their runs.

    A recipe is run by all methods, and departed from by one. Between equals it is the default of
    the model's class, and else what most runs have.
    """
    methods: dict[Any, set[str]] = {}
    for flat in chosen:
        methods.setdefault(flat.get(name), set()).add(flat["model.method"])
    most = max(len(found) for found in methods.values())
    values = [flat.get(name) for flat in chosen if len(methods[flat.get(name)]) == most]
    default = _model_defaults(records[0]).get(name)
    return default if default in values else max(values, key=values.count)


def _model_defaults(record: Record) -> dict[str, Any]:
    """The fields of a run's model as its class has them; empty where that cannot be asked."""
    try:
        model = type(config_from_dict(record["config"]["model"]))()
    except (ValueError, TypeError, ImportError):
        return {}
    return flatten({"model": config_dict(model)})


def _order(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key that sorts numbers as numbers, whatever else stands beside them."""
    return tuple(
        (0, value, "") if isinstance(value, int | float) else (1, 0, show(value))
        for value in values
    )
