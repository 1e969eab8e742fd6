"""Files that are whole or absent, and JSON read back without surprises."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then rename it into place.

    A crash, a full disk or a raising `write` leaves what stood at `path` untouched.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; expected the name of a file to write")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename is not None and Path(error.filename) == temporary:
            error.filename = str(path)  # the name that the caller knows
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as UTF-8, whole or not at all."""

    def write(at: Path) -> None:
        at.write_text(text, encoding="utf-8")

    write_whole(path, write)


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


def make_folder_of(file: Path, what: str) -> None:
    """Make the folder that a file will be written to; a folder in its place is an error."""
    if file.is_dir():
        raise IsADirectoryError(f"{file}: expected a file for {what}, got a folder; name one in it")
    make_folder(file.parent, what)


def read_json(path: str | os.PathLike[str], what: str, remedy: str, *, kind: type = dict) -> Any:
    """The JSON object in a file; anything else is a `ValueError` that says `what` was expected
    and what to do about it, `remedy`. `kind=object` lets lists and single values pass too."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, brackets without end
        raise ValueError(
            f"{path}: expected {what} as JSON, got a truncated or foreign file ({error}); {remedy}"
        ) from error
    if not isinstance(values, kind):
        raise ValueError(
            f"{path}: expected {what}, an object in JSON, got {values!r:.80}; {remedy}"
        )
    return values
