"""Pictures of results, drawn from their JSON so that no GPU machine needs matplotlib.

tensor-memory bench plot results/bench/scan-nvidia-h200.json
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensor_memory.bench import report

LABELS = {"forward": "forward", "forward_backward": "forward and backward"}


def draw_scan(result: dict[str, Any], figure: Any) -> bool:
    """Cost against each thing that was varied; False where nothing was."""
    swept = {name: [row for row in part if "ms" in row] for name, part in result["sweeps"].items()}
    swept = {name: part for name, part in swept.items() if part}
    if not swept:
        return False
    panels = figure.subplots(1, len(swept), squeeze=False, sharey=True)[0]
    for panel, (name, part) in zip(panels, swept.items(), strict=True):
        sizes = [_size(row["shape"][name]) for row in part]
        for kind in LABELS:
            ways = [row["ms"][kind] for row in part]
            best = [way.get("graph", way["eager"]) for way in ways]
            medians = [timing["median"] for timing in best]
            low = [timing["median"] - timing["p10"] for timing in best]
            high = [timing["p90"] - timing["median"] for timing in best]
            panel.errorbar(sizes, medians, yerr=[low, high], marker="o", label=LABELS[kind])
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")
        panel.set_xlabel("voxels" if name == "grid" else name)
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(frameon=False)
    return True


def draw_train_step(result: dict[str, Any], figure: Any) -> bool:
    """Bars: a step without and with memory."""
    rows = {name: row for name, row in result["models"].items() if "ms" in row}
    if not rows:
        return False
    panel = figure.subplots()
    for offset, which in ((-0.2, "base"), (0.2, "memory")):
        places = [index + offset for index in range(len(rows))]
        medians = [row["ms"][which]["median"] for row in rows.values()]
        panel.bar(places, medians, width=0.4, label=which)
    panel.set_xticks(range(len(rows)), list(rows))
    panel.set_ylabel("milliseconds per step")
    panel.legend(frameon=False)
    return True


def draw_decode(result: dict[str, Any], figure: Any) -> bool:
    """Bytes held after so many tokens: a growing cache, and the memory's state."""
    rows = {name: row for name, row in result["batches"].items() if "state_bytes" in row}
    if not rows:
        return False
    panel = figure.subplots()
    for name, row in rows.items():
        lengths = [int(length) for length in row["key_value_bytes"]]
        cache = [size / report.MIB for size in row["key_value_bytes"].values()]
        (line,) = panel.plot(lengths, cache, marker="o", label=f"key-value cache, batch {name}")
        state = [row["state_bytes"] / report.MIB] * len(lengths)
        panel.plot(lengths, state, "--", color=line.get_color(), label=f"memory, batch {name}")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("tokens seen")
    panel.set_ylabel("MiB")
    panel.legend(frameon=False)
    return True


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

    from tensor_memory.files import write_whole

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
        figure = Figure(figsize=(12, 3.5) if name == "scan" else (6, 4), layout="constrained")
        if not DRAW[name](record["result"], figure):
            print(f"{path}: nothing was measured that could be drawn")
            continue
        figure.suptitle(f"{name}, {record['config']['device_name']}")
        target = path.with_suffix(".png")
        write_whole(target, lambda at, figure=figure: figure.savefig(at, format="png", dpi=120))
        print(f"written to {target}")
    return 0
