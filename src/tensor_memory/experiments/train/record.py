"""The result of a run as plain values."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tensor_memory.experiments.models import Model
from tensor_memory.experiments.results import config_dict
from tensor_memory.experiments.run_config import RunConfig
from tensor_memory.experiments.tasks import Task
from tensor_memory.experiments.train.journal import Journal
from tensor_memory.experiments.train.options import RunOptions
from tensor_memory.provenance import provenance


@dataclass(frozen=True)
class Measured:
    """What is known once training is over; empty in the record of an interrupted run."""

    speed: str
    """How steps were launched, and why not otherwise."""
    backend: str | None
    """What the memory ran on; None where there is none."""
    test: dict[str, dict[str, float]]
    """Measures of every test split."""
    memory: dict[str, Any] | None
    """How the memory is used; None where there is none."""
    finished: bool = True


def make_record(
    config: RunConfig[Any, Any],
    options: RunOptions,
    task: Task,
    model: Model,
    journal: Journal,
    measured: Measured,
) -> dict[str, Any]:
    """Everything a table, a plot or a sceptic needs of one run."""
    rate, step_ms = journal.speed()
    device = next(model.parameters()).device
    at_best = [entry["valid"] for entry in journal.curve if entry["step"] == journal.best_step]
    record = {
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
        "speed": measured.speed,
        "backend": measured.backend,
        "steps_per_second": rate,
        "step_ms": step_ms,
        "wall_seconds": journal.seconds,
        "peak_memory_bytes": peak_memory(device),
        "shared_device": options.shared_device,
        "metric": task.metric,
        "higher_is_better": task.higher_is_better,
        "steps": journal.step,
        "curve": journal.curve,
        "best_step": journal.best_step,
        "valid": at_best[0] if at_best else {},
        "test": measured.test,
        "ceiling": {split: task.ceiling(split) for split in task.test_splits},
        "memory": measured.memory,
        "finished": measured.finished,
        "stopped_early": journal.stopped_early,
    }
    return record | provenance(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: most allocated on the GPU in this run; on a CPU the process's largest resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # elsewhere in KiB
