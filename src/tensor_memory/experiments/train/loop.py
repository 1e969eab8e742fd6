"""The training loop: one for every task, model, device and number of processes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from tensor_memory.experiments.results import write_result
from tensor_memory.experiments.run_config import RunConfig
from tensor_memory.experiments.train.batches import TrainingBatches
from tensor_memory.experiments.train.evaluation import Evaluator
from tensor_memory.experiments.train.journal import Journal, Stopwatch
from tensor_memory.experiments.train.options import RunOptions
from tensor_memory.experiments.train.processes import make_accelerator
from tensor_memory.experiments.train.record import Measured, make_record
from tensor_memory.experiments.train.schedule import make_optimizer
from tensor_memory.experiments.train.steps import Step
from tensor_memory.progress import progress


def train(config: RunConfig[Any, Any], options: RunOptions) -> dict[str, Any]:
    """Train, keep the best on "valid", measure the test splits: the result record.

    The record is also written to `output/result.json`.
    """
    started = time.perf_counter()
    accelerator = make_accelerator(options)
    device = accelerator.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    task = config.task.build(config.seed).to(device)
    torch.manual_seed(config.seed)
    model = config.model.build(task).to(device)
    optimizer = make_optimizer(model, config.optimizer, device)
    wrapped = accelerator.prepare_model(model) if accelerator.num_processes > 1 else model
    step = Step(wrapped, task, optimizer, config, device, process=accelerator.process_index)
    evaluator = Evaluator(model, task, config, accelerator)
    journal, watch, budget = Journal(), Stopwatch(), config.budget
    log_every = max(1, budget.evaluate_every // 10)
    batches = TrainingBatches(
        task,
        budget,
        device,
        first=journal.step,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )
    best: dict[str, torch.Tensor] = {}
    shown = progress(f"{task.name} {config.model.method}", budget.steps)
    model.train()
    with nullcontext(lambda *a, **k: None) if options.quiet else shown as advance:
        while journal.step < budget.steps:
            step(journal.step, batches.take())
            journal.step += 1
            now = journal.step
            last = now == budget.steps
            if now % log_every == 0 or now % budget.evaluate_every == 0 or last:
                steps = now - journal.logged
                loss = journal.log_loss(step.loss_sum.item())
                step.loss_sum.zero_()
                lap = watch.lap(steps)
                if lap:
                    journal.laps.append(lap)
                advance(steps, note=f"loss {loss:.4g}")
            if now % budget.evaluate_every == 0 or last:
                with watch.pause():
                    valid = evaluator.valid()
                    if journal.enter(valid, task.metric, task.higher_is_better):
                        best = {name: x.clone() for name, x in model.state_dict().items()}
                if budget.patience is not None and journal.waited >= budget.patience:
                    journal.stopped_early = not last
                    break
    batches.close()
    if best:
        model.load_state_dict(best)
    test = evaluator.tests()
    journal.seconds += time.perf_counter() - started
    record = make_record(
        config, options, task, model, journal, Measured(step.described, None, test, None)
    )
    if accelerator.is_main_process:
        write_result(options.output / "result.json", record)
    return record
