"""A run's config as plain values for JSON, its name, and what tells it from others.

Each dataclass is written with the name of its class under "class": the short name of `CONFIGS` for
ours, `module:Class` for yours. A class of ours that moves to another module changes its line in
`CONFIGS` and no file that was written before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from tensor_memory_lab.records.text import short_name

if TYPE_CHECKING:
    from tensor_memory_lab.run_config import RunConfig

CLASS = "class"
"""Key that names a dataclass in a config's dict; a keyword, so no field can have this name."""

CONFIGS = {
    "RunConfig": "tensor_memory_lab.run_config",
    "OptimizerConfig": "tensor_memory_lab.run_config",
    "BudgetConfig": "tensor_memory_lab.run_config",
    "MemoryConfig": "tensor_memory",
    "PlaceConfig": "tensor_memory",
    "BindingConfig": "tensor_memory_lab.tasks.binding",
    "DiceConfig": "tensor_memory_lab.tasks.dice",
    "LanguageTaskConfig": "tensor_memory_lab.tasks.language",
    "MapConfig": "tensor_memory_lab.tasks.map_building",
    "MazeConfig": "tensor_memory_lab.tasks.maze",
    "MqarConfig": "tensor_memory_lab.tasks.mqar",
    "MaskedImagesConfig": "tensor_memory_lab.tasks.masked_images",
    "NoHarmConfig": "tensor_memory_lab.tasks.no_harm",
    "OcclusionConfig": "tensor_memory_lab.tasks.occlusion",
    "VideoTaskConfig": "tensor_memory_lab.tasks.video",
    "WorldConfig": "tensor_memory_lab.tasks.world",
    "ImageModelConfig": "tensor_memory_lab.models.image",
    "LanguageModelConfig": "tensor_memory_lab.models.language",
    "MazeModelConfig": "tensor_memory_lab.models.maze",
    "PeerConfig": "tensor_memory_lab.models.peers",
    "RecallModelConfig": "tensor_memory_lab.models.recall",
    "ToyModelConfig": "tensor_memory_lab.models.toy",
    "VideoModelConfig": "tensor_memory_lab.models.video",
    "WorldModelConfig": "tensor_memory_lab.models.world",
}
"""The module that each class of ours is found in. Names here are in files: never rename one."""

PLACES = ("data_dir", "cache_dir")
"""Fields that say where something lies. They decide no number, so they do not tell runs apart."""

NEUTRAL = (
    "seed",
    "speed",
    "recipe",
    "budget.checkpoint_every",
    "budget.accumulate",
    "budget.evaluation_batch_size",
    "model.non_causal",
)
"""Fields that are averaged over, go with the method, or change no number beyond rounding and what
dropout draws."""

_registered: dict[str, type] = {}

C = TypeVar("C", bound=type)


class UnknownClassError(ValueError):
    """A config names a class that is none of ours and that nobody has registered."""


def register_config(cls: C) -> C:
    """Let `config_from_dict` rebuild a dataclass of your own.

    A class whose config has been through `config_dict` in this process is registered already.
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
    ('MemoryConfig', [4, 4])
    >>> config_from_dict(plain) == MemoryConfig(grid=(4, 4))
    True
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"config_dict: expected a dataclass, got {config!r}")
    return _plain(config, type(config).__name__)


def config_from_dict(values: Mapping[str, Any]) -> Any:
    """The inverse of `config_dict`: a `RunConfig`, or whatever dataclass the dict names.

    Only the classes of `CONFIGS` and registered ones are built, so a foreign file cannot make this
    import or call anything else. Fields that are missing take their defaults.
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


def config_hash(config: RunConfig[Any, Any]) -> str:
    """Eight hex digits of everything in a config but its seed, speed and where its data lies."""
    return plain_hash(config_dict(config))


def plain_hash(config: Mapping[str, Any]) -> str:
    """`config_hash` of a config that is a dict already, such as a record's."""
    chosen = {name: value for name, value in config.items() if name not in ("seed", "speed")}
    values = without_places(chosen)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def run_name(config: RunConfig[Any, Any]) -> str:
    """The folder a run is kept in: `<recipe>-<method>-<config_hash>-s<seed>`."""
    name = f"{config.recipe}-{config.model.method}-{config_hash(config)}-s{config.seed}"
    return re.sub(r"[^\w.@+-]+", "-", name).strip("-")


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


def flatten(config: Any) -> dict[str, Any]:
    """A config's dict as `field.field` to value, less classes and places; lists become tuples.

    >>> flatten({"class": "A", "task": {"writes": 20, "data_dir": "x"}, "grid": [4, 4]})
    {'task.writes': 20, 'grid': (4, 4)}
    """
    return {name: _hashable(value) for name, value in _fields(config).items()}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, names joined by dots."""
    if not isinstance(values, Mapping):
        return {prefix.removesuffix("."): values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.")
    return found


def declared(
    config: RunConfig[Any, Any],
    usual: RunConfig[Any, Any],
    settings: Sequence[str] = (),
    method: Sequence[str] = ("model",),
) -> dict[str, dict[str, Any]]:
    """The columns `settings` and `variant` of a run's record: how it departs from its recipe.

    Args:
        config: what is run.
        usual: what the recipe gives when nothing is changed.
        settings: fields that the recipe declares as settings; `task` stands for all of it.
        method: fields that the recipe declares as the method.

    The longer of two names that fit a field counts. What is in neither is a setting.
    """
    now, before = _fields(config_dict(config)), _fields(config_dict(usual))

    def fit(name: str, fields: Sequence[str]) -> int:
        return max((len(f) for f in fields if f"{name}.".startswith(f"{f}.")), default=0)

    found: dict[str, dict[str, Any]] = {"settings": {}, "variant": {}}
    for name, value in now.items():
        if value != before.get(name) and name not in (*NEUTRAL, "model.method"):
            of_method = fit(name, method) > fit(name, settings)
            found["variant" if of_method else "settings"][name] = value
    return found


def _fields(config: Any) -> dict[str, Any]:
    named = flat(without_places(config))
    return {name: value for name, value in named.items() if short_name(name) != CLASS}


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list | tuple) else value


def _class_name(cls: type) -> str:
    ours = CONFIGS.get(cls.__qualname__)
    if ours is not None and f"{cls.__module__}.".startswith(f"{ours}."):
        return cls.__qualname__
    if cls.__module__.startswith(("tensor_memory_lab.", "tensor_memory.")):
        raise TypeError(
            f"{cls.__module__}:{cls.__qualname__}: expected a config that "
            "tensor_memory_lab.records.config.CONFIGS names, got one it lacks; add a line there"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_class(name: Any) -> type:
    if name in _registered:
        return _registered[name]
    if name in CONFIGS:
        return getattr(importlib.import_module(CONFIGS[name]), name)
    raise UnknownClassError(
        f"config: expected one of {', '.join(CONFIGS)} or a registered class, got {name!r}; if it "
        "is yours, name the recipe that made the run (--recipe module:function), or in a program "
        "pass the class to register_config first"
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
