"""Measuring: medians with their spread, peak memory, and the ceilings of the machine."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

Call = Callable[[], object]

ENQUEUED = 10
"""Rounds handed to a GPU before it is waited for, so that its queue stays full."""


@dataclass(frozen=True)
class Budget:
    """How long one measurement may take: at least `least` rounds, then until time is up."""

    seconds: float = 0.3
    least: int = 10
    most: int = 300
    warm_up: int = 3


QUICK = Budget(seconds=0.0, least=2, most=2, warm_up=1)
"""For tests: the numbers mean nothing, the code has run."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call."""

    median: float
    p10: float
    p90: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The middle and the spread of single times in milliseconds.

        >>> Timing.of([3.0, 1.0, 2.0])
        Timing(median=2.0, p10=1.2, p90=2.8, repeats=3)
        """
        values = torch.tensor(samples, dtype=torch.float64)
        p10, p90 = values.quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
        return cls(statistics.median(samples), round(p10, 9), round(p90, 9), len(samples))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def measure(call: Call, device: torch.device, budget: Budget) -> Timing:
    """Time one call; see `measure_alternately`."""
    return measure_alternately({"call": call}, device, budget)["call"]


def measure_alternately(
    calls: Mapping[str, Call], device: torch.device, budget: Budget
) -> dict[str, Timing]:
    """Time several calls turn by turn, so that drift of the machine meets them all alike.

    On a GPU the time is that between two events around a call, with caches emptied before it and
    many calls enqueued before the host waits: what a training loop sees, Python included where it
    is the slower one.
    """
    for call in calls.values():
        for _ in range(budget.warm_up):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    began, rounds = time.perf_counter(), 0
    while rounds < budget.least or (
        rounds < budget.most and time.perf_counter() - began < budget.seconds
    ):
        turns = min(clock.enqueued, budget.most - rounds)
        for name, times in clock.times(calls, turns).items():
            samples[name] += times
        rounds += turns
    return {name: Timing.of(times) for name, times in samples.items()}


class _HostClock:
    enqueued = 1

    def times(self, calls: Mapping[str, Call], turns: int) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(turns):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                taken[name].append((time.perf_counter() - start) * 1e3)
        return taken


class _CudaClock:
    enqueued = ENQUEUED

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.dirt = torch.empty(2 * l2, dtype=torch.uint8, device=device)

    def times(self, calls: Mapping[str, Call], turns: int) -> dict[str, list[float]]:
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
        torch.cuda.synchronize(self.device)
        for _ in range(turns):
            for name, call in calls.items():
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                self.dirt.zero_()
                start.record()
                call()
                end.record()
                marks[name].append((start, end))
        torch.cuda.synchronize(self.device)
        return {n: [start.elapsed_time(end) for start, end in pairs] for n, pairs in marks.items()}


def captured(call: Call) -> Call:
    """The work of `call` as a CUDA graph: replaying it costs the device's time alone."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazily made handles and kernels must exist before capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """The most memory held during one call beyond what was held before; None on a CPU."""
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(device: torch.device, budget: Budget, *, side: int) -> dict[str, float]:
    """What this machine reaches: products of `side`³ random values by type, and a copy."""
    reached: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        timing = measure(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, budget)
        name = str(dtype).removeprefix("torch.")
        reached[f"matmul_{name}_tflops"] = 2 * side**3 / timing.median / 1e9
    source = torch.randn(side * side * 4, device=device)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source), device, budget)
    reached["copy_gbytes_per_s"] = 2 * source.nbytes / timing.median / 1e6
    return reached


def part_failures() -> tuple[type[Exception], ...]:
    """What one measured part may die of while the others keep their numbers.

    RuntimeError: out of memory, a refused launch or capture. ValueError: a shape the backend says
    it cannot serve. Triton's own: a kernel that does not compile or fit.
    """
    known: list[type[Exception]] = [RuntimeError, ValueError]
    if "triton" in sys.modules:
        from triton.errors import TritonError

        known.append(TritonError)
    return tuple(known)


def describe(error: Exception) -> str:
    """An error on one line or a few, for a record."""
    return f"{type(error).__name__}: {str(error).strip()[:2000]}"
