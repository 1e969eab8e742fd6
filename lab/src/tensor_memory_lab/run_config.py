"""A run as plain values: task, model, optimiser, budget, seed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.models import ModelConfig
from tensor_memory_lab.tasks import TaskConfig

T = TypeVar("T", bound=TaskConfig)
M = TypeVar("M", bound=ModelConfig)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; weight decay on matrices only."""

    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.01
    """On matrices; none on biases, gates and norms."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW's two running means."""
    clip: float = 1.0
    """Largest norm of the gradient; 0 clips nothing."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up: stay, or fall to zero along a half cosine over the whole budget."""
    warmup: int = 0
    """Steps of linear warm-up."""
    place_rate: float = 1.0
    """Part of the rate at which weights that make places learn. At high rates their tanh
    saturates, the sooner the wider the tokens; a place at the border hardly learns any more."""

    def __post_init__(self) -> None:
        for name in ("lr", "place_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"optimizer.{name}: expected a positive number, got {getattr(self, name)}"
                )
        if not all(0 <= value < math.inf for value in (self.weight_decay, self.clip, self.warmup)):
            raise ValueError(
                "optimizer: expected weight_decay, clip and warmup of 0 or more, got "
                f"{self.weight_decay}, {self.clip} and {self.warmup}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas: expected two numbers in [0, 1), got {self.betas}")
        check_choices(self, "optimizer")


@dataclass(frozen=True)
class BudgetConfig:
    """How long and how often; two runs are compared only where this agrees."""

    steps: int = 2000
    """Optimiser steps."""
    batch_size: int = 128
    """Rows per optimiser step, over all processes and accumulated parts together."""
    accumulate: int = 1
    """Parts that the rows of one process are cut into, one after the other."""
    evaluate_every: int = 200
    """Steps between evaluations on "valid"."""
    evaluation_batches: int | None = None
    """Batches of "valid" per evaluation; None takes all of them. Tests always take all."""
    evaluation_batch_size: int | None = None
    """Rows per evaluation batch; None takes `batch_size`."""
    patience: int | None = None
    """Stop after this many evaluations without a better one; None never stops early."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last step always leaves one."""
    test: bool = True
    """Whether the test splits are measured at the end. A run that only helps to choose a rate
    leaves them alone."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"budget.{name}: expected 1 or more, got {getattr(self, name)}")
        for name in ("evaluation_batches", "evaluation_batch_size", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(
                    f"budget.{name}: expected 1 or more, or None, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class RunConfig(Generic[T, M]):
    """Everything that decides a run's numbers, and nothing else."""

    recipe: str
    """Name of the recipe that made this config."""
    task: T
    model: M
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    seed: int = 0
    """Initialisation, dropout and training data; evaluation data never depends on it."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: products under autocast, weights and accumulations stay float32."""
    speed: Literal["auto", "eager", "graph", "compile"] = "auto"
    """How a step is launched; changes no number beyond rounding. auto: a CUDA graph where one
    can be captured, else eager. compile: the same of a compiled forward pass and loss."""

    def __post_init__(self) -> None:
        check_choices(self)
        if not -(2**63) <= self.seed < 2**64:  # what PyTorch takes
            raise ValueError(f"seed: expected a number from -2**63 to 2**64 - 1, got {self.seed}")
