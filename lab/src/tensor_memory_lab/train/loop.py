"""The training loop: one for every task, model, device and number of processes."""

from __future__ import annotations

import atexit
import gc
import shutil
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tensor_memory_lab.progress import progress
from tensor_memory_lab.records import write_result
from tensor_memory_lab.records.records import finite, read_result
from tensor_memory_lab.records.wording import listing, measure_text
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import KeepsAssets
from tensor_memory_lab.train.batches import TrainingBatches, check_batch_size, rows_of
from tensor_memory_lab.train.checkpoints import (
    Checkpoints,
    load_optimizer,
    load_weights,
    optimizer_tensors,
    weights_of,
)
from tensor_memory_lab.train.evaluation import Evaluator
from tensor_memory_lab.train.folder import RunFolder, writing
from tensor_memory_lab.train.interruption import Interruption
from tensor_memory_lab.train.journal import Journal, Stopwatch
from tensor_memory_lab.train.memory_use import measure_memory, memory_backend
from tensor_memory_lab.train.options import RunOptions
from tensor_memory_lab.train.processes import make_accelerator, share_gradients
from tensor_memory_lab.train.record import Measured, describe_run, make_record
from tensor_memory_lab.train.schedule import learning_rate, make_optimizer
from tensor_memory_lab.train.speed import make_step
from tensor_memory_lab.train.steps import Step
from tensor_memory_lab.train.trackers import Trackers

if TYPE_CHECKING:
    from accelerate import Accelerator

AGREE_EVERY = 10
"""Steps between the moments when several processes ask each other whether to stop."""

SHOW_EVERY = 0.2
"""Seconds between movements of the progress bar."""


def train(config: RunConfig[Any, Any], options: RunOptions) -> dict[str, Any]:
    """Train, keep the best on "valid", measure the test splits: the result record.

    The record is also written to `output/result.json`. After SIGINT or SIGTERM the step in hand
    is finished and saved, and a record comes back whose "finished" is false.
    """
    accelerator = make_accelerator(options)
    folder = RunFolder(options.output)
    folder.check(config, resume=options.resume)
    try:
        if accelerator.is_main_process:
            folder.hold()  # before anything is read that another process may be replacing
        if options.resume and folder.result.exists():
            return read_result(folder.result)
        with Interruption() as interruption:
            return _Run(config, options, accelerator, folder, interruption).go()
    finally:
        folder.release()


