"""One optimiser step: parts, gradients, clipping, update.

A step is a function of the weights, the batch, the carry and a seed made of (run, process, step).
What is drawn within it, such as dropout, does not depend on what was drawn before, so a resumed run
draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tensor_memory import PlaceMemory, TensorMemory
from tensor_memory_lab.models import Carry
from tensor_memory_lab.run_config import OptimizerConfig, RunConfig
from tensor_memory_lab.tasks import Batch, Task
from tensor_memory_lab.tasks.synthetic import generator
from tensor_memory_lab.train.batches import rows_in, rows_of
from tensor_memory_lab.train.compiling import compiled, one_compiles
from tensor_memory_lab.train.graph import Graphed, refuse_graph, shapes_of, why_not_graph

if TYPE_CHECKING:
    from accelerate import Accelerator


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of optimiser step number `step`, counted from 0, of a budget of `steps`.

    The warm-up rises linearly and reaches the peak at its last step. The cosine then falls from
    the peak to zero at the end of the budget.

    >>> config = OptimizerConfig(lr=1.0, warmup=2, schedule="cosine")
    >>> [round(learning_rate(config, step, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    >>> learning_rate(OptimizerConfig(lr=1.0, schedule="constant"), 5, 6)
    1.0
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup) / max(steps - config.warmup, 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that learn, each once, by its first name."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def place_weights(model: nn.Module) -> list[nn.Parameter]:
    """Weights that make places from tokens, of all memories of a model."""
    return [
        p
        for memory in model.modules()
        if isinstance(memory, PlaceMemory | TensorMemory)
        for name, p in memory.named_parameters()
        if name.endswith(("place.weight", "coordinate.weight"))
    ]


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: parameters of two or more dimensions.

    Embeddings and convolutions count as matrices; biases, norms and gates do not decay. On a GPU
    the rate is a tensor and the steps are counted there, so that a CUDA graph can hold the update.
    """
    parts = {id(p): config.place_rate for p in place_weights(model)}
    if config.place_rate != 1 and not parts:
        raise ValueError(
            f"optimizer.place_rate: expected 1, got {config.place_rate}: this model has no weights "
            "that make places"
        )
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for p in sorted((p for _, p in trained(model)), key=lambda p: p.ndim < 2):  # matrices first
        decay = config.weight_decay if p.ndim >= 2 else 0.0
        groups.setdefault((decay, parts.get(id(p), 1.0)), []).append(p)
    cuda = device.type == "cuda"
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": decay,
                "part": part,
                "lr": torch.tensor(config.lr * part, device=device) if cuda else config.lr * part,
            }
            for (decay, part), parameters in groups.items()
        ],
        betas=config.betas,
        fused=device.type in ("cpu", "cuda"),
        capturable=cuda,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group its part of this rate, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * group["part"])  # in place: a captured graph reads this tensor
        else:
            group["lr"] = rate * group["part"]


def seed_step(seed: int, process: int, step: int, device: torch.device) -> None:
    """Seed this process's generators for one step."""
    number = generator(seed, process, step).initial_seed()
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)


