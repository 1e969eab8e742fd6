"""The rows a process trains on, ready when they are asked for.

Letters: B rows.
"""

from __future__ import annotations

from collections import deque
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


def check_batch_size(budget: BudgetConfig, processes: int) -> int:
    """Rows per process; an error where the batch cannot be cut into equal parts."""
    parts = processes * budget.accumulate
    if budget.batch_size % parts:
        raise ValueError(
            f"budget.batch_size: expected a multiple of {parts} ({processes} processes × "
            f"{budget.accumulate} accumulated parts), got {budget.batch_size}"
        )
    return budget.batch_size // processes


class TrainingBatches:
    """One process's rows of every training batch, in order from a step on, on its device.

    Batches that are made on the CPU for a GPU are made by a thread, a few steps ahead, in pinned
    memory. That needs no care: a batch is a function of its number.
    """

    def __init__(
        self,
        task: Task,
        budget: BudgetConfig,
        device: torch.device,
        *,
        first: int,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self._task, self._size, self._device = task, budget.batch_size, device
        rows = check_batch_size(budget, processes)
        self._rows = (process * rows, (process + 1) * rows)
        self._next, self._end = first, budget.steps
        self._waiting: deque[Future[Batch]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def take(self) -> Batch:
        """The batch of the next step."""
        batch = self._waiting.popleft().result() if self._waiting else self._make(self._next)
        self._next += 1
        apart = any(tensor.device.type != self._device.type for tensor in batch.values())
        if apart and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        while self._thread and len(self._waiting) < AHEAD:
            ahead = self._next + len(self._waiting)
            if ahead >= self._end:
                break
            self._waiting.append(self._thread.submit(self._make_pinned, ahead))
        return {name: x.to(self._device, non_blocking=True) for name, x in batch.items()}

    def close(self) -> None:
        """Stop making batches."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int) -> Batch:
        return rows_of(self._task.batch("train", step, self._size), *self._rows)

    def _make_pinned(self, step: int) -> Batch:
        return {
            name: x.pin_memory() if x.device.type == "cpu" else x
            for name, x in self._make(step).items()
        }
