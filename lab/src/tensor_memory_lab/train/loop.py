"""The training loop: one for every task, model, device and number of processes."""

from __future__ import annotations

import atexit
import gc
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tensor_memory_lab.interruption import handled
from tensor_memory_lab.progress import progress
from tensor_memory_lab.records import config_dict, read_result, run_name, write_result
from tensor_memory_lab.records.config import flat
from tensor_memory_lab.records.store import finite
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import KeepsAssets
from tensor_memory_lab.train.batches import rows_of, rows_per_process, training_batches
from tensor_memory_lab.train.checkpoint import (
    RunFolder,
    load_optimizer,
    load_weights,
    optimizer_tensors,
    weights_of,
    writing,
)
from tensor_memory_lab.train.evaluation import Evaluator, measure_memory, memory_backend
from tensor_memory_lab.train.processes import make_accelerator
from tensor_memory_lab.train.record import (
    DivergedError,
    Journal,
    Stopwatch,
    describe_run,
    make_record,
)
from tensor_memory_lab.train.step import Step, learning_rate, make_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

AGREE_EVERY = 10
"""Steps between the moments when several processes ask each other whether to stop."""

SHOW_EVERY = 0.2
"""Seconds between movements of the progress bar."""


@dataclass(frozen=True)
class RunOptions:
    """What a run is told besides its config; decides no number."""

    output: Path
    """The run's folder: config.json, metrics.jsonl, checkpoints/, result.json."""
    resume: bool = False
    """Continue what the folder holds; on a CPU the numbers are those of a run never interrupted."""
    from_previous: bool = False
    """With `resume`: continue from the checkpoint before the last one, when that is broken."""
    trackers: tuple[str, ...] = ()
    """Also log to these: "tensorboard", or any tracker that Accelerate knows and that is there."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda or cuda:N."""
    shared_device: bool = False
    """Other runs share the device: the record says so, and tables leave its timings out."""
    keep_checkpoints: bool = True
    """False drops the checkpoints of a run that has finished."""
    quiet: bool = False
    """Show no progress and say nothing."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """What the recipe declares about the config (`records.declared`); goes into the record."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", Path(self.output))
        object.__setattr__(self, "trackers", tuple(self.trackers))
        if self.from_previous and not self.resume:
            raise ValueError(
                "from_previous: expected resume=True beside it (--resume --from-previous), "
                "since only a resumed run reads a checkpoint"
            )


