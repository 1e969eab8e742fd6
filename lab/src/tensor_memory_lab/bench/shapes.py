"""The scans that are measured: their shapes, their inputs, and the work they cannot avoid.

Letters: B batch, S steps, n axes, V voxels, C channels, Q reads and M writes per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScanShape:
    """One scan: B rows of S steps over a grid of C channels.

    >>> ScanShape(32, 32, 32, (8, 8, 8), torch.bfloat16).label
    'B 32, S 32, C 32, 8x8x8, bfloat16'
    """

    batch: int
    steps: int
    channels: int
    grid: tuple[int, ...]
    products: torch.dtype
    """The type of the matrix products; accumulators and cell are float32 either way."""

    reads: int = 1
    """Q, points read per step."""

    @property
    def voxels(self) -> int:
        """V, the product of the grid."""
        return math.prod(self.grid)

    @property
    def label(self) -> str:
        """One line for tables and error messages."""
        grid = "x".join(map(str, self.grid))
        return f"B {self.batch}, S {self.steps}, C {self.channels}, {grid}, {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        """`products` without its package."""
        return str(self.products).removeprefix("torch.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch": self.batch,
            "steps": self.steps,
            "channels": self.channels,
            "grid": list(self.grid),
            "products": self.dtype_name,
            "reads": self.reads,
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


def sweep(name: str, around: ScanShape, values: tuple[Any, ...]) -> list[ScanShape]:
    """The shapes of one sweep, everything but `name` as in `around`."""
    return [replace(around, **{name: value}) for value in values]


@dataclass(frozen=True)
class Work:
    """What the equations ask for, whatever the implementation does. See `docs/benchmarks.md`."""

    flops_forward: int
    flops_forward_backward: int
    transcendentals_forward: int
    bytes_forward: int
    bytes_forward_kept: int
    bytes_forward_backward: int


def work(shape: ScanShape) -> Work:
    """Operations and compulsory bytes of a scan with one write per step.

    Per row and step: the deposit 2·C·V, the axis filters 6·n·2C·V, the mix 2·4C·2C·V, the state's
    update 4·C·V, the reads 2·2ⁿ·Q·C. The backward does each twice, once per operand.

    Bytes: inputs, outputs and (for a backward) hidden and cell of every step cross the memory
    once per pass, the gradients of outputs and inputs once. Caches serve everything else.
    """
    B, S, C, V, Q = shape.batch, shape.steps, shape.channels, shape.voxels, shape.reads
    n = len(shape.grid)
    per_step = 2 * C * V + 12 * n * C * V + 16 * C * C * V + 4 * C * V + 2 * 2**n * Q * C
    forward = B * S * per_step
    state = 2 * 4 * B * C * V  # hidden and cell
    weights = 4 * (8 * C * C + 4 * C + 6 * n * C)
    inputs = 4 * B * S * (n * Q + n + 1 + C) + weights + state
    outputs = 4 * B * S * Q * C + state
    kept = B * S * C * V * (shape.products.itemsize + 4)
    return Work(
        flops_forward=forward,
        flops_forward_backward=3 * forward,
        transcendentals_forward=B * S * 5 * C * V,
        bytes_forward=inputs + outputs,
        bytes_forward_kept=inputs + outputs + kept,
        bytes_forward_backward=3 * inputs + 2 * outputs + 2 * kept,
    )


@dataclass(frozen=True)
class ScanInputs:
    """Arguments of `memory_scan` by name, and the gradients that its outputs will receive."""

    arguments: dict[str, Tensor]
    grads: tuple[Tensor, Tensor, Tensor]

    def leaves(self, *, dtype: torch.dtype | None = None, rows: slice | None = None) -> ScanInputs:
        """Copies that ask for gradients, in another type or of a few rows alone."""
        take = {
            name: t if rows is None or name in WEIGHTS else t[rows]
            for name, t in self.arguments.items()
        }
        grads = [g if rows is None else g[rows] for g in self.grads]
        return ScanInputs(
            {name: t.detach().to(dtype or t.dtype).clone() for name, t in take.items()},
            tuple(g.to(dtype or g.dtype) for g in grads),  # type: ignore[arg-type]
        ).requiring_grad()

    def requiring_grad(self) -> ScanInputs:
        """The same, every argument marked."""
        for tensor in self.arguments.values():
            tensor.requires_grad_()
        return self


WEIGHTS = ("taps", "mix", "bias")
"""Arguments that all rows share."""


def draw_inputs(shape: ScanShape, device: torch.device, seed: int) -> ScanInputs:
    """Random inputs of the sizes a freshly made memory produces, the same on every device.

    Coordinates keep away from the voxel planes: there the interpolation has a kink, and the last
    bit of a coordinate would decide between two gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    B, S, C, Q = shape.batch, shape.steps, shape.channels, shape.reads
    n = len(shape.grid)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def coordinates(heads: int) -> Tensor:
        spans = torch.tensor(shape.grid[::-1]) - 1  # coordinate 0 addresses the last axis
        voxel = (torch.rand(B, S, heads, n, generator=generator) * spans).floor()
        inside = 0.05 + 0.9 * torch.rand(B, S, heads, n, generator=generator)
        return (voxel.minimum(spans - 1.0) + inside) / spans * 2 - 1

    low = shape.products
    arguments = {
        "read_at": coordinates(Q),
        "write_at": coordinates(1),
        "spread": (0.3 * normal(B, S, 1)).exp(),
        "content": normal(B, S, 1, C).to(low),  # what a projection under autocast hands over
        "taps": torch.tensor([0.0, 1.0, 0.0]) + 0.1 * normal(n, 2 * C, 3),
        "mix": normal(4 * C, 2 * C) / math.sqrt(3 * C),
        "bias": 0.1 * normal(4 * C),
        "hidden": normal(B, C, *shape.grid).tanh(),
        "cell": normal(B, C, *shape.grid),
    }
    grads = normal(B, S, Q, C), normal(B, C, *shape.grid), normal(B, C, *shape.grid)
    moved = {name: tensor.to(device) for name, tensor in arguments.items()}
    return ScanInputs(moved, tuple(g.to(device) for g in grads))  # type: ignore[arg-type]
