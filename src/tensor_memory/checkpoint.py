"""The memory's weights in a folder of their own: safetensors, and what they are in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment import Attachment, memory_inside, memory_layers
from tensor_memory.attachment.hooks import NAME
from tensor_memory.attachment.overrides import FILES, MEMORY_FILE
from tensor_memory.build import AnyConfig
from tensor_memory.config import PlaceConfig
from tensor_memory.files import checked_path, load_tensors, read_json, save_tensors, write_text
from tensor_memory.residual import MemoryResidual
from tensor_memory.wording import counted

WEIGHTS, DESCRIPTION = "memory.safetensors", MEMORY_FILE

_HOW = ("backend", "checkpoint_every")
"""Fields that say how a memory is computed, not what it is."""

_KIND = "tensor-memory weights"
_FORMAT = 1


def save_memory(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the memories of `model`, attached or built in by hand, and nothing else of it.

    `memory.safetensors` holds the weights, `memory.json` the config and the blocks it sits on, or
    the paths of the `MemoryResidual`s. The weights hold a copy of it, so that a save cut short
    between the two files is noticed.
    """
    saved = _Memories(model, "save_memory")
    folder = checked_path(folder)
    if folder.is_file():
        raise NotADirectoryError(
            f"{folder}: expected the name of a folder, got a file; a folder is made where there is "
            "none"
        )
    folder.mkdir(parents=True, exist_ok=True)
    described = saved.describe()
    save_tensors(folder / WEIGHTS, saved.weights(), kind=_KIND, description=json.dumps(described))
    write_text(folder / DESCRIPTION, json.dumps(described, indent=2) + "\n")


def load_memory(
    model: nn.Module, folder: str | os.PathLike[str], *, same_blocks: bool = True
) -> None:
    """Read what `save_memory` wrote into the memories of `model`.

    Args:
        model: the model, with memories attached or built in as they were when saved.
        folder: where `save_memory` wrote.
        same_blocks: require the memory to sit on blocks of the same names in the same order.
            False asks for as many only, and the first layer saved goes to the first here: for a
            host that has been wrapped since (PEFT), or for other blocks on purpose.

    Raises:
        FileNotFoundError: the folder is not one of `save_memory`.
        ValueError: a truncated, damaged or foreign file, files of two saves, a key that is unknown
            or missing, another config, host width, number of layers or blocks. The memory is then
            left as it was.
    """
    if not isinstance(same_blocks, bool):
        raise TypeError(
            f"same_blocks: expected True or False, got {same_blocks!r:.80}; leave it out for True"
        )
    memories = _Memories(model, "load_memory")
    folder = checked_path(folder)
    saved, here = _read_description(folder / DESCRIPTION), memories.describe()
    weights = load_tensors(folder / WEIGHTS, kind=_KIND, description=json.dumps(saved))
    kinds = [type(memory.config) for memory in memories.memories]
    _require_same(saved, here, kinds, folder, memories.attached)
    if same_blocks and saved["blocks"] != here["blocks"]:
        raise ValueError(
            f"{folder}: expected a memory for the blocks {', '.join(here['blocks'])} of this "
            f"model, got one for {', '.join(saved['blocks'])}; attach with layers= to the blocks "
            "it was saved from, or pass same_blocks=False to load them in this order"
        )
    _require_fit(weights, memories.weights(), folder / WEIGHTS)
    memories.load(weights)


FILES.save, FILES.load = save_memory, load_memory  # for hosts that PEFT saves


