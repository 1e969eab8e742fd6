"""tensor-memory inspect: what a recording holds, as a table, as figures, as a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tensor_memory.inspect.figure_files import KINDS, THEMES, write_figures
from tensor_memory.inspect.page import LIMIT_MB, write_page
from tensor_memory.inspect.recorder import record
from tensor_memory.inspect.recording import Recording
from tensor_memory.wording import counted

IN_A_RUN = "recording.safetensors"
"""The recording that a run's folder may hold."""

RUN_ROWS = 4
"""Rows of its data that the model of a run is watched on."""

OF_FIGURES = ("only", "row", "layer", "chunks", "theme")
OF_A_PAGE = ("every", "limit_mb")
OF_A_RUN = ("split", "data_dir", "windows", "which", "recipe")
"""Options that count where figures are drawn, a page is written, a run is recorded."""


class OpenedRun(NamedTuple):
    """A trained model and something for it to do."""

    model: nn.Module
    call: Callable[[], Any]
    """Runs the model on some of its task's data."""
    annotations: Mapping[str, Any] = {}
    """What the tokens of that data were, for `Recording.annotate`."""


OpenRun = Callable[[argparse.Namespace], OpenedRun]
"""From the options, `source` a run's folder among them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `run_inspect`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="RECORDING_OR_RUN",
        help="a file that recording.save() or --save wrote, or the folder of a run",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw every figure there")
    parser.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        metavar="NAME",
        help=f"draw this figure alone, or several by several --only: {', '.join(KINDS)}",
    )
    parser.add_argument("--row", type=int, help="row that figures show (default 0)")
    parser.add_argument(
        "--layer", action="append", help="number or name of a layer to draw (default: all)"
    )
    parser.add_argument(
        "--chunks", type=_chunks, metavar="START:STOP", help="chunks to draw (default: all)"
    )
    parser.add_argument("--theme", choices=[*THEMES, "both"], help="of the figures (default light)")
    page = parser.add_argument_group("what goes on the page")
    page.add_argument(
        "--rows",
        type=_positive,
        metavar="N",
        help=f"the first so many rows (default: all; of a run, {RUN_ROWS} are recorded)",
    )
    page.add_argument(
        "--every", type=_positive, metavar="N", help="one recorded chunk in N (default 1)"
    )
    page.add_argument(
        "--limit-mb",
        type=float,
        metavar="MB",
        help=f"refuse a larger page (default {LIMIT_MB:g})",
    )
    run = parser.add_argument_group("where a run is given, what its model is watched doing")
    run.add_argument(
        "--split", help="of the task's data (default: test, or the first split of that name)"
    )
    run.add_argument(
        "--data-dir", type=Path, metavar="FOLDER", help="where the data have moved since training"
    )
    run.add_argument(
        "--windows",
        type=_positive,
        metavar="N",
        help="so many, one after the other, where the task carries its state on (default 1)",
    )
    run.add_argument("--which", choices=("best", "last"), help="checkpoint (default best)")
    run.add_argument(
        "--recipe",
        metavar="MODULE:FUNCTION",
        help="your recipe that made the run, where its task or model is a class of your own",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the recording there")


def run_inspect(options: argparse.Namespace, open_run: OpenRun | None = None) -> int:
    """Show what a recording holds, and write what was asked for; exit status 0."""
    if options.source.exists():
        _require_used(options)
    for path in filter(None, (options.save, options.html)):
        if not path.parent.is_dir():  # told before a model is run
            raise FileNotFoundError(
                f"{path}: expected a file in an existing folder, and {path.parent} is none; "
                "make it first"
            )
    recording = open_recording(options, open_run)
    print(summary(recording))
    if options.save:
        recording.save(options.save)
        print(f"recording: {options.save}")
    if options.figures:
        layers = None if options.layer is None else [_layer(name) for name in options.layer]
        written = write_figures(
            recording,
            options.figures,
            row=options.row or 0,
            layers=layers,
            chunks=options.chunks or slice(None),
            themes=THEMES if options.theme == "both" else (options.theme or "light",),
            kinds=options.only,
        )
        print(f"figures: {len(written)} in {options.figures}")
    if options.html:
        write_page(
            recording,
            options.html,
            every=options.every or 1,
            rows=options.rows,
            limit_mb=LIMIT_MB if options.limit_mb is None else options.limit_mb,
        )
        print(f"page: {options.html}")
    return 0


def _require_used(options: argparse.Namespace) -> None:
    """Refuse an option that would change nothing, by what is missing for it to count."""
    given = {name for name, value in vars(options).items() if value is not None}
    kept = options.source if options.source.is_file() else options.source / IN_A_RUN
    is_recorded = kept.is_file()
    page = (*OF_A_PAGE, "rows") if is_recorded else OF_A_PAGE  # of a run, rows are recorded
    for names, needed in ((OF_FIGURES, "figures"), (page, "html")):
        idle = [name for name in names if name in given]
        if idle and needed not in given:
            what = "FOLDER, where the figures go" if needed == "figures" else "FILE, the page"
            raise ValueError(
                f"{_flags(idle)}: expected --{needed} {what}, and there is none; add it, or leave "
                f"{_flags(idle)} out"
            )
    idle = [name for name in OF_A_RUN if name in given]
    if idle and is_recorded:
        raise ValueError(
            f"{_flags(idle)}: expected the folder of a run to record, got the recording {kept}, "
            f"which is shown as it is; give a run's folder without a {IN_A_RUN}, or leave "
            f"{_flags(idle)} out"
        )


def _flags(names: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def open_recording(options: argparse.Namespace, open_run: OpenRun | None = None) -> Recording:
    """A saved recording, that of a run's folder, or one made of its model."""
    source: Path = options.source
    if not source.exists():
        raise FileNotFoundError(
            f"{source}: no such file or folder; expected a recording, or the folder of a run"
        )
    if source.is_file():
        try:
            return Recording.load(source)
        except ValueError as error:
            raise ValueError(f"{error}; of a run, give the folder with its config.json") from error
    if (source / IN_A_RUN).is_file():
        return Recording.load(source / IN_A_RUN)
    if open_run is None:
        raise ValueError(
            f"{source}: the folder holds no {IN_A_RUN}; save one there with "
            "`with record(model) as recording: ...` and recording.save(...)"
        )
    model, call, annotations = open_run(options)
    return record_call(model, call, **annotations)