def train(config: RunConfig[Any, Any], options: RunOptions) -> dict[str, Any]:
    """Train, keep the best on "valid", measure the test splits: the result record.

    The record is also written to `output/result.json`. After SIGINT or SIGTERM the step in hand
    is finished and saved, and a record comes back whose "finished" is false.
    """
    accelerator = make_accelerator(options.device, options.trackers, options.output)
    folder = RunFolder(options.output)
    folder.check(config, resume=options.resume)
    try:
        if accelerator.is_main_process:
            folder.hold()  # before anything is read that another process may be replacing
        if options.resume and folder.result.exists():
            try:
                return read_result(folder.result)
            except ValueError as error:
                raise ValueError(f"{error}. Delete it, and --resume measures it again") from error
        with _signals() as asked:
            return _Run(config, options, accelerator, folder, asked).go()
    finally:
        folder.release()


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Inside, SIGINT and SIGTERM are noted by name; a second SIGINT interrupts at once.

    Signals reach the main thread alone, so in another one nothing is noted.
    """
    asked: list[str] = []

    def note(number: int, _: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    with handled(signal.SIGINT, note), handled(signal.SIGTERM, note):
        yield asked


class _Run:
    """One sitting at a run: everything that lives as long as `train` does."""

    def __init__(
        self,
        config: RunConfig[Any, Any],
        options: RunOptions,
        accelerator: Accelerator,
        folder: RunFolder,
        asked: list[str],
    ) -> None:
        self.config, self.options, self.accelerator = config, options, accelerator
        self.folder, self.asked = folder, asked
        self.main, self.device = accelerator.is_main_process, accelerator.device
        self.several = accelerator.num_processes > 1
        self.began = time.perf_counter()
        gc.collect()  # what an earlier run in this process held would count in this one's peak
        if self.device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()

        self.rows = rows_per_process(config.budget, accelerator.num_processes)
        self.task = config.task.build(config.seed).to(self.device)
        torch.manual_seed(config.seed)
        self.model = config.model.build(self.task).to(self.device)
        self.described = describe_run(config, self.task, self.model) | dict(options.declared)
        self.optimizer = make_optimizer(self.model, config.optimizer, self.device)
        self.evaluator = Evaluator(self.model, self.task, config, accelerator)
        self.journal, carry = self._restore()
        self.saved = self.journal.step
        self.best: dict[str, Tensor] | None = None  # weights not yet in a checkpoint
        if self.several:
            atexit.register(_leave_processes)
        self.step = Step(self.model, self.task, self.optimizer, config, accelerator, carry=carry)
        self.step.loss_sum.fill_(self.journal.loss_sum)
        self.watch = Stopwatch()
        self.log_every = max(1, config.budget.evaluate_every // 10)

    def _restore(self) -> tuple[Journal, dict[str, Tensor] | None]:
        """Put the last checkpoint back, where one is to be continued; open the folder."""
        found = None
        if self.options.resume:
            found = self.folder.resume(from_previous=self.options.from_previous)
        self.accelerator.wait_for_everyone()  # all have read before one writes
        journal, carry = Journal(), None
        if found is None:
            # What cannot be drawn is told before there is a folder, which would look begun.
            self.task.batch("train", 0, self.config.budget.batch_size)
            if self.options.resume:
                self._say(f"{self.folder.path}: no checkpoint to continue, starting at step 0")
        else:
            journal, parts = found
            load_weights(self.model, parts["model"], str(self.folder.checkpoints))
            load_optimizer(self.model, self.optimizer, parts["optimizer"])
            if "carry" in parts:
                first = self.accelerator.process_index * self.rows
                mine = rows_of(parts["carry"], first, first + self.rows)
                carry = {name: tensor.to(self.device) for name, tensor in mine.items()}
            self._say(f"{self.folder.path}: continuing after step {journal.step}")
        if self.main:
            assets = self.task.assets() if isinstance(self.task, KeepsAssets) else {}
            self.folder.create(self.config, assets)
            self.folder.cut(journal.step)
        return journal, carry

    def go(self) -> dict[str, Any]:
        """Train to the end of the budget, then measure; or until interrupted."""
        budget, journal = self.config.budget, self.journal
        if (warmup := self.config.optimizer.warmup) > budget.steps:
            self._say(
                f"the warm-up of {warmup} steps is longer than the budget of {budget.steps}: the "
                "rate stays below its peak; shorten --optimizer.warmup"
            )
        if self.options.trackers:
            plain = flat(config_dict(self.config))
            known = {
                n: v if isinstance(v, bool | int | float) else str(v) for n, v in plain.items()
            }
            self.accelerator.init_trackers(run_name(self.config), config=known)
        batches = training_batches(
            self.task,
            budget,
            self.device,
            first=journal.step,
            process=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )
        backend = memory_backend(self.model)
        self._say(
            f"model      {self.described['parameters']:,} parameters, "
            f"{self.described['state_bytes']:,} bytes of state"
            + (f", memory on backend {backend}" if backend else "")
        )
        self.model.train()
        stopped = False
        with closing(batches), self._progress() as advance:
            shown, at = journal.step, time.perf_counter()
            while journal.step < budget.steps and not (journal.stopped_early or stopped):
                self.step(journal.step, next(batches))
                journal.step += 1
                note = self._after_step()
                now = time.perf_counter()
                if note or now - at > SHOW_EVERY:
                    advance(journal.step - shown, note=note)
                    shown, at = journal.step, now
                stopped = self._asked_to_stop()
        if stopped:
            return self._interrupted()
        self._save()
        return self._finish()

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
        try:
            loss = journal.log_loss(self._read_loss())
        except DivergedError:
            self._diverged()
            raise
        self.step.loss_sum.zero_()
        journal.laps += self.watch.lap(steps)
        rate = learning_rate(self.config.optimizer, journal.step - 1, self.config.budget.steps)
        entry: dict[str, Any] = {"step": journal.step, "loss": loss, "lr": rate}
        metric = self.task.metric
        with self.watch.pause():
            if evaluates:
                limit = self.config.budget.evaluation_batches
                entry["valid"] = valid = self.evaluator.split("valid", limit=limit)
                if journal.enter(valid, metric, self.task.higher_is_better):
                    self.best = {name: x.clone() for name, x in weights_of(self.model).items()}
            entry["seconds"] = round(journal.seconds + time.perf_counter() - self.began, 3)
            if self.main:
                self.folder.log(finite(entry))
            known = {n.replace(".", "/"): v for n, v in flat(entry).items() if n != "step"}
            self.accelerator.log(known, step=journal.step)
        if not journal.curve:
            return f"loss {loss:.4g}"
        return f"loss {loss:.4g}, {metric} {journal.curve[-1]['valid'][metric]:.4g}"

    def _read_loss(self) -> float:
        """The summed loss, averaged over processes; the device has caught up afterwards."""
        total = self.step.loss_sum
        if self.several:
            total = cast(Tensor, self.accelerator.reduce(total.clone(), reduction="mean"))
        return total.item()

    def _save(self) -> None:
        """Write a checkpoint of this step, unless it is there."""
        journal = self.journal
        if self.saved == journal.step:
            return
        journal.loss_sum = self._read_loss()
        self._count_seconds()
        carry = self.step.carry
        if carry is not None and self.several:
            carry = cast(dict[str, Tensor], self.accelerator.gather(carry))
        if self.main:
            self.folder.save(
                journal,
                model=weights_of(self.model),
                optimizer=optimizer_tensors(self.model, self.optimizer),
                carry=carry,
                best=self.best,
            )
        self.accelerator.wait_for_everyone()
        self.saved, self.best = journal.step, None

    def _asked_to_stop(self) -> bool:
        if not self.several:
            return bool(self.asked)
        if self.journal.step % AGREE_EVERY:
            return False
        votes = torch.tensor(len(self.asked), device=self.device)
        return bool(cast(Tensor, self.accelerator.reduce(votes, reduction="sum")).item())

    def _interrupted(self) -> dict[str, Any]:
        self._save()
        self._say(
            f"{''.join(self.asked[:1]) or 'another process'}: saved step {self.journal.step} of "
            f"{self.config.budget.steps} in {self.folder.path}; continue by adding --resume to "
            "the same command, or with RunOptions(..., resume=True)",
            always=True,
        )
        return self._record(backend=None, test={}, memory=None, finished=False)

    def _diverged(self) -> None:
        """Leave a record whose measures are None: a run that failed counts among its seeds."""
        nothing = {self.task.metric: None}
        splits = self.task.test_splits if self.config.budget.test else ()
        measures = {"valid": nothing, "test": dict.fromkeys(splits, nothing), "memory": None}
        self._write(self._record(backend=None, **measures, finished=True))

    def _finish(self) -> dict[str, Any]:
        """Measure the best weights on the test splits, with their memory and without."""
        if self.journal.best_step is not None:
            _, weights = self.folder.weights("best")
            load_weights(self.model, weights, str(self.folder.checkpoints))
        self.step.close()
        splits = self.task.test_splits if self.config.budget.test else ()
        test = {}
        for split in splits:
            which = "last" if self.journal.best_step is None else "best"
            self._say(f"measuring {split} with the {which} weights")
            test[split] = self.evaluator.split(split)
            if self.asked and not self.several:
                return self._interrupted()
        memory = measure_memory(self.model, self.evaluator, splits)
        backend = memory_backend(self.model)
        self.evaluator.close()
        record = self._record(backend=backend, test=test, memory=memory, finished=True)
        self._write(record)
        self.accelerator.wait_for_everyone()
        return record

    def _write(self, record: dict[str, Any]) -> None:
        if self.main:
            with writing(self.folder.result, "the result"):
                write_result(self.folder.result, record)
            if not self.options.keep_checkpoints:
                shutil.rmtree(self.folder.checkpoints)

    def _record(self, **measured: Any) -> dict[str, Any]:
        self._count_seconds()
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return make_record(
            self.described,
            self.journal,
            self.device,
            speed=self.step.described,
            shared_device=self.options.shared_device,
            **measured,
        )

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.journal.seconds, self.began = self.journal.seconds + now - self.began, now

    def _progress(self) -> Any:
        if not self.main or self.options.quiet:
            return nullcontext(lambda amount=1, note="": None)
        label = f"{self.task.name} {self.config.model.method}"
        return progress(label, self.config.budget.steps, start=self.journal.step)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self.main and (always or not self.options.quiet):
            print(text, file=sys.stderr, flush=True)


def _leave_processes() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
