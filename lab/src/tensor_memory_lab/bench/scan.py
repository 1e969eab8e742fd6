"""The scan alone: published shapes and sweeps, after agreement with the float64 reference.

    tensor-memory-lab bench scan --compiled

Three things are timed: `forward` (nothing kept), `forward_kept` (what a backward needs is kept)
and `forward_backward`; each as `eager` calls and, on a GPU, as the replay of a CUDA `graph`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tensor_memory import memory_scan
from tensor_memory_lab.bench import report
from tensor_memory_lab.bench.shapes import (
    CPU_LANGUAGE,
    CPU_PUBLISHED,
    CPU_SWEEPS,
    LANGUAGE,
    PUBLISHED,
    SWEEPS,
    Scan,
    ScanInputs,
    ScanShape,
    Shape,
    check,
    work,
)
from tensor_memory_lab.bench.timing import (
    QUICK,
    Budget,
    Call,
    captured,
    ceilings,
    measure,
    peak_bytes,
)
from tensor_memory_lab.interruption import terminated_as_interrupted
from tensor_memory_lab.progress import progress

KINDS = ("forward", "forward_kept", "forward_backward")


def calls(scan: Scan, inputs: ScanInputs, shape: Shape) -> dict[str, Call]:
    """What is timed, by kind."""
    plain, marked = inputs.arguments, inputs.leaves()
    device = plain["write_at"].device

    def forward() -> object:
        with torch.no_grad(), shape.autocast(device):
            return scan(**plain)

    def forward_kept() -> Any:
        with shape.autocast(device):
            return scan(**marked.arguments)

    def forward_backward() -> object:
        leaves = list(marked.arguments.values())
        return torch.autograd.grad(forward_kept(), leaves, marked.grads)

    return dict(zip(KINDS, (forward, forward_kept, forward_backward), strict=True))


def time_kinds(
    timed: dict[str, Call], device: torch.device, budget: Budget, errors: dict[str, str]
) -> dict[str, Any]:
    """Times, eager and on a GPU as a graph, and peak memory by kind."""
    ms = {kind: {"eager": measure(call, device, budget)} for kind, call in timed.items()}
    peaks = {kind: peak_bytes(call, device) for kind, call in timed.items()}
    if device.type == "cuda":
        for kind, call in timed.items():
            with report.recorded(errors, f"graph of {kind}"):
                ms[kind]["graph"] = measure(captured(call), device, budget)
    return {"ms": ms, "peak_bytes": peaks}


def compiled_loop() -> Scan:
    """The plain loop, its step by `torch.compile`: the opponent that a user has for nothing.

    Shapes are taken as they are: code for any size would be slower. All steps as one graph take
    minutes to compile.
    """
    compiled = torch.compile(partial(memory_scan, backend="reference"), dynamic=False)

    def scan(*, hidden: Any, cell: Any, taps: Any, mix: Any, bias: Any, **steps: Any) -> Any:
        weights, reads = {"taps": taps, "mix": mix, "bias": bias}, []
        for s in range(steps["write_at"].shape[1]):
            now = {name: x[:, s : s + 1] for name, x in steps.items()}  # (B, 1, ...)
            read, hidden, cell = compiled(**now, **weights, hidden=hidden, cell=cell)
            reads.append(read)
        return torch.cat(reads, dim=1), hidden, cell

    return scan


class Bench:
    """One run of the benchmark: what was asked for, and what has been measured so far."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.on_cpu = options, device, device.type == "cpu"
        full = Budget(least=5, warm_up=1) if self.on_cpu else Budget()
        self.budget = QUICK if options.quick else full
        side = 64 if options.quick else 1024 if self.on_cpu else 8192
        self.ceilings = ceilings(device, self.budget, side=side)
        self.result: dict[str, Any] = {"ceilings": self.ceilings, "shapes": {}, "sweeps": {}}

    def run(self) -> dict[str, Any]:
        """All parts; one that fails is recorded in its place and the others go on.

        Ctrl-C, or a time limit's SIGTERM, ends it with what was measured until then.
        """
        try:
            with terminated_as_interrupted():
                self._measure_all()
        except KeyboardInterrupt:
            self.result["interrupted"] = True
        return self.result

    def _measure_all(self) -> None:
        named, swept = self._plan()
        brief = replace(self.budget, seconds=self.budget.seconds / 3)
        total = len(named) + sum(map(len, swept.values()))
        with progress("scan", total, unit="shapes") as advance:
            for name, shape in named.items():
                compiled = self.options.compiled and name == "language"
                row = self.result["shapes"][name] = self._row(shape)
                self._measure(row, partial(self._measure_shape, row, shape, self.budget))
                self._measure(row, partial(self._measure_loops, row, shape, compiled))
                advance(note=name)
            for name, shapes in swept.items():
                rows = self.result["sweeps"][name] = []
                for shape in shapes:
                    rows.append(row := self._row(shape))
                    self._measure(row, partial(self._measure_shape, row, shape, brief))
                    advance(note=f"{name}: {shape.label}")

    def _plan(self) -> tuple[dict[str, ScanShape], dict[str, list[ScanShape]]]:
        """The shapes asked for; on a CPU fewer rows, and tiny ones to try it out."""
        published = CPU_PUBLISHED if self.on_cpu else PUBLISHED
        named = {name: published[name] for name in self.options.shapes if name in published}
        around, values = (CPU_LANGUAGE, CPU_SWEEPS) if self.on_cpu else (LANGUAGE, SWEEPS)
        if self.options.quick:
            tiny = {"batch": 2, "steps": 3, "channels": 16, "grid": (3, 3, 3)}
            named = {name: replace(shape, **tiny) for name, shape in named.items()}
            around, values = replace(around, **tiny), {name: (tiny[name],) for name in SWEEPS}
        return named, {
            name: [replace(around, **{name: value}) for value in values[name]]
            for name in self.options.sweeps
        }

    def _row(self, shape: ScanShape) -> dict[str, Any]:
        backend = self.options.backend
        row = {"shape": shape.to_dict(), "label": shape.label, "backend": backend, "errors": {}}
        with report.recorded(row["errors"], "agreement"):
            row["agreement"] = check(shape, shape.scan(backend), self.device, self.options.seed)
        return row

    def _measure(self, row: dict[str, Any], part: Callable[[], None]) -> None:
        """Do a part where the scan agreed, and note what it dies of."""
        if row.get("agreement", {}).get("failures") or {"agreement", "all"} & row["errors"].keys():
            return
        with report.recorded(row["errors"], "all"):
            part()

    def _measure_shape(self, row: dict[str, Any], shape: ScanShape, budget: Budget) -> None:
        """Times, memory and shares of the ceilings."""
        inputs = shape.draw(self.device, self.options.seed)
        timed = calls(shape.scan(self.options.backend), inputs, shape)
        row |= time_kinds(timed, self.device, budget, row["errors"])
        row["us_per_step"] = {
            kind: {how: t["median"] * 1e3 / shape.steps for how, t in ways.items()}
            for kind, ways in row["ms"].items()
        }
        row["work"] = asked = work(shape)
        matmul = self.ceilings[f"matmul_{shape.dtype_name}_tflops"] * 1e9  # per millisecond
        copy = self.ceilings["copy_gbytes_per_s"] * 1e6
        row["share_of_ceiling"] = {}
        for kind, ways in row["ms"].items():
            ms = ways.get("graph", ways["eager"])["median"]
            row["share_of_ceiling"][kind] = {
                "matmul": asked[f"flops_{kind}"] / ms / matmul,
                "bandwidth": asked[f"bytes_{kind}"] / ms / copy,
            }

    def _measure_loops(self, row: dict[str, Any], shape: ScanShape, compiled: bool) -> None:
        """The plain loop, eager and compiled: how many times our time goes into theirs."""
        inputs = shape.draw(self.device, self.options.seed)

        def compared(scan: Scan) -> dict[str, Any]:
            timed = calls(scan, inputs, shape)
            ms = {kind: measure(timed[kind], self.device, self.budget) for kind in KINDS}
            ratio = {k: ms[k]["median"] / row["ms"][k]["eager"]["median"] for k in KINDS}
            peaks = {kind: peak_bytes(timed[kind], self.device) for kind in KINDS}
            return {"ms": ms, "ratio": ratio, "peak_bytes": peaks}

        with report.recorded(row["errors"], "plain loop"):
            row["plain_loop"] = compared(shape.scan("reference"))
        if not compiled:
            return
        with report.recorded(row["errors"], "compiled plain loop"), warnings.catch_warnings():
            # The compiler looks at every input's .grad.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not")
            scan, began = compiled_loop(), time.perf_counter()
            agreed = check(shape, scan, self.device, self.options.seed)
            found = {"compiled": "step", "compiled_and_checked_s": time.perf_counter() - began}
            if agreed["failures"]:
                raise RuntimeError(f"DISAGREES: {'; '.join(agreed['failures'])}")
            row["compiled_plain_loop"] = compared(scan) | found | {"agreement": agreed}


