"""The peers' recurrences by flash-linear-attention's own kernels: on a GPU, in bfloat16."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def fla_rule(operator: str, state: Tensor, **inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> reads (B, N, H, V), the state after the last token (B, H, K, V), both in float32.

    Decays, rates and the state stay in float32. Queries come scaled.

    Args:
        operator: package and name, such as "gla.chunk_gla".
        state: (B, H, K, V).
        inputs: by the names that the operator has for them; None is left out.
    """
    given = {
        name: x.to(torch.bfloat16) if name in ("q", "k", "v", "a", "b") else x
        for name, x in inputs.items()
        if x is not None
    }
    kernel = _kernel(operator, state.device)
    with torch.autocast(state.device.type, enabled=False):
        reads, after = kernel(**given, scale=1.0, initial_state=state, output_final_state=True)
    return reads.float(), after


def _kernel(operator: str, device: torch.device) -> Callable[..., Any]:
    if device.type != "cuda":
        raise ValueError(
            "model.peer.backend: expected torch on a CPU, got fla, whose kernels need a CUDA "
            f"device and not {device.type}"
        )
    package, name = operator.split(".")
    try:
        module = importlib.import_module(f"fla.ops.{package}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"model.peer.backend: fla needs flash-linear-attention ({error}); "
            "pip install fla-core, or keep torch"
        ) from error
    return getattr(module, name)
