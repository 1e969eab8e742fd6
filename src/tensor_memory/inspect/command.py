"""tensor-memory inspect RECORDING: a recording as a table, as figures, as a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from tensor_memory.inspect.figure_files import THEMES
from tensor_memory.inspect.page import LIMIT_MB
from tensor_memory.inspect.recording import Recording

FIGURE_OPTIONS = ("only", "row", "layer", "chunks", "theme")
PAGE_OPTIONS = ("rows", "every", "limit_mb")


def run_inspect(options: argparse.Namespace) -> int:
    """Show what a recording holds, and write what was asked for; exit status 0.

    `options` are those that `tensor_memory.cli` reads; those that were not given are None.
    """
    _require_output(options, "figures", "FOLDER", FIGURE_OPTIONS)
    _require_output(options, "html", "FILE", PAGE_OPTIONS)
    if options.recording.is_dir():
        raise ValueError(
            f"{options.recording}: expected a file that recording.save() wrote, got a folder; "
            "`tensor-memory-lab inspect` records the model in the folder of a run"
        )
    _require_apart(options.recording, options.html, options.figures)
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


def _require_apart(recording: Path, page: Path | None, figures: Path | None) -> None:
    """Refuse to write the page over another file, before anything is written."""
    taken = {recording.resolve(): "the recording, which would be lost"}
    if figures is not None:
        taken[figures.resolve()] = "the folder of --figures too"
    if page is not None and page.resolve() in taken:
        raise ValueError(
            f"--html: expected a file of its own, got {page}, {taken[page.resolve()]}; name "
            "another file, such as page.html"
        )
