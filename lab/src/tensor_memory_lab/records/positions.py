"""The figure of loss against position, and its records on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.files import read_json, write_text
from tensor_memory_lab.records.plots import LOOKS, OTHERS, _figure, _legend, _save
from tensor_memory_lab.records.records import local_places
from tensor_memory_lab.records.tables import Table
from tensor_memory_lab.records.wording import bytes_text

Record = Mapping[str, Any]

PARTS = "parts of a window"
"""What the thin lines of the figure show."""


def write_positions(path: Path, record: Record) -> None:
    """Write a record of kind "positions" as JSON, whole or not at all, places as in results."""
    record = dict(record) | {"config": local_places(record["config"])}
    text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def read_positions(folder: Path) -> list[Record]:
    """Every record of kind "positions" in a folder, by name of its file."""
    remedy = "remove it, or measure again with `tensor-memory positions`"
    paths = sorted(folder.glob("*.json"))
    found = [read_json(path, "the loss of a run against position", remedy) for path in paths]
    return [record for record in found if record.get("kind") == "positions"]


def positions_table(records: Sequence[Record]) -> Table:
    """Loss at the training length and with the longest history, and what that history is worth."""
    ends = sorted({record["windows"][-1]["history"] for record in records})
    table = []
    for record in records:
        last = record["windows"][-1]
        losses = dict.fromkeys(ends, "–") | {last["history"]: f"{last['loss']:.4f}"}
        table.append(
            {
                "method": _label(record),
                "trained": _training(record),
                "state": bytes_text(record["state_bytes"]),
                "loss without history": f"{record['windows'][0]['loss']:.4f}",
                **{f"after {end:,} tokens": loss for end, loss in losses.items()},
                "gain": f"{last['gain']:+.4f} ± {1.96 * last['gain_error']:.4f}",
            }
        )
    return table


def draw_positions(records: Sequence[Record], path: Path) -> list[Path]:
    """Loss of the same tokens against how far into the text they stand; the files written.

    The thin line shows parts of a window, the marks whole windows; the dashed line ends the
    training length.
    """
    labelled = list(_labelled(records))
    with _figure(1, [label for label, _ in labelled] + [PARTS]) as (figure, (axis,)):
        for number, (label, record) in enumerate(labelled):
            other = OTHERS[number % len(OTHERS)]
            alone = label == record["method"]
            colour, dash, marker = LOOKS.get(record["method"], other) if alone else other
            N = record["length"]
            middles = [window["history"] + N / 2 for window in record["windows"]]
            axis.plot(record["positions"], record["losses"], color=colour, alpha=0.3, linewidth=0.8)
            axis.plot(middles, [window["loss"] for window in record["windows"]], dash,
                      color=colour, marker=marker, markersize=4, linewidth=1.5,
                      label=label)  # fmt: skip
        axis.axvline(records[0]["length"], color="#555555", linestyle=(0, (4, 3)),
                     label="training length")  # fmt: skip
        axis.plot([], [], color="#555555", alpha=0.3, linewidth=0.8, label=PARTS)
        axis.set_xlabel("position in the text, tokens")
        axis.set_ylabel("loss of the same tokens, nats")
        axis.set_xlim(left=0)
        _legend(figure, [axis])
        return _save(figure, path)


def _labelled(records: Sequence[Record]) -> Iterable[tuple[str, Record]]:
    """Each record under its method, with its training and seed where methods repeat."""
    methods = [record["method"] for record in records]
    for record in records:
        label = _label(record)
        if methods.count(record["method"]) > 1:
            label += f", trained {_training(record)}, seed {record['seed']}"
        yield label, record


def _training(record: Record) -> str:
    """Carried or fresh; and the step, where that is not the run's last."""
    step, steps = record["step"], record["config"]["budget"]["steps"]
    return record["trained"] + (f", step {step:,} of {steps:,}" if step < steps else "")


def _label(record: Record) -> str:
    future = " (sees the future)" if record["labels"].get("non_causal") else ""
    return f"{record['method']}{future}"
