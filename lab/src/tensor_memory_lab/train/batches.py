"""The rows that a process trains on, on its device when they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from tensor_memory_lab.run_config import BudgetConfig
from tensor_memory_lab.tasks import Batch, Task

AHEAD = 3
"""Batches made ahead of time where they are made on the CPU for a GPU."""


def rows_of(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Rows `start` to `stop` of every tensor: views."""
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def rows_in(batch: dict[str, Tensor]) -> int:
    """How many rows a batch has."""
    return next(iter(batch.values())).shape[0]


def rows_per_process(budget: BudgetConfig, processes: int) -> int:
    """Rows of each process; an error where the batch cannot be cut into equal parts."""
    parts = processes * budget.accumulate
    if budget.batch_size % parts:
        raise ValueError(
            f"budget.batch_size: expected a multiple of {parts} ({processes} processes × "
            f"{budget.accumulate} accumulated parts), got {budget.batch_size}"
        )
    return budget.batch_size // processes


def training_batches(
    task: Task,
    budget: BudgetConfig,
    device: torch.device,
    *,
    first: int,
    process: int = 0,
    processes: int = 1,
) -> Generator[Batch]:
    """The rows of one process of every training batch, from step `first` to the budget's end.

    Where a task makes its batches on the CPU for a GPU, a thread makes them a few steps ahead, in
    pinned memory. A batch is a function of its number, so the thread changes no number.
    """
    rows = rows_per_process(budget, processes)

    def make(step: int) -> Batch:
        batch = task.batch("train", step, budget.batch_size)
        batch = rows_of(batch, process * rows, (process + 1) * rows)
        if device.type == "cuda":
            batch = {n: x.pin_memory() if x.device.type == "cpu" else x for n, x in batch.items()}
        return batch

    waiting: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        for step in range(first, budget.steps):
            batch = waiting.popleft().result() if waiting else make(step)
            if any(x.device.type != device.type for x in batch.values()):
                begun = step + 1 + len(waiting)
                for ahead in range(begun, min(step + 1 + AHEAD, budget.steps)):
                    waiting.append(thread.submit(make, ahead))
            yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}