class _Run:
    """One sitting at a run: everything that lives as long as `train` does."""

    def __init__(
        self,
        config: RunConfig[Any, Any],
        options: RunOptions,
        accelerator: Accelerator,
        folder: RunFolder,
        interruption: Interruption,
    ) -> None:
        self.config, self.options, self.accelerator = config, options, accelerator
        self.folder, self.interruption = folder, interruption
        self.main, self.device = accelerator.is_main_process, accelerator.device
        self.began = time.perf_counter()
        gc.collect()  # what an earlier run in this process held would count in this one's peak
        if self.device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()

        rows = check_batch_size(config.budget, accelerator.num_processes)
        self.task = config.task.build(config.seed).to(self.device)
        torch.manual_seed(config.seed)
        self.model = config.model.build(self.task).to(self.device)
        self.described = describe_run(config, self.task, self.model)
        self.optimizer = make_optimizer(self.model, config.optimizer, self.device)
        self.checkpoints = Checkpoints(folder, folder.fingerprint(config))
        self.journal, carry = self._restore(rows)
        self.best: dict[str, Tensor] | None = None  # weights not yet in a checkpoint
        wrapped = self.model
        if accelerator.num_processes > 1:
            wrapped = share_gradients(accelerator, self.model, lambda: self._first_loss(carry))
            atexit.register(_leave_processes)
        self.step = make_step(
            wrapped,
            self.task,
            self.optimizer,
            config,
            self.device,
            process=accelerator.process_index,
            carry=carry,
            processes=accelerator.num_processes,
        )
        self.step.loss_sum.fill_(self.journal.loss_sum)
        self.evaluator = Evaluator(self.model, self.task, config, accelerator)
        self.watch = Stopwatch()
        self.log_every = max(1, config.budget.evaluate_every // 10)

    def _first_loss(self, carry: dict[str, Tensor] | None) -> Tensor:
        """A loss of the model before it is wrapped, as the next step will make it."""
        step = Step(self.model, self.task, self.optimizer, self.config, self.device, carry=carry)
        batches = self._batches()
        try:
            return step.first_loss(batches.take())
        finally:
            batches.close()

    def _restore(self, rows: int) -> tuple[Journal, dict[str, Tensor] | None]:
        """Put the last checkpoint back, where one is to be continued; open the folder."""
        found = None
        if self.options.resume:
            found = self.checkpoints.resume(from_previous=self.options.from_previous)
        self.accelerator.wait_for_everyone()  # all have read before one writes
        carry = None
        if found is None:
            journal = Journal()
            # What cannot be drawn is told before there is a folder, which would look begun.
            self.task.batch("train", 0, self.config.budget.batch_size)
            if self.options.resume:
                self._say(f"{self.folder.path}: no checkpoint to continue, starting at step 0")
        else:
            journal, where = found.journal, str(self.folder.checkpoints)
            load_weights(self.model, found.model, where)
            load_optimizer(self.model, self.optimizer, found.optimizer)
            if found.carry is not None:
                first = self.accelerator.process_index * rows
                mine = rows_of(found.carry, first, first + rows)
                carry = {name: tensor.to(self.device) for name, tensor in mine.items()}
            self._say(f"{self.folder.path}: continuing after step {journal.step}")
        if self.main:
            assets = self.task.assets() if isinstance(self.task, KeepsAssets) else {}
            self.folder.create(self.config, assets)
            self.folder.cut_metrics(journal.step)
            self.checkpoints.point_best()
        self.saved = journal.step
        return journal, carry

    def go(self) -> dict[str, Any]:
        """Train to the end of the budget, then measure; or until interrupted."""
        budget, journal = self.config.budget, self.journal
        if (warmup := self.config.optimizer.warmup) > budget.steps:
            self._say(
                f"the warm-up of {warmup} steps is longer than the budget of {budget.steps}: the "
                "rate stays below its peak; shorten --optimizer.warmup"
            )
        self.trackers = Trackers(self.accelerator, self.config, self.options)
        batches = self._batches()
        self.model.train()
        stopped = False
        try:
            with self._progress() as advance:
                shown, at = journal.step, time.perf_counter()
                while journal.step < budget.steps and not (journal.stopped_early or stopped):
                    self.step(journal.step, batches.take())
                    journal.step += 1
                    note = self._after_step()
                    now = time.perf_counter()
                    if note or now - at > SHOW_EVERY:
                        advance(journal.step - shown, note=note)
                        shown, at = journal.step, now
                    stopped = self._asked_to_stop()
        finally:
            batches.close()
        if stopped:
            return self._interrupted()
        self._save()
        return self._finish()

    def _batches(self) -> TrainingBatches:
        """This process's rows, from the next step on."""
        return TrainingBatches(
            self.task,
            self.config.budget,
            self.device,
            first=self.journal.step,
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )

    def _after_step(self) -> str:
        """Log, evaluate and save where the step is one to do so at; what progress should say."""
        budget, journal, step, note = self.config.budget, self.journal, self.journal.step, ""
        last = step == budget.steps
        evaluates = last or step % budget.evaluate_every == 0
        if evaluates or step % self.log_every == 0:
            note = self._log(evaluates)
        if evaluates and budget.patience is not None and journal.waited >= budget.patience:
            journal.stopped_early = not last
        if step % budget.checkpoint_every == 0:
            self._read_loss()  # waits for the device: the pause must not take its steps' time
            with self.watch.pause():
                self._save()
        return note

    def _log(self, evaluates: bool) -> str:
        journal, steps = self.journal, self.journal.step - self.journal.logged
        loss = journal.log_loss(self._read_loss())
        self.step.loss_sum.zero_()
        lap = self.watch.lap(steps)
        if lap is not None:
            journal.laps.append(lap)
        rate = learning_rate(self.config.optimizer, journal.step - 1, self.config.budget.steps)
        entry: dict[str, Any] = {"step": journal.step, "loss": loss, "lr": rate}
        with self.watch.pause():
            if evaluates:
                entry["valid"] = valid = self.evaluator.valid()
                if journal.enter(valid, self.task.metric, self.task.higher_is_better):
                    self.best = {name: x.clone() for name, x in weights_of(self.model).items()}
            entry["seconds"] = round(journal.seconds + time.perf_counter() - self.began, 3)
            if self.main:
                self.folder.log(finite(entry))
            self.trackers.log(entry)
        metric = self.task.metric
        known = journal.curve[-1]["valid"][metric] if journal.curve else None
        shown = "" if known is None else f", {metric} {measure_text(known, metric)}"
        return f"loss {loss:.4g}{shown}"

    def _read_loss(self) -> float:
        """The summed loss, averaged over processes; the device has caught up afterwards."""
        total = self.step.loss_sum
        if self.accelerator.num_processes > 1:
            total = cast(Tensor, self.accelerator.reduce(total.clone(), reduction="mean"))
        return total.item()

    def _save(self) -> None:
        """Write a checkpoint of this step, unless it is there."""
        journal = self.journal
        if self.saved == journal.step:
            return
        journal.loss_sum = self._read_loss()
        now = time.perf_counter()
        journal.seconds, self.began = journal.seconds + now - self.began, now
        carry = self.step.carry
        if carry is not None and self.accelerator.num_processes > 1:
            carry = cast(dict[str, Tensor], self.accelerator.gather(carry))
        if self.main:
            self.folder.sync_metrics()
            self.checkpoints.save(
                journal,
                weights_of(self.model),
                optimizer_tensors(self.model, self.optimizer),
                carry,
                self.best,
            )
        self.accelerator.wait_for_everyone()
        self.saved, self.best = journal.step, None

    def _asked_to_stop(self) -> bool:
        asked = self.interruption.asked is not None
        if self.accelerator.num_processes == 1:
            return asked
        if self.journal.step % AGREE_EVERY:
            return False
        votes = torch.tensor(int(asked), device=self.device)
        return bool(cast(Tensor, self.accelerator.reduce(votes, reduction="sum")).item())

    def _interrupted(self) -> dict[str, Any]:
        self._save()
        self.trackers.close()
        self._say(
            f"{self.interruption.asked or 'another process'}: saved step {self.journal.step} of "
            f"{self.config.budget.steps} in {self.folder.path}; continue by adding --resume to "
            "the same command, or with RunOptions(..., resume=True)",
            always=True,
        )
        return self._record(Measured(self.step.described, None, {}, None, finished=False))

    def _finish(self) -> dict[str, Any]:
        """Measure the best weights on the test splits, with their memory and without."""
        if self.journal.best_step is not None:
            _, weights = self.checkpoints.weights("best")
            load_weights(self.model, weights, str(self.folder.best))
        self.step.close()
        self._say(f"measuring {listing(self.task.test_splits)} with the best weights")
        test = {}
        for split in self.task.test_splits:
            test[split] = self.evaluator.split(split)
            if self.accelerator.num_processes == 1 and self.interruption.asked:
                return self._interrupted()
        memory = measure_memory(self.model, self.evaluator)
        backend = memory_backend(self.model)
        record = self._record(Measured(self.step.described, backend, test, memory))
        if self.main:
            with writing(self.folder.result, "the result"):
                write_result(self.folder.result, record)
            if not self.options.keep_checkpoints:
                for pointer in (self.folder.last, self.folder.best):
                    pointer.unlink(missing_ok=True)
                shutil.rmtree(self.folder.checkpoints)
        self.trackers.close()
        self.evaluator.close()
        self.accelerator.wait_for_everyone()
        return record

    def _record(self, measured: Measured) -> dict[str, Any]:
        self.journal.seconds += time.perf_counter() - self.began
        return make_record(self.described, self.options, self.device, self.journal, measured)

    def _progress(self) -> Any:
        if not self.main or self.options.quiet:
            return nullcontext(_unseen)
        label = f"{self.task.name} {self.config.model.method}"
        return progress(label, self.config.budget.steps, start=self.journal.step)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self.main and (always or not self.options.quiet):
            print(text, file=sys.stderr, flush=True)


def _unseen(amount: int = 1, note: str = "") -> None:
    """An `Advance` that shows nothing."""


def _leave_processes() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
