"""`tensor-memory-lab inspect RUN_FOLDER`: record what a run's memory does with its task's data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch

from tensor_memory import MemoryResidual, PlaceMemory, Recording, TensorMemory, record
from tensor_memory_lab.commands.option_types import count
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import config_dict
from tensor_memory_lab.tasks import Annotations, Describes, PreparesModel
from tensor_memory_lab.train import load_run


def inspect_command(arguments: Sequence[str]) -> int:
    """Record the model of a run, print a table, and write what was asked for."""
    options = _parser().parse_args(arguments)
    if options.recipe is not None:
        config_dict(find_recipe(options.recipe)())  # which makes the classes in it known
    _check_outputs(options)
    for path in filter(None, (options.save, options.html)):
        path.parent.mkdir(parents=True, exist_ok=True)  # now, and not after the model ran
    recording = record_run(
        options.folder,
        options.which,
        split=options.split,
        rows=options.rows,
        windows=options.windows,
        data_dir=options.data_dir,
    )
    print(recording.summary())
    if options.save:
        recording.save(options.save)
        print(f"recording: {options.save}")
    if options.figures:
        print(f"figures: {len(recording.save_figures(options.figures))} in {options.figures}")
    if options.html:
        recording.save_page(options.html, title=options.folder.name)
        print(f"page: {options.html}")
    return 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse to write two outputs to one place, or a recording over another file."""
    given = {name: getattr(options, name) for name in ("save", "html", "figures")}
    places = [path.resolve() for path in given.values() if path is not None]
    if len(set(places)) < len(places):
        told = " ".join(f"--{name} {path}" for name, path in given.items() if path is not None)
        raise ValueError(f"expected another path for each output, got {told}; rename one")
    if options.save is not None and options.save.is_file():
        try:
            Recording.load(options.save)
        except ValueError as error:
            raise ValueError(
                f"--save {options.save}: expected a recording to replace, or no such file, got "
                f"another file ({error}); name another"
            ) from error


def record_run(
    folder: Path,
    which: Literal["best", "last"] = "best",
    *,
    split: str | None = None,
    rows: int = 4,
    windows: int = 1,
    data_dir: Path | None = None,
) -> Recording:
    """What the model of a run does with the first rows of its test data."""
    config, task, model = load_run(folder, which, data_dir=data_dir)
    held = (MemoryResidual, TensorMemory, PlaceMemory)
    if not any(isinstance(part, held) for part in model.modules()):
        raise ValueError(
            f"{folder}: expected a run whose model has a memory, got one of the method "
            f"{config.model.method}, which has none; methods with a memory are called tensor, "
            "place or spatial"
        )
    if windows > 1 and not task.carries:
        raise ValueError(
            f"--windows: expected 1, since {task.name} carries nothing from one batch to the next, "
            f"got {windows}; take more --rows"
        )
    if split is None:  # the split called test, or the first of several such as test@25%
        split = "test" if "test" in task.test_splits else task.test_splits[0]
    if windows > (there := task.batches(split, rows)):
        raise ValueError(
            f"--windows: expected {there} or fewer, as many as {split} has for {rows} rows, got "
            f"{windows}; ask for fewer"
        )
    batches = [task.batch(split, index, rows) for index in range(windows)]
    carry = None
    ready = task.prepared(model, split) if isinstance(task, PreparesModel) else nullcontext()
    with torch.no_grad(), ready, record(model.eval()) as recording:
        for batch in batches:
            _, carry = model(batch, carry)
    if isinstance(task, Describes):
        recording.annotate(**joined([task.describe(batch) for batch in batches]))
    return recording


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory-lab inspect",
        description="Record what the memory of a run does with some of its task's data. "
        "`tensor-memory inspect` shows a saved recording again, with more options.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN_FOLDER", help="a run with checkpoints")
    add("--html", type=Path, metavar="FILE", help="write a page for a browser")
    add("--figures", type=Path, metavar="FOLDER", help="draw every figure there")
    add("--save", type=Path, metavar="FILE", help="keep the recording there")
    add("--rows", type=count, default=4, metavar="N", help="rows to record (default 4)")
    windows = "so many, one after the other, where the task carries its state on (default 1)"
    add("--windows", type=count, default=1, metavar="N", help=windows)
    add("--split", help="of the task's data (default: test, or the first split of that name)")
    add("--which", choices=("best", "last"), default="best", help="checkpoint (default best)")
    moved = "where the data have moved since training"
    add("--data-dir", type=Path, metavar="FOLDER", help=moved)
    own = "your recipe that made the run, where its task or model is a class of your own"
    add("--recipe", metavar="MODULE:FUNCTION", help=own)
    return parser
