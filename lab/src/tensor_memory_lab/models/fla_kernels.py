"""The peers' recurrences by flash-linear-attention's own kernels: on a GPU, in bfloat16."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Callable[..., Any]

CRASH_ON_HOPPER = ("delta_rule.chunk_delta_rule", "kda.chunk_kda")
"""Their backward passes read outside of their memory (seen with fla-core 0.6.0, Triton 3.6.0)."""


def load_kernel(operator: str) -> Kernel:
    """An operator by its package and name, such as "gla.chunk_gla"."""
    if not torch.cuda.is_available():
        raise ValueError(
            "model.peer.backend: expected torch where there is no CUDA device, got fla, whose "
            "kernels need one"
        )
    if operator in CRASH_ON_HOPPER and torch.cuda.get_device_capability()[0] == 9:
        raise ValueError(
            "model.peer.backend: expected torch on Hopper, got fla, whose "
            f"{operator} reads outside of its memory there in the backward pass"
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


def fla_rule(kernel: Kernel, state: Tensor, **inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """-> reads (B, N, H, V), the state after the last token (B, H, K, V), both in float32.

    Decays, rates and the state stay in float32. Queries come scaled.

    Args:
        kernel: as `load_kernel` gives it.
        state: (B, H, K, V).
        inputs: by the names that the kernel has for them; None is left out.
    """
    K = state.shape[2]
    odd = K % 2  # which some kernels refuse in 16 bits: a feature of zeros changes nothing
    given = {name: x for name, x in inputs.items() if x is not None}
    given |= {n: F.pad(x, (0, odd)) for n, x in given.items() if x.ndim == 4 and n != "v"}
    given |= {n: x.to(torch.bfloat16) for n, x in given.items() if n in ("q", "k", "v", "a", "b")}
    with torch.autocast(state.device.type, enabled=False):
        reads, after = kernel(
            **given, scale=1.0, initial_state=F.pad(state, (0, 0, 0, odd)), output_final_state=True
        )
    return reads.float(), after[:, :, :K]
