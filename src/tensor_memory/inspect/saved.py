"""A recording in one safetensors file: its arrays, and a JSON description as bytes beside them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig
from tensor_memory.files import load_tensors, save_tensors
from tensor_memory.inspect.recording import ARRAYS, FLOATS, LayerRecording, Recording

KIND = "tensor-memory recording"

_FORMAT = 1
_DESCRIPTION, _FRAMES = "description", "frames"
_KEYS = ("format", "layers", "every", "asked_every", "rows_left_out", "texts", "tokens_per_frame")


def save_recording(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write `recording` whole or not at all."""
    described = {
        "format": _FORMAT,
        "layers": [
            {"name": layer.name, "config": layer.config.to_dict(), "gate": layer.gate}
            for layer in recording.layers
        ],
        **{name: getattr(recording, name) for name in _KEYS[2:]},
    }
    text = json.dumps(described, ensure_ascii=True).encode()
    tensors = {_DESCRIPTION: torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    if recording.frames is not None:
        tensors[_FRAMES] = recording.frames
    for number, layer in enumerate(recording.layers):
        for name, array in layer.arrays().items():
            tensors[f"layers.{number}.{name}"] = array
    save_tensors(path, tensors, kind=KIND)


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """Read what `save_recording` wrote; anything else is a `ValueError`."""
    tensors = load_tensors(path, kind=KIND)
    described = _description(tensors.pop(_DESCRIPTION, None), path)
    frames = tensors.pop(_FRAMES, None)
    layers = []
    for number, values in enumerate(described["layers"]):
        config = _config(values["config"], path)
        arrays = {
            name: tensors.pop(f"layers.{number}.{name}")
            for name in ARRAYS
            if f"layers.{number}.{name}" in tensors
        }
        _require_shapes(arrays, config, f"{path}: layer {values['name']!r}")
        arrays = {"spread": None, **arrays}
        layers.append(LayerRecording(values["name"], config, values["gate"], **arrays))
    if tensors:
        raise ValueError(f"{path}: unknown tensors {', '.join(sorted(tensors))}; save it again")
    if frames is not None and (frames.dtype != torch.uint8 or frames.ndim != 5):
        raise ValueError(
            f"{path}: expected frames (B, F, h, w, 3) in uint8, got {tuple(frames.shape)} in "
            f"{frames.dtype}; save it again"
        )
    rest = {name: described[name] for name in _KEYS[2:]}
    return Recording(layers=layers, frames=frames, **rest)


def _description(stored: Tensor | None, path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        described: Any = json.loads(bytes(stored.tolist())) if stored is not None else {}
    except ValueError as error:
        raise ValueError(
            f"{path}: expected a description in JSON, got a damaged one ({error}); save it again"
        ) from error
    found = list(described) if isinstance(described, dict) else []
    if sorted(found) != sorted(_KEYS):
        raise ValueError(
            f"{path}: expected a description with the keys {', '.join(_KEYS)}, "
            f"got {', '.join(found) or 'none'}; save it again"
        )
    if described["format"] != _FORMAT:
        raise ValueError(
            f"{path}: expected format {_FORMAT}, got {described['format']!r}; it was written by "
            "another version of tensor-memory"
        )
    for layer in described["layers"]:
        if not isinstance(layer, dict) or sorted(layer) != ["config", "gate", "name"]:
            raise ValueError(
                f"{path}: expected layers of name, config and gate, got {layer!r}; save it again"
            )
    return described


def _config(values: Any, path: str | os.PathLike[str]) -> MemoryConfig:
    try:
        return MemoryConfig.from_dict(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the fields of a MemoryConfig, got {values!r} ({error}); "
            "save it again"
        ) from error


def _require_shapes(arrays: dict[str, Tensor], config: MemoryConfig, where: str) -> None:
    missing = set(ARRAYS) - set(arrays) - ({"spread"} if config.write == "nearest" else set())
    if missing:
        raise ValueError(f"{where}: missing tensors {', '.join(sorted(missing))}; save it again")
    T, B = arrays["chunk"].numel(), arrays["seen"].numel()
    M, n = config.write_heads, config.axes
    Q = config.read_heads * (config.chunk_size if config.reads == "token" else 1)
    expected = {
        "read_at": (T, B, Q, n),
        "write_at": (T, B, M, n),
        "spread": (T, B, M),
        "content_norm": (T, B, M),
        "gates": (T, B, 3),
        "hidden_norm": (T, B, *config.grid),
        "readout": (T, B, Q, config.channels),
        "use": (T, B),
        "span": (T, B, 2),
        "written": (T, B),
        "present": (T, B),
        "chunk": (T,),
        "seen": (B,),
    }
    for name, array in arrays.items():
        if array.shape != expected[name]:
            raise ValueError(
                f"{where}: expected {name} of shape {expected[name]}, got {tuple(array.shape)}; "
                "save it again"
            )
        if array.is_floating_point() != (name in FLOATS):
            raise ValueError(f"{where}: {name} came as {array.dtype}; save it again")
