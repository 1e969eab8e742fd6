"""The scans that are measured: shapes, inputs, the work they cannot avoid, and whether they agree.

No speed is given to a scan that does not agree with the float64 reference: outputs, final state
and every gradient.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tensor_memory import memory_scan

Scan = Callable[..., tuple[Any, ...]]
"""Takes the tensors of a recurrence by name; returns what is read and the state after."""


class Shape:
    """The sizes of one recurrence, and how to draw, run and judge it."""

    grid: Any
    """Voxels along each axis."""
    products: torch.dtype
    """The type of the matrix products; what is summed is float32 either way."""
    outputs: ClassVar[tuple[str, ...]]
    """Names of what the recurrence returns."""

    @property
    def voxels(self) -> int:
        """V, the product of the grid."""
        return math.prod(self.grid)

    @property
    def dtype_name(self) -> str:
        """`products` without its package."""
        return str(self.products).removeprefix("torch.")

    @property
    def label(self) -> str:
        """One line for tables and error messages."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        raise NotImplementedError

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context a training step of this type runs its scan in."""
        low = self.products != torch.float32
        return torch.autocast(device.type, self.products if low else None, enabled=low)

    def draw(self, device: torch.device, seed: int) -> ScanInputs:
        """Random inputs of these sizes."""
        raise NotImplementedError

    def scan(self, backend: str) -> Scan:
        """The recurrence by one backend."""
        raise NotImplementedError

    def expected(self, inputs: ScanInputs) -> dict[str, Tensor]:
        """What is right, in float64: outputs and gradients by name."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScanShape(Shape):
    """One scan: B rows of S steps over a grid of C channels.

    >>> ScanShape(32, 32, 32, (8, 8, 8), torch.bfloat16).label
    'B 32, S 32, C 32, 8x8x8, bfloat16'
    """

    batch: int
    steps: int
    channels: int
    grid: tuple[int, ...]
    products: torch.dtype
    reads: int = 1
    """Q, points read per step."""

    outputs = ("reads", "hidden", "cell")

    @property
    def label(self) -> str:
        """One line for tables and error messages."""
        grid = "x".join(map(str, self.grid))
        return f"B {self.batch}, S {self.steps}, C {self.channels}, {grid}, {self.dtype_name}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"grid": list(self.grid), "products": self.dtype_name}

    def draw(self, device: torch.device, seed: int) -> ScanInputs:
        """Random inputs of the sizes a freshly made memory produces, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        B, S, C, Q, n = self.batch, self.steps, self.channels, self.reads, len(self.grid)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        arguments = {
            "read_at": coordinates(self.grid, (B, S, Q), generator),
            "write_at": coordinates(self.grid, (B, S, 1), generator),
            "spread": (0.3 * normal(B, S, 1)).exp(),
            "content": normal(B, S, 1, C).to(self.products),  # as projections under autocast
            "taps": torch.tensor([0.0, 1.0, 0.0]) + 0.1 * normal(n, 2 * C, 3),
            "mix": normal(4 * C, 2 * C) / math.sqrt(3 * C),
            "bias": 0.1 * normal(4 * C),
            "hidden": normal(B, C, *self.grid).tanh(),
            "cell": normal(B, C, *self.grid),
        }
        grads = [normal(B, S, Q, C), normal(B, C, *self.grid), normal(B, C, *self.grid)]
        moved = {name: tensor.to(device) for name, tensor in arguments.items()}
        return ScanInputs(moved, [g.to(device) for g in grads])

    def scan(self, backend: str) -> Scan:
        """`memory_scan` by one backend."""
        return lambda **tensors: memory_scan(**tensors, backend=backend)

    def expected(self, inputs: ScanInputs) -> dict[str, Tensor]:
        """The reference in float64, a block of rows at a time: rows share weights alone."""
        per_row = KEPT_PER_VALUE * self.steps * self.channels * self.voxels
        block = max(1, REFERENCE_VALUES // per_row)
        reference, parts = self.scan("reference"), []
        for at in range(0, self.batch, block):
            rows = inputs.leaves(dtype=torch.float64, rows=slice(at, at + block))
            parts.append(rows.with_gradients(self, reference(**rows.arguments)))
        shared = {f"grad_{name}" for name in inputs.shared}
        return {
            name: torch.stack([part[name] for part in parts]).sum(0)
            if name in shared
            else torch.cat([part[name] for part in parts])
            for name in parts[0]
        }


LANGUAGE = ScanShape(32, 32, 32, (8, 8, 8), torch.bfloat16)

PUBLISHED = {
    "language": LANGUAGE,
    "language-float32": replace(LANGUAGE, products=torch.float32),
    "video": ScanShape(32, 25, 64, (8, 8, 8), torch.bfloat16),
    "binding": ScanShape(128, 104, 16, (6, 6, 6), torch.float32),
}
"""The scans of the paper's language, video and binding models."""

SWEEPS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 8, 32, 64, 128, 256),
    "steps": (8, 16, 32, 64, 128, 256),
    "channels": (16, 32, 64, 128),
    "grid": ((4, 4, 4), (6, 6, 6), (8, 8, 8), (12, 12, 12), (16, 16, 16)),
}
"""What is varied around the language scan, one thing at a time."""

CPU_LANGUAGE = replace(LANGUAGE, batch=2, steps=8, products=torch.float32)

CPU_PUBLISHED = {
    "language": replace(LANGUAGE, batch=2, products=torch.float32),
    "video": replace(PUBLISHED["video"], batch=1, products=torch.float32),
    "binding": replace(PUBLISHED["binding"], batch=8),
}
"""The same with a sixteenth of the rows or less; bfloat16 products are a GPU's."""

