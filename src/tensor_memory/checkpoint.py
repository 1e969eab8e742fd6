"""The memory's weights in a folder of their own: safetensors, and what they are in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory.attachment import Attachment, attachment_of
from tensor_memory.attachment.overrides import FILES, MEMORY_FILE
from tensor_memory.build import AnyConfig
from tensor_memory.files import load_tensors, read_json, save_tensors, write_text
from tensor_memory.wording import counted

WEIGHTS, DESCRIPTION = "memory.safetensors", MEMORY_FILE

_HOW = ("backend", "checkpoint_every")
"""Fields that say how a memory is computed, not what it is."""

_GIVEN = ("given", "offset")

_KIND = "tensor-memory weights"
_FORMAT = 1


def save_memory(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the memory attached to `model`, and nothing of the host, into `folder`.

    `memory.safetensors` holds the weights, `memory.json` the config and the blocks it sits on.
    """
    attachment = attachment_of(model, "save_memory")
    folder = Path(folder)
    if folder.is_file():
        raise NotADirectoryError(
            f"{folder}: is a file; expected the name of a folder, which is made where there is none"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, attachment.state_dict(), kind=_KIND)
    text = json.dumps(_describe(attachment), indent=2) + "\n"
    write_text(folder / DESCRIPTION, text)


def load_memory(
    model: nn.Module, folder: str | os.PathLike[str], *, same_blocks: bool = True
) -> None:
    """Read what `save_memory` wrote into the memory attached to `model`.

    Args:
        model: the host, with a memory attached as it was when saved.
        folder: where `save_memory` wrote.
        same_blocks: require the memory to sit on blocks of the same names in the same order.
            False asks for as many only, and the first layer saved goes to the first here: for a
            host that has been wrapped since (PEFT), or for other blocks on purpose.

    Raises:
        FileNotFoundError: the folder is not one of `save_memory`.
        ValueError: a truncated or foreign file, a key that is unknown or missing, another config,
            host width, number of layers or blocks. The memory is then left as it was.
    """
    attachment = attachment_of(model, "load_memory")
    folder = Path(folder)
    saved, here = _read_description(folder / DESCRIPTION), _describe(attachment)
    _require_same(saved, here, type(attachment.config), folder)
    if same_blocks and saved["blocks"] != here["blocks"]:
        raise ValueError(
            f"{folder}: holds a memory for the blocks {', '.join(saved['blocks'])}, and this host "
            f"carries one on {', '.join(here['blocks'])}; attach with layers= to the blocks it was "
            "saved from, or pass same_blocks=False to load them in this order"
        )
    weights = load_tensors(folder / WEIGHTS, kind=_KIND)
    _require_fit(weights, attachment.state_dict(), folder / WEIGHTS)
    attachment.load_state_dict(weights, strict=True)


FILES.save, FILES.load = save_memory, load_memory  # for hosts that PEFT saves


def _describe(attachment: Attachment) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "config": attachment.config.to_dict(),
        "widths": attachment.dims,
        "blocks": attachment.paths,
        "share_weights": attachment.shared,
        "scope": attachment.scope,
    }


def _read_description(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected a folder written by save_memory(model, folder)"
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
    "config": ("an object of config fields", lambda value: isinstance(value, dict)),
    "widths": ("a list of integers", lambda value: _is_list_of(int, value)),
    "blocks": ("a list of module paths", lambda value: _is_list_of(str, value)),
    "share_weights": ("true or false", lambda value: isinstance(value, bool)),
    "scope": ("'layer' or 'depth'", lambda value: value in ("layer", "depth")),
}


def _require_same(
    saved: dict[str, Any], here: dict[str, Any], kind: type[AnyConfig], folder: Path
) -> None:
    if set(saved["widths"]) != set(here["widths"]):
        raise ValueError(
            f"{folder}: holds a memory for hosts of width {_listed(saved['widths'])}, and this "
            f"host has width {_listed(here['widths'])}; load it into the host it was trained on"
        )
    if saved["share_weights"] != here["share_weights"]:
        raise ValueError(
            f"{folder}: expected share_weights={here['share_weights']} as attached, got "
            f"{saved['share_weights']}; attach with share_weights={saved['share_weights']}"
        )
    if len(saved["blocks"]) != len(here["blocks"]):
        raise ValueError(
            f"{folder}: holds {counted(len(saved['blocks']), 'memory layer')} "
            f"({', '.join(saved['blocks'])}), and this host has {len(here['blocks'])} "
            f"({', '.join(here['blocks'])}); attach to as many blocks with layers= or every="
        )
    if saved["scope"] != here["scope"]:
        raise ValueError(
            f"{folder}: expected scope={here['scope']!r} as attached, got {saved['scope']!r}; "
            f"attach with scope={saved['scope']!r}"
        )
    config = _config(saved["config"], kind, folder / DESCRIPTION).to_dict()
    differing = [
        f"{name} {config[name]!r} (here {value!r})"
        for name, value in here["config"].items()
        if config[name] != value and name not in _HOW
    ]
    if differing:
        raise ValueError(
            f"{folder}: holds a memory of another config: {', '.join(differing)}; attach with "
            "the config it was saved with"
            + (" and where=, which names its places" if config.get("places") in _GIVEN else "")
        )


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
            f"{path}: unknown tensors {_listed(unknown)}, missing tensors {_listed(missing)}; "
            "attach with the options (norm, share_weights, layers) it was saved with"
        )
    for name, tensor in weights.items():
        if tensor.shape != here[name].shape:
            raise ValueError(
                f"{path}: expected {name} of shape {tuple(here[name].shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        if not torch.can_cast(tensor.dtype, here[name].dtype):
            raise ValueError(
                f"{path}: expected {name} of a type that fits {here[name].dtype}, "
                f"got {tensor.dtype}"
            )


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in dict.fromkeys(values)) or "none"
