"""A trained decoder and its vocabulary from its run's folder alone, without the text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks.language import LanguageTaskConfig
from tensor_memory_lab.tasks.text import Vocabulary
from tensor_memory_lab.train.checkpoints import Checkpoints, load_weights
from tensor_memory_lab.train.folder import RunFolder, read_config

VOCABULARY = "vocabulary.txt"


class SavedText(NamedTuple):
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
) -> SavedText:
    """Config, vocabulary and model of a language run, the model in evaluation mode.

    `carried` builds the model with or without a state that goes from window to window, whichever
    it was trained with; the weights are the same.
    """
    run = RunFolder(folder)
    if not run.config.is_file():
        raise FileNotFoundError(
            f"{run.config}: no such file; expected the folder of a language run, with config.json, "
            f"{VOCABULARY} and checkpoints in it"
        )
    config = read_config(run.config)
    task, model = config.task, config.model
    if not (isinstance(task, LanguageTaskConfig) and isinstance(model, LanguageModelConfig)):
        raise ValueError(
            f"{run.path}: expected a language run, got one of the recipe {config.recipe} "
            f"({type(task).__name__}); `tensor-memory run language` makes one"
        )
    vocabulary = _read_vocabulary(run.path / VOCABULARY)
    if not run.checkpoints.is_dir():
        raise FileNotFoundError(
            f"{run.checkpoints}: no checkpoints; expected a run that kept them: `sweep` drops them "
            "unless it is told --keep-checkpoints, `run` keeps them"
        )
    step, weights = Checkpoints(run, run.fingerprint(config)).weights(which)
    with torch.random.fork_rng(devices=[]):
        built = LanguageModel(
            model,
            words=len(vocabulary),
            length=task.length,
            carried=task.carried if carried is None else carried,
        )
    load_weights(built, weights, str(run.path / which))
    return SavedText(config, vocabulary, built.to(device).eval(), step)


def _read_vocabulary(path: Path) -> Vocabulary:
    """The words by line; an empty file stands for the 256 bytes."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected the words by id that a language run leaves there"
        )
    text = path.read_text(encoding="utf-8")
    return Vocabulary(tuple(text.split("\n")) if text else ())
