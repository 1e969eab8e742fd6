"""How steps are launched: eagerly, compiled, or as one CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tensor_memory_lab.models import Carry
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Task
from tensor_memory_lab.train.steps import Step


def make_step(
    model: nn.Module,
    task: Task,
    optimizer: torch.optim.Optimizer,
    config: RunConfig[Any, Any],
    device: torch.device,
    *,
    process: int = 0,
    processes: int = 1,
    carry: Carry | None = None,
) -> Step:
    """The step that `config.speed` asks for; "auto" takes a CUDA graph where it can."""
    reason = why_not_graph(device, processes)
    if config.speed == "graph" and reason is not None:
        raise ValueError(
            f"speed 'graph' cannot serve this run: {reason}; choose --speed auto or eager"
        )
    arguments = (model, task, optimizer, config, device)
    if config.speed in ("auto", "graph") and reason is None:
        from tensor_memory_lab.train.graph import GraphStep

        required = config.speed == "graph"
        return GraphStep(*arguments, process=process, carry=carry, required=required)
    step = Step(*arguments, process=process, carry=carry)
    if config.speed == "auto":
        step.reason = reason
    return step


def why_not_graph(device: torch.device, processes: int) -> str | None:
    """The reason no CUDA graph can be captured here, or None."""
    if device.type != "cuda":
        return f"a CUDA graph needs a CUDA device, got {device.type}"
    if processes > 1:
        return f"a CUDA graph is captured for one process, got {processes}"
    return None
