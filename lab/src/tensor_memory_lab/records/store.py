"""Records on disk, and read back as the rows of a data frame (columns: see the package)."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_memory_lab.files import read_json, write_text
from tensor_memory_lab.records.config import current, flatten, local_places, plain_hash
from tensor_memory_lab.records.text import label_text, not_measured, variant_text

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path("results")
"""Where the name of a study is looked for."""

NEEDED: dict[str, dict[str, type]] = {
    "run": {
        "config": dict, "recipe": str, "task": str, "method": str, "seed": int, "labels": dict,
        "parameters": int, "state_bytes": int,
        "metric": str, "curve": list, "test": dict, "ceiling": dict, "finished": bool,
    },
    "positions": {"config": dict, "method": str, "seed": int, "windows": list},
    "benchmark": {"benchmark": str, "config": dict, "seed": int, "result": dict},
    "paper": {"config": dict, "recipe": str, "method": str},
}  # fmt: skip
"""What a record of each kind must have."""

_REMEDY = "leave it out, or run what made it again"


def read(*paths: str | os.PathLike[str]) -> pd.DataFrame:
    """The records of studies, files and folders, one row each.

    A path is a study's file (`results/diagnostics.jsonl`), the name of one (`diagnostics`), the
    JSON of one run, or a folder with any of them however deep, such as that of a run or a sweep.
    """
    return frame(read_records(paths))


def read_records(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The records themselves, each with the name of its study.

    The same record found twice counts once; two that differ for one config and seed are an error.
    A run's own folder knows nothing of the tries before it.
    """
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in paths:
        for where, record in _records(Path(path)):
            key = where
            if record["kind"] == "run":
                key = f"{plain_hash(record['config'])}-{record['seed']}"
            first, known = found.setdefault(key, (where, record))
            if _content(known) != _content(record):
                raise ValueError(
                    f"{first} and {where}: expected one record per config and seed, got two that "
                    "differ; leave one of them out"
                )
    return [record for _, record in found.values()]


