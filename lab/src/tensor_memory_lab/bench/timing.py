"""Measuring: medians with their spread, peak memory, and the ceilings of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]
Timing = dict[str, Any]
"""Milliseconds of one call: median, p10, p90; and repeats."""

ENQUEUED = 10
"""Calls handed to a GPU in a row, so that its queue stays full where Python is the faster one."""


@dataclass(frozen=True)
class Budget:
    """How long one measurement may take: at least `least` rounds, then until time is up."""

    seconds: float = 0.3
    least: int = 10
    most: int = 300
    warm_up: int = 3

    def goes_on(self, rounds: int, began: float) -> bool:
        """Whether another round is due."""
        in_time = time.perf_counter() - began < self.seconds
        return rounds < self.least or (rounds < self.most and in_time)


QUICK = Budget(seconds=0.0, least=2, most=2, warm_up=1)
"""For tests: the numbers mean nothing, the code has run."""


def timing(samples: list[float]) -> Timing:
    """The middle and the spread of single times in milliseconds.

    >>> timing([3.0, 1.0, 2.0])
    {'median': 2.0, 'p10': 1.2, 'p90': 2.8, 'repeats': 3}
    """
    values = torch.tensor(samples, dtype=torch.float64)
    p10, p90 = (round(values.quantile(share).item(), 9) for share in (0.1, 0.9))
    return {
        "median": statistics.median(samples), "p10": p10, "p90": p90, "repeats": len(samples)
    }  # fmt: skip


def measure(call: Call, device: torch.device, budget: Budget) -> Timing:
    """Time one call; see `measure_alternately`."""
    return measure_alternately({"call": call}, device, budget)["call"]


def measure_alternately(
    calls: Mapping[str, Call], device: torch.device, budget: Budget
) -> dict[str, Timing]:
    """Time several calls turn by turn, so that drift of the machine meets them all alike.

    On a GPU a turn is ten calls in a row, as in a loop of their own: right after a call that
    Python was too slow for, another would wait for its launches as well. The time is that between
    two events around a call, with caches emptied before it, Python included where it is the slower
    one.
    """
    for call in calls.values():
        for _ in range(budget.warm_up):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    cuda = device.type == "cuda"
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    dirt = torch.empty(size, dtype=torch.uint8, device=device)
    began, rounds = time.perf_counter(), 0
    while budget.goes_on(rounds, began):
        turns = min(ENQUEUED, budget.most - rounds) if cuda else 1
        for name, times in (_cuda_times(calls, turns, dirt) if cuda else _times(calls)).items():
            samples[name] += times
        rounds += turns
    return {name: timing(times) for name, times in samples.items()}


def _times(calls: Mapping[str, Call]) -> dict[str, list[float]]:
    taken = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        taken[name] = [(time.perf_counter() - start) * 1e3]
    return taken


def _cuda_times(
    calls: Mapping[str, Call], turns: int, dirt: torch.Tensor
) -> dict[str, list[float]]:
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    torch.cuda.synchronize(dirt.device)
    for name, call in calls.items():
        for _ in range(turns):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            dirt.zero_()  # nothing of the call before stays in the cache
            start.record()
            call()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize(dirt.device)
    return {n: [start.elapsed_time(end) for start, end in pairs] for n, pairs in marks.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes on so many threads of the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def peak_bytes(call: Call, device: torch.device, held: int | None = None) -> int | None:
    """The most memory held during one call beyond `held`, or beyond what was held before.

    None on a CPU.
    """
    if device.type != "cuda":
        return None
    call()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device) if held is None else held
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def ceilings(device: torch.device, budget: Budget, *, side: int) -> dict[str, float]:
    """What this machine reaches: products of `side`³ random values by type, and a copy."""
    reached: dict[str, float] = {"matmul_side": side}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        found = measure(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, budget)
        name = str(dtype).removeprefix("torch.")
        reached[f"matmul_{name}_tflops"] = 2 * side**3 / found["median"] / 1e9
    source = torch.randn(side * side * 4, device=device)
    target = torch.empty_like(source)
    found = measure(lambda: target.copy_(source), device, budget)
    reached["copy_gbytes_per_s"] = 2 * source.nbytes / found["median"] / 1e6
    return reached
