"""Every memory that a model holds, attached or built in by hand."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from tensor_memory.attachment.attachment import Attachment
from tensor_memory.build import AnyMemory
from tensor_memory.place import PlaceMemory
from tensor_memory.residual import MemoryResidual
from tensor_memory.tensor import TensorMemory

_Module = TypeVar("_Module", bound=nn.Module)

MemoryLayer = MemoryResidual | TensorMemory | PlaceMemory


def memory_layers(model: nn.Module, asker: str) -> list[tuple[str, MemoryLayer]]:
    """Every residual and every memory without one, in the model's order, by name.

    An attached layer has the name of its block, any other its own path.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{asker}: expected a model (torch.nn.Module) that holds a memory, got "
            f"{type(model).__name__}; pass the model itself"
        )
    blocks = {}
    for path, attachment in parts(model, Attachment):
        host = path.rpartition(".")[0]
        for block, layer in zip(attachment.paths, attachment.layers, strict=True):
            blocks[layer] = f"{host}.{block}" if host else block
    layers: list[tuple[str, MemoryLayer]] = [
        (blocks.get(layer, path or "memory"), layer) for path, layer in parts(model, MemoryResidual)
    ]
    held = {layer.memory for _, layer in layers}
    memories = [*parts(model, TensorMemory), *parts(model, PlaceMemory)]
    layers += [(path or "memory", memory) for path, memory in memories if memory not in held]
    if not layers:
        raise ValueError(
            f"{asker}: expected a model that holds a memory, got {type(model).__name__} without "
            "one; call attach(model, ...) first, or build a MemoryResidual into it"
        )
    order = {module: number for number, module in enumerate(model.modules())}
    return sorted(layers, key=lambda found: order[found[1]])


def memory_inside(layer: MemoryLayer) -> AnyMemory:
    """The memory of a residual, or the memory itself."""
    memory = layer.memory if isinstance(layer, MemoryResidual) else layer
    assert isinstance(memory, TensorMemory | PlaceMemory)
    return memory


def parts(model: nn.Module, kind: type[_Module]) -> list[tuple[str, _Module]]:
    """The modules of a kind inside a model, by path."""
    return [(path, part) for path, part in model.named_modules() if isinstance(part, kind)]