def append(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Add a record to a study's file, unless it is there.

    The file is replaced as a whole, so a process that is killed leaves it as it was or with the
    whole line. Several processes may append at once.
    """
    path = Path(path)
    check_record(record, "the record")
    line = _line({k: v for k, v in _public(record).items() if k != "study"})
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        if (found := find_run(path, record)) is not None:
            if _content(found[1]) == _content(json.loads(line)):
                return
            raise _taken(found[0])
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        end = "" if not before or before.endswith("\n") else "\n"
        write_text(path, f"{before}{end}{line}\n")


def check_untaken(path: Path, config: Mapping[str, Any]) -> None:
    """Raise where a study has a record of this config and seed."""
    found = find_run(path, dict(config) | {"kind": "run", "config": config})
    if found is not None:
        raise _taken(found[0])


def find_run(path: Path, record: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Where a study has a record of the same config and seed, and that record."""

    def of_today(config: Mapping[str, Any]) -> str:  # with the fields that configs got since
        return plain_hash(current(config))

    if record["kind"] != "run" or not path.exists():
        return None
    wanted = of_today(record["config"])
    for where, known in _lines(path):
        alike = all(known.get(key) == record[key] for key in ("kind", "recipe", "seed"))
        if alike and of_today(known["config"]) == wanted:
            return where, known
    return None


def _taken(where: str) -> ValueError:
    return ValueError(
        f"{where}: expected no record of this config and seed, got that of another run; delete the "
        "line, or name another study"
    )


def replace_tries(
    path: str | os.PathLike[str], record: Mapping[str, Any], tries: Mapping[str, Any]
) -> None:
    """Let the line of a run say other tries; its own record and all other lines stay."""
    path = Path(path)
    with _locked(path.parent):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            found = json.loads(line)
            if [found.get("config"), found.get("seed")] == [record["config"], record["seed"]]:
                lines[number] = _line(found | {"tries": tries})
        write_text(path, "\n".join(lines) + "\n")


def check_study(path: str | os.PathLike[str]) -> None:
    """Refuse to append to a file that holds anything but records, a line each."""
    path = Path(path)
    if path.is_file():
        try:
            list(_lines(path))
        except ValueError as error:
            raise ValueError(
                f"{path}: expected a study to add records to, a line each, or no such file, got a "
                f"file of other content ({error}); name another"
            ) from error
    if path.suffix != ".jsonl":  # it would be read back as the record of one run
        raise ValueError(
            f"{path}: expected the name of a study's file, NAME.jsonl, got another; rename it"
        )


def write_result(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write the record of one run as a JSON file of its own, a line per entry."""
    check_record(record, "the record")
    lines = [f"  {json.dumps(key)}: {_line(value)}" for key, value in _public(record).items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_result` wrote; anything else is a `ValueError` that names the file."""
    record = read_json(path, "the record of a run", _REMEDY)
    check_record(record, str(path))
    return record


def check_record(record: Any, where: str) -> None:
    """Raise where a record lacks something that tables and figures read."""
    kind = record.get("kind") if isinstance(record, Mapping) else None
    if kind not in NEEDED:
        raise ValueError(
            f"{where}: expected a record of kind {', '.join(NEEDED)}, got {kind!r}; {_REMEDY}"
        )
    for key, expected in NEEDED[kind].items():
        if not isinstance(record.get(key), expected):
            got = f"{record[key]!r:.80}" if key in record else "nothing"
            raise ValueError(
                f"{where}: expected a record of kind {kind}, its {key} of type "
                f"{expected.__name__}, got {got}; {_REMEDY}"
            )


def frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Records as the rows of a data frame."""
    import pandas as pd  # a run that only writes its record does without

    return pd.DataFrame([_row(record) for record in records], dtype=object)


def parts(record: Mapping[str, Any], path: str) -> Iterator[dict[str, Any]]:
    """The entries of a record at a path, each as a record of its own, with its name as `key`.

    >>> record = {"seed": 0, "result": {"a": {"ms": 1}, "b": {"ms": 2}}}
    >>> [(part["key"], part["ms"]) for part in parts(record, "result.*")]
    [('a', 1), ('b', 2)]
    """
    found: list[tuple[list[str], Any]] = [([], record)]
    for step in path.split("."):
        if step == "*":
            found = [([*k, str(n)], v) for k, at in found for n, v in _entries(at)]
        else:
            found = [(k, at[step]) for k, at in found if isinstance(at, Mapping) and step in at]
    for keys, entry in found:
        yield dict(record) | entry | {"key": keys[0], "keys": keys}


def finite(value: Any) -> Any:
    """Plain values with null for every number that JSON has no word for.

    >>> finite({"loss": float("nan"), "curve": (1.0, float("inf"))})
    {'loss': None, 'curve': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record as columns. A measure that is None diverged, and one that is NaN was not measured;
    what else is None is left out."""
    run = record["kind"] == "run"
    measures = {"valid": record.get("valid") or {}, **(record.get("test") or {})}
    nested = {"config", "settings", "variant", "curve", "valid", "test"}
    if run:
        nested.add("memory")
    if record.get("shared_device"):  # others took part of the time
        nested |= {"step_ms", "steps_per_second"}
    flat = flatten(record.get("config", {}))
    flat |= flatten({name: value for name, value in record.items() if name not in nested})
    row = {name: value for name, value in flat.items() if value is not None}
    if run and record.get("memory"):
        without = record["memory"].get("test_without_memory") or {}
        measures |= {f"off.{split}": values for split, values in without.items()}
        for name in ("gate", "use"):
            row[f"memory.{name}"] = tuple(layer[name] for layer in record["memory"]["layers"])
    for split, values in measures.items():
        for name, value in values.items():
            row[f"{split}.{name}"] = math.nan if not_measured(values, name) else value
    if "method" in record:
        row |= {"variant": variant_text(record.get("variant", {})), "label": label_text(record)}
    hardware = record.get("hardware") or {}
    return row | {
        "rate": row.get("optimizer.lr"),
        "commit": (record.get("commit") or "unknown")[:10],
        "hardware": hardware.get("gpu") or hardware.get("cpu"),
        "curve": record.get("curve"),
        "record": record,
    }


def _entries(at: Any) -> list[tuple[Any, Any]]:
    return list(at.items() if isinstance(at, Mapping) else enumerate(at))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record stands, and the record."""
    named = RESULTS / f"{path}.jsonl"
    if not path.exists() and named.is_file():
        path = named
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file, folder or study; expected records of runs, such as "
            f"{RESULTS / 'diagnostics.jsonl'}"
        )
    if path.is_dir():
        for file in sorted((*path.rglob("*.jsonl"), *path.rglob("*.json"))):
            if file.suffix == ".jsonl" and file.name != "metrics.jsonl":
                yield from _lines(file)
            elif file.suffix == ".json":  # configs and the like may lie beside it
                record = read_json(file, "a record", _REMEDY, kind=object)
                if isinstance(record, dict) and record.get("kind") in NEEDED:
                    yield _checked(record, str(file), "")
    elif path.suffix == ".jsonl":
        yield from _lines(path)
    else:
        yield _checked(read_json(path, "a record", _REMEDY), str(path), "")


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected records as lines of text, got other content ({error}); {_REMEDY}"
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{where}: expected a record as one line of JSON, got {line!r:.60} ({error}); "
                "mend or delete the line"
            ) from error
        yield _checked(record, where, path.stem)


def _checked(record: Any, where: str, study: str) -> tuple[str, dict[str, Any]]:
    check_record(record, where)
    return where, {"study": study} | record


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("study", "tries")}


def _public(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record that says nothing about somebody's disk: a run's folder has the whole path."""
    return dict(record) | {"config": local_places(record.get("config", {}))}


def _line(value: Any) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks."""
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
