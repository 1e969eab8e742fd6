"""The place memory alone, after agreement with float64.

    tensor-memory-lab bench places

The recurrence `place_scan`: both rules with the Gaussian kernel, and the linear kernel on growing
grids at equal tokens, in many rows and in one; timed as `bench scan` does. The fused backend serves
where it can and "torch" elsewhere; every row says which. On a GPU products are in bfloat16, and
where flash-linear-attention is installed, its operator for the rule gets the same addresses.

On a CPU also a whole `PlaceMemory` forward and backward on two threads, beside its token-by-token
reference and beside a `TensorMemory` that writes every token and holds as many values.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tensor_memory import MemoryConfig, PlaceConfig, PlaceMemory, TensorMemory
from tensor_memory_lab.bench import report
from tensor_memory_lab.bench.place_shapes import PlaceShape, addresses
from tensor_memory_lab.bench.scan import KINDS, calls, time_kinds
from tensor_memory_lab.bench.shapes import check, rms_ratio
from tensor_memory_lab.bench.timing import (
    QUICK,
    Budget,
    Call,
    captured,
    measure,
    measure_alternately,
    threads,
)
from tensor_memory_lab.progress import progress

FLA = {"linear": "simple_gla", "delta": "gated_delta_rule"}
"""What flash-linear-attention calls a rule."""
RULES = tuple(FLA)
GRIDS = ((8, 8), (16, 16), (64, 64))
WORLDS = ((8, 8), (64, 64, 64))
"""For the linear kernel: of every row, and of one row that has all tokens."""

PLACE = PlaceConfig(grid=(8, 8), channels=32, heads=4)
TENSOR = MemoryConfig(grid=(16, 16), channels=16, chunk_size=1)
"""As many values as `PLACE`, hidden and cell together; as many axes."""


def plan(quick: bool, device: torch.device) -> dict[str, PlaceShape]:
    """The recurrences to time, by name."""
    low = device.type == "cuda"
    B, N = (2, 6) if quick else (32 if low else 2, 512)
    base, grids, worlds = PLACE, GRIDS, WORLDS
    if quick:
        base = PlaceConfig(grid=(4, 4), channels=4, heads=2)
        grids, worlds = ((4, 4), (6, 6)), ((4, 4), (4, 4, 4))
    products = torch.bfloat16 if low else torch.float32
    shapes = {
        f"{rule} rule": PlaceShape(B, N, replace(base, rule=rule), products) for rule in RULES
    }
    for kind, rows in (("linear kernel", B), ("one row", 1)):
        for grid in grids if rows == B else worlds:
            config = replace(base, kernel="linear", grid=grid, wrap=False)
            name = f"{kind}, {'x'.join(map(str, grid))}"
            shapes[name] = PlaceShape(rows, B * N // rows, config, products)
    return shapes


def measure_shape(
    shape: PlaceShape, options: argparse.Namespace, device: torch.device, budget: Budget
) -> dict[str, Any]:
    """Agreement, then times and memory. Plain values for JSON."""
    # A grid that the fused backend does not hold is one of the questions here.
    asked = "auto" if options.backend == "triton" else options.backend
    with torch.device("meta"):
        backend = PlaceMemory(1, replace(shape.config, backend=asked)).backend_on(device)
    row: dict[str, Any] = {"shape": shape.to_dict(), "label": shape.label, "backend": backend}
    row["errors"] = {}
    with report.recorded(row["errors"], "all"):
        row["agreement"] = check(shape, shape.scan(backend), device, options.seed)
        if not row["agreement"]["failures"]:
            inputs = shape.draw(device, options.seed)
            timed = calls(shape.scan(backend), inputs, shape)
            row |= time_kinds(timed, device, budget, row["errors"])
    return row


def measure_fla(
    shape: PlaceShape, row: dict[str, Any], device: torch.device, budget: Budget, seed: int
) -> None:
    """The forward of flash-linear-attention on addresses that are made beforehand."""
    inputs = shape.draw(device, seed)
    given, phi = inputs.arguments, addresses(shape, inputs)
    name, keys, rates = FLA["linear"], given["rate"][..., None] * phi, {}
    if shape.config.rule == "delta":
        name, keys, rates = FLA["delta"], phi, {"beta": given["rate"].to(shape.products)}
    theirs = partial(
        getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}"),
        q=phi.to(shape.products),
        k=keys.to(shape.products),
        v=given["content"].to(shape.products),
        g=given["log_keep"],
        scale=1.0,
        initial_state=given["state"].flatten(2, -2),
        output_final_state=True,
        **rates,
    )

    def forward() -> Any:
        with torch.no_grad():
            return theirs()

    with torch.no_grad():
        exact = {name: tensor.double() for name, tensor in given.items()}
        reads, _ = shape.scan("torch")(**exact)
    ms = {"eager": measure(forward, device, budget)}
    ms["graph"] = measure(captured(forward), device, budget)
    ours = row["ms"]["forward"]
    row[name] = {
        "ms": {"forward": ms},
        "rms_ratio": rms_ratio(forward()[0], reads),
        "ratio": {how: ours[how]["median"] / ms[how]["median"] for how in ours},
    }


def measure_memories(
    rule: Any, options: argparse.Namespace, device: torch.device, budget: Budget
) -> dict[str, Any]:
    """Whole memories forward and backward, turn by turn: how often our time goes into theirs."""
    place, tensor, (B, N, d) = replace(PLACE, rule=rule), TENSOR, (2, 512, 128)
    if options.quick:
        place = replace(place, grid=(4, 4), channels=4, heads=2)
        tensor, (B, N, d) = replace(tensor, grid=(4, 4), channels=4), (2, 6, 8)
    shape = PlaceShape(B, N, place, torch.float32)
    row: dict[str, Any] = {"label": f"{shape.label}, d {d}", "threads": torch.get_num_threads()}
    row |= {"batch": B, "tokens": N, "dim": d, "errors": {}}
    row |= {"place": place.to_dict(), "tensor": tensor.to_dict()}
    row["agreement"] = check(shape, shape.scan(options.backend), device, options.seed)
    if row["agreement"]["failures"]:
        return row
    torch.manual_seed(options.seed)
    x, grad = torch.randn(B, N, d).requires_grad_(), torch.randn(B, N, d)
    memories = {
        "place": PlaceMemory(d, replace(place, backend=options.backend)),
        "reference": PlaceMemory(d, replace(place, backend="reference")),
        "tensor": TensorMemory(d, replace(tensor, backend=options.backend)),
    }

    def step(memory: PlaceMemory | TensorMemory) -> Call:
        leaves = [x, *memory.parameters()]
        return lambda: torch.autograd.grad(memory(x)[0], leaves, grad)

    with torch.no_grad():
        row["state_bytes"] = {name: memory(x)[1].nbytes for name, memory in memories.items()}
    row["state_values"] = {"place": place.state_values, "tensor": tensor.state_values}
    row["ms"] = measure_alternately({n: step(m) for n, m in memories.items()}, device, budget)
    ours = row["ms"]["place"]["median"]
    row["ratio"] = {name: row["ms"][name]["median"] / ours for name in ("reference", "tensor")}
    return row


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every shape; one that fails is recorded and the others go on."""
    on_cpu = device.type == "cpu"
    full = Budget(seconds=2.0, least=5, warm_up=1) if on_cpu else Budget()
    budget = QUICK if options.quick else full
    shapes = plan(options.quick, device)
    result: dict[str, Any] = {"shapes": {}, "memories": {}}
    with progress("places", len(shapes) + len(RULES) * on_cpu, unit="shapes") as advance:
        for name, shape in shapes.items():
            row = result["shapes"][name] = measure_shape(shape, options, device, budget)
            timed = name.endswith("rule") and "ms" in row and not on_cpu
            if timed and importlib.util.find_spec("fla") is not None:
                with report.recorded(row["errors"], "fla"):
                    measure_fla(shape, row, device, budget, options.seed)
            advance(note=name)
        _compare_grids(result["shapes"])
        for rule in RULES if on_cpu else ():
            longer = replace(budget, seconds=10 * budget.seconds, most=40)
            result["memories"][rule] = measure_memories(rule, options, device, longer)
            advance(note=f"a whole memory, {rule} rule")
    return result


