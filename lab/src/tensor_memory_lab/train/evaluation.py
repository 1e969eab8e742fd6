"""Measures over a whole split, the sums kept on the device until its end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tensor_memory_lab.models import Carry
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Batch, Sums, Task
from tensor_memory_lab.train.batches import rows_of
from tensor_memory_lab.train.graph import GraphedMeasure
from tensor_memory_lab.train.speed import why_not_graph
from tensor_memory_lab.train.steps import autocast

if TYPE_CHECKING:
    from accelerate import Accelerator


class Evaluator:
    """Measures a model on splits of a task; several processes share the rows of every batch.

    Args:
        model: the model itself, not wrapped.
        task: scores its outputs.
        config: sizes of batches, and precision.
        accelerator: the processes that share the work, and their device.
    """

    def __init__(
        self, model: nn.Module, task: Task, config: RunConfig[Any, Any], accelerator: Accelerator
    ) -> None:
        self.model, self.task, self.config = model, task, config
        self.accelerator, self.device = accelerator, accelerator.device
        self.size = config.budget.evaluation_batch_size or config.budget.batch_size
        self._graphed: GraphedMeasure | None = None
        graph = config.speed in ("auto", "graph") and not task.carries
        if graph and why_not_graph(self.device, accelerator.num_processes) is None:
            self._graphed = GraphedMeasure(lambda batch: self.measure(batch, None)[0])

    def valid(self) -> dict[str, float]:
        """Measures on as much of "valid" as the budget says."""
        return self.split("valid", limit=self.config.budget.evaluation_batches)

    def tests(self, *, eager: bool = False) -> dict[str, dict[str, float]]:
        """Measures on every test split, whole."""
        return {split: self.split(split, eager=eager) for split in self.task.test_splits}

    def close(self) -> None:
        """Free what a captured graph holds."""
        if self._graphed is not None:
            self._graphed.close()

    @torch.no_grad()
    def split(
        self, split: str, *, limit: int | None = None, eager: bool = False
    ) -> dict[str, float]:
        """Measures on the first `limit` batches of a split, or on all of it.

        `eager` runs the model's own code even where a graph of it has been captured.
        """
        count = self.task.batches(split, self.size)
        was_training = self.model.training
        self.model.eval()
        found, carry = [], None
        for index in range(count if limit is None else min(limit, count)):
            batch = self.task.batch(split, index, self.size)
            part, weight = self._share(batch, first=not found)
            if weight is None:
                continue
            part = {name: x.to(self.device, non_blocking=True) for name, x in part.items()}
            if carry is not None:  # the last batch may have fewer rows
                carry = rows_of(carry, 0, next(iter(part.values())).shape[0])
            if self._graphed is not None and not eager:
                sums = self._graphed(part)
            else:
                sums, carry = self.measure(part, carry)
            found.append((sums, weight))
        self.model.train(was_training)
        return self.task.finish(self._means(found))

    def measure(self, batch: Batch, carry: Carry | None) -> tuple[Sums, Carry | None]:
        """Sums of one batch, and what its rows carry to the next."""
        with autocast(self.config, self.device):
            outputs, after = self.model(batch, carry)
            sums = self.task.measure(outputs, batch)
        return sums, after if self.task.carries else None

    def _share(self, batch: Batch, *, first: bool) -> tuple[Batch, int | None]:
        """This process's rows and what they count; None where there are none.

        The places are those of a full batch, so that a row stays with its process. A process
        without rows in the first batch measures one row for nothing: it must know the measures.
        """
        per = -(-self.size // self.accelerator.num_processes)
        start = self.accelerator.process_index * per
        part = rows_of(batch, start, start + per)
        if next(iter(part.values())).shape[0]:
            return part, 1
        return (rows_of(batch, 0, 1), 0) if first else (part, None)

    def _means(self, found: list[tuple[Sums, int]]) -> dict[str, float]:
        """Sums over counts, added in float64 and read from the device once."""
        names = sorted(found[0][0])
        weights = torch.tensor([[[w]] for _, w in found], dtype=torch.float64)
        table = torch.stack([_pairs(sums, names, self.device) for sums, _ in found])
        total = (table * weights.to(self.device)).sum(0)  # (measures, 2): sum, count
        if self.accelerator.num_processes > 1:
            total = cast(Tensor, self.accelerator.reduce(total, reduction="sum"))
        return {
            name: part / count if count else math.nan
            for name, (part, count) in zip(names, total.tolist(), strict=True)
        }


def _pairs(sums: Sums, names: list[str], device: torch.device) -> Tensor:
    flat = [value.detach().to(device, torch.float64) for name in names for value in sums[name]]
    return torch.stack(flat).reshape(-1, 2)
