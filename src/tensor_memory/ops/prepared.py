"""Weights that stay as they are for a while, prepared once for all layers that share them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_prepared: ContextVar[dict[Any, Any] | None] = ContextVar("prepared weights", default=None)


def fixed_weights() -> AbstractContextManager[None]:
    """Inside, weights of a memory do not change, so that layers which share it prepare them once.

    For one forward pass of a model of your own; `attach` does it by itself. On a GPU a training
    step that is launched from Python gets faster: of the place memory's weights each layer then
    returns one gradient. Results stay the same. A change in place is noticed, also other weights
    (`torch.func.functional_call`); a change through `.data` is not. A CUDA graph is captured around
    it, not within.

    >>> from tensor_memory import MemoryResidual, PlaceMemory
    >>> memory = PlaceMemory(8)
    >>> layers = [MemoryResidual(memory, own_memory=False) for _ in range(2)]
    >>> x = torch.randn(1, 5, 8)
    >>> with fixed_weights():
    ...     for layer in layers:
    ...         x, _ = layer(x)
    """
    return nullcontext() if torch.compiler.is_compiling() else holding({})


@contextmanager
def holding(held: dict[Any, Any]) -> Iterator[None]:
    """Inside, `held` keeps what is prepared; the next layer of a forward pass may go on with it."""
    token = _prepared.set(held)
    try:
        yield
    finally:
        _prepared.reset(token)


def prepared_once(make: Callable[..., Any], weights: tuple[Tensor, ...], *options: Any) -> Any:
    """`make(weights, *options)`, or inside `fixed_weights` what it made of the same weights before.

    Without gradients it is always made again: what is spared is mostly their sum.
    """
    held = _prepared.get()
    if held is None or not torch.is_grad_enabled():
        return make(weights, *options)
    key = (*map(id, weights), *options)  # an id is theirs while they are held
    known = held.get(key)
    if known is not None:
        _, found, made = known
        if found == list(map(_now, weights)):
            return made
    made = make(weights, *options)
    if not any(map(Tensor.is_inference, weights)):  # these do not know their version
        held[key] = weights, list(map(_now, weights)), made
    return made


_now = operator.attrgetter("requires_grad", "_version")
"""What tells that a weight was changed in place, frozen or set free."""
