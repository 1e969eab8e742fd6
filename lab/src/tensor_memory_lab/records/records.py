"""A run as JSON: its config with the classes it is made of, its name, its result."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from tensor_memory_lab.files import read_json, write_text
from tensor_memory_lab.run_config import RunConfig

CLASS = "class"
"""Key that names a dataclass in a config's dict; a keyword, so no field can have this name."""

PLACES = ("data_dir", "cache_dir")
"""Fields that say where something lies. They decide no number, so they do not tell runs apart."""

_TRUSTED = ("tensor_memory.config", "tensor_memory_lab.")
_registered: dict[str, type] = {}

C = TypeVar("C", bound=type)


class UnknownClassError(ValueError):
    """A config names a class that is not of this package and that nobody has registered."""


def register_config(cls: C) -> C:
    """Let `config_from_dict` rebuild a dataclass that lives outside this package.

    Classes of this package need no registering, nor do those of a config that has been through
    `config_dict` in this process.
    """
    if not hasattr(cls, "__dataclass_fields__"):
        raise TypeError(f"register_config: expected a dataclass, got {cls!r}")
    _registered[_class_name(cls)] = cls
    return cls


def config_dict(config: Any) -> dict[str, Any]:
    """A config as plain values for JSON, each dataclass with its class under "class".

    >>> from tensor_memory import MemoryConfig
    >>> plain = config_dict(MemoryConfig(grid=(4, 4)))
    >>> plain["class"], plain["grid"]
    ('tensor_memory.config:MemoryConfig', [4, 4])
    >>> config_from_dict(plain) == MemoryConfig(grid=(4, 4))
    True
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"config_dict: expected a dataclass, got {config!r}")
    return _plain(config, type(config).__name__)


def config_from_dict(values: Mapping[str, Any]) -> Any:
    """The inverse of `config_dict`: a `RunConfig` (or whatever dataclass the dict names).

    Only dataclasses of this package and registered ones are built, so a foreign file cannot make
    this import or call anything else. Fields that are missing take their defaults.
    """
    if not isinstance(values, Mapping) or CLASS not in values:
        raise ValueError(
            f"config: expected a dict that names its dataclass under {CLASS!r}, got {values!r:.200}"
        )
    cls = _find_class(values[CLASS])
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    unknown = sorted(set(values) - set(fields) - {CLASS})
    if unknown:
        raise ValueError(
            f"{cls.__name__}: unknown field {', '.join(unknown)}; known are {', '.join(fields)}; "
            "the file was written by another version"
        )
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{cls.__name__}: expected a value for {', '.join(missing)}, got none")
    hints = get_type_hints(cls)
    return cls(**{name: _rich(values[name], hints.get(name)) for name in fields if name in values})


def current(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config's dict as today's classes write it, so that a field added since has its default.

    A config that today's classes refuse stays as it was written.
    """
    try:
        return config_dict(config_from_dict(config))
    except (ValueError, TypeError, ImportError):
        return config


def config_hash(config: RunConfig) -> str:
    """Eight hex digits of everything in a config but its seed and where its data lies."""
    return plain_hash(config_dict(config))


