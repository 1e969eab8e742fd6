"""The comparison with the float64 reference that comes before any speed.

Outputs, final state and every gradient; errors as a share of the expected tensor, both root mean
squares, so that one rounding near zero does not count and a wrong corner cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensor_memory import memory_scan
from tensor_memory_lab.bench.shapes import WEIGHTS, ScanInputs, ScanShape, draw_inputs

OUTPUTS = ("reads", "hidden", "cell")


@dataclass(frozen=True)
class Bounds:
    """The largest RMS error allowed, as a share of the expected RMS."""

    outputs: float
    gradients: float


BOUNDS = {
    torch.float32: Bounds(outputs=1e-5, gradients=1e-4),
    torch.bfloat16: Bounds(outputs=1e-2, gradients=3e-2),
}
"""By the type of the matrix products; the only such table of the benchmarks."""

REFERENCE_VALUES = 2**30
"""Values the reference may hold for its backward at a time (8 GiB): rows go through in blocks."""

KEPT_PER_VALUE = 30
"""Values the reference keeps per step and state value, roughly."""


@dataclass(frozen=True)
class Agreement:
    """Error ratios by name, gradients as `grad_<argument>`."""

    shape: ScanShape
    ratios: dict[str, float]

    @property
    def failures(self) -> list[str]:
        """What is off, in words; empty when all is well."""
        bounds = BOUNDS[self.shape.products]
        found = []
        for name, ratio in self.ratios.items():
            bound = bounds.outputs if name in OUTPUTS else bounds.gradients
            if not ratio <= bound:  # NaN is a failure too
                found.append(f"{name}: error {ratio:.1e} of its size, allowed {bound:.0e}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        bounds = BOUNDS[self.shape.products]
        return {
            "passed": not self.failures,
            "failures": self.failures,
            "bounds": {"outputs": bounds.outputs, "gradients": bounds.gradients},
            "rms_ratios": self.ratios,
        }


def check(shape: ScanShape, backend: str, device: torch.device, seed: int) -> Agreement:
    """Run one scan forward and backward, and the reference in float64 beside it."""
    return check_scan(
        shape, lambda **tensors: memory_scan(**tensors, backend=backend), device, seed
    )


def check_scan(
    shape: ScanShape, scan: Callable[..., Any], device: torch.device, seed: int
) -> Agreement:
    """`check` of any function that takes the tensors of `memory_scan`."""
    inputs = draw_inputs(shape, device, seed)
    got = _run(inputs, shape, scan)
    expected = _expected(inputs, shape)
    return Agreement(
        shape, {name: _rms_ratio(got[name], value) for name, value in expected.items()}
    )


def autocast(shape: ScanShape, device: torch.device) -> torch.autocast:
    """The context a training step of this type runs its scan in."""
    low = shape.products != torch.float32
    return torch.autocast(device.type, shape.products if low else None, enabled=low)


def _run(inputs: ScanInputs, shape: ScanShape, scan: Callable[..., Any]) -> dict[str, Tensor]:
    given = inputs.leaves()
    arguments = given.arguments
    with autocast(shape, arguments["hidden"].device):
        outputs = scan(**arguments)
    return _with_gradients(outputs, given)


def _expected(inputs: ScanInputs, shape: ScanShape) -> dict[str, Tensor]:
    """The reference in float64, a block of rows at a time: rows share weights and nothing else."""
    per_row = KEPT_PER_VALUE * shape.steps * shape.channels * shape.voxels
    block = max(1, REFERENCE_VALUES // per_row)
    parts = []
    for at in range(0, shape.batch, block):
        rows = inputs.leaves(dtype=torch.float64, rows=slice(at, at + block))
        outputs = memory_scan(**rows.arguments, backend="reference")  # type: ignore[arg-type]
        parts.append(_with_gradients(outputs, rows))
    shared = {f"grad_{name}" for name in WEIGHTS}
    return {
        name: torch.stack([part[name] for part in parts]).sum(0)
        if name in shared
        else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


def _with_gradients(outputs: tuple[Any, ...], given: ScanInputs) -> dict[str, Tensor]:
    grads = torch.autograd.grad(outputs, list(given.arguments.values()), given.grads)
    named = dict(zip(OUTPUTS, outputs, strict=True))
    named |= {f"grad_{name}": g for name, g in zip(given.arguments, grads, strict=True)}
    return {name: tensor.detach() for name, tensor in named.items()}


def _rms_ratio(got: Tensor, expected: Tensor) -> float:
    error = (got.double() - expected).square().mean().sqrt()
    size = expected.square().mean().sqrt()
    return (error / size.clamp(min=1e-300)).item()
