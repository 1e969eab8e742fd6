"""Processes to interrupt, to kill or to join, forked from one that has imported everything.

In a process of its own, importing torch and what a first step of training loads takes seconds.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PRELOADED = (
    "torch._dynamo",  # which every optimizer loads
    "accelerate",
    "tensor_memory_lab.commands.arguments",
    "tensor_memory_lab.train",
)


def start(target: Callable[..., Any], *arguments: Any, folder: Path, **variables: str) -> Any:
    """A process that calls a function of a module; its exit code is what the function returns.

    It is in a process group and a folder of its own, where the files out and err are what it says.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    process = context.Process(target=_run, args=(target, arguments, folder, variables), daemon=True)
    process.start()
    return process


def _run(
    target: Callable[..., Any], arguments: Any, folder: Path, variables: dict[str, str]
) -> None:
    os.setpgid(0, 0)
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    gc.freeze()  # a run collects garbage first, and need not look through the imports
    sys.exit(target(*arguments))