def plain_hash(config: Mapping[str, Any]) -> str:
    """`config_hash` of a config that is a dict already, such as a result's."""
    values = without_places({name: value for name, value in config.items() if name != "seed"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def without_places(config: Any) -> Any:
    """A config's dict less what only says where data lies.

    Of a text or of images of one's own nothing else says which they are, so there the folder's name
    stays.

    >>> without_places({"corpus": "any", "data_dir": "/a/disk/poems", "cache_dir": "/tmp"})
    {'corpus': 'any', 'data_dir': 'poems'}
    """
    if not isinstance(config, Mapping):
        return config
    kept = {k: without_places(v) for k, v in config.items() if k not in PLACES}
    own = config.get("corpus") == "any" or config.get("layout") == "folder"
    if own and config.get("data_dir"):
        kept["data_dir"] = Path(config["data_dir"]).name
    return kept


def local_places(config: Any) -> Any:
    """A config's dict with the last part alone of each place: the rest is one machine's matter.

    >>> local_places({"task": {"data_dir": "/a/disk/birds.zip", "cache_dir": None, "side": 120}})
    {'task': {'data_dir': 'birds.zip', 'cache_dir': None, 'side': 120}}
    """
    if not isinstance(config, Mapping):
        return config
    return {
        name: Path(value).name if name in PLACES and value is not None else local_places(value)
        for name, value in config.items()
    }


def run_name(config: RunConfig) -> str:
    """The folder a run is kept in: `<recipe>-<method>-<config_hash>-s<seed>`."""
    return file_name(f"{config.recipe}-{config.model.method}-{config_hash(config)}-s{config.seed}")


def file_name(text: str) -> str:
    """A text as the name of a file anywhere.

    >>> file_name("binding (budget.steps=500)")
    'binding-budget.steps-500'
    """
    return re.sub(r"[^\w.@+-]+", "-", text).strip("-")


def write_result(path: str | os.PathLike[str], record: Mapping[str, Any]) -> Path:
    """Write one run's record as JSON, whole or not at all; the path it went to.

    `path` is the file, or a folder, which then gets `<run_name>.json`. One line per entry keeps
    the files small and their differences readable. Numbers that are not finite become null. Of the
    places in its config the last part is kept: results are passed on, and a run's own folder has
    the whole path in config.json.
    """
    _check_record(record, "the record")
    record = dict(record) | {"config": local_places(record["config"])}
    path = Path(path)
    if path.suffix != ".json" or path.is_dir():
        path = path / f"{run_name(config_from_dict(record['config']))}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"  {json.dumps(key)}: {json.dumps(finite(value), ensure_ascii=False, allow_nan=False)}"
        for key, value in record.items()
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    write_text(path, text)
    return path


def read_results(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The records of runs in files, and in folders however deep, in the order of their names.

    A file that is named must hold a run; in folders, JSON of other kinds is passed over. The same
    record found twice counts once; two different ones for one config and seed are an error.
    """
    records: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in [Path(path) for path in paths]:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder; expected results of runs")
        found = path.is_dir()
        for file in sorted(path.rglob("*.json")) if found else [path]:
            record = read_json(file, _RESULT, _REMEDY, kind=object if found else dict)
            if found and not (isinstance(record, dict) and record.get("kind") == "run"):
                continue
            _check_record(record, str(file), f"; {_REMEDY}")
            key = f"{plain_hash(current(record['config']))}-{record['seed']}"
            first, known = records.setdefault(key, (file, record))
            if known != record:
                raise ValueError(
                    f"{first} and {file}: expected one result per config and seed, got two that "
                    "differ; leave one of them out"
                )
    return [record for _, record in records.values()]


_NEEDED: dict[str, type] = {
    "config": dict,
    "recipe": str,
    "task": str,
    "method": str,
    "seed": int,
    "labels": dict,
    "parameters": int,
    "state_bytes": int,
    "metric": str,
    "curve": list,
    "test": dict,
    "ceiling": dict,
    "finished": bool,
}
"""What tables, plots and sweeps read of every record."""

_RESULT = "the result of a run"
_REMEDY = (
    "leave it out, or delete it: the `tensor-memory sweep` that made it, or `run` with --resume, "
    "writes it again"
)


def read_finished(folder: Path) -> list[dict[str, Any]]:
    """The finished runs of a folder; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return [record for record in read_results([folder]) if record["finished"]]


def _check_record(record: Mapping[str, Any], where: str, remedy: str = "") -> None:
    missing = [key for key in _NEEDED if key not in record]
    if record.get("kind") != "run" or missing:
        lacking = f", without {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"{where}: expected the result of a run (kind 'run' with {', '.join(_NEEDED)}), "
            f"got kind {record.get('kind')!r}{lacking}{remedy}"
        )
    for key, kind in _NEEDED.items():
        if not isinstance(record[key], kind):
            raise ValueError(
                f"{where}: expected the result of a run, its {key} of type {kind.__name__}, "
                f"got {record[key]!r:.80}{remedy}"
            )


def read_result(path: Path) -> dict[str, Any]:
    """The record of one run; anything else is a `ValueError` that names the file."""
    record = read_json(path, _RESULT, _REMEDY)
    _check_record(record, str(path), f"; {_REMEDY}")
    return record


def _class_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_class(name: Any) -> type:
    if name in _registered:
        return _registered[name]
    module, _, qualname = str(name).partition(":")
    if module in _TRUSTED or module.startswith(_TRUSTED[1]):
        try:
            found = getattr(importlib.import_module(module), qualname, None)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("tensor_memory"):
                raise
            found = None
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            return found
    raise UnknownClassError(
        f"config: expected a dataclass of tensor_memory_lab or a registered one, got "
        f"{name!r}; if it is yours, give `tensor-memory inspect` the recipe that made the run "
        "(--recipe module:function), or in a program pass the class to register_config first"
    )


def _plain(value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        register_config(type(value))
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return {CLASS: _class_name(type(value))} | {
            name: _plain(getattr(value, name), f"{where}.{name}") for name in fields
        }
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    if isinstance(value, Mapping) and CLASS not in value and all(isinstance(k, str) for k in value):
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(f"{where}: expected plain values and dataclasses of them, got {value!r}")


def _rich(value: Any, hint: Any) -> Any:
    if isinstance(value, Mapping):
        if CLASS in value:
            return config_from_dict(value)
        return {key: _rich(item, None) for key, item in value.items()}
    if isinstance(value, list):  # configs are frozen, so their sequences are tuples
        return tuple(_rich(item, None) for item in value)
    kinds = get_args(hint) or (hint,)
    if isinstance(value, str) and Path in kinds and str not in kinds:
        return Path(value)
    return value


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
