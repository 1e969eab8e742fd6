"""How far a run has come, how fast it goes, and its result as plain values."""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensor_memory_lab.models import Model
from tensor_memory_lab.provenance import provenance
from tensor_memory_lab.records import config_dict
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Task


class DivergedError(ValueError):
    """The training loss is no number any more."""


COLD = 10
"""Steps at the start of a sitting that hold compilation, capture and first launches."""


@dataclass
class Journal:
    """What a checkpoint remembers besides tensors: plain values."""

    step: int = 0
    """Finished optimiser steps, which is the data position too."""
    best_step: int | None = None
    """The evaluation with the best value of the task's metric on "valid"."""
    waited: int = 0
    """Evaluations since the best one."""
    stopped_early: bool = False
    curve: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation: step, training loss since the one before, measures on "valid"."""
    loss_sum: float = 0.0
    """Of the steps since the last line of metrics."""
    logged: int = 0
    """The step of that line."""
    interval_loss: float = 0.0
    """Sum of the losses from the last evaluation to the last line of metrics."""
    seconds: float = 0.0
    """Wall time, all sittings together."""
    laps: list[tuple[int, float]] = field(default_factory=list)
    """Steps and seconds of timed stretches: no evaluation, no checkpoint, no first steps."""

    def log_loss(self, loss_sum: float) -> float:
        """The mean loss of the steps since the last line; a loss that is no number stops here."""
        mean = loss_sum / (self.step - self.logged)
        if not math.isfinite(mean):
            raise DivergedError(
                f"step {self.step}: expected a finite training loss, got {mean}; lower "
                "--optimizer.lr, lengthen --optimizer.warmup or clip harder, and start again"
            )
        self.interval_loss += loss_sum
        self.logged, self.loss_sum = self.step, 0.0
        return mean

    def enter(self, valid: dict[str, float], metric: str, higher_is_better: bool) -> bool:
        """Note an evaluation; whether it is the best so far.

        Of two with the same metric the one of less loss is better: where a task is solved, the
        first perfect accuracy comes from a model that has only begun to solve it.
        """
        steps = self.step - (self.curve[-1]["step"] if self.curve else 0)
        best = self.best_valid()
        self.curve.append({"step": self.step, "loss": self.interval_loss / steps, "valid": valid})
        self.interval_loss = 0.0

        def rank(measures: dict[str, float]) -> tuple[float, float]:
            value = measures[metric]
            return (value if higher_is_better else -value, -measures.get("loss", 0.0))

        if not math.isnan(valid[metric]) and (not best or rank(valid) > rank(best)):
            self.best_step, self.waited = self.step, 0
            return True
        self.waited += 1
        return False

    def best_valid(self) -> dict[str, float]:
        """Measures of the best evaluation; empty where there is none."""
        return next((e["valid"] for e in self.curve if e["step"] == self.best_step), {})

    def speed(self) -> dict[str, float | None]:
        """Steps per second, and milliseconds of the median step; None where nothing was timed."""
        seconds = sum(lap for _, lap in self.laps)
        if not seconds:
            return {"steps_per_second": None, "step_ms": None}
        median = statistics.median(lap / steps for steps, lap in self.laps)
        rate = sum(steps for steps, _ in self.laps) / seconds
        return {"steps_per_second": rate, "step_ms": 1000 * median}


class Stopwatch:
    """Times stretches of steps between moments when the device has caught up.

    The first steps of a sitting (`COLD`) are dropped.
    """

    def __init__(self) -> None:
        self._cold = COLD
        self._begun = self._paused = 0.0

    def lap(self, steps: int) -> list[tuple[int, float]]:
        """End a stretch of `steps` and begin the next; call it right after reading the device."""
        now = time.perf_counter()
        seconds = now - self._begun - self._paused
        self._begun, self._paused = now, 0.0
        cold, self._cold = self._cold, self._cold - steps
        return [] if cold > 0 else [(steps, seconds)]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count what is done inside; the device must have caught up on both ends."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started


def describe_run(config: RunConfig[Any, Any], task: Task, model: Model) -> dict[str, Any]:
    """What a record holds that is known before the first step.

    It is asked then, so that a task or a model that cannot say it is found before it is trained.
    """
    described = {
        "kind": "run",
        "recipe": config.recipe,
        "config": config_dict(config),
        "task": task.name,
        "method": config.model.method,
        "seed": config.seed,
        "facts": task.facts(),
        "labels": model.labels(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": model.state_bytes(),
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "ceiling": {split: task.ceiling(split) for split in task.test_splits},
    }
    for name, of in (("facts", task), ("labels", model)):
        try:
            json.dumps(described[name])
        except TypeError as error:
            raise ValueError(
                f"{type(of).__name__}.{name}: expected plain values, which JSON can hold, got "
                f"{described[name]!r} ({error})"
            ) from error
    return described


def make_record(
    described: dict[str, Any], journal: Journal, device: torch.device, **measured: Any
) -> dict[str, Any]:
    """Everything a table, a plot or a sceptic needs of one run."""
    return (
        described
        | journal.speed()
        | {
            "wall_seconds": journal.seconds,
            "peak_memory_bytes": peak_memory(device),
            "steps": journal.step,
            "curve": journal.curve,
            "best_step": journal.best_step,
            "valid": journal.best_valid(),
            "stopped_early": journal.stopped_early,
        }
        | measured
        | provenance(device)
    )


def peak_memory(device: torch.device) -> int:
    """Bytes: most allocated on the GPU in this run; on a CPU the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # elsewhere in KiB
