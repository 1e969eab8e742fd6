"""One optimiser step: parts, gradients, clipping, update; launched eagerly or compiled.

A step is a function of the weights, the batch, the carry, and a seed made of (run, process,
step): whatever is drawn within it, such as dropout, does not depend on what was drawn before, so
a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from tensor_memory_lab.models import Carry
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Batch, Task
from tensor_memory_lab.train.batches import rows_of
from tensor_memory_lab.train.schedule import learning_rate, set_learning_rate


def seed_step(seed: int, process: int, step: int, device: torch.device) -> None:
    """Seed this process's generators for one step."""
    text = f"{seed}/{process}/{step}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % 2**63
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
    """Runs optimiser steps and sums their losses on the device.

    Args:
        model: the model, wrapped for several processes where there are any.
        task: scores its outputs.
        optimizer: from `make_optimizer`.
        config: the run.
        device: where everything lies.
        process: number of this process.
        carry: what the model left after the step before; None at the start.
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        optimizer: torch.optim.Optimizer,
        config: RunConfig[Any, Any],
        device: torch.device,
        *,
        process: int = 0,
        carry: Carry | None = None,
    ) -> None:
        self.model, self.task, self.optimizer = model, task, optimizer
        self.config, self.device, self.process = config, device, process
        self.carry = carry
        self.loss_sum = torch.zeros((), device=device)
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.reason: str | None = None
        """Why steps are eager where the config left the choice."""
        self._compiled: Any = None

    @property
    def described(self) -> str:
        """How steps are launched, and why not otherwise."""
        if self.config.speed == "compile":
            return "compile"
        return "eager" if self.reason is None else f"eager ({self.reason})"

    def close(self) -> None:
        """Free what only steps need."""
        self._compiled = None

    def __call__(self, step: int, batch: Batch) -> None:
        """Optimiser step number `step`, counted from 0."""
        self._prepare(step)
        self._run(batch)

    def first_loss(self, batch: Batch) -> Tensor:
        """The loss of the first accumulated part of a batch, with its graph."""
        rows = next(iter(batch.values())).shape[0] // self.config.budget.accumulate
        carry = None if self.carry is None else rows_of(self.carry, 0, rows)
        return self._loss(rows_of(batch, 0, rows), carry)[0]

    def _prepare(self, step: int) -> None:
        """What changes from step to step and is decided on the host."""
        seed_step(self.config.seed, self.process, step, self.device)
        rate = learning_rate(self.config.optimizer, step, self.config.budget.steps)
        set_learning_rate(self.optimizer, rate)

    def _run(self, batch: Batch) -> None:
        """Everything that is done on the device; waits for nothing."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, carry = self._gradients(batch)
        if self.config.optimizer.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.config.optimizer.clip)
        self.optimizer.step()
        self.loss_sum.add_(loss)
        if carry is not None:
            self._keep(carry)

    def _keep(self, carry: Carry) -> None:
        self.carry = carry

    def _gradients(self, batch: Batch) -> tuple[Tensor, Carry | None]:
        """Gradients of the mean loss over all parts, that loss, and the carry of all rows."""
        parts = self.config.budget.accumulate
        rows = next(iter(batch.values())).shape[0] // parts
        total, carries = torch.zeros((), device=self.device), []
        for number in range(parts):
            at = (number * rows, (number + 1) * rows)
            carry = None if self.carry is None else rows_of(self.carry, *at)
            with self._unsynchronised() if number < parts - 1 else nullcontext():
                loss, after = self._forward(rows_of(batch, *at), carry)
                # The scan's backward is Python: on autograd's own thread it would hand the
                # interpreter to and fro, a fifth of a language step (docs/kernel-log.md, 22).
                with torch.autograd.set_multithreading_enabled(False):
                    (loss / parts).backward()
            total = total + loss.detach() / parts
            carries.append(after)
        if not self.task.carries or carries[0] is None:
            return total, None
        if parts == 1:
            return total, carries[0]
        return total, {name: torch.cat([c[name] for c in carries]) for name in carries[0]}

    def _forward(self, batch: Batch, carry: Carry | None) -> tuple[Tensor, Carry | None]:
        if self.config.speed != "compile":
            return self._loss(batch, carry)
        if self._compiled is None:
            self._compiled = torch.compile(self._loss)
        return self._compiled(batch, carry)

    def _loss(self, batch: Batch, carry: Carry | None) -> tuple[Tensor, Carry | None]:
        with autocast(self.config, self.device):
            outputs, after = self.model(batch, carry)
            return self.task.loss(outputs, batch), after

    def _unsynchronised(self) -> AbstractContextManager[Any]:
        """Gradients of all but the last part stay in their process."""
        no_sync = getattr(self.model, "no_sync", None)
        return cast(Any, no_sync)() if no_sync else nullcontext()
