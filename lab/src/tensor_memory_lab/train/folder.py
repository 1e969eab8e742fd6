"""A run's folder: its config, its lines of metrics, its result; and what it refuses.

Several processes of one run share one folder. All read it, the first one writes and holds it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensor_memory_lab.files import read_json, write_text
from tensor_memory_lab.records import config_dict, config_from_dict
from tensor_memory_lab.records.records import UnknownClassError, current, without_places
from tensor_memory_lab.run_config import RunConfig

try:
    import fcntl
except ImportError:  # Windows: there nobody is kept out
    fcntl = None

CONFIG = "the config of a run"
NO_CONFIG = "put back the file that the run wrote, or train again into another folder"


class RunFolder:
    """Paths of one run, and the text files in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self.last = self.path / "last"
        self.best = self.path / "best"
        self._held: int | None = None

    def check(self, config: RunConfig[Any, Any], *, resume: bool) -> None:
        """Refuse a folder that holds another run, or this one where nobody said to resume it."""
        parts = (self.config, self.metrics, self.result, self.checkpoints, self.last)
        found = [part.name for part in parts if part.exists()]
        if found and not resume:
            raise ValueError(
                f"{self.path}: expected a new or empty folder, got one that holds a run "
                f"({', '.join(found)}); continue it with --resume, or choose another --output"
            )
        if not self.config.exists():
            if {self.last.name, self.result.name} & set(found):
                raise ValueError(
                    f"{self.config}: no such file; expected the config of the run that "
                    f"{self.path} holds; put it back, or choose another --output"
                )
            return
        self._check_config(read_json(self.config, CONFIG, NO_CONFIG), config)

    def _check_config(self, there: Any, config: RunConfig[Any, Any]) -> None:
        before = flat(without_places(current(there)))
        now = flat(without_places(json.loads(json.dumps(config_dict(config)))))
        names = [name for name in before | now if before.get(name) != now.get(name)]
        if names:
            told = "; ".join(f"{n}: {before.get(n)!r} there, {now.get(n)!r} now" for n in names)
            raise ValueError(
                f"{self.config}: expected the config this run was started with, got one that "
                f"differs in {told}. Resume with the same values, or choose another --output"
            )

    def fingerprint(self, config: RunConfig[Any, Any]) -> str:
        """A hash of everything that decides a run's numbers, as it was written when it started:
        a field that the config has got since is in none of its checkpoints."""
        written = read_json(self.config, CONFIG, NO_CONFIG) if self.config.exists() else None
        plain = without_places(config_dict(config) if written is None else written)
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()

    def create(self, config: RunConfig[Any, Any], assets: Mapping[str, str]) -> None:
        """Make the folder, hold it, and write down the config and the task's own files."""
        self._refuse_other(assets)
        with writing(self.path, "the run's folder"):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.hold()
            for left in self.path.glob(".*.tmp"):  # a killed process was writing these
                left.unlink()
            if not self.config.exists():
                write_json(self.config, config_dict(config))
            for name, text in assets.items():
                write_text(self.path / name, text)

    def hold(self) -> None:
        """Keep other processes out of a folder that is there, until `release` or until this one
        ends, killed or not."""
        if fcntl is None or self._held is not None or not self.path.exists():
            return
        self._held = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self.path}: expected a run that nobody is training, got one that another "
                "process has in hand; wait for it or stop it, or choose another --output"
            ) from error
        except OSError:  # a file system without locks
            pass

    def release(self) -> None:
        """Let others train here."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _refuse_other(self, assets: Mapping[str, str]) -> None:
        """Raise where the folder holds files that the task has made of other data."""
        for name, text in assets.items():
            file = self.path / name
            if file.is_file() and file.read_text(encoding="utf-8", errors="replace") != text:
                raise ValueError(
                    f"{file}: expected what this run's data makes, got that of other data; resume "
                    "with the data it was started with, or choose another --output"
                )

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with writing(self.metrics, "metrics"), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def sync_metrics(self) -> None:
        """Have the lines on the disk before a checkpoint that counts on them."""
        if self.metrics.exists():
            with writing(self.metrics, "metrics"), self.metrics.open("rb") as file:
                os.fsync(file.fileno())

    def cut_metrics(self, step: int) -> None:
        """Drop the lines beyond `step`, which a resumed run writes again."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            at = _step_of(line)
            if at is None or at > step:  # a torn line was being written when the run was killed
                break
            kept.append(line + "\n")
        with writing(self.metrics, "metrics"):
            write_text(self.metrics, "".join(kept))


@contextmanager
def writing(path: Path, what: str) -> Iterator[None]:
    """Say what a refusing disk or folder means for the run."""
    try:
        yield
    except OSError as error:
        told = OSError(
            f"{path}: cannot write {what} ({error.strerror or error}); expected a folder that may "
            "be written to and has room. Checkpoints written before are intact: make room or mend "
            "the folder, then continue with --resume"
        )
        told.errno = error.errno
        raise told from error


def read_config(path: Path) -> RunConfig[Any, Any]:
    """The config of a run, or an error that names the file."""
    values = read_json(path, CONFIG, NO_CONFIG)
    try:
        return config_from_dict(values)
    except UnknownClassError as error:
        raise ValueError(f"{path}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: expected {CONFIG}, got one that cannot be built: {error}; {NO_CONFIG}"
        ) from error


def write_json(path: Path, values: Any) -> None:
    """Write plain values, whole or not at all."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, names joined by dots."""
    if not isinstance(values, dict):
        return {prefix.removesuffix("."): values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.")
    return found
