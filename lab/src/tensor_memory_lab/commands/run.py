"""`tensor-memory-lab run RECIPE [--field value …]`: train one model and show what came out."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_memory_lab.files import make_folder_of
from tensor_memory_lab.recipes import Recipe, find_recipe
from tensor_memory_lab.terminal import print_table

if TYPE_CHECKING:
    from tensor_memory_lab.run_config import RunConfig

USAGE = """usage: tensor-memory-lab run RECIPE [--field value ...]

Train one model. `tensor-memory-lab list` shows the recipes, `tensor-memory-lab run RECIPE --help`
every field of one and its value, such as

  tensor-memory-lab run binding --model.method tensor --task.writes 20 --budget.steps 100 --seed 1
"""

RUNS = Path("runs")
"""Where run folders go unless told otherwise."""


def run_command(arguments: Sequence[str]) -> int:
    """Run a recipe; 0 when it has finished, 130 when it was interrupted and can be resumed."""
    if arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if arguments[0].startswith("-"):
        raise ValueError(f"run: expected the name of a recipe first, got {arguments[0]!r}\n{USAGE}")
    recipe = find_recipe(arguments[0])
    # Imported here, since torch takes seconds: a wrong name and --help are told at once.
    from tensor_memory_lab.commands.arguments import parse_run
    from tensor_memory_lab.records import append, config_dict, declared, read_result, run_name
    from tensor_memory_lab.records.store import check_study, check_untaken
    from tensor_memory_lab.train import RunOptions, train
    from tensor_memory_lab.train.record import DivergedError

    config, settings = parse_run(recipe, arguments[1:])
    folder = settings.output or RUNS / run_name(config)
    if settings.results is not None:
        make_folder_of(settings.results, "results")  # now, not after hours of training
        check_study(settings.results)
        if not (folder / "result.json").exists():
            check_untaken(settings.results, config_dict(config))
    speaks = os.environ.get("RANK", "0") == "0"  # of the processes that a launcher started
    if speaks and not settings.quiet:
        _print_header(recipe, config, settings.device, folder)
    options = RunOptions(
        output=folder,
        resume=settings.resume,
        from_previous=settings.from_previous,
        trackers=settings.tracker,
        device=settings.device,
        shared_device=settings.shared_device,
        keep_checkpoints=settings.keep_checkpoints,
        quiet=settings.quiet,
        declared=declared(config, recipe(), recipe.settings, recipe.method),
    )
    try:
        record = train(config, options)
    except DivergedError:  # it counts among its seeds
        if speaks and settings.results is not None:
            append(settings.results, read_result(folder / "result.json"))
        raise
    if not record["finished"]:  # the loop has said how to go on
        return 130
    if speaks:
        if settings.results is not None:
            append(settings.results, record)
        print_outcome(record)
        print(folder / "result.json")
    return 0


def _print_header(recipe: Recipe, config: RunConfig[Any, Any], device: str, folder: Path) -> None:
    """Say on stderr what is trained, where, for how long, and where to look meanwhile."""
    from tensor_memory_lab.provenance import provenance
    from tensor_memory_lab.train.processes import find_device

    found = find_device(device)
    hardware = provenance()["hardware"]
    budget = config.budget
    lines = {
        "run": f"{config.recipe}, method {config.model.method}, seed {config.seed}",
        "device": f"{found}, {hardware['gpu'] if found.startswith('cuda') else hardware['cpu']}",
        "steps": f"{budget.steps:,} of {budget.batch_size} rows, "
        f"validation every {budget.evaluate_every:,}",
        "expected": recipe.expected or "the recipe does not say how long it takes",
        "folder": f"{folder}: metrics.jsonl grows during training, result.json is the end",
    }
    for name, text in lines.items():
        print(f"{name:<10} {text}", file=sys.stderr, flush=True)


def print_outcome(record: Mapping[str, Any]) -> None:
    """Print what a run was, and a table of its measures with a row for each test split."""
    from tensor_memory_lab.records.text import bound_name, bytes_text, measure_text, split_text

    parts = [
        f"{record['parameters']:,} parameters",
        f"{bytes_text(record['state_bytes'])} of state",
    ]
    if record.get("steps_per_second"):
        parts.append(f"{record['steps_per_second']:,.3g} steps/s")
    if record.get("best_step") is not None:
        parts.append(f"best at step {record['best_step']:,}")
    print(f"{record['task']}, {record['method']}, seed {record['seed']}: {', '.join(parts)}")
    for where, name in (("facts", "evaluation"), ("labels", "context")):
        if text := (record.get(where) or {}).get(name):
            print(f"{name}: {text}")
    measures = dict.fromkeys(name for found in record["test"].values() for name in found)
    rows = []
    for split, found in record["test"].items():
        row = {"split": split}
        row |= {name: split_text(found, name) if name in found else "" for name in measures}
        ceiling = record["ceiling"].get(split)
        if ceiling is not None:
            row[bound_name(record)] = measure_text(ceiling, record["metric"])
        rows.append(row)
    print_table(rows)
