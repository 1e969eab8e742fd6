"""tensor-memory inspect RECORDING: a recording as a table, as figures, as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensor_memory.inspect.figure_files import KINDS, THEMES
from tensor_memory.inspect.page import LIMIT_MB
from tensor_memory.inspect.recording import Recording

FIGURE_OPTIONS = ("only", "row", "layer", "chunks", "theme")
PAGE_OPTIONS = ("rows", "every", "limit_mb")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `run_inspect`. Those that were not given are None."""
    parser.add_argument(
        "recording", type=Path, metavar="RECORDING", help="a file that recording.save() wrote"
    )
    figures = parser.add_argument_group("figures")
    figures.add_argument("--figures", type=Path, metavar="FOLDER", help="draw every figure there")
    figures.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        metavar="NAME",
        help=f"draw this figure alone, or several by several --only: {', '.join(KINDS)}",
    )
    figures.add_argument("--row", type=int, help="the row they show (default 0)")
    figures.add_argument(
        "--layer", action="append", help="number or name of a layer to draw (default: all)"
    )
    figures.add_argument(
        "--chunks", type=_chunks, metavar="START:STOP", help="chunks to draw (default: all)"
    )
    figures.add_argument("--theme", choices=[*THEMES, "both"], help="default light")
    page = parser.add_argument_group("page for a browser")
    page.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    page.add_argument(
        "--rows", type=_positive, metavar="N", help="show the first so many rows (default: all)"
    )
    page.add_argument(
        "--every", type=_positive, metavar="N", help="show one recorded chunk in N (default 1)"
    )
    page.add_argument(
        "--limit-mb",
        type=float,
        metavar="MB",
        help=f"refuse a larger page (default {LIMIT_MB:g})",
    )


def run_inspect(options: argparse.Namespace) -> int:
    """Show what a recording holds, and write what was asked for; exit status 0."""
    _require_output(options, "figures", "FOLDER", FIGURE_OPTIONS)
    _require_output(options, "html", "FILE", PAGE_OPTIONS)
    if options.recording.is_dir():
        raise ValueError(
            f"{options.recording}: expected a file that recording.save() wrote, got a folder; "
            "`tensor-memory-lab inspect` records the model in the folder of a run"
        )
    recording = Recording.load(options.recording)
    print(recording.summary())
    if options.figures:
        names = options.layer
        written = recording.save_figures(
            options.figures,
            row=options.row or 0,
            layers=names and [int(name) if name.isdecimal() else name for name in names],
            chunks=options.chunks or slice(None),
            themes=THEMES if options.theme == "both" else (options.theme or "light",),
            kinds=options.only,
        )
        print(f"figures: {len(written)} in {options.figures}")
    if options.html:
        recording.save_page(
            options.html,
            every=options.every or 1,
            rows=options.rows,
            limit_mb=LIMIT_MB if options.limit_mb is None else options.limit_mb,
        )
        print(f"page: {options.html}")
    return 0


def _require_output(
    options: argparse.Namespace, output: str, where: str, names: tuple[str, ...]
) -> None:
    """Refuse options that would change nothing because their output is not asked for."""
    given = [name for name in names if getattr(options, name) is not None]
    if given and getattr(options, output) is None:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(
            f"{flags}: expected --{output} {where} beside it, got none; add it, or leave {flags} "
            "out"
        )


def _chunks(text: str) -> slice:
    start, colon, stop = text.partition(":")
    if not colon or not all(part == "" or part.lstrip("-").isdecimal() for part in (start, stop)):
        raise argparse.ArgumentTypeError(f"expected START:STOP, such as 0:12, got {text!r}")
    return slice(*(int(part) if part else None for part in (start, stop)))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)
