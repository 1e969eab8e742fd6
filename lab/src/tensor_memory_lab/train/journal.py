"""How far a run has come: what its checkpoints remember besides tensors, and how fast it goes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

COLD = 10
"""Steps at the start of a sitting that hold compilation, capture and first launches."""


@dataclass
class Journal:
    """Plain values; a checkpoint's state.json holds them, so a resumed run goes on with them."""

    step: int = 0
    """Finished optimiser steps, which is the data position too."""
    best: float | None = None
    """Best value of the task's metric on "valid"."""
    best_step: int | None = None
    waited: int = 0
    """Evaluations since the best one."""
    stopped_early: bool = False
    curve: list[dict[str, Any]] = field(default_factory=list)
    """One entry per evaluation: step, training loss since the one before, measures on "valid"."""
    loss_sum: float = 0.0
    """Of the steps since the last line of metrics."""
    logged: int = 0
    """The step of that line."""
    losses: list[tuple[int, float]] = field(default_factory=list)
    """Steps and mean loss of every line of metrics since the last evaluation."""
    seconds: float = 0.0
    """Wall time, all sittings together."""
    laps: list[tuple[int, float]] = field(default_factory=list)
    """Steps and seconds of timed stretches: no evaluation, no checkpoint, no first steps."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Journal:
        """What `to_dict` made."""
        known = {f.name for f in fields(cls)}
        journal = cls(**{name: value for name, value in values.items() if name in known})
        journal.losses = [(int(steps), loss) for steps, loss in journal.losses]
        journal.laps = [(int(steps), seconds) for steps, seconds in journal.laps]
        return journal

    def log_loss(self, loss_sum: float) -> float:
        """The mean loss of the steps since the last line; a loss that is no number stops here."""
        steps = self.step - self.logged
        mean = loss_sum / steps
        if not math.isfinite(mean):
            raise ValueError(
                f"step {self.step}: expected a finite training loss, got {mean}; lower "
                "--optimizer.lr, lengthen --optimizer.warmup or clip harder, and start again"
            )
        self.losses.append((steps, mean))
        self.logged, self.loss_sum = self.step, 0.0
        return mean

    def enter(self, valid: dict[str, float], metric: str, higher_is_better: bool) -> bool:
        """Note an evaluation; whether it is the best so far, of equals the one of less loss."""
        steps = sum(count for count, _ in self.losses)
        loss = sum(count * mean for count, mean in self.losses) / steps
        self.losses = []
        best = next((e["valid"] for e in self.curve if e["step"] == self.best_step), None)
        self.curve.append({"step": self.step, "loss": loss, "valid": valid})
        value = valid[metric]
        better = best is None or _is_better(valid, best, metric, higher_is_better)
        if better and not math.isnan(value):
            self.best, self.best_step, self.waited = value, self.step, 0
            return True
        self.waited += 1
        return False

    def speed(self) -> tuple[float | None, float | None]:
        """Steps per second, and milliseconds of the median step; None where nothing was timed."""
        seconds = sum(lap for _, lap in self.laps)
        if not seconds:
            return None, None
        median = statistics.median(lap / steps for steps, lap in self.laps)
        return sum(steps for steps, _ in self.laps) / seconds, 1000 * median


def _is_better(
    valid: dict[str, float], best: dict[str, float], metric: str, higher_is_better: bool
) -> bool:
    """Whether an evaluation beats another.

    Accuracies are often the same, above all where a task is solved: the earliest of them would
    stand for a model that has only begun to.
    """
    value, other = valid[metric], best[metric]
    if value == other:
        return valid.get("loss", 0.0) < best.get("loss", 0.0)
    return value > other if higher_is_better else value < other


class Stopwatch:
    """Times stretches of steps between moments when the device has caught up.

    The first steps of a sitting (`COLD`) are dropped.
    """

    def __init__(self) -> None:
        self._cold = COLD
        self._begun = self._paused = 0.0

    def lap(self, steps: int) -> tuple[int, float] | None:
        """End a stretch of `steps` and begin the next; call it right after reading the device."""
        now = time.perf_counter()
        seconds = now - self._begun - self._paused
        self._begun, self._paused = now, 0.0
        if self._cold > 0:
            self._cold -= steps
            return None
        return steps, seconds

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count what is done inside; the device must have caught up on both ends."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started
