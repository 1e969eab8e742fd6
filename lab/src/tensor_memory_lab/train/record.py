"""The result of a run as plain values."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tensor_memory_lab.models import Model
from tensor_memory_lab.provenance import provenance
from tensor_memory_lab.records import config_dict
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Task
from tensor_memory_lab.train.journal import Journal
from tensor_memory_lab.train.options import RunOptions


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


def describe_run(config: RunConfig[Any, Any], task: Task, model: Model) -> dict[str, Any]:
    """What a record holds that is known before the first step.

    Asked then, so that a task or a model that cannot say it is found out before it is trained.
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
    described: dict[str, Any],
    options: RunOptions,
    device: torch.device,
    journal: Journal,
    measured: Measured,
) -> dict[str, Any]:
    """Everything a table, a plot or a sceptic needs of one run."""
    rate, step_ms = journal.speed()
    at_best = [entry["valid"] for entry in journal.curve if entry["step"] == journal.best_step]
    record = described | {
        "speed": measured.speed,
        "backend": measured.backend,
        "steps_per_second": rate,
        "step_ms": step_ms,
        "wall_seconds": journal.seconds,
        "peak_memory_bytes": peak_memory(device),
        "shared_device": options.shared_device,
        "steps": journal.step,
        "curve": journal.curve,
        "best_step": journal.best_step,
        "valid": at_best[0] if at_best else {},
        "test": measured.test,
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
