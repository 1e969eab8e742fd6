"""The plain loop by `torch.compile`: one step called for each, or all steps as one graph."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensor_memory import memory_scan
from tensor_memory_lab.bench.agreement import Agreement, check_scan
from tensor_memory_lab.bench.shapes import ScanShape

WAYS = ("step", "whole")
"""`whole` unrolls every step into one graph, which takes minutes for 32 of them."""


def compiled_loop(way: str) -> Callable[..., Any]:
    """A function of `memory_scan`'s tensors, compiled when it is first called.

    Shapes are taken as they are: code for any size would be slower, and no opponent.
    """
    compiled = torch.compile(partial(memory_scan, backend="reference"), dynamic=False)
    return compiled if way == "whole" else _step_by_step(compiled)


def compile_and_check(
    way: str, shape: ScanShape, device: torch.device, seed: int
) -> tuple[Callable[..., Any], Agreement, float]:
    """The loop, compiled by its comparison with the reference, and the seconds both took."""
    scan, began = compiled_loop(way), time.perf_counter()
    with warnings.catch_warnings():  # the compiler looks at every input's .grad
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
        agreed = check_scan(shape, scan, device, seed)
    return scan, agreed, time.perf_counter() - began


def _step_by_step(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The scan as scans of one step, each going on where the last one ended."""

    def stepped(
        *,
        read_at: Tensor,
        write_at: Tensor,
        spread: Tensor,
        content: Tensor,
        hidden: Tensor,
        cell: Tensor,
        **weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        reads = []
        per_step = {"read_at": read_at, "write_at": write_at, "spread": spread, "content": content}
        for s in range(write_at.shape[1]):
            now = {name: x[:, s : s + 1] for name, x in per_step.items()}  # (B, 1, ...)
            read, hidden, cell = scan(**now, **weights, hidden=hidden, cell=cell)
            reads.append(read)
        return torch.cat(reads, dim=1), hidden, cell

    return stepped
