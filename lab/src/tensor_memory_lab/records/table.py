"""From records to a table: runs that differ in their seed alone make a row."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple

import pandas as pd
from scipy.special import stdtrit

from tensor_memory_lab.records.config import NEUTRAL, current, flatten
from tensor_memory_lab.records.text import (
    bytes_text,
    decimals,
    field_text,
    is_percent,
    order_key,
    short_name,
    value_text,
)

Frame = Any
"""A `pandas.DataFrame`, which by its own annotations may be a series after every selection."""

Table = list[dict[str, str]]
"""Rows of column to text; every row has the same columns."""

NOTHING = "–"
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean over seeds, and half of its 95 % interval by Student's t; None for one seed."""

    mean: float
    half: float | None


@dataclass(frozen=True)
class Column:
    """What one column of a table shows of the runs of a row."""

    value: str | tuple[str, ...]
    """A column of the data frame, or "seeds", how many there are; or several columns."""
    join: str = " / "
    """What stands between several."""
    title: str = ""
    """The heading; the value's name unless given."""
    show: str = "mean"
    """"mean" with its interval, "seeds" one by one, the "max", or the "first"."""
    less: str = ""
    """Less the row of this method or label, seed by seed; bold where the 95 % interval leaves zero
    out."""
    over: str = ""
    """As a multiple of the mean of the row of this method or label."""
    between: tuple[str, ...] = ()
    """How much of the way from the first of two methods to the second."""
    match: tuple[str, ...] = ()
    """Columns in which the other row agrees with this one. Without it that row has another label
    and is otherwise the same; with it, or where methods make the rows, it has the method, whatever
    its variant."""
    study: str = ""
    """Take the value from the same row of another study, such as "cost" or "paper"."""
    or_own: bool = False
    """Where the other study has no such row, this row's own value."""
    without: tuple[str, ...] = ()
    """Parts of a variant, such as "forget_bias", that the other study does not tell apart."""
    kind: str = ""
    """How a number is written: "percent", "bytes", "count", "text"; by its name unless given."""
    scale: float = 1.0
    digits: int | None = None
    """Decimals; by size unless given."""
    unit: str = ""

    @property
    def values(self) -> tuple[str, ...]:
        """The data frame's columns."""
        return (self.value,) if isinstance(self.value, str) else self.value

    @property
    def heading(self) -> str:
        """The title, or what the column shows in short."""
        return self.title or heading(self.values[0]) + (f" less {self.less}" if self.less else "")

    def text(self, found: Any, name: str, *, signed: bool = False, size: float = 0.0) -> str:
        """A value, or an `Interval`; a difference with its sign, to the digits of this size."""
        mean, half = found if isinstance(found, Interval) else (found, None)
        if isinstance(mean, str | bool) or self.kind == "text":
            return value_text(mean)
        if mean is None or math.isnan(mean):
            return "diverged"
        if self.kind == "bytes":
            return bytes_text(mean)
        percent = self.kind == "percent" or (not self.kind and is_percent(name))
        scale = self.scale * (100 if percent else 1)
        digits = 0 if self.kind == "count" else 1 if percent else decimals(scale * (size or mean))
        digits = digits if self.digits is None else self.digits
        text = f"{scale * mean:{'+' if signed else ','}.{digits}f}"
        if half is not None and self.kind != "count":
            text += f" ± {scale * half:.{digits}f}"
        if not signed:
            return text + (self.unit or (" %" if percent else ""))
        shown = half is not None and abs(mean) > half and round(scale * mean, digits) != 0
        return f"**{text}**" if shown else text


