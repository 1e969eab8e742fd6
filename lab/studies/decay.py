"""How long a write lasts before anything is learned, by where the forget gate starts.

    python lab/studies/decay.py            # a minute on a CPU core, draws docs/images/decay-*.png

A memory can only learn to keep what still reaches the loss. At the start of training the forget
gate is σ(forget bias) everywhere, so what a token wrote fades by that factor with every later
write. Measured is ‖∂m_t / ∂x_s‖, how much the read of token t still depends on token s, over the
distance t - s, with the weights a new `TensorMemory` has. The paper's bias is 0.

Needs: pip install tensor-memory-lab.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from tensor_memory import MemoryConfig, TensorMemory
from tensor_memory_lab.files import write_whole
from tensor_memory_lab.provenance import write_record
from tensor_memory_lab.records.figure import HEIGHT, INK, WIDTH, Theme, name_lines, style

DIM = 64
ROWS = 16
BIASES = (0.0, 1.0, 3.0, 5.0)
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)
COLOURS: dict[Theme, tuple[str, ...]] = {
    "light": ("#D55E00", "#E69F00", "#009E73", "#0072B2"),
    "dark": ("#FF8A4C", "#E69F00", "#2FC29B", "#56B4E9"),
}
ASKED = {"windowed-binding": (3, 13), "windowed-map": (10, 48), "windowed-binding-long": (125, 147)}
"""Tokens from a question back to what may answer it, nearest and farthest."""


def influence(forget_bias: float, distances: Sequence[int], seeds: int = 3) -> list[float]:
    """‖∂m_t / ∂x_s‖ at each distance t - s: geometric mean over `seeds` new memories.

    Tokens are normal, as behind a LayerNorm. The Frobenius norm is estimated from the gradient of
    one random direction of m per row.
    """
    logs = torch.zeros(len(distances), dtype=torch.float64)
    for seed in range(seeds):
        torch.manual_seed(seed)
        config = MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1, forget_bias=forget_bias)
        memory = TensorMemory(DIM, config).double()  # float32 would end at 1e-38
        x = torch.randn(ROWS, max(distances) + 1, DIM, dtype=torch.float64, requires_grad=True)
        m, _ = memory(x)  # (B, N, d)
        direction = torch.randn(ROWS, DIM, dtype=torch.float64)
        for index, distance in enumerate(distances):
            along = (m[:, distance] * direction).sum()
            (gradient,) = torch.autograd.grad(along, x, retain_graph=True)
            logs[index] += gradient[:, 0].square().sum(-1).mean().sqrt().log() / seeds
    return logs.exp().tolist()


def draw(
    found: dict[float, list[float]], distances: Sequence[int], path: Path, theme: Theme
) -> None:
    """One line per bias, relative to the read right after the write."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(WIDTH, HEIGHT + 0.6), layout="constrained")
        axis = figure.subplots()
        names = []
        for (bias, values), colour in zip(found.items(), COLOURS[theme], strict=True):
            relative = [value / values[0] for value in values]
            axis.plot(distances, relative, color=colour, marker="o", markersize=4, linewidth=2)
            kept = 1 / (1 + math.exp(-bias))
            names.append((f"bias {bias:g}: keeps {kept:.3g} per token", colour, relative[-1]))
        for height, (name, (near, far)) in zip((1e4, 1e7, 1e4), ASKED.items(), strict=True):
            axis.plot([near, far], [height, height], color=INK[theme], alpha=0.6, linewidth=5)
            side = "left" if near < 64 else "right"
            at = near if side == "left" else far
            axis.text(at, 6 * height, f"asked in {name}", ha=side, va="center", size=8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(distances, [str(distance) for distance in distances])
        axis.minorticks_off()
        axis.set_yscale("log")
        axis.set_yticks([10.0**power for power in range(-12, 4, 3)])
        axis.set_ylim(1e-13, 1e9)
        axis.set_xlabel("tokens between write and read")
        axis.set_ylabel("‖∂read / ∂write‖, relative")
        shown = [(name, colour, max(end, 1e-13)) for name, colour, end in names]
        name_lines(axis, shown, 17, HEIGHT + 0.6)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda at: figure.savefig(at, format="png", dpi=150))


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    folder = "folder of the figure, light and dark (default docs/images)"
    add("--output", type=Path, default=Path("docs/images"), help=folder)
    add("--seeds", type=int, default=3, help="new memories to average over (default 3)")
    add("--record", help="add what came out to this study's file (.jsonl)")
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"--seeds: expected 1 or more, got {options.seeds}")
    torch.set_num_threads(1)
    found = {bias: influence(bias, DISTANCES, options.seeds) for bias in BIASES}
    print("distance   " + "  ".join(f"{distance:>7}" for distance in DISTANCES))
    for bias, values in found.items():
        shown = "  ".join(f"{value / values[0]:7.0e}" for value in values)
        print(f"bias {bias:<5g} {shown}")
    for theme in COLOURS:
        draw(found, DISTANCES, options.output / f"decay-{theme}.png", theme)
    print(options.output)
    if options.record:
        result = {
            f"{bias:g}": {
                str(distance): value for distance, value in zip(DISTANCES, values, strict=True)
            }
            for bias, values in found.items()
        }
        config = {"seeds": options.seeds, "rows": ROWS, "dim": DIM}
        write_record(options.record, benchmark="decay", config=config, seed=0, result=result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
