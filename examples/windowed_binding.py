"""Two models that see two tokens at a time, one of them with a memory: which one remembers?

    python examples/windowed_binding.py     # about two minutes on a CPU core

Eight values are written at points of space; after a pause the values at four of those points are
asked for. Two layers of attention over two tokens reach two tokens back, and no answer lies that
near, so only what is carried along can answer. Both models see the same data and start from the
same values; the memory is the one thing in which they differ. At the end: a table, learning curves
and a page that shows the memory at work.

Needs: pip install 'tensor-memory[inspect]'

Letters: B batch, N tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    Recording,
    TensorMemory,
    memory_disabled,
    record,
)

VALUES, WRITES, PAUSE, QUERIES = 8, 8, 2, 4
LENGTH = WRITES + PAUSE + QUERIES
BLANK, ASK = VALUES, VALUES + 1  # symbols after the values 0 to 7
DIM, LAYERS, HEADS, WINDOW = 64, 2, 4, 2
# The forget gate starts open (bias 4): at the paper's 0 it takes twice the steps.
MEMORY = MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1, forget_bias=4.0)
EVALUATE_EVERY, VALID_ROWS, TEST_ROWS = 25, 512, 2048


class Rows(NamedTuple):
    """What is written or asked, and where."""

    symbol: Tensor  # (B, N) a value, BLANK or ASK
    point: Tensor  # (B, N, 3) in [-1, 1]
    answer: Tensor  # (B, QUERIES) the values asked for


def draw_rows(count: int, generator: torch.Generator) -> Rows:
    """Eight writes, a pause and four questions per row."""
    value = torch.randint(VALUES, (count, WRITES), generator=generator)
    point = torch.rand(count, WRITES, 3, generator=generator) * 2 - 1
    asked = torch.randint(WRITES, (count, QUERIES), generator=generator)
    symbol = F.pad(F.pad(value, (0, PAUSE), value=BLANK), (0, QUERIES), value=ASK)
    at = point.gather(1, asked[..., None].expand(-1, -1, 3))
    point = torch.cat([point, point.new_zeros(count, PAUSE, 3), at], dim=1)
    return Rows(symbol, point, value.gather(1, asked))


def describe(rows: Rows) -> list[list[str]]:
    """The text of every token, for the page."""

    def text(symbol: int, point: list[float]) -> str:
        at = ", ".join(f"{x:+.1f}" for x in point)
        if symbol == BLANK:
            return "pause; "
        return f"what is at ({at})? " if symbol == ASK else f"{symbol} at ({at}); "

    named = zip(rows.symbol.tolist(), rows.point.tolist(), strict=True)
    return [[text(*token) for token in zip(*row, strict=True)] for row in named]


class Model(nn.Module):
    """Symbols and points -> logits over the values, for each question."""

    def __init__(self, memory: MemoryConfig | None) -> None:
        super().__init__()
        self.symbol, self.point = nn.Embedding(VALUES + 2, DIM), nn.Linear(3, DIM)
        options = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, HEADS, 4 * DIM, **options) for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VALUES))
        near = torch.ones(LENGTH, LENGTH).tril().triu(1 - WINDOW).bool()
        self.register_buffer("beyond", ~near)
        # Made last, so that one seed gives both models the same host.
        self.memory = None if memory is None else MemoryResidual(TensorMemory(DIM, memory))

    def forward(self, rows: Rows) -> Tensor:
        """(B, N) symbols and points -> (B, QUERIES, VALUES)."""
        x = self.symbol(rows.symbol) + self.point(rows.point)
        for number, block in enumerate(self.blocks):
            x = block(x, src_mask=self.beyond)
            if number == 0 and self.memory is not None:
                x, _ = self.memory(x)
        return self.head(x[:, -QUERIES:])


class Trained(NamedTuple):
    """A model and how it came to be."""

    model: Model
    curve: list[tuple[int, float]]  # step, part of the validation questions answered right
    seconds: float


def train(label: str, memory: MemoryConfig | None, steps: int, seed: int) -> Trained:
    """Minimise the cross-entropy of the answers."""
    torch.manual_seed(seed)
    model = Model(memory)
    data = torch.Generator().manual_seed(seed + 1)
    valid = draw_rows(VALID_ROWS, torch.Generator().manual_seed(-1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    curve, started = [(0, accuracy(model, valid))], time.perf_counter()
    for step in range(1, steps + 1):
        rows = draw_rows(32, data)
        loss = F.cross_entropy(model(rows).flatten(0, 1), rows.answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVALUATE_EVERY == 0 or step == steps:
            curve.append((step, accuracy(model, valid)))
        if step % 100 == 0 or step == steps:
            print(f"{label}: step {step} of {steps}, {curve[-1][1]:.0%} right", flush=True)
    return Trained(model, curve, time.perf_counter() - started)


@torch.no_grad()
def accuracy(model: Model, rows: Rows) -> float:
    """The part of the questions that is answered right."""
    return (model(rows).argmax(-1) == rows.answer).float().mean().item()


@torch.no_grad()
def watch(model: Model, rows: Rows) -> Recording:
    """What the memory does with every token of these rows."""
    with record(model, texts=describe(rows)) as recording:
        model(rows)
    return recording


def draw_curves(trained: dict[str, Trained], path: Path) -> None:
    """Answers right over the steps of training, a line per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3), layout="constrained")
    axis = figure.subplots()
    for (label, (_, curve, _)), colour in zip(trained.items(), ("#D55E00", "#0072B2"), strict=True):
        axis.plot(*zip(*curve, strict=True), color=colour, label=label)
    axis.axhline(1 / VALUES, color="#777777", linestyle=":", label="chance")
    axis.set(xlabel="steps", ylabel="answers right", ylim=(0, 1))
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)


