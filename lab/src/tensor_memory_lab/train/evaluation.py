"""Measures over whole splits, and how much a trained model uses its memory.

A half-open gate says nothing by itself, since W_out makes its scale arbitrary. What counts is
‖σ(γ)m‖ / ‖x‖, how much a layer's memory adds to the stream it is added to, and what is lost when
nothing is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tensor_memory import MemoryResidual, PlaceMemory, TensorMemory, memory_disabled
from tensor_memory_lab.models import Carry
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Batch, PreparesModel, Sums, Task
from tensor_memory_lab.train.batches import rows_in, rows_of
from tensor_memory_lab.train.graph import Graphed, shapes_of, why_not_graph
from tensor_memory_lab.train.step import autocast

if TYPE_CHECKING:
    from accelerate import Accelerator


class Evaluator:
    """Measures a model on splits of a task; several processes share the rows of every batch.

    Args:
        model: the model itself, not wrapped.
        task: scores its outputs.
        config: sizes of batches, and precision.
        accelerator: the processes that share the work, and the device of this one.
    """

    def __init__(
        self, model: nn.Module, task: Task, config: RunConfig[Any, Any], accelerator: Accelerator
    ) -> None:
        self.model, self.task, self.config = model, task, config
        self.accelerator, self.device = accelerator, accelerator.device
        rows = config.budget.batch_size
        self.size = config.budget.evaluation_batch_size or rows
        if task.carries and self.size != rows:
            raise ValueError(
                "budget.evaluation_batch_size: expected that of training for a task that carries, "
                f"{rows}, since it is the number of streams, got {self.size}; leave it out"
            )
        self._graphed: Graphed | None = None
        graph = config.speed != "eager" and not task.carries
        if graph and why_not_graph(self.device, accelerator.num_processes) is None:
            self._graphed = Graphed(
                lambda batch: self._measure(batch, None)[0], shapes=shapes_of(task)
            )

    def close(self) -> None:
        """Free what a captured graph holds; from now on every batch is measured eagerly."""
        if self._graphed is not None:
            self._graphed.close()
        self._graphed = None

    def split(self, split: str, *, limit: int | None = None) -> dict[str, float]:
        """Measures on the first `limit` batches of a split, or on all of it."""
        if not isinstance(self.task, PreparesModel):
            return self._split(split, limit, self._graphed)
        with self.task.prepared(self.model, split):
            # A graph keeps the model that it was captured with.
            return self._split(split, limit, self._graphed if split == "valid" else None)

    @torch.no_grad()
    def _split(self, split: str, limit: int | None, graphed: Graphed | None) -> dict[str, float]:
        count = self.task.batches(split, self.size)
        was_training = self.model.training
        self.model.eval()
        found, names, carry = [], [], None
        for index in range(count if limit is None else min(limit, count)):
            part, weight = self._share(self.task.batch(split, index, self.size))
            part = {name: x.to(self.device, non_blocking=True) for name, x in part.items()}
            if carry is not None:  # the last batch may have fewer rows
                carry = rows_of(carry, 0, rows_in(part))
            if graphed is not None:
                sums = graphed(part)
            else:
                sums, carry = self._measure(part, carry)
            names = sorted(sums)
            pairs = [x.to(self.device, torch.float64) for name in names for x in sums[name]]
            found.append(weight * torch.stack(pairs).reshape(-1, 2))  # (measures, 2): sum, count
        self.model.train(was_training)
        total = torch.stack(found).sum(0)
        if self.accelerator.num_processes > 1:
            total = cast(Tensor, self.accelerator.reduce(total, reduction="sum"))
        means = {}
        for name, (s, count) in zip(names, total.tolist(), strict=True):  # reads the device once
            if count or name == self.task.metric:  # what a split has none of is left out
                means[name] = s / count if count else math.nan
        return self.task.finish(means)

    def _measure(self, batch: Batch, carry: Carry | None) -> tuple[Sums, Carry | None]:
        """Sums of one batch, and what its rows carry to the next."""
        with autocast(self.config, self.device):
            outputs, after = self.model(batch, carry)
            sums = self.task.measure(outputs, batch)
        return sums, after if self.task.carries else None

    def _share(self, batch: Batch) -> tuple[Batch, int]:
        """This process's rows and 1, or any row and 0 where it has none.

        The places are those of a full batch, so that a row stays with its process.
        """
        per = -(-self.size // self.accelerator.num_processes)
        start = self.accelerator.process_index * per
        part = rows_of(batch, start, start + per)
        return (part, 1) if rows_in(part) else (rows_of(batch, 0, 1), 0)


def measure_memory(
    model: nn.Module, evaluator: Evaluator, splits: Sequence[str]
) -> dict[str, Any] | None:
    """Gates and uses per layer on a "valid" batch, and the first of `splits` with the memory off.

    None for a model without memory.
    """
    if not memory_layers(model):
        return None
    evaluator.close()  # a captured graph has the memory in it
    layers = memory_use(model, evaluator)
    with memory_disabled(model):
        without = {split: evaluator.split(split) for split in splits[:1]}
    return {"layers": layers, "test_without_memory": without}


def memory_layers(model: nn.Module) -> dict[str, MemoryResidual]:
    """The model's `MemoryResidual`s by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MemoryResidual)}


def memory_use(model: nn.Module, evaluator: Evaluator) -> list[dict[str, Any]]:
    """Per layer its name, σ(γ), and the mean over tokens of ‖σ(γ)m‖ / ‖x‖ on one "valid" batch.

    A layer that is called several times (frames, segments) is averaged over its calls; one that
    is never called has no use.
    """
    layers = memory_layers(model)
    found: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers.values()}

    def note(layer: nn.Module, arguments: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        x = arguments[0].float()  # (B, N, d)
        added = output[0].float() - x
        found[layer].append((added.norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-12)).mean())

    handles = [layer.register_forward_hook(note) for layer in layers.values()]
    try:
        evaluator.split("valid", limit=1)
    finally:
        for handle in handles:
            handle.remove()
    return [
        {
            "name": name,
            "gate": layer.gate.detach().sigmoid().item(),
            "use": torch.stack(found[layer]).mean().item() if found[layer] else None,
        }
        for name, layer in layers.items()
    ]


def memory_backend(model: nn.Module) -> str | None:
    """The backends that the model's memories run on; None without memory."""
    served = {
        memory.backend_on(memory.output.weight.device)
        for memory in model.modules()
        if isinstance(memory, TensorMemory | PlaceMemory)
    }
    return ", ".join(sorted(served)) or None
