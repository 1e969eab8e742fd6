"""Hidden states in and out of what a block returns: a tensor, a tuple or a model output."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tensor_memory.attachment.blocks import Block

_NAMES = ("last_hidden_state", "hidden_states", "hidden_state", "sample", "output")


def take_hidden(output: Any, block: Block) -> Tensor:
    """The hidden states in a block's output, as (B, N, d)."""
    hidden = output if isinstance(output, Tensor) else _get(output, _place(output, block))
    if block.sequence_first and hidden.ndim == 3:
        hidden = hidden.transpose(0, 1)
    if hidden.ndim == 2:  # one row without a batch axis, as nn.TransformerEncoder allows
        hidden = hidden[None]
    if hidden.ndim != 3:
        raise ValueError(
            f"attach: expected block '{block.path}' to return hidden states of shape (B, N, d), "
            f"got {tuple(hidden.shape)}; name other blocks with layers="
        )
    if hidden.shape[2] != block.dim:  # a stage that ends in a projection, as Swin's
        raise ValueError(
            f"attach: expected block '{block.path}' to return hidden states of width {block.dim}, "
            f"that of its norms, got {tuple(hidden.shape)}; name the blocks inside it, or others, "
            "with layers="
        )
    return hidden


def put_hidden(output: Any, block: Block, hidden: Tensor) -> Any:
    """The same output with other hidden states (B, N, d)."""
    place = None if isinstance(output, Tensor) else _place(output, block)
    old = output if place is None else _get(output, place)
    if old.ndim == 2:
        hidden = hidden[0]
    elif block.sequence_first:
        hidden = hidden.transpose(0, 1)
    return hidden if place is None else _replaced(output, place, hidden)


def _place(output: Any, block: Block) -> int | str:
    """Where the hidden states are: an index or a name."""
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return 0
    names = list(output) if isinstance(output, Mapping) else []
    if not names and dataclasses.is_dataclass(output):
        names = [field.name for field in dataclasses.fields(output)]
    tensors = [name for name in names if isinstance(_get(output, name), Tensor)]
    for name in (*_NAMES, *tensors[:1]):
        if name in tensors:
            return name
    raise TypeError(
        f"attach: expected block '{block.path}' to return a tensor, a tuple that starts with one "
        f"or a model output, got {type(output).__name__}; name other blocks with layers="
    )


def _get(output: Any, place: int | str) -> Any:
    if isinstance(place, int) or isinstance(output, Mapping):
        return output[place]  # type: ignore[index]
    return getattr(output, place)


def _replaced(output: Any, place: int | str, hidden: Tensor) -> Any:
    if isinstance(output, list):
        return [hidden, *output[1:]]
    if isinstance(output, tuple):
        rest = (hidden, *output[1:])
        return type(output)(*rest) if hasattr(output, "_fields") else rest
    changed = copy.copy(output)
    if isinstance(output, Mapping):
        changed[place] = hidden  # type: ignore[index]
    else:
        object.__setattr__(changed, str(place), hidden)
    return changed
