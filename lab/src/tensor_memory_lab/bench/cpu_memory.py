"""A whole memory on two CPU threads, turn by turn with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tensor_memory import MemoryConfig, TensorMemory
from tensor_memory_lab.bench import agreement
from tensor_memory_lab.bench.shapes import ScanShape
from tensor_memory_lab.bench.timing import Budget, Call, measure_alternately


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch on so many CPU threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_cpu_memory(backend: str, budget: Budget, seed: int, *, quick: bool) -> dict[str, Any]:
    """A whole `TensorMemory` forward and backward on two threads, this backend and the reference.

    B 32, N 24, d 64, C 16, 6³, K 1: the memory of the binding model.
    """
    B, N, d, C, grid = (2, 4, 8, 4, (3, 3, 3)) if quick else (32, 24, 64, 16, (6, 6, 6))
    shape = ScanShape(B, N, C, grid, torch.float32)
    row: dict[str, Any] = {"shape": shape.to_dict(), "label": f"{shape.label}, d {d}", "threads": 2}
    agreed = agreement.check(shape, backend, torch.device("cpu"), seed)
    row["agreement"] = agreed.to_dict()
    if agreed.failures:
        return row

    def step(name: str) -> Call:
        torch.manual_seed(seed)
        config = MemoryConfig(channels=C, grid=grid, chunk_size=1, backend=name)
        memory = TensorMemory(d, config)
        x = torch.randn(B, N, d).requires_grad_()
        grad = torch.randn(B, N, d)
        leaves = [x, *memory.parameters()]
        return lambda: torch.autograd.grad(memory(x)[0], leaves, grad)

    with threads(2):
        ours, plain = backend, "reference"
        turns = {name: step(name) for name in (ours, plain)}
        longer = replace(budget, seconds=30 * budget.seconds, most=40)
        ms = measure_alternately(turns, torch.device("cpu"), longer)
    row["ms"] = {name: timing.to_dict() for name, timing in ms.items()}
    row["ratio"] = ms[plain].median / ms[ours].median
    return row