class _Memories:
    """The memory layers of a model, numbered, with the names that their weights are saved under."""

    def __init__(self, model: nn.Module, asker: str) -> None:
        found = memory_layers(model, asker)
        self.paths = [path for path, _ in found]
        self.layers = [layer for _, layer in found]
        self.memories = [memory_inside(layer) for layer in self.layers]
        attachment = getattr(model, NAME, None)
        if isinstance(attachment, Attachment) and list(attachment.layers) == self.layers:
            self.paths = attachment.paths  # without what a wrapper puts before them
        scopes = [part.scope for part in model.modules() if isinstance(part, Attachment)]
        self.attached, self.scope = bool(scopes), "depth" if "depth" in scopes else "layer"

    @property
    def shared(self) -> bool | list[int]:
        """Whether one memory serves all layers; else for each the first layer with its memory."""
        first = [self.memories.index(memory) for memory in self.memories]
        if not any(first):
            return len(first) > 1 or "memory" not in self.layers[0]._modules
        return first if len(set(first)) < len(first) else False

    def describe(self) -> dict[str, Any]:
        """What `memory.json` holds."""
        configs = [memory.config.to_dict() for memory in self.memories]
        return {
            "format": _FORMAT,
            "config": configs[0] if all(c == configs[0] for c in configs) else configs,
            "widths": [memory.dim for memory in self.memories],
            "blocks": self.paths,
            "share_weights": self.shared,
            "scope": self.scope,
        }

    def weights(self) -> dict[str, Tensor]:
        """Every tensor once."""
        return {
            prefix + name: tensor
            for prefix, module in self._modules().items()
            for name, tensor in _own_state(module).items()
        }

    def load(self, weights: dict[str, Tensor]) -> None:
        """Put in what `weights` gave."""
        for prefix, module in self._modules().items():
            own = {name: weights[prefix + name] for name in _own_state(module)}
            module.load_state_dict(own, strict=False)

    def _modules(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        for number, (layer, memory) in enumerate(zip(self.layers, self.memories, strict=True)):
            if layer is not memory:
                found[f"layers.{number}."] = layer
            if self.memories.index(memory) == number:
                prefix = "memory." if self.shared is True else f"layers.{number}.memory."
                found[prefix] = memory
        return found


def _own_state(module: nn.Module) -> dict[str, Tensor]:
    """The state of a memory, or of a residual without the memory inside."""
    state = module.state_dict()
    if isinstance(module, MemoryResidual):
        return {name: t for name, t in state.items() if not name.startswith("memory.")}
    return state


def _read_description(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected a folder written by save_memory, got no such file; "
            "save with save_memory(model, folder)"
        )
    described = read_json(path, "what save_memory wrote", "save again")
    known = ("format", "config", "widths", "blocks", "share_weights", "scope")
    if sorted(described) != sorted(known):
        raise ValueError(
            f"{path}: expected the keys {', '.join(known)}, got {', '.join(described) or 'none'}; "
            "save again"
        )
    if described["format"] != _FORMAT:
        raise ValueError(
            f"{path}: expected format {_FORMAT}, got {described['format']!r}; it was written by "
            "another version of tensor-memory: load it with that one, or save again"
        )
    for name, (expected, fits) in _VALUES.items():
        if not fits(described[name]):
            raise ValueError(
                f"{path}: expected {name} to be {expected}, got {described[name]!r}; save again"
            )
    return described


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "config": (
        "an object of config fields, or one per layer",
        lambda value: isinstance(value, dict) or _is_list_of(dict, value),
    ),
    "widths": ("a list of integers", lambda value: _is_list_of(int, value)),
    "blocks": ("a list of module paths", lambda value: _is_list_of(str, value)),
    "share_weights": (
        "true or false, or a number per layer",
        lambda value: isinstance(value, bool) or _is_list_of(int, value),
    ),
    "scope": ("'layer' or 'depth'", lambda value: value in ("layer", "depth")),
}