KINDS = ("", "percent", "bytes", "count", "text")
SHOWN = ("mean", "seeds", "max", "first")
COMPARED = ("less", "over", "between")
NEEDED = {"match": COMPARED, "or_own": ("study",), "without": ("study",)}
"""Fields of a column that say nothing without one of others."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "parameters": {"kind": "count", "show": "first"},
    "state_bytes": {"title": "state", "kind": "bytes", "show": "first"},
    "peak_memory_bytes": {"title": "peak memory", "kind": "bytes", "show": "max"},
    "step_ms": {"title": "step", "digits": 1, "unit": " ms"},
    "steps_per_second": {"title": "steps/s", "kind": "count"},
    "ceiling.test": {"title": "ceiling", "show": "first"},
    "memory.gate": {"title": "gate by layer"},
    "memory.use": {"title": "added over input by layer"},
}
"""How common columns are shown unless told otherwise."""


def column(declared: str | Mapping[str, Any]) -> Column:
    """A column from its declaration: the name of a data frame's column, or fields of `Column`."""
    given = {"value": declared} if isinstance(declared, str) else dict(declared)
    known = [field.name for field in fields(Column)]
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"column {given.get('value')!r}: unknown {', '.join(unknown)}; known are "
            f"{', '.join(known)}"
        )
    name = given.get("value")
    for key, choices in (("kind", KINDS), ("show", SHOWN)):
        if given.get(key, choices[0]) not in choices:
            raise ValueError(
                f"column {name!r}: expected a {key} of {', '.join(filter(None, choices))}, "
                f"got {given[key]!r}"
            )
    compared = [key for key in COMPARED if given.get(key)]
    if len(compared) > 1:
        raise ValueError(
            f"column {name!r}: expected one of {', '.join(COMPARED)}, got {', '.join(compared)}; "
            "make a column of each"
        )
    if given.get("study") and (given.get("less") or given.get("between")):
        raise ValueError(f"column {name!r}: expected {compared[0]} or study, got both; drop one")
    for key, needed in NEEDED.items():
        if given.get(key) and not any(given.get(other) for other in needed):
            raise ValueError(
                f"column {name!r}: expected {' or '.join(needed)} beside {key}, got none; add it, "
                f"or leave {key} out"
            )
    usual = DEFAULTS.get(name, {}) if isinstance(name, str) and "over" not in given else {}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in (usual | given).items()
    }
    return Column(**values)


def interval(values: Iterable[float | None]) -> Interval:
    """Mean and 95 % interval of one value per seed; a run that diverged makes the mean NaN.

    >>> mean, half = interval([0.91, 0.94, 0.94])
    >>> round(mean, 3), round(half, 4), interval([0.91]).half
    (0.93, 0.043, None)
    """
    numbers = pd.Series(list(values), dtype=float)
    if len(numbers) < 2 or numbers.isna().any():
        return Interval(float(numbers.mean(skipna=False)), None)
    return Interval(float(numbers.mean()), float(_quantile(len(numbers) - 1) * numbers.sem()))


@cache
def _quantile(freedom: int) -> Any:
    """Standard errors from the mean to the end of the interval."""
    return stdtrit(freedom, (1 + CONFIDENCE) / 2)  # scipy.stats takes a second to import


