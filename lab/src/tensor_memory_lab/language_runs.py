"""A trained decoder from its run's folder: loaded without its text, measured by position.

Loss by position: the same tokens are scored at every distance. A window of the text is predicted
with nothing before it, with one window before it that was read and carried, with two, and so on. So
a difference between distances is one of memory and not of text.

Letters: B rows, N tokens per window, W whole windows of the text, H windows of history and one.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tensor_memory_lab.models import Carry
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.provenance import provenance
from tensor_memory_lab.records import config_dict
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks.language import LanguageTask, LanguageTaskConfig
from tensor_memory_lab.tasks.text import Vocabulary
from tensor_memory_lab.train.batches import rows_of
from tensor_memory_lab.train.checkpoint import RunFolder, load_weights, read_config
from tensor_memory_lab.train.step import autocast

VOCABULARY = "vocabulary.txt"

BINS = 8
"""Means per window that are kept of its positions."""


class TextRun(NamedTuple):
    """What the folder of a language run holds."""

    config: RunConfig[Any, Any]
    vocabulary: Vocabulary
    model: LanguageModel
    step: int
    """Steps that the model was trained for."""


def load_text_run(
    folder: str | os.PathLike[str],
    which: Literal["best", "last"] = "best",
    *,
    device: torch.device | str = "cpu",
    carried: bool | None = None,
) -> TextRun:
    """Config, vocabulary and model of a language run, the model in evaluation mode.

    `carried` builds the model with or without a state that goes from window to window, whichever
    it was trained with; the weights are the same.
    """
    config = read_config(folder)
    task, model = config.task, config.model
    if not (isinstance(task, LanguageTaskConfig) and isinstance(model, LanguageModelConfig)):
        raise ValueError(
            f"{folder}: expected a language run, got one of the recipe {config.recipe} "
            f"({type(task).__name__}); `tensor-memory-lab run language` makes one"
        )
    vocabulary = _read_vocabulary(Path(folder) / VOCABULARY)
    step, weights = RunFolder(folder).weights(which)
    with torch.random.fork_rng(devices=[]):
        built = LanguageModel(
            model,
            words=len(vocabulary),
            length=task.length,
            carried=task.carried if carried is None else carried,
        )
    load_weights(built, weights, str(folder))
    return TextRun(config, vocabulary, built.to(device).eval(), step)


def _read_vocabulary(path: Path) -> Vocabulary:
    """The words by line; an empty file stands for the 256 bytes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected the words by id that a language run leaves there"
        )
    text = path.read_text(encoding="utf-8")
    return Vocabulary(tuple(text.split("\n")) if text else ())


def loss_by_position(
    config: RunConfig[Any, Any],
    task: LanguageTask,
    model: LanguageModel,
    *,
    step: int,
    windows: int = 16,
    size: int = 32,
) -> dict[str, Any]:
    """The record of a measurement on the test text, kind "positions".

    Args:
        config: the run's.
        task: its text, on the model's device.
        model: built to carry, in evaluation mode.
        step: how many steps it was trained for.
        windows: H, how many training lengths the text gets long.
        size: rows that are read side by side.
    """
    nll = window_losses(config, task, model, windows=windows, size=size)  # (H, windows, N)
    means = nll.mean(2)  # (H, windows)
    gains = means[:1] - means  # what history is worth, window by window
    error = gains.std(1) / gains.shape[1] ** 0.5 if gains.shape[1] > 1 else gains.new_zeros(windows)
    N = nll.shape[2]
    edges = torch.arange(BINS + 1) * N // BINS if N >= BINS else torch.arange(N + 1)
    parts = list(itertools.pairwise(edges.tolist()))
    return {
        "kind": "positions",
        "recipe": config.recipe,
        "config": config_dict(config),
        "task": task.name,
        "method": config.model.method,
        "seed": config.seed,
        "labels": model.labels(),
        "state_bytes": model.state_bytes(),
        "trained": "carried" if config.task.carried else "fresh",
        "step": step,
        "length": N,
        "tokens": nll.shape[1] * N,
        "windows": [
            {
                "history": h * N,
                "loss": means[h].mean().item(),
                "gain": gains[h].mean().item(),
                "gain_error": error[h].item(),
            }
            for h in range(windows)
        ],
        "positions": [h * N + (first + last) / 2 for h in range(windows) for first, last in parts],
        "losses": [nll[h, :, a:b].mean().item() for h in range(windows) for a, b in parts],
    } | provenance(model.word.weight.device)


@torch.no_grad()
def window_losses(
    config: RunConfig[Any, Any],
    task: LanguageTask,
    model: LanguageModel,
    *,
    windows: int,
    size: int,
) -> Tensor:
    """(H, W - H + 1, N) in float64 on the CPU: losses of the test text's windows from number
    H - 1 on, with 0 to H - 1 windows of history carried into them."""
    if windows < 1 or size < 1:
        raise ValueError(f"expected windows and size of 1 or more, got {windows} and {size}")
    tokens, N = task.splits["test"], config.task.length
    W = len(tokens) // N
    if windows > W:
        raise ValueError(
            f"test text: expected at least {windows} windows of {N} tokens, got {W}; ask for "
            "fewer with --times"
        )
    device = model.word.weight.device
    found = torch.zeros(windows, W - windows + 1, N, dtype=torch.float64)
    before = torch.cat([tokens.new_tensor([task.vocabulary.start]), tokens[:-1]])
    for first in range(0, W, size):
        start = torch.arange(first, min(first + size, W))  # window that each row starts with
        carry: Carry | None = None
        for h in range(windows):
            start = start[start + h < W]  # rows that have reached the end of the text stop
            if not len(start):
                break
            at = (start[:, None] + h) * N + torch.arange(N)  # (B, N)
            at = at.to(tokens.device)
            batch = {"ids": before[at].long().to(device), "targets": tokens[at].long().to(device)}
            with autocast(config, device):
                outputs, carry = model(batch, rows_of(carry, 0, len(start)) if carry else None)
            nll, scored = outputs["nll"].double().cpu(), start + h - (windows - 1)
            found[h, scored[scored >= 0]] = nll[scored >= 0]
    return found
