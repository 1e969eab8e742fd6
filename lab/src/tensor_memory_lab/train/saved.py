"""A trained model from its run's folder, to look at, measure or use."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Literal

import torch

from tensor_memory_lab.models import Model
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Task
from tensor_memory_lab.train.checkpoints import Checkpoints, load_weights
from tensor_memory_lab.train.folder import RunFolder, read_config


def load_run(
    folder: str | os.PathLike[str],
    which: Literal["best", "last"] = "best",
    *,
    device: torch.device | str = "cpu",
    data_dir: str | os.PathLike[str] | None = None,
) -> tuple[RunConfig[Any, Any], Task, Model]:
    """The config, the task and the model of a run, with its best or its last weights.

    The model is on `device` and in evaluation mode. `data_dir` names the data where they have moved
    since training. A config class that is not of this package must have been registered
    (`results.register_config`).
    """
    if which not in ("best", "last"):
        raise ValueError(f"which: expected 'best' or 'last', got {which!r}")
    run = RunFolder(folder)
    if not run.config.is_file():
        raise FileNotFoundError(
            f"{run.config}: no such file; expected the folder of a run, with config.json in it"
        )
    config = read_config(run.config)
    _, weights = Checkpoints(run, run.fingerprint(config)).weights(which)
    given = config.task
    if data_dir is not None:
        if not hasattr(given, "data_dir"):
            raise ValueError(
                f"data_dir: expected none for {type(given).__name__}, whose data are drawn, "
                f"got {os.fspath(data_dir)!r}"
            )
        given = replace(given, data_dir=os.fspath(data_dir))
    task = given.build(config.seed).to(torch.device(device))
    with torch.random.fork_rng():
        model = config.model.build(task)
    load_weights(model, weights, str(run.path / which))
    return config, task, model.to(device).eval()