def _require_same(
    saved: dict[str, Any],
    here: dict[str, Any],
    kinds: list[type[AnyConfig]],
    folder: Path,
    attached: bool,
) -> None:
    if set(saved["widths"]) != set(here["widths"]):
        raise ValueError(
            f"{folder}: expected a memory for hosts of width {_listed(here['widths'])} like this "
            f"model, got one for width {_listed(saved['widths'])}; load it into the host it was "
            "trained on"
        )
    if saved["share_weights"] != here["share_weights"] and not attached:
        raise ValueError(
            f"{folder}: expected {_sharing(here['share_weights'])} as in this model, got "
            f"{_sharing(saved['share_weights'])}; load into a model built like the saved one "
            "(layer.memory is the memory inside a MemoryResidual)"
        )
    if saved["share_weights"] != here["share_weights"]:
        raise ValueError(
            f"{folder}: expected share_weights={here['share_weights']} as in this model, got "
            f"{saved['share_weights']}; attach with share_weights={saved['share_weights']}"
        )
    if len(saved["blocks"]) != len(here["blocks"]):
        raise ValueError(
            f"{folder}: expected {counted(len(here['blocks']), 'memory layer')} as in this model "
            f"({', '.join(here['blocks'])}), got {len(saved['blocks'])} "
            f"({', '.join(saved['blocks'])}); attach to as many blocks with layers= or every="
        )
    if saved["scope"] != here["scope"]:
        raise ValueError(
            f"{folder}: expected scope={here['scope']!r} as attached, got {saved['scope']!r}; "
            f"attach with scope={saved['scope']!r}"
        )
    configs = _per_layer(saved)
    if len(configs) != len(kinds):
        raise ValueError(
            f"{folder / DESCRIPTION}: expected a config for each of "
            f"{counted(len(kinds), 'layer')}, got {len(configs)}; save again"
        )
    for values, expected, kind in zip(configs, _per_layer(here), kinds, strict=True):
        config = _config(values, kind, folder / DESCRIPTION).to_dict()
        differing = [n for n in expected if n not in _HOW and config[n] != expected[n]]
        if differing:
            how = "attach" if attached else "build the model"
            remedy = f"{how} with the config it was saved with"
            if attached and config.get("places") in ("given", "offset"):
                remedy += " and where=, which names its places"
            if differing == ["grid"] and kind is PlaceConfig and not attached:
                remedy += f", and then take memory.resized({expected['grid']})"
            raise ValueError(
                f"{folder}: expected a memory of this model's config, got one with "
                + ", ".join(f"{n} {config[n]!r} (here {expected[n]!r})" for n in differing)
                + f"; {remedy}"
            )


def _sharing(shared: bool | list[int]) -> str:
    """Which layers have which memory, in words."""
    if shared is True:
        return "one memory without a MemoryResidual or shared by all layers"
    return f"memories shared as {shared}" if shared else "a memory of its own for every layer"


def _per_layer(described: dict[str, Any]) -> list[dict[str, Any]]:
    """The config of every layer."""
    config, layers = described["config"], len(described["blocks"])
    return config if isinstance(config, list) else [config] * layers


def _config(values: dict[str, Any], kind: type[AnyConfig], path: Path) -> AnyConfig:
    try:
        return kind.from_dict(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the fields of a {kind.__name__}, got {values!r} ({error}); "
            "attach with the kind of config it was saved with, or save again"
        ) from error


def _require_fit(weights: dict[str, Tensor], here: dict[str, Tensor], path: Path) -> None:
    unknown, missing = sorted(set(weights) - set(here)), sorted(set(here) - set(weights))
    if unknown or missing:
        raise ValueError(
            f"{path}: expected the tensors of this model's memory, got unknown tensors "
            f"{_listed(unknown)}, missing tensors {_listed(missing)}; attach with the options "
            "(norm, share_weights, layers) it was saved with"
        )
    for name, tensor in weights.items():
        if tensor.shape != here[name].shape:
            raise ValueError(
                f"{path}: expected {name} of shape {tuple(here[name].shape)}, "
                f"got {tuple(tensor.shape)}; save again"
            )
        if not torch.can_cast(tensor.dtype, here[name].dtype):
            raise ValueError(
                f"{path}: expected {name} of a type that fits {here[name].dtype}, "
                f"got {tensor.dtype}; save again"
            )


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in dict.fromkeys(values)) or "none"
