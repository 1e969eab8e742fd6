"""How a call of a recurrence finds the backend that serves it."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable

import torch

from tensor_memory.ops.autograd import is_transformed
from tensor_memory.ops.inputs import checked_device

BACKENDS = ("auto", "reference", "torch", "triton")

_log = logging.getLogger("tensor_memory")
_announced: set[str] = set()
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def backends(device: torch.device | str | None = None) -> dict[str, str | None]:
    """Which backends can serve on a device: None for one that can, else the reason why not.

    Args:
        device: where the tensors would be; None asks for a GPU where there is one, else the CPU.

    >>> backends("cpu")["torch"] is None
    True
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = checked_device("backends", device)
    return {name: why_not(name, device) for name in BACKENDS if name != "auto"}


def why_not(backend: str, device: torch.device) -> str | None:
    """The reason a backend cannot serve on this machine and device, or None where it can."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(
            f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r:.80}; "
            "'auto' picks the fastest that can serve"
        )
    if backend != "triton":
        return None
    if not _TRITON_INSTALLED:
        return (
            "triton is not installed; it comes with CUDA builds of torch, or `pip install triton`"
        )
    if device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return (
        f"it needs a CUDA device, got {device.type}; "
        "TRITON_INTERPRET=1 runs its kernels on a CPU, slowly, to test them"
    )


def choose(
    function: str, backend: str, device: torch.device, why_not_fused: Callable[[], str | None]
) -> str:
    """The backend that serves a call. An explicit one serves or raises; "auto" logs its choice.

    Args:
        function: the public function, for the log.
        backend: what the caller asked for.
        device: where the tensors are.
        why_not_fused: the reason "triton" cannot serve these tensors, or None; asked only where
            "triton" can serve on this device.
    """
    reason = why_not(backend, device)
    if backend != "reference" and is_transformed():
        reason = "torch.func and forward-mode differentiation see through 'reference' alone"
        if backend == "auto":
            return _announce(function, "reference", f"because {reason}")
        reason += "; use 'auto' or 'reference'"
    elif backend == "auto":
        if device.type != "cuda":
            return _announce(function, "torch", f"on device {device.type}")
        reason = why_not("triton", device) or why_not_fused()
        if reason is None:
            return _announce(function, "triton", "on device cuda")
        return _announce(function, "torch", f"because 'triton' cannot serve: {reason}")
    elif backend == "triton" and reason is None:
        reason = why_not_fused()
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot serve this request: {reason}")
    return backend


def _announce(function: str, backend: str, why: str) -> str:
    """Log a choice of "auto" once, and return it."""
    line = f"{function}: backend 'auto' chose '{backend}' {why}"
    if not torch.compiler.is_compiling() and line not in _announced:
        _announced.add(line)
        _log.info(line)
    return backend
