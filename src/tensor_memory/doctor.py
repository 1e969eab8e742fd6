"""What this machine can do: versions, devices, backends, and whether the backends agree."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import torch

import tensor_memory
from tensor_memory.ops import backends, memory_scan
from tensor_memory.wording import counted

PACKAGES = ("torch", "safetensors", "triton", "transformers", "accelerate", "peft", "timm")

AGREEMENT = 1e-3
"""Largest difference from the reference, for values of order one in float32. A broken kernel is
off by far more; a GPU that multiplies in TF32 is off by less."""


def run_doctor(_: argparse.Namespace | None = None) -> int:
    """Print the findings; 1 where a backend that serves disagrees with the reference."""
    print(f"tensor-memory {tensor_memory.__version__}, Python {platform.python_version()}")
    for package in PACKAGES:
        print(f"  {package:<14}{_version(package)}")
    healthy = True
    for device in _devices():
        print(_describe(device))
        for backend, reason in backends(device).items():
            if reason is not None:
                print(f"  {backend:<14}cannot serve: {reason}")
                continue
            difference = self_check(backend, device)
            agrees = difference <= AGREEMENT
            healthy = healthy and agrees
            verdict = "agrees with" if agrees else "DISAGREES with"
            print(
                f"  {backend:<14}{verdict} the reference, largest difference {difference:.1e} "
                f"(allowed {AGREEMENT:.0e})"
            )
    print("all well" if healthy else "a backend disagrees: do not trust it on this machine")
    return 0 if healthy else 1


def self_check(backend: str, device: torch.device) -> float:
    """The largest difference from the reference in float64: outputs, state and gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, S, C, grid = 2, 5, 16, (4, 4, 4)
    inputs = {
        "read_at": draw(B, S, 1, 3).tanh(),
        "write_at": draw(B, S, 1, 3).tanh(),
        "spread": draw(B, S, 1).exp(),
        "content": draw(B, S, 1, C),
        "taps": draw(3, 2 * C, 3) / 3,
        "mix": draw(4 * C, 2 * C) / C,
        "bias": draw(4 * C),
        "hidden": draw(B, C, *grid).tanh(),
        "cell": draw(B, C, *grid),
    }
    weights = draw(B, S, 1, C), draw(B, C, *grid), draw(B, C, *grid)
    expected = _run(inputs, weights, "reference", torch.device("cpu"), torch.float64)
    got = _run(inputs, weights, backend, device, torch.float32)
    return max(
        ((one.double().cpu() - other).abs().max() / other.abs().max().clamp(min=1)).item()
        for one, other in zip(got, expected, strict=True)
    )


def _run(
    inputs: dict[str, torch.Tensor],
    weights: tuple[torch.Tensor, ...],
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    given = {name: tensor.to(device, dtype).requires_grad_() for name, tensor in inputs.items()}
    scanned = memory_scan(**given, backend=backend)  # type: ignore[arg-type]
    outputs = [t for t in scanned if t is not None]
    loss = sum(
        (output * weight.to(device, dtype)).sum()
        for output, weight in zip(outputs, weights, strict=True)
    )
    gradients = torch.autograd.grad(loss, list(given.values()))  # type: ignore[arg-type]
    return [tensor.detach() for tensor in (*outputs, *gradients)]


def _devices() -> list[torch.device]:
    cuda = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *cuda]


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu: {platform.machine()}, {counted(torch.get_num_threads(), 'thread')}"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{device}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute "
        f"capability {properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
