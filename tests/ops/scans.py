"""Scans to test: inputss of awkward sizes, what a backend makes of them, and who serves here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from tensor_memory import memory_scan
from tensor_memory.ops import why_not
from tensor_memory.ops.scan.inputs import ScanInputs
from tolerances import assert_same_rms

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FUSED = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        why_not("triton", HERE) is not None, reason=f"triton: {why_not('triton', HERE)}"
    ),
)
GRIDS = [(2,), (5, 3), (3, 4, 2), (2, 3, 2, 2)]


@dataclass(frozen=True)
class Case:
    """The sizes and options of a scan; its tensors are drawn from a seed."""

    B: int = 3
    S: int = 7
    Q: int | None = 2
    M: int = 2
    C: int = 3
    grid: tuple[int, ...] = (3, 4, 2)
    nearest: bool = False
    pointwise: bool = False
    writes: bool = True
    resets: bool = True

    def __str__(self) -> str:
        options = ("nearest", "pointwise", "writes", "resets")
        sizes = f"B{self.B} S{self.S} Q{self.Q} M{self.M} C{self.C}"
        return " ".join(
            [sizes, "x".join(map(str, self.grid)), *(o for o in options if getattr(self, o))]
        )

    def make(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> ScanInputs:
        """Tensors of order one; some reads lie outside the grid, and no row is like another."""
        generator = torch.Generator().manual_seed(seed)
        n = len(self.grid)

        def normal(*shape: int) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return drawn.to(HERE, dtype)

        def marks(share: float) -> Tensor:
            return (torch.rand(self.B, self.S, generator=generator) < share).to(HERE)

        B, S, M, C = self.B, self.S, self.M, self.C
        return ScanInputs(
            read_at=None if self.Q is None else 1.2 * normal(B, S, self.Q, n).tanh(),
            write_at=normal(B, S, M, n).tanh(),
            spread=None if self.nearest else normal(B, S, M).mul(0.5).exp(),
            content=normal(B, S, M, C),
            taps=None if self.pointwise else normal(n, 2 * C, 3),
            mix=normal(4 * C, 2 * C) / C**0.5,
            bias=normal(4 * C),
            hidden=normal(B, C, *self.grid),
            cell=normal(B, C, *self.grid),
            writes=marks(0.7) if self.writes else None,
            resets=marks(0.3) if self.resets else None,
        )


def near_the_start(case: Case, seed: int = 0) -> ScanInputs:
    """Weights as a memory has them early in training: a long scan of larger ones is chaos."""
    inputs = case.make(torch.float32, seed)
    identity = torch.tensor([0.0, 1.0, 0.0], device=HERE)
    return inputs._replace(
        taps=None if inputs.taps is None else 0.7 * identity + 0.2 * inputs.taps,
        mix=inputs.mix * (1 / 3) ** 0.5,
        bias=0.3 * inputs.bias,
        hidden=0.3 * inputs.hidden,
        cell=0.3 * inputs.cell,
    )


def awkward_cases() -> list[Case]:
    """Every grid, length and number of channels; the other options take turns among them."""
    cases = []
    for i, (grid, S, C) in enumerate(product(GRIDS, (0, 1, 7), (1, 3, 16))):
        cases.append(
            Case(
                B=1 + i % 3,
                S=S,
                Q=(1, 2, 3, None)[i % 4],
                M=1 + i % 3,
                C=C,
                grid=grid,
                nearest=i % 5 == 1,
                pointwise=i % 7 == 2,
                writes=i % 2 == 0,
                resets=i % 3 == 0,
            )
        )
    return cases


Results = dict[str, Tensor]


def floats(inputs: ScanInputs) -> tuple[Tensor | None, ...]:
    """All that have a gradient: everything but the masks."""
    return inputs[:9]


def run(inputs: ScanInputs, backend: str, checkpoint_every: int | None = None) -> Results:
    """Reads, final state and the gradients of all inputs, by name, for fixed random weights."""
    leaves = [v if v is None else v.detach().clone().requires_grad_() for v in floats(inputs)]
    reads, hidden, cell = memory_scan(
        *leaves,
        writes=inputs.writes,
        resets=inputs.resets,
        backend=backend,
        checkpoint_every=checkpoint_every,
    )
    results = {"hidden": hidden, "cell": cell} | ({} if reads is None else {"reads": reads})
    generator = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        for value in results.values()
    ]
    pairs = zip(results.values(), grads, strict=True)
    pairs = [(value, grad) for value, grad in pairs if value.requires_grad]  # no step reads nothing
    torch.autograd.backward(*zip(*pairs, strict=True))
    results = {name: value.detach() for name, value in results.items()}
    for name, leaf in zip(ScanInputs._fields, leaves, strict=False):
        if leaf is not None:
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            results[f"gradient of {name}"] = grad
    return results


def as_double(inputs: ScanInputs) -> ScanInputs:
    return ScanInputs._make(
        v if v is None or not v.is_floating_point() else v.double() for v in inputs
    )


def assert_agree(got: Results, expected: Results, dtype: torch.dtype) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_rms(name, got[name], value, dtype)
