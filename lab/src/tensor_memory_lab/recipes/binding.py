"""Coordinate binding under full attention: the paper's cell, and long enough to settle it.

    tensor-memory-lab run binding --model.method tensor
    tensor-memory-lab sweep --plan lab/plans/published.toml --jobs 6

Expected on one H200: see `expected` of each recipe and docs/evidence/diagnostics.md. The paper
reports 90.8 / 91.0 / 90.4 / 94.8 % (base, wide, slots, tensor) for `binding`.
"""

from __future__ import annotations

from typing import Any

from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks import TaskConfig
from tensor_memory_lab.tasks.binding import BindingConfig

PUBLISHED = OptimizerConfig(
    lr=3e-4, weight_decay=0.01, betas=(0.9, 0.999), clip=1.0, schedule="constant"
)
"""AdamW of all published diagnostics."""

LONGER = OptimizerConfig(
    lr=1e-3, weight_decay=0.01, betas=(0.9, 0.95), clip=1.0, schedule="cosine", warmup=100
)
"""What every method gets where the point is how far it comes, annealed fully."""

Toy = RunConfig[Any, ToyModelConfig]


def diagnostic(
    name: str, task: TaskConfig, model: ToyModelConfig, optimizer: OptimizerConfig, **budget: Any
) -> Toy:
    """A run of a diagnostic; `budget` are fields of `BudgetConfig`, steps among them."""
    usual: Any = {"batch_size": 128, "evaluate_every": 100, "evaluation_batch_size": 1024}
    return RunConfig(name, task, model, optimizer, BudgetConfig(**usual | budget))


@recipe(
    "binding",
    expected="10 s on one H200; CPU: base 2 min, tensor 30 min",
    settings=("task.writes", "task.noise"),
)
def binding() -> Toy:
    """Coordinate binding as published: W 20, σ 0.1, 2,000 steps of 128."""
    task = BindingConfig(writes=20, noise=0.1)
    model = ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.1)
    return diagnostic("binding", task, model, PUBLISHED, steps=2000)


@recipe("binding-long", expected="25 s on one H200", settings=("task.writes", "task.noise"))
def binding_long() -> Toy:
    """Coordinate binding to convergence: 6,000 steps at 1e-3, annealed, no dropout."""
    task = BindingConfig(writes=20, noise=0.1)
    model = ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.0)
    return diagnostic("binding-long", task, model, LONGER, steps=6000, evaluate_every=150)
