"""Memories to test: every option, weights that make every term count, and ways to call them.

Tensors are made from a drawn seed, so that hypothesis shrinks shapes and options, not numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tensor_memory import MemoryConfig, MemoryState, TensorMemory
from tolerances import assert_same

DIM = 3
SEEDS = st.integers(0, 2**31)

_SMALL: dict[str, Any] = {"channels": 2, "grid": (3, 2), "chunk_size": 3}
OPTIONS = {
    "paper": MemoryConfig(**_SMALL | {"grid": (2, 3, 2)}),
    "one axis": MemoryConfig(**_SMALL | {"grid": (5,)}),
    "four axes": MemoryConfig(**_SMALL | {"grid": (2, 2, 3, 2)}),
    "token reads": MemoryConfig(**_SMALL, reads="token"),
    "heads": MemoryConfig(**_SMALL, read_heads=2, write_heads=2),
    "token reads, heads": MemoryConfig(**_SMALL, reads="token", read_heads=2, write_heads=2),
    "separate coordinates": MemoryConfig(
        **_SMALL, share_coordinates=False, read_heads=3, write_heads=2
    ),
    "nearest": MemoryConfig(**_SMALL, write="nearest"),
    "pointwise": MemoryConfig(**_SMALL, mixing="pointwise"),
    "sigma, biases": MemoryConfig(**_SMALL, sigma_scale=0.5, spread_bias=-1.0, forget_bias=2.0),
    "chunks of one": MemoryConfig(**_SMALL | {"chunk_size": 1}),
}


@st.composite
def configs(draw: st.DrawFn) -> MemoryConfig:
    """Any combination of options, on grids small enough for the oracle's loops."""
    axes = draw(st.integers(1, 4))
    shared = draw(st.booleans())
    reads, writes = draw(st.integers(1, 2 if shared else 3)), draw(st.integers(1, 3))
    return MemoryConfig(
        channels=draw(st.integers(1, 3)),
        grid=tuple(draw(st.integers(2, 5 if axes < 3 else 3)) for _ in range(axes)),
        chunk_size=draw(st.integers(1, 5)),
        reads=draw(st.sampled_from(["chunk", "token"])),
        read_heads=reads,
        write_heads=reads if shared else writes,
        write=draw(st.sampled_from(["gaussian", "nearest"])),
        share_coordinates=shared,
        mixing=draw(st.sampled_from(["factorized", "pointwise"])),
        sigma_scale=draw(st.sampled_from([1.0, 0.4])),
        backend=draw(st.sampled_from(["auto", "reference"])),
    )


def make_memory(
    config: MemoryConfig, dim: int = DIM, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> TensorMemory:
    """A memory whose weights, all of order one, leave no term of the equations negligible."""
    generator = torch.Generator().manual_seed(seed)
    memory = TensorMemory(dim, config).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(
                noise * (0.8 if parameter.ndim < 2 else 1.5 / parameter.shape[-1] ** 0.5)
            )
    return memory.to(dtype)


def stirred(module: Any) -> Any:
    """The module with every weight moved from its start, where a mistake might not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return module


def make_tokens(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def make_marks(rows: int, length: int, share: float, seed: int) -> Tensor:
    """(B, N) bool, true at about that share of the places."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, length, generator=generator) < share


def make_state(
    config: MemoryConfig, rows: int, dim: int = DIM, *, seed: int = 0, together: bool = False
) -> MemoryState:
    """A state in the middle of things: not zero, each row, or all, somewhere inside a chunk."""
    generator = torch.Generator().manual_seed(seed)
    empty = MemoryState.zeros(config, dim, rows, dtype=torch.float64)
    filled = {
        name: torch.randn(getattr(empty, name).shape, generator=generator, dtype=torch.float64)
        for name in ("hidden", "cell", "tokens", "readout")
    }
    fill = torch.randint(0, config.chunk_size, (rows,), generator=generator)
    aligned = int(fill[0]) if together else None
    if aligned is not None:
        fill = torch.full_like(fill, aligned)
    used = torch.arange(config.chunk_size) < fill[:, None]
    filled["tokens"] *= used[..., None]
    filled["readout"] *= (fill > 0)[:, None]
    filled["hidden"] *= 0.5
    return MemoryState(**filled, fill=fill, aligned=aligned)


@dataclass(frozen=True)
class Call:
    """The arguments of one call, but for the state."""

    x: Tensor
    mask: Tensor | None = None
    reset: Tensor | None = None
    flush: Tensor | bool | int = False

    @property
    def marks(self) -> dict[str, Any]:
        return {"mask": self.mask, "reset": self.reset, "flush": self.flush}

    @property
    def ends(self) -> Tensor | bool:
        """The same flush, said place by place where it comes every so many."""
        if isinstance(self.flush, Tensor | bool):
            return self.flush
        rows, length = self.x.shape[:2]
        return ((torch.arange(length) + 1) % self.flush == 0).expand(rows, length)

    def part(self, start: int, stop: int) -> Call:
        """These positions alone; a flush at the end stays at the end."""
        if isinstance(self.flush, int) and not isinstance(self.flush, bool):
            return replace(self, flush=self.ends).part(start, stop)

        def cut(marks: Any) -> Any:
            return marks[:, start:stop] if isinstance(marks, Tensor) else marks

        flush = cut(self.flush)
        if self.flush is True and stop < self.x.shape[1]:
            flush = False
        return Call(self.x[:, start:stop], cut(self.mask), cut(self.reset), flush)

    def rows(self, order: list[int]) -> Call:
        """These rows alone, in this order."""
        marks = (m[order] if isinstance(m, Tensor) else m for m in self.marks.values())
        return Call(self.x[order], *marks)


@st.composite
def calls(draw: st.DrawFn, rows: int, lengths: st.SearchStrategy[int]) -> Call:
    """Tokens with or without holes, documents and flushes."""
    length, seed = draw(lengths), draw(SEEDS)
    call = Call(make_tokens(rows, length, DIM, seed=seed))
    if draw(st.booleans()):
        call = replace(call, mask=make_marks(rows, length, 0.7, seed + 1))
    if draw(st.booleans()):
        call = replace(call, reset=make_marks(rows, length, 0.2, seed + 2))
    flush = draw(st.sampled_from(["no", "end", "marked", "frames"]))
    if flush == "frames":
        call = replace(call, flush=draw(st.integers(1, 10)))
    elif flush != "no":
        marked = make_marks(rows, length, 0.2, seed + 3)
        call = replace(call, flush=True if flush == "end" else marked)
    return call


def run(
    memory: TensorMemory, pieces: list[Call], state: MemoryState | None = None
) -> tuple[Tensor, MemoryState]:
    """Several calls in a row, their outputs joined."""
    outputs = []
    for piece in pieces:
        m, state = memory(piece.x, state, **piece.marks)
        outputs.append(m)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def assert_same_state(got: MemoryState, expected: MemoryState) -> None:
    assert torch.equal(got.fill, expected.fill)
    for name in ("hidden", "cell", "tokens", "readout"):
        assert_same(getattr(got, name), getattr(expected, name))


def assert_identical_state(got: MemoryState, expected: MemoryState) -> None:
    for name in ("hidden", "cell", "tokens", "fill", "readout"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