def _compare_grids(rows: dict[str, Any]) -> None:
    """Times of the linear kernel over those on the smallest grid, as many rows and as one."""
    for kind in ("linear kernel", "one row"):
        timed = [row for name, row in rows.items() if name.startswith(kind) and "ms" in row]
        for row in timed:
            row["over_smallest_grid"] = {}
            for part, ways in row["ms"].items():
                least = timed[0]["ms"][part]
                row["over_smallest_grid"][part] = {
                    how: t["median"] / least[how]["median"]
                    for how, t in ways.items()
                    if how in least
                }


def tables(result: dict[str, Any]) -> list[report.Rows]:
    """The recurrences, then the whole memories."""
    number = report.number
    shapes: report.Rows = []
    for name, row in result["shapes"].items():
        if "ms" not in row:
            continue
        line = {"recurrence": name, "shape": row["label"], "backend": row["backend"]}
        for kind in KINDS:
            ways = row["ms"][kind]
            line[f"{kind}, ms ({'/'.join(ways)})"] = " / ".join(
                number(t["median"]) for t in ways.values()
            )
        over = row.get("over_smallest_grid", {}).get("forward_backward", {})
        line["over the smallest grid"] = " / ".join(map(number, over.values())) or "–"
        theirs = (row.get(FLA[row["shape"]["rule"]]) or {}).get("ratio", {})
        line["forward over fla"] = " / ".join(map(number, theirs.values())) or "–"
        line["peak, MiB"] = report.mib(row["peak_bytes"]["forward_backward"])
        shapes.append(line)
    memories = [
        {"memory": row["label"]}
        | {f"{name}, ms": number(t["median"]) for name, t in row["ms"].items()}
        | {f"times faster than {name}": number(ratio) for name, ratio in row["ratio"].items()}
        for row in result["memories"].values()
        if "ms" in row
    ]
    return [shapes, memories]


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where anything disagreed or died."""
    parser = report.make_parser(
        "places", "Time the place memory's recurrence, after comparing it with float64."
    )
    options, device = report.parse(parser, argv)
    with threads(2) if device.type == "cpu" else nullcontext():
        result = run(options, device)
    parts = {**result["shapes"], **{f"{r} memory": row for r, row in result["memories"].items()}}
    config = {"autocast": "bfloat16" if device.type == "cuda" else None}
    complaints = report.failures(parts)
    return report.finish("places", options, device, config, result, tables(result), complaints)
