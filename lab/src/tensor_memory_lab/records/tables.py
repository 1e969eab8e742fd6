"""Tables of comparisons, as Markdown and as CSV, with what a reader must know below them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from tensor_memory_lab.records.comparison import (
    Comparison,
    Record,
    Row,
    short_names,
    show,
)
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.paper import Published, published
from tensor_memory_lab.records.wording import (
    PERCENT,
    bound_name,
    bytes_text,
    estimate_text,
    listing,
    measure_text,
)
from tensor_memory_lab.wording import counted

CSV_COLUMNS = (
    "method", "variant", "split", "measure", "mean", "half_width", "runs", "ceiling", "paper",
    "parameters", "state_bytes", "steps_per_second",
)  # fmt: skip

COLUMNS = ("method", "seeds", "parameters", "state", "steps/s", "notes", "accuracy", "loss")
"""Headings that a field of a setting must not take."""

Table = list[dict[str, str]]
"""Rows of column to text; every row has the same columns."""


def result_table(comparison: Comparison, measures: Sequence[str] = ()) -> Table:
    """One row per setting and method: measures of every test split, sizes, speed.

    `measures` names those to show besides the task's metric.
    """
    shown = [comparison.metric, *(name for name in measures if name != comparison.metric)]
    _check_measures(comparison, shown)
    columns = [(split, name) for name in shown for split in comparison.splits]
    table = []
    for row in comparison.rows:
        line = setting_cells(row) | {"method": row.label, "seeds": str(len(row.records))}
        for split, name in columns:
            found = row.measure(split, name)
            heading = _heading(split, name, comparison)
            line[heading] = "–" if found is None else estimate_text(found, name)
            line[f"paper: {heading}"] = _paper_text(published(row.records[0], split, name))
            if name == comparison.metric:
                bound = f"{bound_name(row.records[0])}: {heading}"
                line[bound] = _ceiling(row.records[0], split, name)
        line |= {
            "parameters": f"{row.records[0]['parameters']:,}",
            "state": bytes_text(row.records[0]["state_bytes"]),
            "steps/s": _speed(row),
            "notes": _notes(row),
        }
        table.append(line)
    return _without_empty(table)


def memory_table(comparison: Comparison) -> Table:
    """How open and how used the memory of each row is, and what is lost without it.

    Gate and use are means over seeds, layer by layer. Empty where no run has a memory.
    """
    table = []
    for row in comparison.rows:
        memories = [record["memory"] for record in row.records if record.get("memory")]
        if not memories:
            continue
        line = setting_cells(row) | {"method": row.label, "seeds": str(len(memories))}
        layers = [memory["layers"] for memory in memories]
        for key, heading in (("gate", "σ(γ) per layer"), ("use", "‖σ(γ)m‖/‖x‖ per layer")):
            per_layer = [[found[i][key] for found in layers] for i in range(len(layers[0]))]
            line[heading] = ", ".join(
                "–" if None in values else f"{sum(values) / len(values):.3g}"
                for values in per_layer
            )
        measures = [comparison.metric, *(["loss"] if comparison.metric in PERCENT else [])]
        for split, name in ((split, name) for split in comparison.splits for name in measures):
            heading, found = _heading(split, name, comparison), row.measure(split, name)
            line[heading] = "–" if found is None else estimate_text(found, name)
            line[f"{heading} without memory"] = _without(memories, split, name)
        table.append(line)
    return table


def caption(comparison: Comparison) -> str:
    """What stands below a table: seeds, hardware, commits, budget, what was left out."""
    records = comparison.records
    seeds = sorted({record["seed"] for record in records})
    counts = {len(row.records) for row in comparison.rows}
    label = "Seed" if len(seeds) == 1 else "Seeds"
    parts = [f"{label} {listing(seeds)}"]
    if len(counts) > 1:
        parts[0] += f" ({min(counts)} to {max(counts)} per row)"
    parts[0] += "; mean ± half of the 95 % interval (Student t)" if max(counts) > 1 else ""
    chances = sorted({r["facts"]["chance"] for r in records if "chance" in r.get("facts", {})})
    if chances and comparison.metric in PERCENT:
        shown = listing([measure_text(chance, comparison.metric) for chance in chances])
        parts.append(f"Chance: {shown}")
    parts.append(f"Hardware: {listing(hardware(records))}")
    parts.append(f"Commit: {listing(commits(records))}")
    parts.append(f"Budget: {_budget_text(comparison.budget)}")
    protocols = dict.fromkeys((record.get("facts") or {}).get("evaluation") for record in records)
    told = [protocol for protocol in protocols if protocol]
    if told:
        parts.append(f"Evaluation: {listing(told)}")
    if comparison.unfinished:
        left = counted(comparison.unfinished, "unfinished run is", "unfinished runs are")
        parts.append(f"{left} left out")
    if notes := _paper_notes(comparison):
        parts.append(f"Paper's numbers: {notes}")
    return ". ".join(parts) + "."


def markdown(table: Table) -> str:
    """A Markdown table, numbers to the right."""
    if not table:
        return ""
    columns = list(table[0])
    right = {name: all(_is_number(line[name]) for line in table) for name in columns}
    lines = [columns, ["--:" if right[name] else ":--" for name in columns]]
    lines += [[line[name].replace("|", "\\|") for name in columns] for line in table]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def csv_text(comparison: Comparison) -> str:
    """Every measure of every row as plain numbers: mean, half of the interval, runs."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [*comparison.fields, *CSV_COLUMNS], lineterminator="\n")
    writer.writeheader()
    for row in comparison.rows:
        first = row.records[0]
        for split, measures in first["test"].items():
            for name in measures:
                found = row.measure(split, name)
                if found is None:
                    continue
                paper = published(first, split, name)
                is_metric = name == comparison.metric
                writer.writerow({
                    **{field: show(value) for field, value in row.setting},
                    "method": row.method, "variant": row.variant, "split": split, "measure": name,
                    "mean": found.mean, "half_width": found.half_width, "runs": found.count,
                    "ceiling": first["ceiling"].get(split) if is_metric else None,
                    "paper": None if paper is None or paper.high else paper.value,
                    "parameters": first["parameters"], "state_bytes": first["state_bytes"],
                    "steps_per_second": mean_speed(row),
                })  # fmt: skip
    return out.getvalue()


