"""Pictures of results, drawn from their JSON so that no GPU machine needs matplotlib.

tensor-memory bench plot results/bench/scan-nvidia-h200.json
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tensor_memory_lab.bench import report
from tensor_memory_lab.bench.train_step import WAYS

LABELS = {"forward": "forward", "forward_backward": "forward and backward"}
SIZES = {"scan": (12, 3.5), "train-step": (9, 4), "decode": (10, 4)}
"""Inches of a figure, by benchmark."""


def draw_scan(result: dict[str, Any], figure: Any) -> bool:
    """Cost against each thing that was varied, or that of each shape; False where there is none."""
    swept = {name: _timed(part) for name, part in result["sweeps"].items()}
    swept = {name: part for name, part in swept.items() if part}
    if not swept:
        return draw_shapes(result, figure)
    panels = figure.subplots(1, len(swept), squeeze=False, sharey=True)[0]
    for panel, (name, part) in zip(panels, swept.items(), strict=True):
        sizes = [_size(row["shape"][name]) for row in part]
        for kind in LABELS:
            best = [_best(row, kind) for row in part]
            medians = [timing["median"] for timing in best]
            low = [timing["median"] - timing["p10"] for timing in best]
            high = [timing["p90"] - timing["median"] for timing in best]
            panel.errorbar(sizes, medians, yerr=[low, high], marker="o", label=LABELS[kind])
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.set_xlabel("voxels" if name == "grid" else name)
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(frameon=False)
    return True


def draw_shapes(result: dict[str, Any], figure: Any) -> bool:
    """Bars: the plain loop and this scan at every shape; False where none was timed."""
    rows = {name: row for name, row in result["shapes"].items() if _timed([row])}
    if not rows:
        return False
    panels = figure.subplots(1, len(LABELS), sharey=True)
    for panel, (kind, label) in zip(panels, LABELS.items(), strict=True):
        groups: dict[str, dict[str, float]] = {}
        for name, row in rows.items():
            groups[name] = {"this scan": _best(row, kind)["median"]}
            if kind in row.get("plain_loop", {}).get("ms", {}):
                groups[name]["plain loop"] = row["plain_loop"]["ms"][kind]["median"]
        _bars(panel, groups)
        panel.set_yscale("log")
        panel.set_ylim(top=3 * panel.get_ylim()[1])  # room for the numbers above bars
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set_title(label)
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(frameon=False, loc="upper left", ncols=2)
    return True


def draw_train_step(result: dict[str, Any], figure: Any) -> bool:
    """Bars: a step without and with memory, launched from Python and in the other ways timed."""
    groups: dict[str, dict[str, float]] = {}
    for name, row in result["models"].items():
        ways = {name: row} | {f"{name}\n{title}": row.get(way) for way, title in WAYS.items()}
        for way, timed in ways.items():
            if timed and "ms" in timed:
                groups[way] = {
                    "without memory": timed["ms"]["base"]["median"],
                    "with memory": timed["ms"]["memory"]["median"],
                }
    if not groups:
        return False
    panel = figure.subplots()
    _bars(panel, groups)
    panel.set_ylabel("milliseconds per step")
    panel.legend(frameon=False)
    return True


def draw_decode(result: dict[str, Any], figure: Any) -> bool:
    """Left the time of a token; right bytes after so many: a growing cache, and the state."""
    rows = {name: row for name, row in result["batches"].items() if "state_bytes" in row}
    if not rows:
        return False
    left, right = figure.subplots(1, 2)
    _bars(left, {f"batch {name}": _per_token(row) for name, row in rows.items()})
    left.set_ylim(top=1.25 * left.get_ylim()[1])  # room for the legend
    left.set_ylabel("milliseconds per token")
    left.legend(frameon=False, loc="upper left", ncols=2)
    for name, row in rows.items():
        lengths = [int(length) for length in row["key_value_bytes"]]
        cache = [size / report.MIB for size in row["key_value_bytes"].values()]
        (line,) = right.plot(lengths, cache, marker="o", label=f"key-value cache, batch {name}")
        state = [row["state_bytes"] / report.MIB] * len(lengths)
        right.plot(lengths, state, "--", color=line.get_color(), label=f"memory, batch {name}")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("tokens seen")
    right.set_ylim(top=8 * right.get_ylim()[1])  # room for the legend
    right.set_ylabel("MiB")
    right.legend(frameon=False)
    return True


def _timed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that have every time which is drawn: a part may have died."""
    return [row for row in rows if all(kind in row.get("ms", {}) for kind in LABELS)]


def _best(row: dict[str, Any], kind: str) -> dict[str, float]:
    """The device's time where a graph told it, else that of launches from Python."""
    ways = row["ms"][kind]
    return ways.get("graph", ways["eager"])


def _per_token(row: dict[str, Any]) -> dict[str, float]:
    base, memory = (row["ms_per_token"][which]["median"] for which in ("base", "memory"))
    return {"without memory": base, "with memory": memory}


def _bars(panel: Any, groups: dict[str, dict[str, float]]) -> None:
    """Groups of bars with their heights above them; a group may lack some."""
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        middle = width * (number - (len(names) - 1) / 2)
        heights = {at: bars[name] for at, bars in enumerate(groups.values()) if name in bars}
        drawn = panel.bar(
            [at + middle for at in heights], list(heights.values()), width, label=name
        )
        panel.bar_label(drawn, fmt="%.3g", fontsize=8)
    panel.set_xticks(range(len(groups)), list(groups))


DRAW: dict[str, Callable[[dict[str, Any], Any], bool]] = {
    "scan": draw_scan,
    "train-step": draw_train_step,
    "decode": draw_decode,
}


def _size(value: int | list[int]) -> int:
    """What a sweep's value counts: itself, or the voxels of a grid."""
    if isinstance(value, int):
        return value
    voxels = 1
    for size in value:
        voxels *= size
    return voxels


def main(argv: list[str]) -> int:
    """Draw each record beside its JSON, as a PNG of the same name."""
    parser = argparse.ArgumentParser(
        prog="tensor-memory bench plot", description="Draw results beside their JSON, as PNG."
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON records")
    paths = parser.parse_args(argv).results
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(
            "matplotlib is not installed; pip install 'tensor-memory[experiments]', "
            "or draw on another machine from the same JSON"
        )
    from matplotlib.figure import Figure  # draws without any display

    from tensor_memory_lab.files import write_whole

    for path in paths:
        try:
            record = report.load(path)
        except ValueError as error:
            parser.error(str(error))
        name = record["benchmark"]
        if name not in DRAW:
            parser.error(
                f"{path}: expected a record of {', '.join(DRAW)}, got one of {name!r}; leave it out"
            )
        figure = Figure(figsize=SIZES[name], layout="constrained")
        if not DRAW[name](record["result"], figure):
            print(f"{path}: nothing was measured that could be drawn")
            continue
        figure.suptitle(f"{name}, {record['config']['device_name']}")
        target = path.with_suffix(".png")
        write_whole(target, lambda at, figure=figure: figure.savefig(at, format="png", dpi=120))
        print(f"written to {target}")
    return 0
