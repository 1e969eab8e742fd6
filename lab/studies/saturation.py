"""What a new memory still holds of a write after 124 blank tokens, by how its gates start.

    python lab/studies/saturation.py --record results/saturation.jsonl   # 3 minutes on a CPU core

Rows of `windowed-binding-long` go through a model that has learned nothing. Then, with everything
written and 124 blank tokens gone by, three things are measured: the part of the cells whose tanh is
saturated; R², how much of the content that a question asks for a linear map finds in what is read
at its place; and how loud that content is in the readout. Reads and writes are put at the places of
the task, which training has to find: what is asked here is whether the cells keep what they are
given. Linear maps are judged on rows that they were not fitted to.

Needs: pip install tensor-memory-lab.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tensor_memory import MemoryConfig, MemoryResidual, memory_scan
from tensor_memory_lab.provenance import write_record
from tensor_memory_lab.recipes.windowed import windowed_binding_long
from tensor_memory_lab.tasks import Batch
from tensor_memory_lab.tasks.binding import BLANK, squared_distances

PUBLISHED = MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1)
OPEN = replace(PUBLISHED, forget_bias=5.0)
NARROW = replace(OPEN, spread_bias=-1.0)
STARTS = {
    "as published": PUBLISHED,
    "forget 5": OPEN,
    "forget 5, spread -1": NARROW,
    "forget 5, spread -1, blanks write nothing": NARROW,
    "forget 5, spread -1, input -3": replace(NARROW, input_bias=-3.0),
    "forget 5, spread -1, feedback 0": replace(NARROW, feedback=0.0),
    "forget 5, spread -1, feedback 0, gain 4": replace(NARROW, feedback=0.0, gain=4.0),
}
"""Starting values. Where blanks write nothing, their content is taken out: it is not what fills the
cells."""


class Kept(NamedTuple):
    """What was found after the gap."""

    saturated: float
    """Part of the cells with |tanh c| above 0.95."""
    explained: float
    """R² of the content asked for, from what is read at its place."""
    loudness: float
    """Standard deviation, over questions, of what that content makes of the readout W_out r."""


def measure(name: str, seed: int = 0, rows: int = 320, gap: int = 124) -> Kept:
    """Send rows of the task through a new memory that starts as STARTS has it under `name`."""
    usual, memory_config = windowed_binding_long(), STARTS[name]
    model_config = replace(usual.model, method="tensor", memory=memory_config)
    task = replace(usual.task, gap=gap).build(seed)
    torch.manual_seed(seed)
    model = model_config.build(task)
    memory = next(m for m in model.modules() if isinstance(m, MemoryResidual)).memory
    batch = task.batch("train", 0, rows)
    with torch.no_grad():
        seen: list[Tensor] = []
        handle = memory.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        model(batch)
        handle.remove()
        summary = memory.write_proj(seen[0])  # (B, N, d): one token per chunk
        content = memory.content(summary)  # (B, N, C)
        blank = (batch["kind"] == BLANK)[..., None]
        own = memory.write_head(summary).tanh()
        at = torch.where(blank, own, batch["place"].clamp(-1, 1))  # (B, N, 3)
        spread = torch.nn.functional.softplus(memory.spread(summary))  # (B, N, 1)
        if "blanks" in name:
            content = content.masked_fill(blank, 0)
        first = int(batch["ask"][0, 0])
        asked = at[:, first:]  # (B, Q, 3): read by every step, the last of them after the gap
        empty = torch.zeros(rows, memory_config.channels, *memory_config.grid)
        reads, _, cell = memory_scan(
            asked[:, None].expand(-1, first + 1, -1, -1),
            at[:, : first + 1, None],
            spread[:, : first + 1],
            content[:, : first + 1, None],
            memory.taps,
            memory.mix.weight,
            memory.mix.bias,
            empty,
            empty,
        )
        assert reads is not None
        read = reads[:, first].flatten(0, 1)  # (B · Q, C)
        wanted = _asked_content(batch, content, task.config.writes).flatten(0, 1)
        readout = memory.output(read)  # (B · Q, d)
        spoken = readout.var(0).mean().item() * max(r_squared(wanted, readout), 0.0)
        saturated = (cell.tanh().abs() > 0.95).float().mean().item()
        return Kept(saturated, r_squared(read, wanted), spoken**0.5)


def _asked_content(batch: Batch, content: Tensor, writes: int) -> Tensor:
    """(B, Q, C): the content of the write nearest to each question."""
    questions = batch["place"].gather(1, batch["ask"][..., None].expand(-1, -1, 3))
    nearest = squared_distances(questions, batch["place"][:, :writes]).argmin(-1)
    return content.gather(1, nearest[..., None].expand(-1, -1, content.shape[2]))


def r_squared(inputs: Tensor, targets: Tensor) -> float:
    """Of a linear map fitted to the first half of the rows, on the second half.

    >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    >>> round(r_squared(x, 2 * x + 1), 3)
    1.0
    """
    half = len(inputs) // 2
    inputs, targets = inputs.double(), targets.double()
    scaled = (inputs - inputs[:half].mean(0)) / (inputs[:half].std(0) + 1e-12)
    scaled = torch.nn.functional.pad(scaled, (0, 1), value=1.0)
    weights = torch.linalg.lstsq(scaled[:half], targets[:half]).solution
    left = (scaled[half:] @ weights - targets[half:]).square().sum()
    return 1 - float(left / (targets[half:] - targets[:half].mean(0)).square().sum())


def main(argv: list[str] | None = None) -> int:
    """Measure every start and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, default=3, help="new memories to average over (default 3)")
    rows = "rows per memory, half of them to fit R² on (default 320)"
    add("--rows", type=int, default=320, help=rows)
    add("--record", help="add what came out to this study's file (.jsonl)")
    options = parser.parse_args(argv)
    for name in ("seeds", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(options, name)}")
    torch.set_num_threads(1)
    print(f"{'start':<44}{'saturated':>12}{'R²':>8}{'loudness':>12}")
    result = {}
    for name in STARTS:
        found = [measure(name, seed, options.rows) for seed in range(options.seeds)]
        kept = Kept(*(sum(values) / len(found) for values in zip(*found, strict=True)))
        result[name] = kept._asdict()
        numbers = f"{kept.saturated:>12.0%}{kept.explained:>8.2f}{kept.loudness:>12.4f}"
        print(f"{name:<44}{numbers}", flush=True)
    if options.record:
        config = {"seeds": options.seeds, "rows": options.rows}
        write_record(options.record, benchmark="saturation", config=config, seed=0, result=result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