def complaints(result: dict[str, Any]) -> list[str]:
    """Parts that disagreed or died, or were not reached."""
    parts = dict(result["shapes"])
    for name, swept in result["sweeps"].items():
        parts |= {f"sweep over {name}, {row['label']}": row for row in swept}
    found = report.failures(parts)
    if result.get("interrupted"):
        found.append("interrupted: what is not in the tables was not measured")
    return found


def tables(result: dict[str, Any]) -> list[report.Rows]:
    """The published shapes, the sweeps."""
    swept = [(f"over {name}", row) for name, part in result["sweeps"].items() for row in part]
    shapes = [_cells(name, row) for name, row in result["shapes"].items() if "ms" in row]
    return [shapes, [_cells(name, row) for name, row in swept if "ms" in row]]


def _cells(name: str, row: dict[str, Any]) -> dict[str, str]:
    number = report.number
    hows = "/".join(row["ms"]["forward"])
    times = {
        f"{title}, ms ({hows})": " / ".join(number(t["median"]) for t in row["ms"][kind].values())
        for kind, title in zip(KINDS, ("forward", "kept", "forward + backward"), strict=True)
    }
    loops = {
        title: number(row[key]["ratio"]["forward_backward"] if key in row else None)
        for key, title in (("plain_loop", "× loop"), ("compiled_plain_loop", "× compiled loop"))
    }
    share = row.get("share_of_ceiling", {}).get("forward_backward", {})
    return (
        {"scan": name, "shape": row["label"]}
        | times
        | {
            "peak, MiB": report.mib(row["peak_bytes"]["forward_backward"]),
            **loops,
            "of matrix ceiling": f"{100 * share['matmul']:.1f} %",
            "of bandwidth": f"{100 * share['bandwidth']:.1f} %",
        }
    )


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where anything disagreed or died."""
    parser = report.make_parser(
        "scan", "Time the scan alone, after comparing it with the reference."
    )
    add = parser.add_argument
    add("--shapes", nargs="*", choices=PUBLISHED, default=list(PUBLISHED), help="published scans")
    add("--sweeps", nargs="*", choices=SWEEPS, default=list(SWEEPS), help="what is varied")
    add("--compiled", action="store_true", help="also the plain loop, its step by torch.compile")
    options, device = report.parse(parser, argv)
    result = Bench(options, device).run()
    config = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    return report.finish(
        "scan", options, device, config, result, tables(result), complaints(result)
    )
