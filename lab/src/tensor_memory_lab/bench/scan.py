"""The scan alone: published shapes and sweeps, after agreement with the float64 reference.

    tensor-memory bench scan --compiled

A scan that disagrees gets no speed, and the status is 1. Three things are timed: `forward`
(nothing kept), `forward_kept` (what a backward needs is kept) and `forward_backward`; each as
`eager` calls and, on a GPU, as the replay of a CUDA `graph`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

from tensor_memory import memory_scan
from tensor_memory_lab.bench import agreement, aims, report, scan_tables
from tensor_memory_lab.bench.compiled_loop import WAYS, compile_and_check
from tensor_memory_lab.bench.cpu_memory import measure_cpu_memory
from tensor_memory_lab.bench.shapes import (
    CPU_LANGUAGE,
    CPU_PUBLISHED,
    CPU_SWEEPS,
    LANGUAGE,
    PUBLISHED,
    SWEEPS,
    ScanInputs,
    ScanShape,
    draw_inputs,
    sweep,
    work,
)
from tensor_memory_lab.bench.timing import (
    QUICK,
    Budget,
    Call,
    captured,
    ceilings,
    describe,
    measure,
    part_failures,
    peak_bytes,
)
from tensor_memory_lab.interruption import terminated_as_interrupted
from tensor_memory_lab.progress import progress

Scan = Callable[..., Any]

COMPILED = "also the plain loop by torch.compile: one step, or the whole loop (minutes)"

KINDS = ("forward", "forward_kept", "forward_backward")


def calls(scan: Scan, inputs: ScanInputs, shape: ScanShape) -> dict[str, Call]:
    """What is timed, by kind: `scan` takes the arguments of `memory_scan`."""
    plain = inputs.arguments
    marked = inputs.leaves()
    leaves = list(marked.arguments.values())
    device = plain["hidden"].device

    def forward() -> object:
        with torch.no_grad(), agreement.autocast(shape, device):
            return scan(**plain)

    def forward_kept() -> Any:
        with agreement.autocast(shape, device):
            return scan(**marked.arguments)

    def forward_backward() -> object:
        return torch.autograd.grad(forward_kept(), leaves, marked.grads)

    return dict(zip(KINDS, (forward, forward_kept, forward_backward), strict=True))


def fused(backend: str) -> Scan:
    """`memory_scan` by one backend."""
    return lambda **arguments: memory_scan(**arguments, backend=backend)


def measure_shape(
    shape: ScanShape,
    backend: str,
    device: torch.device,
    budget: Budget,
    seed: int,
    ceiling: dict[str, float],
    *,
    against_plain_loop: bool,
    compiled: str | None,
) -> dict[str, Any]:
    """Agreement first; then times, memory and shares of the ceilings. Plain values for JSON."""
    row: dict[str, Any] = {"shape": shape.to_dict(), "label": shape.label, "backend": backend}
    agreed = agreement.check(shape, backend, device, seed)
    row["agreement"] = agreed.to_dict()
    if agreed.failures:
        return row

    inputs = draw_inputs(shape, device, seed)
    timed = calls(fused(backend), inputs, shape)
    row["ms"] = {kind: {"eager": measure(timed[kind], device, budget).to_dict()} for kind in KINDS}
    row["peak_bytes"] = {kind: peak_bytes(timed[kind], device) for kind in KINDS}
    row["errors"] = {}
    if device.type == "cuda":
        for kind in KINDS:
            with _recorded(row["errors"], f"graph of {kind}"):
                replay = captured(timed[kind])
                row["ms"][kind]["graph"] = measure(replay, device, budget).to_dict()
    row["us_per_step"] = {
        kind: {how: t["median"] * 1e3 / shape.steps for how, t in ways.items()}
        for kind, ways in row["ms"].items()
    }
    row["work"] = asdict(work(shape))
    row["share_of_ceiling"] = _shares(row, shape, ceiling)
    if against_plain_loop:
        loop = calls(fused("reference"), inputs, shape)
        with _recorded(row["errors"], "plain loop"):
            row["plain_loop"] = _compared(loop, row["ms"], device, budget)
    if compiled is not None:
        with _recorded(row["errors"], "compiled plain loop"):
            scan, agreed, seconds = compile_and_check(compiled, shape, device, seed)
            if agreed.failures:
                row["errors"]["compiled plain loop"] = f"DISAGREES: {'; '.join(agreed.failures)}"
                return row
            found = _compared(calls(scan, inputs, shape), row["ms"], device, budget)
            row["compiled_plain_loop"] = found | {
                "compiled": compiled,
                "compiled_and_checked_s": seconds,
                "agreement": agreed.to_dict(),
            }
    return row


@contextmanager
def _recorded(errors: dict[str, str], part: str) -> Iterator[None]:
    """Out of memory in one part, or a refused capture, must not cost the others their numbers."""
    try:
        yield
    except part_failures() as error:
        errors[part] = describe(error)


def _compared(
    timed: dict[str, Call], ours: dict[str, Any], device: torch.device, budget: Budget
) -> dict[str, Any]:
    """Times of another implementation, eager, and how many times ours go into them."""
    ms = {kind: measure(timed[kind], device, budget).to_dict() for kind in KINDS}
    ratio = {kind: ms[kind]["median"] / ours[kind]["eager"]["median"] for kind in KINDS}
    peaks = {kind: peak_bytes(timed[kind], device) for kind in KINDS}
    return {"ms": ms, "ratio": ratio, "peak_bytes": peaks}


def _shares(
    row: dict[str, Any], shape: ScanShape, ceiling: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Achieved operations and bytes per second over the measured ceilings, by kind."""
    asked = row["work"]
    flops = {
        "forward": asked["flops_forward"],
        "forward_kept": asked["flops_forward"],
        "forward_backward": asked["flops_forward_backward"],
    }
    matmul = ceiling[f"matmul_{shape.dtype_name}_tflops"] * 1e9  # per millisecond
    copy = ceiling["copy_gbytes_per_s"] * 1e6
    shares = {}
    for kind in KINDS:
        ways = row["ms"][kind]
        ms = ways.get("graph", ways["eager"])["median"]
        shares[kind] = {
            "matmul": flops[kind] / ms / matmul,
            "bandwidth": asked[f"bytes_{kind}"] / ms / copy,
        }
    return shares


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All parts; one that fails is recorded in its place and the others go on.

    Ctrl-C, or a time limit's SIGTERM, ends it with what was measured until then.
    """
    on_cpu = device.type == "cpu"
    budget = QUICK if options.quick else Budget(least=5, warm_up=1) if on_cpu else Budget()
    side = 64 if options.quick else 1024 if on_cpu else 8192
    ceiling = ceilings(device, budget, side=side)
    result: dict[str, Any] = {"ceilings": ceiling | {"matmul_side": side}}
    result |= {"shapes": {}, "sweeps": {}, "aims": []}
    try:
        with terminated_as_interrupted():
            _measure_all(result, options, device, budget)
    except KeyboardInterrupt:
        result["interrupted"] = True
    result["aims"] = _judged(result, options, device)
    if options.compiled is None:
        result["compiled_plain_loop"] = "skipped: compiling takes a while, ask with --compiled"
    return result


def _measure_all(
    result: dict[str, Any], options: argparse.Namespace, device: torch.device, budget: Budget
) -> None:
    """Measure one part after another into its place in `result`."""
    named, swept = _plan(options, device)
    on_cpu = device.type == "cpu"
    brief = replace(budget, seconds=budget.seconds / 3)

    def measured(shape: ScanShape, budget: Budget, **against: Any) -> dict[str, Any]:
        return _attempt(
            lambda: measure_shape(
                shape, options.backend, device, budget, options.seed, result["ceilings"], **against
            )
        )

    total = len(named) + sum(map(len, swept.values())) + on_cpu
    with progress("scan", total, unit="shapes") as advance:
        for name, shape in named.items():
            compiled = options.compiled if name == "language" else None
            result["shapes"][name] = measured(
                shape, budget, against_plain_loop=True, compiled=compiled
            )
            advance(note=name)
        if on_cpu:
            result["cpu_memory"] = _attempt(
                lambda: measure_cpu_memory(
                    options.backend, budget, options.seed, quick=options.quick
                )
            )
            advance(note="a whole memory")
        for name, shapes in swept.items():
            result["sweeps"][name] = []
            for shape in shapes:
                row = measured(shape, brief, against_plain_loop=False, compiled=None)
                result["sweeps"][name].append({"label": shape.label} | row)
                advance(note=f"{name}: {shape.label}")


def _plan(
    options: argparse.Namespace, device: torch.device
) -> tuple[dict[str, ScanShape], dict[str, list[ScanShape]]]:
    """The shapes asked for; on a CPU fewer rows, and tiny ones to try it out."""
    on_cpu = device.type == "cpu"
    published = CPU_PUBLISHED if on_cpu else PUBLISHED
    named = {name: published[name] for name in options.shapes if name in published}
    around = CPU_LANGUAGE if on_cpu else LANGUAGE
    values = CPU_SWEEPS if on_cpu else SWEEPS
    if not options.quick:
        return named, {name: sweep(name, around, values[name]) for name in options.sweeps}
    tiny = {
        name: replace(shape, batch=2, steps=3, channels=16, grid=(3, 3, 3))
        for name, shape in named.items()
    }
    small = replace(around, batch=1, steps=2, channels=16, grid=(3, 3, 3))
    return tiny, {name: [replace(small, **{name: getattr(small, name)})] for name in options.sweeps}


def _attempt(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The part's result, or what it died of."""
    errors: dict[str, str] = {}
    with _recorded(errors, "all"):
        return part()
    return {"errors": errors}


