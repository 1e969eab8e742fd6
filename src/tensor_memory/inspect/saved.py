"""A recording in one safetensors file: its arrays, and a JSON description as bytes beside them."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from tensor_memory.config import MemoryConfig
from tensor_memory.files import load_tensors, save_tensors
from tensor_memory.inspect.layer_recording import ARRAYS, FLOATS, LayerRecording
from tensor_memory.inspect.recording import Recording

KIND = "tensor-memory recording"

_FORMAT = 1
_DESCRIPTION, _FRAMES = "description", "frames"
_PLAIN = {
    "layers": "a list",
    "every": "a number from 1",
    "asked_every": "a number from 1",
    "rows_left_out": "a number from 0",
    "texts": "a list of texts per row or none",
    "tokens_per_frame": "a number from 1",
}
_KEYS = ("format", *_PLAIN)


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
            # A copy: safetensors refuses tensors that share memory, as slices of a layer do.
            tensors[f"layers.{number}.{name}"] = array.clone()
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
    rows = {layer.rows for layer in layers}
    if len(rows) > 1:
        raise ValueError(
            f"{path}: expected layers with the same rows, got {sorted(rows)}; save it again"
        )
    for name, found in (("texts", described["texts"]), ("frames", frames)):
        if found is not None and len(found) < max(rows, default=0):
            raise ValueError(
                f"{path}: expected {name} of {max(rows)} rows, got {len(found)}; save it again"
            )
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
            "another version of tensor-memory: load it with that one, or save it again"
        )
    for name in _KEYS[1:]:
        if not _is_plain(name, described[name]):
            raise ValueError(
                f"{path}: expected {_PLAIN[name]} as {name}, got {described[name]!r:.80}; "
                "save it again"
            )
    for layer in described["layers"]:
        if not isinstance(layer, dict) or sorted(layer) != ["config", "gate", "name"]:
            raise ValueError(
                f"{path}: expected layers of name, config and gate, got {layer!r}; save it again"
            )
    return described


def _is_plain(name: str, value: Any) -> bool:
    """Whether a value of the description is what `_PLAIN` says."""
    if name == "layers":
        return isinstance(value, list)
    if name == "texts":
        rows = value if isinstance(value, list) else [value]
        return value is None or all(
            isinstance(row, list) and all(isinstance(text, str) for text in row) for row in rows
        )
    least = 0 if name == "rows_left_out" else 1
    return isinstance(value, int) and value >= least


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
        whole = torch.bool if name in ("written", "present") else torch.int64
        if not (array.is_floating_point() if name in FLOATS else array.dtype == whole):
            raise ValueError(f"{where}: {name} came as {array.dtype}; save it again")