def autocast(config: RunConfig[Any, Any], device: torch.device) -> AbstractContextManager[Any]:
    """bf16 products where the config asks for them.

    Casts of weights are not kept: a weight that several layers share then gathers its gradient in
    float32, eagerly and in a CUDA graph alike.
    """
    if config.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class Step:
    """Runs optimiser steps, launched as `config.speed` says, and sums their losses on the device.

    Args:
        model: the model.
        task: scores its outputs.
        optimizer: from `make_optimizer`.
        config: the run.
        accelerator: the processes of the run, and the device of this one.
        carry: what the model left after the step before; None at the start.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        config: RunConfig[Any, Any],
        accelerator: Accelerator,
        *,
        carry: Carry | None = None,
    ) -> None:
        self.model, self.task, self.optimizer, self.config = model, task, optimizer, config
        self.accelerator, self.device, self.carry = accelerator, accelerator.device, carry
        self.loss_sum = torch.zeros((), device=self.device)
        self._number = 0
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._loss = compiled(self.loss, task) if config.speed == "compile" else self.loss
        self._met: set[tuple[torch.Size, ...]] = set()  # shapes of batches
        self._graphed: Graphed | None = None
        self._reason = why_not_graph(self.device, accelerator.num_processes)
        if config.speed != "eager" and self._reason is None:
            required = config.speed == "graph"
            self._graphed = Graphed(
                self._run, before=self._prepare, required=required, shapes=shapes_of(task)
            )
        elif config.speed == "graph":
            refuse_graph(str(self._reason))

    @property
    def described(self) -> str:
        """How steps are launched, and why not otherwise."""
        launched = "eager" if self._graphed is None else self._graphed.described
        if self._graphed is None and self.config.speed != "eager":
            launched = f"eager ({self._reason})"
        return f"compiled, {launched}" if self.config.speed == "compile" else launched

    def __call__(self, number: int, batch: Batch) -> None:
        """Optimiser step number `number`, counted from 0."""
        self._number = number
        if self._graphed is not None:
            self._graphed(batch)
        else:
            self._prepare()
            self._run(batch)

    def loss(self, batch: Batch, carry: Carry | None) -> tuple[Tensor, Carry | None]:
        """The loss of some rows, with its graph, and what they carry to the next step."""
        with autocast(self.config, self.device):
            outputs, after = self.model(batch, carry)
            return self.task.loss(outputs, batch), after

    def close(self) -> None:
        """Free what only steps need."""
        if self._graphed is not None:
            self._graphed.close()
        self.optimizer.zero_grad(set_to_none=True)

    def _prepare(self) -> None:
        """What changes from step to step and is decided on the host."""
        seed_step(self.config.seed, self.accelerator.process_index, self._number, self.device)
        rate = learning_rate(self.config.optimizer, self._number, self.config.budget.steps)
        set_learning_rate(self.optimizer, rate)

    def _run(self, batch: Batch) -> None:
        """Everything that is done on the device; waits for nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, carry = self._gradients(batch)
        if self.accelerator.num_processes > 1:
            self._average_gradients()
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self._parameters, self.config.optimizer.clip)
        self.optimizer.step()
        self.loss_sum.add_(loss)
        if self.carry is None or carry is None:
            self.carry = carry
        else:  # in place: a captured graph reads the carry where it has left it
            for name, x in carry.items():
                self.carry[name].copy_(x)

    def _gradients(self, batch: Batch) -> tuple[Tensor, Carry | None]:
        """Gradients of the mean loss over all parts, that loss, and the carry of all rows."""
        parts = self.config.budget.accumulate
        rows = rows_in(batch) // parts
        total, carries = torch.zeros((), device=self.device), []
        for number in range(parts):
            at = (number * rows, (number + 1) * rows)
            carry = None if self.carry is None else rows_of(self.carry, *at)
            with self._compiling(batch):
                loss, after = self._loss(rows_of(batch, *at), carry)
                # The scan's backward is Python. On autograd's own thread it would pass the
                # interpreter lock to and fro, a fifth of a language step.
                with torch.autograd.set_multithreading_enabled(False):
                    (loss / parts).backward()
            total = total + loss.detach() / parts
            carries.append(after)
        if not self.task.carries or carries[0] is None:
            return total, None
        return total, {name: torch.cat([c[name] for c in carries]) for name in carries[0]}

    def _compiling(self, batch: Batch) -> AbstractContextManager[None]:
        """Around a forward and a backward pass: the first of each shape compiles both."""
        shape = tuple(x.shape for x in batch.values())
        if self.config.speed != "compile" or shape in self._met:
            return nullcontext()
        self._met.add(shape)
        return one_compiles(self.config, shape)

    def _average_gradients(self) -> None:
        """One mean over the processes, of all gradients in one vector.

        Weights that no process uses keep no gradient, such as those of a memory that reads and
        never writes, in rows shorter than a chunk.
        """
        grads = [p.grad for p in self._parameters if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        flat = cast(Tensor, self.accelerator.reduce(flat, reduction="mean"))
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view_as(grad))