def _judged(
    result: dict[str, Any], options: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    if options.quick:
        return []
    if device.type == "cpu":
        return [aims.CPU_MEMORY.judge(result.get("cpu_memory", {}).get("ratio"))]
    if not aims.applies(report.device_name(device)):
        return []
    judged = []
    for (name, kind), aim in aims.SCAN.items():
        ways = result["shapes"].get(name, {}).get("ms", {}).get(kind, {})
        judged += [
            aim.judge(ways[how]["median"] if how in ways else None, how)
            for how in ("eager", "graph")
        ]
    return judged


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where anything disagreed or died."""
    parser = argparse.ArgumentParser(
        prog="tensor-memory bench scan",
        description="Time the scan alone, after comparing it with the float64 reference.",
        formatter_class=report.Defaults,
    )
    report.add_common_options(parser)
    add = parser.add_argument
    add("--shapes", nargs="*", choices=PUBLISHED, default=list(PUBLISHED), help="published scans")
    add("--sweeps", nargs="*", choices=SWEEPS, default=list(SWEEPS), help="what is varied")
    add("--compiled", nargs="?", choices=WAYS, const="step", help=COMPILED)
    options = parser.parse_args(argv)
    device = report.check_common_options(parser, options)
    result = run(options, device)
    config = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    return report.finish(
        "scan",
        options,
        device,
        config,
        result,
        [*scan_tables.rows(result), report.aim_rows(result["aims"])],
        scan_tables.complaints(result),
    )
