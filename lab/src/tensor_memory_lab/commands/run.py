"""`tensor-memory run RECIPE [--field value …]`: train one model and say what came out."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensor_memory_lab.commands.arguments import is_main_process, parse_run
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.records import append, declared, run_name, write_result
from tensor_memory_lab.records.text import bound_name, bytes_text, measure_text

USAGE = """usage: tensor-memory run RECIPE [--field value ...]

Train one model. `tensor-memory list` shows the recipes, `tensor-memory run RECIPE --help` every
field of one and its value, such as

  tensor-memory run binding --model.method tensor --task.writes 20 --budget.steps 100 --seed 1
"""

RUNS = Path("runs")
"""Where run folders go unless told otherwise."""


def run_command(arguments: Sequence[str]) -> int:
    """Run a recipe; 0 when it has finished, 130 when it was interrupted and can be resumed."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0].startswith("-"):
        raise ValueError(f"run: expected the name of a recipe first, got {arguments[0]!r}\n{USAGE}")
    config, settings = parse_run(arguments[0], arguments[1:])
    from tensor_memory_lab.train import RunOptions, train  # not for --help

    folder = settings.output or RUNS / run_name(config)
    if settings.results is not None:
        make_folder(settings.results.parent, "results")  # now, and not after hours of training
    record = train(
        config,
        RunOptions(
            output=folder,
            resume=settings.resume,
            from_previous=settings.from_previous,
            trackers=settings.tracker,
            device=settings.device,
            quiet=settings.quiet,
        ),
    )
    if not record["finished"]:  # the loop has said how to go on
        return 130
    if is_main_process():
        # The recipe declares what is a setting and what the method; the loop knows no recipes.
        record |= declared(config, find_recipe(arguments[0])())
        write_result(folder / "result.json", record)
        if settings.results is not None:
            append(settings.results, record)
        print(summary(record))
        print(f"{folder / 'result.json'}")
    return 0


def make_folder(path: Path, what: str) -> None:
    """Make a folder where there is none; an error that says what it was for."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass  # a folder that is there may still take no files
    except OSError as error:
        raise OSError(
            f"{path}: cannot be made a folder for {what} ({error.strerror}); choose another"
        ) from error


def summary(record: Mapping[str, Any]) -> str:
    """A run's outcome in a few lines.

    >>> print(summary({
    ...     "recipe": "binding", "task": "binding", "method": "tensor", "seed": 0,
    ...     "parameters": 113910, "state_bytes": 27648, "best_step": 1800,
    ...     "test": {"test": {"accuracy": 0.948, "loss": 0.2}}, "ceiling": {"test": 0.96},
    ...     "metric": "accuracy", "steps_per_second": 210.0}))
    binding, tensor, seed 0: 113,910 parameters, 27.0 KiB of state, 210 steps/s, best at step 1,800
      test: accuracy 94.8 %, loss 0.2000 (ceiling 96.0 %)
    """
    parts = [
        f"{record['parameters']:,} parameters",
        f"{bytes_text(record['state_bytes'])} of state",
    ]
    if record.get("steps_per_second"):
        parts.append(f"{record['steps_per_second']:,.3g} steps/s")
    if record.get("best_step") is not None:
        parts.append(f"best at step {record['best_step']:,}")
    lines = [f"{record['task']}, {record['method']}, seed {record['seed']}: {', '.join(parts)}"]
    if protocol := protocol_text(record):
        lines.append(f"  {protocol}")
    for split, measures in record["test"].items():
        shown = ", ".join(f"{name} {measure_text(value, name)}" for name, value in measures.items())
        ceiling = record["ceiling"].get(split)
        end = f" ({bound_name(record)} {measure_text(ceiling, record['metric'])})"
        lines.append(f"  {split}: {shown}{'' if ceiling is None else end}")
    return "\n".join(lines)


def protocol_text(record: Mapping[str, Any]) -> str:
    """How a run's numbers were measured and what a prediction had seen; empty where nobody says.

    >>> protocol_text({"facts": {"evaluation": "windows of 8"}, "labels": {"context": "all of it"}})
    'windows of 8; context: all of it'
    """
    protocol = (record.get("facts") or {}).get("evaluation")
    context = (record.get("labels") or {}).get("context")
    if not protocol:
        return ""
    return f"{protocol}; context: {context}" if context else protocol
