"""Decoded pixels on disk: arrays and a description, whole or absent, checked when opened.

A cache is a folder with `cache.json` and one `.npy` file per array. Its name holds a digest of what
was asked for (files, sizes, decoder), so another request is another folder. The arrays are
memory-mapped: opening a cache of gigabytes takes no time and no memory. Of several processes that
want one cache at the same time, one decodes and the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_memory_lab.files import read_json

if TYPE_CHECKING:
    import numpy as np

VERSION = 1
"""Of the layout below; a cache of another version is not read."""


@dataclass(frozen=True)
class Wanted:
    """What a cache must hold: the kind, how it was decoded, and of which files."""

    kind: str
    how: Mapping[str, Any]
    """Plain values that decide the pixels: size, frames, decoder."""
    files: Sequence[str]
    """Names relative to the data folder, in the order of the rows."""

    def folder(self, parent: str | os.PathLike[str]) -> Path:
        """Where such a cache lies under `parent`."""
        text = json.dumps([VERSION, self.kind, dict(self.how), list(self.files)], sort_keys=True)
        return Path(parent) / f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class CacheWriter:
    """Fills a hidden neighbour of the final folder; `finish` renames it into place.

    Used as a context manager: leaving it without `finish` takes everything away again.
    """

    def __init__(self, folder: Path, wanted: Wanted) -> None:
        self.folder, self.wanted = folder, wanted
        self.temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")

    def __enter__(self) -> CacheWriter:
        self.temporary.mkdir(parents=True)
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A new uint8 array on disk, to be filled in place."""
        import numpy as np

        path = self.temporary / f"{name}.npy"
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)

    def finish(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Make the cache visible; `facts` are what the reader needs besides the pixels."""
        for array in arrays.values():
            array.flush()  # type: ignore[attr-defined]
        described = {
            "version": VERSION,
            "kind": self.wanted.kind,
            "how": dict(self.wanted.how),
            "files": list(self.wanted.files),
            "shapes": {name: list(array.shape) for name, array in arrays.items()},
            "facts": dict(facts),
        }
        text = json.dumps(described, ensure_ascii=False) + "\n"
        (self.temporary / "cache.json").write_text(text, encoding="utf-8")
        try:
            self.temporary.rename(self.folder)
        except OSError:
            if not self.folder.exists():  # else somebody has made the same one meanwhile
                raise


def open_or_make(
    parent: str | os.PathLike[str], wanted: Wanted, make: Callable[[Path], None]
) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    """The cache under `parent`: its folder, arrays and facts; `make(folder)` where there is none.

    The runs of a sweep all begin by asking for it, and decoding it once takes every core.
    """
    folder = wanted.folder(parent)
    found = open_cache(folder, wanted)
    if found is None:
        with _one_at_a_time(folder):
            found = open_cache(folder, wanted)  # somebody may have made it meanwhile
            if found is None:
                make(folder)
                found = open_cache(folder, wanted)
    assert found is not None
    return folder, *found


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other process makes this folder; whoever dies inside lets the next one in."""
    path = folder.with_name(f".{folder.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another process is decoding, waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # who waits for this very file finds the folder made, or makes it
            path.unlink(missing_ok=True)


def open_cache(folder: Path, wanted: Wanted) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Its arrays, memory-mapped, and its facts; None where there is none.

    Raises:
        ValueError: where something lies there that is not what `wanted` says.
    """
    import numpy as np

    if not folder.exists():
        return None
    path = folder / "cache.json"
    if not path.is_file():
        raise _broken(folder, "cache.json is missing")
    remedy = f"delete {folder} to decode again"
    described = read_json(path, "the description of a cache of decoded files", remedy)
    expected = {
        "version": VERSION,
        "kind": wanted.kind,
        "how": json.loads(json.dumps(dict(wanted.how))),
        "files": list(wanted.files),
    }
    for name, value in expected.items():
        if described.get(name) != value:
            raise _broken(folder, f"its {name} differs from what was asked for")
    arrays = {}
    for name, shape in described["shapes"].items():
        file = folder / f"{name}.npy"
        if not file.is_file():
            raise _broken(folder, f"{name}.npy is missing")
        try:
            # Copy on write: torch warns about arrays it may not write to, and nobody writes here.
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise _broken(folder, f"{name}.npy cannot be mapped ({error})") from error
        if list(array.shape) != shape or array.dtype != np.uint8:
            raise _broken(folder, f"{name}.npy is {array.dtype} {array.shape}, not uint8 {shape}")
        arrays[name] = array
    return arrays, described["facts"]


def require_same_sizes(folder: Path, then: Mapping[str, int], now: Mapping[str, int]) -> None:
    """The files that are there `now` must be as long as `then`, when they were decoded.

    A file that is absent is no mistake: a cache may travel without its sources.
    """
    for name, size in then.items():
        if now.get(name, size) != size:
            raise ValueError(
                f"{folder}: decoded from a {name} of {size:,} bytes, which now has "
                f"{now[name]:,}; delete the folder to decode again"
            )


def _broken(folder: Path, reason: str) -> ValueError:
    return ValueError(
        f"{folder}: expected a cache of decoded files, but {reason}; "
        "delete the folder to decode again"
    )