def table(
    runs: Frame,
    columns: Sequence[Column],
    *,
    rows: Sequence[str] = ("label",),
    only: Mapping[str, Any] | None = None,
    across: str = "",
    sort: str = "",
    others: Mapping[str, Frame] | None = None,
    lent: dict[str, list[Frame]] | None = None,
    titles: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Table:
    """One row for each value of `rows`, one column for each of `columns`.

    Args:
        runs: records as `read` gives them.
        columns: what to show.
        rows: columns of the data frame that tell rows apart; runs of a row must otherwise differ
            in their seed alone.
        only: columns and values as of `select`; other rows are there to be compared with.
        across: a column of the data frame whose values each get the columns once more.
        sort: order rows by the mean of this column instead of by `rows`.
        others: the studies that columns take values from.
        lent: filled with the runs of those studies whose values were taken, for `caption`.
        titles: headings for `rows`.
        names: what to write for a value of `rows` or `across`.
    """
    by, names = [*rows, *([across] if across else [])], names or {}
    check_columns(runs, [*by, *([sort] if sort else [])])
    texts = [runs[name].map(partial(field_text, name)) for name in by]
    ranks = [
        {text: rank for rank, text in enumerate(sorted(dict.fromkeys(one), key=order_key))}
        for one in texts
    ]

    def order(item: tuple[tuple[str, ...], Frame]) -> Any:
        if sort:
            return interval(item[1][sort]).mean
        return [rank[part] for rank, part in zip(ranks, item[0], strict=True)]

    found = dict(sorted(runs.groupby(texts, sort=False), key=order))
    for key, group in found.items():
        check_alike(", ".join(key), group)
    headings = [one.heading for one in columns]
    if not across and len(set(headings)) < len(headings):
        raise ValueError(f"table: expected a title of its own for each column, got {headings}")
    cells = _Cells(list(found.values()), by, others or {}, {} if lent is None else lent)
    for one in columns:
        cells.check_compared(one)
    places = list(ranks[-1]) if across else [""]
    shown = set(select(runs, only or {}).index)
    kept = [key for key, group in found.items() if shown.intersection(group.index)]
    lines = []
    for key in dict.fromkeys(key[: len(rows)] for key in kept):
        line = {
            (titles or {}).get(name, heading(name)): names.get(part, part)
            for name, part in zip(rows, key, strict=True)
        }
        for place in places:
            group = found.get((*key, place) if across else key)
            for one in columns:
                title = one.heading
                if across:
                    title = _heading_across(one, columns, across, names.get(place, place))
                line[title] = NOTHING if group is None else cells.text(one, group)
        lines.append(line)
    return lines


def select(runs: Frame, where: Mapping[str, Any]) -> Frame:
    """The runs whose columns have these values; "none" is no value.

    A list names several, and the order that they come in.
    """
    for name, wanted in where.items():
        check_columns(runs, [name])
        texts = [value_text(one) for one in wanted] if isinstance(wanted, list) else []
        found = runs[name].map(value_text)
        runs = runs[found.isin([*texts, value_text(wanted)])]
        place = {text: number for number, text in enumerate(texts)}
        runs = runs.iloc[found[runs.index].map(place.get).argsort(kind="stable")] if texts else runs
    return runs


def check_columns(runs: Frame, names: Sequence[str]) -> None:
    """Raise where records have no such column."""
    for name in names:
        if name not in runs:
            near = difflib.get_close_matches(name, map(str, runs.columns), n=5, cutoff=0.0)
            raise ValueError(
                f"expected a column of the records, got {name}; nearest are {', '.join(near)}"
            )


def check_alike(where: str, runs: Frame) -> None:
    """Raise where the runs of a row, or of a point, do not differ in their seed alone."""
    if len(runs) < 2:
        return
    configs = [record.get("config", {}) for record in runs["record"]]
    flats = [flatten(config) for config in configs]
    if len({frozenset(flat) for flat in flats}) > 1:  # older records lack what is newer than they
        flats = [flatten(current(config)) for config in configs]
    names = dict.fromkeys(name for flat in flats for name in flat if name not in NEUTRAL)
    apart = [name for name in names if len({flat.get(name) for flat in flats}) > 1]
    if apart or runs["seed"].duplicated().any():
        told = f"several values of {', '.join(apart)}" if apart else "a seed twice"
        raise ValueError(
            f"{where}: expected runs that differ in their seed alone, got {told}; tell them apart "
            "(`rows`, `panels`, or --by FIELD), or leave some out (`where`, or --where FIELD=VALUE)"
        )


def markdown(lines: Table) -> str:
    """A Markdown table, numbers to the right."""
    if not lines:
        return ""
    right = {name: all(_is_number(line[name]) for line in lines) for name in lines[0]}
    cells = [list(lines[0]), ["--:" if right[name] else ":--" for name in lines[0]]]
    cells += [[text.replace("|", "\\|") for text in line.values()] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def caption(runs: Frame, lent: Mapping[str, list[Frame]] | None = None) -> str:
    """Where the numbers come from: seeds, hardware, commits; also those that other studies lent."""
    seeds = sorted(set(runs["seed"].dropna()))
    told = f"{'Seeds' if len(seeds) > 1 else 'Seed'} {', '.join(map(str, seeds))}"
    told += "; mean ± half of the 95 % interval" if len(seeds) > 1 else ""
    told += f"; {_origin(runs)}"
    for study, found in (lent or {}).items():
        some = pd.concat(found)
        some = some[some["kind"] != "paper"]  # a paper's numbers are of no commit
        told += "" if some.empty else f"; from {study}.jsonl: {_origin(some)}"
    return f"{told}."


def heading(name: str) -> str:
    """What stands above a column that has no title."""
    return "method" if name == "label" else short_name(name).replace("_", " ")


class _Cells:
    """The rows of a table, so that each can be compared with another."""

    def __init__(
        self,
        groups: list[Frame],
        by: list[str],
        others: Mapping[str, Frame],
        lent: dict[str, list[Frame]],
    ) -> None:
        self.groups, self.by, self.others, self.lent = groups, by, others, lent
        firsts = [group.iloc[0] for group in groups]
        self.names = [(first.get("label"), first.get("method")) for first in firsts]

    def check_compared(self, one: Column) -> None:
        """Raise where a column is compared with a method that no row has."""
        known = dict.fromkeys(name for names in self.names for name in self._known_by(one, names))
        if unknown := {one.less, one.over, *one.between} - {"", *known}:
            what = "method" if self._by_method(one) else "label"
            raise ValueError(
                f"column {one.value!r}: expected a {what} of the table's rows to compare with, got "
                f"{', '.join(sorted(unknown))}; there are {', '.join(map(str, known))}"
            )

    def text(self, one: Column, runs: Frame) -> str:
        """What a column shows of a row."""
        if one.over:
            return self._ratio(one, runs)
        runs = self._elsewhere(one, runs)
        if one.value == "seeds":
            return str(len(runs))
        shown = [self._text(one, name, runs) for name in one.values]
        return one.join.join(text for text in shown if text != NOTHING) or NOTHING

    def _text(self, one: Column, name: str, runs: Frame) -> str:
        values = _by_seed(runs, name)
        if values.empty:
            return NOTHING
        first = values.iloc[0]
        if one.less or one.between:
            return self._compared(one, name, runs, values)
        if isinstance(first, tuple):
            columns = zip(*values, strict=True)
            means = [None if None in part else sum(part) / len(part) for part in columns]
            return ", ".join(NOTHING if mean is None else f"{mean:.3g}" for mean in means)
        if name.startswith("ceiling."):  # written as the measure that it bounds
            name = runs["metric"].iloc[0]
        if one.show == "seeds":
            return ", ".join(one.text(value, name) for value in values.sort_index())
        if one.show == "max":
            return one.text(values.dropna().max(), name)
        if one.show == "first" or isinstance(first, str | bool):
            return one.text(first, name)
        return one.text(interval(values), name)

    def _compared(self, one: Column, name: str, runs: Frame, values: Any) -> str:
        ends = [self._other(one, method, runs) for method in one.between or (one.less,)]
        if any(end is None for end in ends) or (one.less and ends[0] is runs):
            return NOTHING
        if one.less:
            ours, theirs = values.align(_by_seed(ends[0], name), join="inner")
            if ours.empty:
                return NOTHING
            ours, theirs = ours.astype(float), theirs.astype(float)
            return one.text(interval(ours - theirs), name, signed=True, size=ours.mean())
        seeds = set(runs["seed"]).intersection(*(end["seed"] for end in ends))
        own, start, end = (
            interval(some[some["seed"].isin(seeds)][name]).mean for some in (runs, *ends)
        )
        if math.isnan(own + start + end):
            return one.text(math.nan, name)
        higher = runs["record"].iloc[0].get("higher_is_better", True)
        if not seeds or (end <= start if higher else end >= start):
            return NOTHING
        return f"{round(100 * (own - start) / (end - start))} %"

    def _ratio(self, one: Column, runs: Frame) -> str:
        other = self._other(one, one.over, runs)
        if other is None:
            return NOTHING
        own, base = (
            interval(self._elsewhere(one, some)[one.values[0]]).mean for some in (runs, other)
        )
        digits = 2 if one.digits is None else one.digits
        return NOTHING if math.isnan(own / base) else f"{own / base:.{digits}f}×"

    def _other(self, one: Column, method: str, runs: Frame) -> Frame:
        """The row of another method that a row is compared with; None where there is none."""
        same = one.match or [n for n in self.by if n not in ("label", "method", "variant")]
        same = [name for name in ("recipe", *same) if name in runs]
        named = zip(self.groups, self.names, strict=True)
        named = [group for group, names in named if method in self._known_by(one, names)]
        alike = [g for g in named if all(_same(g, runs, name) for name in same)]
        for tried in (True, False):  # the same rate, else the rate that was tried for each
            wanted = _setting(runs, tried=tried) if alike else {}
            found = [g for g in alike if _setting(g, tried=tried) == wanted]
            if len(found) > 1 and not tried:
                raise ValueError(
                    f"table: expected one row of {method!r} to compare with, got {len(found)} that "
                    "differ in what was tried; add a field to 'match', or leave some out"
                )
            if found:
                return found[0]
        return None

    def _known_by(self, one: Column, names: tuple[Any, Any]) -> tuple[Any, ...]:
        return names if self._by_method(one) else names[:1]

    def _by_method(self, one: Column) -> bool:
        """Whether a column may call a row by its method, and not by its label alone."""
        return bool(one.match) or "method" in self.by

    def _elsewhere(self, one: Column, runs: Frame) -> Frame:
        """The runs of another study that stand for the same row."""
        if not one.study:
            return runs
        if one.study not in self.others:
            raise ValueError(f"table: expected records of the study {one.study!r}, got none")
        found = self.others[one.study]
        for name in {"recipe", *self.by} - {"label"}:
            if name in found and name in runs:  # what the other does not say may be anything
                wanted = value_text(runs[name].iloc[0])
                found = found[found[name].map(value_text).isin({wanted, "none"})]
        run, label = runs.iloc[0], _bare(runs["label"].iloc[0], one.without)
        same = [
            _bare(other["label"], one.without) == label and _agrees(other["record"], run)
            for _, other in found[["label", "record"]].iterrows()
        ]
        found = found.loc[pd.Series(same, found.index, dtype=bool)]
        self.lent.setdefault(one.study, []).append(found)
        return runs if found.empty and one.or_own else found


def _origin(runs: Frame) -> str:
    hardware, commits = (sorted(set(runs[name].dropna())) for name in ("hardware", "commit"))
    return f"{', '.join(hardware)}; commit {', '.join(commits)}"


def _by_seed(runs: Frame, name: str) -> Any:
    """The values of a row, none where a run lacks its own: no mean is of some seeds alone."""
    if name not in runs or any(isinstance(v, float) and math.isnan(v) for v in runs[name]):
        return pd.Series(dtype=object)
    return pd.Series(list(runs[name]), list(runs["seed"]) if "seed" in runs else None, dtype=object)


def _heading_across(one: Column, columns: Sequence[Column], across: str, place: str) -> str:
    name = f"{heading(across)} {place}" if place[:1].isdigit() else place
    return name if len(columns) == 1 else f"{name}: {one.heading}"


def _is_number(text: str) -> bool:
    return text == NOTHING or text.lstrip("*+-")[:1].isdigit()


def _agrees(record: Mapping[str, Any], run: Any) -> bool:
    """Whether a published number is of a run's setting: the paper names what matters alone."""
    said = flatten(record["config"]) if record["kind"] == "paper" else {}
    return all(value_text(run.get(name)) == value_text(value) for name, value in said.items())


def _same(some: Frame, other: Frame, name: str) -> bool:
    return value_text(some[name].iloc[0]) == value_text(other[name].iloc[0])


def _setting(runs: Frame, *, tried: bool) -> dict[str, Any]:
    """The setting of a row, with what was tried for it or without; that belongs to its method.

    So do steps where all train for equal time.
    """
    record = runs["record"].iloc[0]
    tries = record.get("tries", {})
    left_out = () if tried else (*tries, *(("budget.steps",) if "seconds" in tries else ()))
    return {n: value for n, value in record.get("settings", {}).items() if n not in left_out}


def _bare(label: str, without: tuple[str, ...]) -> str:
    """A label less these parts of its variant.

    >>> _bare("tensor (grid=4×4, forget_bias=5)", ("forget_bias",))
    'tensor (grid=4×4)'
    """
    method, _, told = label.removesuffix(")").partition(" (")
    kept = [part for part in told.split(", ") if part and part.partition("=")[0] not in without]
    return f"{method} ({', '.join(kept)})" if kept else method