CPU_SWEEPS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 4, 8),
    "steps": (4, 8, 16, 32),
    "channels": (16, 32, 64),
    "grid": ((4, 4, 4), (6, 6, 6), (8, 8, 8)),
}
"""What is varied around `CPU_LANGUAGE`."""


def work(shape: ScanShape) -> dict[str, int]:
    """Operations and compulsory bytes that the equations ask for, with one write per step.

    Per row and step: the written volume 2·C·V, the axis filters 6·n·2C·V, the mix 2·4C·2C·V, the
    state's update 4·C·V, the reads 2·2ⁿ·Q·C. The backward does each twice, once per operand.

    Bytes: inputs, outputs and (for a backward) hidden and cell of every step cross the memory
    once per pass, the gradients of outputs and inputs once. Caches serve everything else.
    """
    B, S, C, V, Q = shape.batch, shape.steps, shape.channels, shape.voxels, shape.reads
    n = len(shape.grid)
    per_step = 2 * C * V + 12 * n * C * V + 16 * C * C * V + 4 * C * V + 2 * 2**n * Q * C
    state = 2 * 4 * B * C * V  # hidden and cell
    weights = 4 * (8 * C * C + 4 * C + 6 * n * C)
    inputs = 4 * B * S * (n * Q + n + 1 + C) + weights + state
    outputs = 4 * B * S * Q * C + state
    kept = B * S * C * V * (shape.products.itemsize + 4)
    return {
        "flops_forward": B * S * per_step,
        "flops_forward_kept": B * S * per_step,
        "flops_forward_backward": 3 * B * S * per_step,
        "bytes_forward": inputs + outputs,
        "bytes_forward_kept": inputs + outputs + kept,
        "bytes_forward_backward": 3 * inputs + 2 * outputs + 2 * kept,
    }


@dataclass(frozen=True)
class ScanInputs:
    """Arguments of a recurrence by name, and the gradients that its outputs will receive."""

    arguments: dict[str, Tensor]
    grads: list[Tensor]
    shared: tuple[str, ...] = ("taps", "mix", "bias")
    """Arguments that all rows share."""

    def leaves(self, *, dtype: torch.dtype | None = None, rows: slice = slice(None)) -> ScanInputs:
        """Copies that ask for gradients, in another type or of a few rows alone."""
        take = {n: t if n in self.shared else t[rows] for n, t in self.arguments.items()}
        copies = {
            name: t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
            for name, t in take.items()
        }
        grads = [g[rows].to(dtype or g.dtype) for g in self.grads]
        return replace(self, arguments=copies, grads=grads)

    def with_gradients(self, shape: Shape, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Outputs by name, and the gradient of every argument."""
        grads = torch.autograd.grad(outputs, list(self.arguments.values()), self.grads)
        named = dict(zip(shape.outputs, outputs, strict=True))
        named |= {f"grad_{name}": g for name, g in zip(self.arguments, grads, strict=True)}
        return {name: tensor.detach() for name, tensor in named.items()}


def coordinates(grid: Sequence[int], size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random places (*size, n), away from the voxel planes.

    There the interpolation has a kink, and the last bit of a coordinate would decide between two
    gradients.
    """
    spans = torch.tensor(grid[::-1]) - 1  # coordinate 0 addresses the last axis
    voxel = (torch.rand(*size, len(grid), generator=generator) * spans).floor()
    inside = 0.05 + 0.9 * torch.rand(*size, len(grid), generator=generator)
    return (voxel.minimum(spans - 1.0) + inside) / spans * 2 - 1


BOUNDS = {
    torch.float32: {"outputs": 1e-5, "gradients": 1e-4},
    torch.bfloat16: {"outputs": 1e-2, "gradients": 3e-2},
}
"""The largest RMS error allowed, as a share of the expected RMS, by the type of the products."""

REFERENCE_VALUES = 2**30
"""Values the reference may hold for its backward at a time (8 GiB): rows go through in blocks."""

KEPT_PER_VALUE = 30
"""Values the reference keeps per step and state value, roughly."""


def check(shape: Shape, scan: Scan, device: torch.device, seed: int) -> dict[str, Any]:
    """Run a scan forward and backward, and its judge in float64 beside it.

    The errors are root mean squares as a share of the expected one, so that one rounding near zero
    does not count and a wrong corner cannot hide. "failures" is empty when all is well.
    """
    inputs = shape.draw(device, seed)
    given = inputs.leaves()
    with shape.autocast(device):
        outputs = scan(**given.arguments)
    got = given.with_gradients(shape, outputs)
    ratios = {name: rms_ratio(got[name], value) for name, value in shape.expected(inputs).items()}
    bounds, failures = BOUNDS[shape.products], []
    for name, ratio in ratios.items():
        bound = bounds["outputs" if name in shape.outputs else "gradients"]
        if not ratio <= bound:  # NaN is a failure too
            failures.append(f"{name}: error {ratio:.1e} of its size, allowed {bound:.0e}")
    return {
        "passed": not failures, "failures": failures, "bounds": bounds, "rms_ratios": ratios
    }  # fmt: skip


def rms_ratio(got: Tensor, expected: Tensor) -> float:
    """The error's root mean square over the expected tensor's."""
    error = (got.double() - expected.double()).square().mean().sqrt()
    return (error / expected.double().square().mean().sqrt().clamp(min=1e-300)).item()
