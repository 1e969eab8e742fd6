"""How much a trained model uses its memory: gates, contributions, and the loss without it.

A half-open gate says nothing by itself, since W_out makes its scale arbitrary. What counts is
‖σ(γ)m‖ / ‖x‖, how much a layer's memory adds to the stream it is added to, and what is lost when
nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tensor_memory import MemoryResidual, MemoryState, TensorMemory
from tensor_memory.ops import why_not
from tensor_memory_lab.train.evaluation import Evaluator


def measure_memory(model: nn.Module, evaluator: Evaluator) -> dict[str, Any] | None:
    """Gates and uses per layer on a "valid" batch, and all test splits with the memory off.

    None for a model without memory.
    """
    if not memory_layers(model):
        return None
    layers = memory_use(model, evaluator)
    with memory_off(model):
        without = evaluator.tests(eager=True)  # a captured graph has the memory in it
    return {"layers": layers, "test_without_memory": without}


def memory_layers(model: nn.Module) -> dict[str, MemoryResidual]:
    """The model's `MemoryResidual`s by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MemoryResidual)}


def memory_use(model: nn.Module, evaluator: Evaluator) -> list[dict[str, Any]]:
    """Per layer its name, σ(γ), and the mean over tokens of ‖σ(γ)m‖ / ‖x‖ on one "valid" batch.

    A layer that is called several times (frames, segments) is averaged over its calls; one that
    is never called has no use.
    """
    layers = memory_layers(model)
    found: dict[str, list[Tensor]] = {name: [] for name in layers}

    def note(name: str) -> Any:
        def hook(_: nn.Module, arguments: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
            x = arguments[0].float()  # (B, N, d)
            added = output[0].float() - x
            ratio = added.norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-12)
            found[name].append(ratio.mean())

        return hook

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        evaluator.split("valid", limit=1, eager=True)
    finally:
        for handle in handles:
            handle.remove()
    return [
        {
            "name": name,
            "gate": layer.gate.detach().sigmoid().item(),
            "use": torch.stack(found[name]).mean().item() if found[name] else None,
        }
        for name, layer in layers.items()
    ]


@contextmanager
def memory_off(model: nn.Module) -> Iterator[None]:
    """Inside, every `MemoryResidual` of the model hands on what it is given and scans nothing.

    A state is handed on too, an empty one where there is none yet, for who carries it.
    """
    layers = list(memory_layers(model).values())
    own = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = _handing_on(layer.memory)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.forward = forward


def _handing_on(memory: TensorMemory) -> Callable[..., tuple[Tensor, MemoryState]]:
    def forward(
        x: Tensor, state: MemoryState | None = None, **_: Any
    ) -> tuple[Tensor, MemoryState]:
        if state is None:
            shape = memory.config, memory.dim, x.shape[0]
            state = MemoryState.zeros(*shape, dtype=x.dtype, device=x.device)
        return x, state

    return forward


def memory_backend(model: nn.Module) -> str | None:
    """What the model's memories run on, and why not on the fused scan; None without memory."""
    layers = memory_layers(model).values()
    served = {
        _served(memory)
        for memory in (*model.modules(), *(r.memory for r in layers))
        if isinstance(memory, TensorMemory)
    }
    return ", ".join(sorted(served)) or None


def _served(memory: TensorMemory) -> str:
    config, device = memory.config, memory.output.weight.device
    if config.backend != "auto":
        return config.backend
    if device.type != "cuda":
        return "torch"
    reason = why_not("triton", device)
    if reason is None:
        from tensor_memory.ops import triton_plan

        state = torch.empty(1, config.channels, *config.grid, device=device)
        reason = triton_plan.why_not(state, torch.float32)
    return "triton" if reason is None else f"torch ({reason})"