def table(trained: dict[str, Trained]) -> str:
    """What came out, a column per model."""
    test = draw_rows(TEST_ROWS, torch.Generator().manual_seed(-2))
    columns = []
    for model, _, seconds in trained.values():
        off, state = "-", 0
        if model.memory is not None:
            state = model.memory(torch.zeros(1, 0, DIM))[1].nbytes
            with memory_disabled(model):
                off = f"{accuracy(model, test):.1%}"
        size = sum(parameter.numel() for parameter in model.parameters())
        cells = (f"{accuracy(model, test):.1%}", off, f"{1 / VALUES:.1%}")
        columns.append([*cells, f"{size:,}", f"{state:,} B", f"{seconds:.0f} s"])
    names = ("answers right", "the same, memory switched off", f"chance, 1 of {VALUES}")
    names += ("parameters", "state carried past attention", "training")
    lines = [("", *trained), *zip(names, *columns, strict=True)]
    return "\n".join(f"{name:<30}{without:>16}{within:>16}" for name, without, within in lines)


def main(argv: list[str] | None = None) -> int:
    """Train both, show what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="of each model (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/windowed-binding"),
        help="folder of the curves and the page (default runs/windowed-binding)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected 1 or more, got {options.steps}")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("expected matplotlib for the curves; pip install 'tensor-memory[inspect]'")
    options.output.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # on tensors this small more threads cost more than they give

    methods = {"without memory": None, "with memory": MEMORY}
    trained = {
        label: train(label, memory, options.steps, options.seed)
        for label, memory in methods.items()
    }
    curves, page = options.output / "curves.png", options.output / "memory.html"
    draw_curves(trained, curves)
    shown = draw_rows(4, torch.Generator().manual_seed(-3))
    watch(trained["with memory"].model, shown).save_page(page, title="Windowed binding")
    print(f"\n{table(trained)}\n")
    print("The task is made to show one thing: what attention cannot reach, a memory can keep.")
    print(f"learning curves:    {curves}")
    print(f"inside the memory:  {page} (open it in a browser)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
