"""Decoded pixels on disk: one memory-mapped array, and a JSON file that says what it holds.

`<kind>-<digest>.npy` is the array. `<kind>-<digest>.json` has the key (what was asked for), the
sizes of the source files, the array's checksum and facts for the reader. The digest is of the key,
so another request has files of its own. The JSON file is written last: an array without one was
never finished and is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tensor_memory_lab.files import read_json, write_text, write_whole
from tensor_memory_lab.progress import progress

VERSION = 2
"""Of the layout described above; part of the digest."""


def cached_array(
    folder: str | os.PathLike[str],
    kind: str,
    key: Mapping[str, Any],
    sizes: Mapping[str, int],
    make: Callable[[Path], dict[str, Any]],
) -> tuple[np.ndarray, dict[str, Any]]:
    """The array for a key, and its facts with its checksum, from `folder` or made now.

    Of several processes that want the same array, one makes it and the others wait.

    Args:
        folder: where the caches are.
        kind: start of the file names, such as "images".
        key: plain values that decide the array, such as file names, frame size and decoder.
        sizes: bytes of the source files that are there now. A cache serves without its sources;
            one whose sources have changed is refused.
        make: writes the array in .npy format to a path and returns facts, which are plain values.

    Raises:
        ValueError: for a cache that is damaged, or that was made from other files.
    """
    key = json.loads(json.dumps(key))  # as it is read back: tuples become lists
    text = json.dumps([VERSION, kind, key], sort_keys=True)
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    array, described = (Path(folder) / f"{name}.{suffix}" for suffix in ("npy", "json"))

    def is_there() -> bool:
        return array.is_file() and described.is_file()

    if not is_there():
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(array):
            if not is_there():  # another process may have made it meanwhile
                _make(array, described, {"key": key, "sizes": dict(sizes)}, make)
    return _open(array, described, key, sizes)


def decode_all(
    decode: Callable[[str], Any],
    names: Sequence[str],
    *,
    unit: str,
    skipped: type[Exception] | tuple[type[Exception], ...] = (),
) -> tuple[list[Any], dict[str, str]]:
    """`decode(name)` of every name in threads: the results in order, and what went wrong.

    Errors of a `skipped` kind are returned by name; any other is raised. Decoders release the
    interpreter, so threads use all cores.
    """
    results, errors = [], {}
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        jobs = [pool.submit(decode, name) for name in names]
        with progress("decoding", len(names), unit=unit) as advance:
            for name, job in zip(names, jobs, strict=True):
                try:
                    results.append(job.result())
                except skipped as error:
                    errors[name] = str(error)
                advance(note=f"{len(errors)} left out" if errors else "")
    finally:  # an error or Ctrl-C: drop what has not begun
        pool.shutdown(cancel_futures=True)
    return results, errors


def _make(
    array: Path,
    described: Path,
    description: dict[str, Any],
    make: Callable[[Path], dict[str, Any]],
) -> None:
    def write(temporary: Path) -> None:
        description["facts"] = make(temporary)
        description["checksum"] = _checksum(temporary)

    described.unlink(missing_ok=True)  # of an array that was lost
    write_whole(array, write)
    write_text(described, json.dumps(description, ensure_ascii=False) + "\n")


def _open(
    array: Path, described: Path, key: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[np.ndarray, dict[str, Any]]:
    remedy = f"delete {array} and {described.name} to decode again"
    description = read_json(described, "the description of a cache", remedy)
    if description.get("key") != key:
        raise ValueError(f"{described}: expected the key that was asked for, got another; {remedy}")
    for name, size in description["sizes"].items():
        if sizes.get(name, size) != size:
            raise ValueError(
                f"{array}: made from a {name} of {size:,} bytes, which now has {sizes[name]:,}; "
                f"{remedy}"
            )
    expected, found = description["checksum"], _checksum(array)
    if found != expected:
        raise ValueError(f"{array}: expected the checksum {expected}, got {found}; {remedy}")
    # Copy on write: torch warns about arrays that it may not write to, and nobody writes here.
    return np.load(array, mmap_mode="c", allow_pickle=False), description["facts"] | {
        "checksum": found
    }


def _checksum(path: Path) -> str:
    """CRC-32 of a file: 1.4 GB/s on one core, eight times as fast as SHA-256."""
    size = path.stat().st_size
    if size > 2**32:
        print(f"{path}: checking {size / 2**30:.0f} GiB", file=sys.stderr, flush=True)
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(2**24):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Only one process at a time is inside for a path; one that dies lets the next one in."""
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{path}: another process is decoding, waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