def record_call(model: nn.Module, call: Callable[[], Any], **options: Any) -> Recording:
    """What `model` does while `call()` runs it, in evaluation mode and without gradients.

    `options` are `record`'s. The model is left in the mode it was in.
    """
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), record(model, **options) as recording:
            call()
    finally:
        for module, mode in training.items():
            module.training = mode
    return recording


def summary(recording: Recording) -> str:
    """A line per layer, and what was not kept."""
    head = ("layer", "grid", "kept", "seen", "gate", "use", "i", "f", "o", "sigma")
    lines: list[tuple[str, ...]] = [head]
    for layer in recording.layers:
        gates = layer.gates.double().flatten(0, 1).nanmean(0)
        spread = torch.tensor(torch.nan) if layer.spread is None else layer.spread.double()
        numbers = (
            torch.tensor(torch.nan if layer.gate is None else layer.gate),
            layer.use.double().nanmean(),
            *(gates if len(layer) else [torch.tensor(torch.nan)] * 3),
            spread.nanmean(),
        )
        lines.append(
            (
                layer.name,
                "x".join(map(str, layer.config.grid)),
                str(int(layer.present.sum())),
                str(int(layer.seen.sum())),
                *("-" if value.isnan() else f"{value:.3f}" for value in numbers),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rows, layers = counted(recording.rows, "row"), counted(len(recording), "layer")
    if recording.rows_left_out:
        rows += f" ({counted(recording.rows_left_out, 'more was', 'more were')} left out)"
    table.append(f"{rows}, {layers}, {recording.nbytes / 2**20:.1f} MiB")
    if recording.every > 1:
        others = counted(recording.dropped, "was", "were")
        table.append(f"one chunk in {recording.every} was kept, {others} not")
    return "\n".join(table)


def _chunks(text: str) -> slice:
    start, colon, stop = text.partition(":")
    try:
        numbers = [int(part) if part else None for part in (start, stop)]
    except ValueError:
        colon = ""
        numbers = []
    if not colon:
        raise argparse.ArgumentTypeError(f"expected START:STOP, such as 0:12, got {text!r}")
    return slice(*numbers)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def _layer(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
