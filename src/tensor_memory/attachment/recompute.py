"""Gradient checkpointing runs a block a second time in the backward pass; its memory must not
advance then, and must start where it started the first time.

The second run happens outside any call of the host, so nothing but the block's input tells which
first run it repeats. Checkpointing keeps that input alive, in the same storage, until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tensor_memory.build import AnyState


@dataclass(frozen=True)
class Given:
    """What a memory layer was given in one run of its block."""

    state: AnyState | None
    mask: Tensor | None
    reset: Tensor | None
    where: Tensor | None = None


@dataclass
class _Run:
    given: Given
    storage: StorageWeakRef
    unique: bool = True


class FirstRuns:
    """The runs of one block whose inputs are still alive."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, tuple[int, ...]], _Run] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_runs": {}}  # a copied model has run nothing yet

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> None:
        """Keep what the memory was given for as long as the block's input lives."""
        for key, run in list(self._runs.items()):  # in place: other threads have runs here too
            if run.storage.expired():
                self._runs.pop(key, None)
        x = _first_tensor(args, kwargs)
        if x is None:
            return
        key = (x.data_ptr(), tuple(x.shape))
        before = self._runs.get(key)
        same = before is None or (before.unique and _is_same(before.given, given))
        self._runs[key] = _Run(given, StorageWeakRef(x.untyped_storage()), unique=same)

    def recall(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """What the memory was given in the run that this one repeats."""
        x = _first_tensor(args, kwargs)
        run = None if x is None else self._runs.get((x.data_ptr(), tuple(x.shape)))
        if run is None or run.storage.expired():  # another input may lie at that address now
            raise RuntimeError(
                f"attach: block '{path}' runs again in the backward pass with an input that its "
                "memory has not seen; checkpoint the block without moving its input elsewhere "
                "(save_on_cpu and the like)"
            )
        if not run.unique:
            raise RuntimeError(
                f"attach: block '{path}' was given one and the same tensor in several calls and "
                "runs again in the backward pass, so its memory cannot tell them apart; pass a "
                "clone of the input to each call"
            )
        return run.given


class Streamed:
    """The inputs, still alive, that a module around the blocks was given inside a stream.

    Run again in the backward pass, it would start from where the stream has come to since.
    """

    def __init__(self) -> None:
        self._inputs: set[StorageWeakRef] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {"_inputs": set()}

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note these inputs for as long as they live."""
        for ref in [ref for ref in self._inputs if ref.expired()]:
            self._inputs.discard(ref)
        self._inputs |= _storages(args, kwargs)

    def refuse(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, stream_open: bool) -> None:
        """Raise where this run repeats one inside a stream."""
        if stream_open or not self._inputs.isdisjoint(_storages(args, kwargs)):
            raise RuntimeError(
                "attach: the host, or a part of it that holds several blocks, was checkpointed "
                "inside a stream and runs again in the backward pass, when the stream has moved "
                "on; checkpoint its blocks instead (gradient_checkpointing_enable, or "
                "torch.utils.checkpoint around each), or call it outside a stream"
            )


def may_run_again(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a checkpoint may repeat this run of a block in the backward pass.

    A reentrant one has gradients off in the first run, which its input still asks for. torch.func
    shows no storage, so nothing would tell there which run is repeated.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    x = _first_tensor(args, kwargs)
    return torch.is_grad_enabled() or module.training or (x is not None and x.requires_grad)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    values = (*args, *kwargs.values())
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def _storages(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[StorageWeakRef]:
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


def _is_same(one: Given, other: Given) -> bool:
    """The same state, and marks and places of the same values: a batch of the epoch before."""
    marks = ((one.mask, other.mask), (one.reset, other.reset), (one.where, other.where))
    return one.state is other.state and all(_are_equal(*pair) for pair in marks)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
