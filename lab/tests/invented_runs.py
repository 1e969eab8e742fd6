"""A task and a model small enough for tests of the commands, and records of runs never run."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig
from tensor_memory_lab.models import Model
from tensor_memory_lab.records import config_dict, declared
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks import Task


@dataclass(frozen=True)
class SignTaskConfig:
    """Which of the numbers is asked for."""

    numbers: int = 4
    """Numbers per row."""
    noise: float = 0.0
    data_dir: str | None = None
    trouble: Literal["none", "raise", "die", "sleep", "wait"] = "none"

    def __post_init__(self) -> None:
        if self.numbers < 1:
            raise ValueError(f"task.numbers: expected 1 or more, got {self.numbers}")

    def build(self, seed: int) -> SignTask:
        """The task, or the trouble it stands for."""
        if self.trouble == "raise":
            raise ValueError("task.trouble: expected none, got what was asked for")
        if self.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "sleep":
            time.sleep(600)
        return SignTask(self.numbers, seed, waits=self.trouble == "wait")


class SignTask(Task):
    """Say the sign of the first number."""

    name = "sign"
    metric = "accuracy"
    higher_is_better = True
    test_splits = ("test",)

    def __init__(self, numbers: int, seed: int, waits: bool) -> None:
        self.numbers, self.seed, self.waits = numbers, seed, waits

    def to(self, device: torch.device) -> SignTask:
        return self

    def batch(self, split: str, index: int, size: int) -> dict[str, Tensor]:
        while self.waits and index == 3 and not Path("go").exists():
            time.sleep(0.02)
        number = {"train": self.seed * 1000 + index, "valid": -1 - index, "test": -100 - index}
        random = torch.Generator().manual_seed(10_000 + number[split])
        x = torch.randn(size, self.numbers, generator=random)
        return {"x": x, "target": (x[:, 0] > 0).long()}

    def batches(self, split: str, size: int) -> int:
        return 2

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs["logits"], batch["target"])

    def measure(self, outputs: Any, batch: dict[str, Tensor]) -> Any:
        rows = torch.tensor(float(len(batch["x"])))
        right = (outputs["logits"].argmax(1) == batch["target"]).sum()
        return {"loss": (self.loss(outputs, batch) * rows, rows), "accuracy": (right, rows)}

    def ceiling(self, split: str) -> float | None:
        return 1.0

    def facts(self) -> dict[str, Any]:
        return {"chance": 0.5}


@dataclass(frozen=True)
class LinearConfig:
    """A linear map."""

    method: Literal["base", "tensor"] = "base"
    wide: bool = False
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig(channels=4, grid=(2, 2)))

    def build(self, task: SignTask) -> Linear:
        return Linear(task.numbers)


class Linear(Model):
    """Two logits of the numbers."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.map = nn.Linear(numbers, 2)

    def forward(self, batch: Any, carry: Any = None) -> Any:
        return {"logits": self.map(batch["x"])}, None


def sign() -> RunConfig[Any, Any]:
    """Say the sign of a number.

    More about it.
    """
    return RunConfig(
        recipe="sign",
        task=SignTaskConfig(),
        model=LinearConfig(),
        optimizer=OptimizerConfig(lr=0.1, schedule="constant"),
        budget=BudgetConfig(steps=4, batch_size=8, evaluate_every=2, checkpoint_every=2),
    )


def record(config: RunConfig[Any, Any], *, accuracy: float = 0.9, **changes: Any) -> dict[str, Any]:
    """The record of a run that ended with this accuracy."""
    steps = config.budget.steps
    curve = [
        {"step": step, "loss": 1.0, "valid": {"accuracy": accuracy * step / steps, "loss": 1.0}}
        for step in (steps // 2, steps)
    ]
    values: dict[str, Any] = {
        "kind": "run", "recipe": config.recipe, "config": config_dict(config), "task": "sign",
        "method": config.model.method, "seed": config.seed, "facts": {"chance": 0.5},
        "labels": {}, "parameters": 10, "state_bytes": 2048, "speed": "eager", "backend": None,
        "steps_per_second": 50.0, "step_ms": 20.0, "wall_seconds": 1.0, "peak_memory_bytes": 1,
        "shared_device": False, "metric": "accuracy", "higher_is_better": True, "steps": steps,
        "curve": curve, "best_step": steps, "valid": curve[-1]["valid"],
        "test": {"test": {"accuracy": accuracy, "loss": 0.5}}, "ceiling": {"test": 1.0},
        "memory": None, "finished": True, "stopped_early": False,
        "commit": "0123456789abcdef", "dirty": False, "hardware": {"gpu": None, "cpu": "a CPU"},
    }  # fmt: skip
    return values | declared(config, sign()) | changes


BASE, TENSOR = LinearConfig(), LinearConfig(method="tensor")


def run(model: Any = BASE, *, seed: int = 0, accuracy: float = 0.9, **rest: Any) -> dict[str, Any]:
    """A record of the invented recipe; `rest` are fields of the config or of the record."""
    fields = {name: rest.pop(name) for name in ("task", "budget", "optimizer") if name in rest}
    config = replace(sign(), model=model, seed=seed, **fields)
    return record(config, accuracy=accuracy, **rest)
