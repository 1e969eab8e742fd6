"""What `tensor-memory inspect RUN_FOLDER` watches: a run's model on some of its task's data."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tensor_memory import MemoryResidual, TensorMemory
from tensor_memory.inspect.command import RUN_ROWS, OpenedRun
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import config_dict
from tensor_memory_lab.tasks import Annotations, Describes, Task
from tensor_memory_lab.train import load_run


def open_run(options: argparse.Namespace) -> OpenedRun:
    """The model of the run in `options.source`, and the first batches of its test data."""
    if options.recipe is not None:
        config_dict(find_recipe(options.recipe)())  # which makes the classes in it known
    config, task, model = load_run(
        options.source, options.which or "best", data_dir=options.data_dir
    )
    if not any(isinstance(part, MemoryResidual | TensorMemory) for part in model.modules()):
        raise ValueError(
            f"{options.source}: expected a run whose model has a memory, got one of the method "
            f"{config.model.method}, which has none; methods with a memory are called tensor "
            "or spatial"
        )
    wanted = options.windows or 1
    if wanted > 1 and not task.carries:
        raise ValueError(
            f"--windows: expected 1, since {task.name} carries nothing from one batch to the next, "
            f"got {wanted}; take more --rows"
        )
    split, rows = options.split or _test_split(task), options.rows or RUN_ROWS
    windows = range(min(wanted, task.batches(split, rows)))
    batches = [task.batch(split, index, rows) for index in windows]

    def call() -> None:
        carry = None
        for batch in batches:
            _, carry = model(batch, carry)

    annotations: dict[str, Any] = {}
    if isinstance(task, Describes):
        annotations |= joined([task.describe(batch) for batch in batches])
    return OpenedRun(model, call, annotations)


def joined(parts: list[Annotations]) -> Annotations:
    """Descriptions of batches whose rows continue each other, as one.

    >>> joined([{"texts": [["a"], ["b"]]}, {"texts": [["c"], ["d"]]}])
    {'texts': [['a', 'c'], ['b', 'd']]}
    """
    whole = parts[0].copy()
    if "texts" in whole:
        rows = zip(*(part.get("texts", []) for part in parts), strict=True)
        whole["texts"] = [[text for part in row for text in part] for row in rows]
    if "frames" in whole:
        whole["frames"] = torch.cat([part["frames"] for part in parts if "frames" in part], dim=1)
    return whole


def _test_split(task: Task) -> str:
    """The split called test, or the first of several such as test@25%."""
    return "test" if "test" in task.test_splits else task.test_splits[0]