def setting_cells(row: Row) -> dict[str, str]:
    """The first columns of a row: what varies over the table beside the method."""
    names = short_names([name for name, _ in row.setting], taken=COLUMNS)
    return {names[name]: show(value) for name, value in row.setting}


def mean_speed(row: Row) -> float | None:
    """Steps per second over the runs that had the device to themselves; None without any."""
    alone = [
        record["steps_per_second"]
        for record in row.records
        if not record.get("shared_device") and record.get("steps_per_second")
    ]
    return sum(alone) / len(alone) if alone else None


def _paper_notes(comparison: Comparison) -> str:
    """How the paper's numbers came about, and of which methods where they differ in that."""
    notes: dict[str, dict[str, None]] = {}
    for row in comparison.rows:
        for split in comparison.splits:
            for name in row.records[0]["test"].get(split, {}):
                entry = published(row.records[0], split, name)
                if entry is not None and entry.note:
                    notes.setdefault(entry.note, {})[row.method] = None
    if len(notes) < 2:
        return "".join(notes)
    return "; ".join(f"{note} ({listing(list(methods))})" for note, methods in notes.items())


def _check_measures(comparison: Comparison, names: Sequence[str]) -> None:
    known = dict.fromkeys(
        name
        for record in comparison.records
        for measures in record["test"].values()
        for name in measures
    )
    for name in names:
        if name not in known:
            raise ValueError(
                f"{comparison.recipe}: expected a measure among {', '.join(known)}, got {name!r}"
            )


def _heading(split: str, name: str, comparison: Comparison) -> str:
    return name if comparison.splits == ["test"] else f"{name} {split}"


def _ceiling(record: Record, split: str, name: str) -> str:
    ceiling = record["ceiling"].get(split)
    return "" if ceiling is None else measure_text(ceiling, name)


def _paper_text(entry: Published | None) -> str:
    if entry is None:
        return ""
    low = measure_text(entry.value, entry.measure)
    if entry.high is None:
        return low
    return f"{low.removesuffix(' %')}–{measure_text(entry.high, entry.measure)}"


def _speed(row: Row) -> str:
    speed = mean_speed(row)
    return "" if speed is None else f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"


def _notes(row: Row) -> str:
    labels = dict.fromkeys(
        name.replace("_", "-") if value is True else f"{name.replace('_', '-')}: {value}"
        for record in row.records
        for name, value in record["labels"].items()
        if value not in (False, None)
    )
    early = sum(bool(record.get("stopped_early")) for record in row.records)
    stopped = [f"{early} of {len(row.records)} stopped early"] if early else []
    return ", ".join([*labels, *stopped])


def _without(memories: list[Mapping[str, Any]], split: str, metric: str) -> str:
    values = [(m.get("test_without_memory") or {}).get(split, {}).get(metric) for m in memories]
    if all(value is None for value in values):
        return "–"
    return estimate_text(estimate(values), metric)


def _without_empty(table: Table) -> Table:
    """The table less the columns in which no row has anything to say."""
    keep = [name for name in table[0] if any(line[name] for line in table)]
    return [{name: line[name] or "–" for name in keep} for line in table]


def _is_number(text: str) -> bool:
    return text == "–" or text.lstrip("*+-")[:1].isdigit()


def hardware(records: Sequence[Record]) -> list[str]:
    """What these runs ran on."""
    found = {}
    for record in records:
        machine = record.get("hardware") or {}
        found[machine.get("gpu") or machine.get("cpu") or "unknown"] = None
    return sorted(found)


def commits(records: Sequence[Record]) -> list[str]:
    """Commits of these runs, short, and whether files were changed."""
    found = set()
    for record in records:
        commit = record.get("commit")
        changed = " with changes" if record.get("dirty") else ""
        found.add("unknown" if commit is None else commit[:10] + changed)
    return sorted(found)


def _budget_text(budget: Mapping[str, Any]) -> str:
    steps, rows = budget["budget.steps"], budget["budget.batch_size"]
    parts = [
        f"{counted(steps, 'step')} of {counted(rows, 'row')}",
        f"AdamW, rate {show(budget['optimizer.lr'])} {budget['optimizer.schedule']}",
    ]
    if budget["optimizer.warmup"]:
        parts.append(f"{counted(budget['optimizer.warmup'], 'step')} of warm-up")
    parts.append(f"weight decay {show(budget['optimizer.weight_decay'])}")
    if budget["budget.patience"] is not None:
        patience = counted(budget["budget.patience"], "evaluation")
        parts.append(f"stopped after {patience} without a better one")
    return ", ".join(parts)
