"""A task and a model small enough to train in a blink, for tests of the loop.

A row is N numbers; the answer is whether the first one is positive. The model averages the row,
with dropout, a memory or a carried state where asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory
from tensor_memory_lab.models import Model
from tensor_memory_lab.records import register_config
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.train import RunOptions, train

N = 4


@register_config
@dataclass(frozen=True)
class TinyTaskConfig:
    carries: bool = False
    resident: bool = True
    uneven: bool = False

    def build(self, seed):
        return TinyTask(self, seed)


class TinyTask:
    name = "tiny"
    metric = "accuracy"
    higher_is_better = True
    test_splits = ("test", "test@half")

    def __init__(self, config, seed, device="cpu"):
        self.config, self.seed, self.device = config, seed, torch.device(device)
        self.carries = config.carries

    def to(self, device):
        return TinyTask(self.config, self.seed, device if self.config.resident else "cpu")

    def batch(self, split, index, size):
        offset = {"train": 1000 * (self.seed + 2), "valid": 0, "test": 1, "test@half": 2}[split]
        draw = torch.Generator().manual_seed(1_000_003 * offset + index)
        if split != "train":
            size = min(size, 70 - index * size)
        elif self.config.uneven and index == 6:
            size //= 2
        x = torch.randn(size, N, 3, generator=draw)
        batch = {"x": x, "target": (x[:, 0, 0] > 0).long(), "fresh": torch.zeros(size).bool()}
        batch["fresh"] |= index == 0
        return {name: value.to(self.device) for name, value in batch.items()}

    def batches(self, split, size):
        return -(-70 // size)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs["logits"].float(), batch["target"])

    def measure(self, outputs, batch):
        logits, target = outputs["logits"].float(), batch["target"]
        count = torch.ones_like(target).sum()
        loss = F.cross_entropy(logits, target, reduction="sum")
        return {"loss": (loss, count), "accuracy": ((logits.argmax(-1) == target).sum(), count)}

    def finish(self, means):
        return means | {"error": 1 - means["accuracy"]}

    def ceiling(self, split):
        return 1.0

    def facts(self):
        return {"chance": 0.5}


@register_config
@dataclass(frozen=True)
class TinyModelConfig:
    method: str = "base"
    dim: int = 8
    dropout: float = 0.0
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(channels=2, grid=(2, 2)))

    def build(self, task):
        return TinyModel(self, task)


class TinyModel(Model):
    def __init__(self, config, task):
        super().__init__()
        self.config, self.carries = config, task.carries
        self.embed = nn.Linear(3, config.dim)
        self.hidden = nn.Linear(config.dim, config.dim)
        self.side = None
        if config.method == "tensor":
            self.side = MemoryResidual(TensorMemory(config.dim, config.memory))
        self.head = nn.Linear(config.dim, 2)

    def forward(self, batch, carry=None):
        x = self.embed(batch["x"])  # (B, N, d)
        if self.carries:
            before = torch.zeros_like(x[:, 0]) if carry is None else carry["before"]
            before = before.masked_fill(batch["fresh"][:, None], 0)
            x = x + 0.5 * before[:, None]
        if self.side is not None:
            x, _ = self.side(x)
        x = x + F.dropout(self.hidden(F.gelu(x)), self.config.dropout, self.training)
        after = {"before": x[:, -1].detach().float()} if self.carries else None
        return {"logits": self.head(x[:, 0] + x.mean(1))}, after

    def state_bytes(self):
        return 64 if self.side is not None else 0


def tiny_run(*, task=None, model=None, optimizer=None, budget=None, **fields):
    """A `RunConfig`: 20 steps of 12 rows, an evaluation every 5, a checkpoint every 4."""
    budget = {"steps": 20, "batch_size": 12, "evaluate_every": 5, "checkpoint_every": 4} | (
        budget or {}
    )
    return RunConfig(
        recipe="tiny",
        task=TinyTaskConfig(**(task or {})),
        model=TinyModelConfig(**(model or {})),
        optimizer=replace(OptimizerConfig(lr=1e-2, warmup=3), **(optimizer or {})),
        budget=BudgetConfig(**budget),
        **fields,
    )


def run(folder, config=None, **options):
    """Train on a CPU in a folder; the record."""
    options = {"device": "cpu", "quiet": True} | options
    return train(config or tiny_run(), RunOptions(folder, **options))


def lines(folder):
    """What a run has told of itself during training."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def shared_run():
    """A run for one or two processes: a recipe for the command line."""
    return tiny_run(
        task={"carries": True}, model={"method": "tensor"}, budget={"accumulate": 2}, seed=1
    )


def long_run():
    """A run that is interrupted long before its end: a recipe for the command line."""
    return tiny_run(model={"dropout": 0.2}, budget={"steps": 3_000_000, "checkpoint_every": 1000})
