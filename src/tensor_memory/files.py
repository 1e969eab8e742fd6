"""Files that are whole or absent, and tensors and JSON read back without surprises."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def checked_path(path: Any) -> Path:
    """A path that a file system can hold."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
        raise TypeError(
            f"path: expected the path of a file or folder, got {path!r:.80}; pass a string or a "
            "pathlib.Path"
        )
    return Path(path)


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary neighbour of `path`, then rename it into place.

    A crash, a full disk or a raising `write` leaves what stood at `path` untouched.
    """
    path = checked_path(path)
    if path.is_dir():
        raise IsADirectoryError(
            f"{path}: expected the name of a file to write, got a folder; name a file in it"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path}: expected a file in a folder that is there, got none; make {path.parent} first"
        )
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
    write_whole(path, lambda at: at.write_text(text, encoding="utf-8"))


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, kind: str, description: str = ""
) -> None:
    """Write named tensors as safetensors, with a checksum of them.

    `kind` says what the file is and is asked for on load. So is `description`, which the caller
    writes to another file too: the two files are then known to be of one save.
    """
    detached = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"kind": kind, "sha256": _checksum(detached)}
    if description:
        metadata["description"] = description
    try:
        write_whole(path, lambda at: save_file(detached, at, metadata=metadata))
    except SafetensorError as error:  # its own name for a disk or a folder that refuses
        raise OSError(
            f"{path}: cannot write the {kind} ({error}); expected a folder that exists, may be "
            "written to and has room"
        ) from error


def load_tensors(
    path: str | os.PathLike[str], *, kind: str, description: str = ""
) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote; a truncated, damaged or foreign file is a `ValueError`.

    So is another description, except where the file was written before it held one.
    """
    if not checked_path(path).is_file():
        got = "a folder" if Path(path).is_dir() else "no such file"
        raise FileNotFoundError(
            f"{path}: expected {_one(kind)} in safetensors format, got {got}; "
            "pass the file that was saved as such"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path}: expected {_one(kind)} in safetensors format, got a truncated or foreign file "
            f"({error}); write it again"
        ) from error
    found = metadata.get("kind")
    if found != kind:
        got = f"a file of kind {found!r}" if found else "a safetensors file of another program"
        raise ValueError(
            f"{path}: expected {_one(kind)}, got {got}; pass the file that was saved as such"
        )
    if metadata.get("description", description) != description:
        raise ValueError(
            f"{path}: expected {_one(kind)} saved with the description beside them, got those "
            "of another save; a save was cut short, or a file was replaced or edited: save again"
        )
    if "sha256" not in metadata:
        warnings.warn(
            f"{path}: expected a checksum, got a file that was written before there was one, so "
            "that damage to it would not show; save it again",
            stacklevel=3,
        )
    elif metadata["sha256"] != _checksum(tensors):
        raise ValueError(
            f"{path}: expected what was written, got other content: a damaged file; write it again"
        )
    return tensors


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes; of contiguous tensors on the CPU."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.nbytes:
            found.update((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    return found.hexdigest()


def read_json(path: str | os.PathLike[str], what: str, remedy: str) -> dict[str, Any]:
    """The JSON object in a file; anything else is a `ValueError` that says `what` was expected
    and what to do about it, `remedy`."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, brackets without end
        raise ValueError(
            f"{path}: expected {what} as JSON, got a truncated or foreign file ({error}); {remedy}"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: expected {what}, an object in JSON, got {values!r:.80}; {remedy}"
        )
    return values


def _one(kind: str) -> str:
    return kind if kind.endswith("s") else f"a {kind}"  # weights, but a state
