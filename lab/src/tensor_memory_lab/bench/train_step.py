"""A training step with and without memory, turn by turn in one run.

    tensor-memory-lab bench train-step
    tensor-memory-lab bench train-step --memory place --layers-with-memory 0 1

Forward, backward and AdamW of the language and the video model at their published sizes, bfloat16
autocast on a GPU. There each step is also timed with its backward on the calling thread, where
autograd has a thread of its own otherwise; with each memory layer as a CUDA graph within a step
that Python launches, where the layers carry nothing within a step; and as a graph as a whole, which
spares both models the time that Python takes to launch. First the scan is compared with one in
float64, and the gradients through layers as graphs with those without. The place memory is measured
in the language model.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tensor_memory import MemoryResidual
from tensor_memory_lab.bench import report
from tensor_memory_lab.bench.hosts import HOSTS, TrainedHost, add_memory_options, memory_changes
from tensor_memory_lab.bench.shapes import check, rms_ratio
from tensor_memory_lab.bench.timing import (
    QUICK,
    Budget,
    Timing,
    captured,
    measure_alternately,
    peak_bytes,
)
from tensor_memory_lab.commands.option_types import count
from tensor_memory_lab.models import Model
from tensor_memory_lab.progress import progress
from tensor_memory_lab.tasks import Batch

WITHOUT, WITH = "base", "memory"


class Training:
    """A model, its optimiser and one batch; calling it takes one step."""

    def __init__(self, host: TrainedHost, model: Model, batch: Batch, device: torch.device) -> None:
        self.device, self.host = device, host
        self.model = model.to(device).train()
        self.batch = batch
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-4, weight_decay=0.1, fused=cuda, capturable=cuda
        )

    def __call__(self) -> Tensor:
        """Forward, backward, update; the loss, which nobody waits for."""
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def backward(self) -> Tensor:
        """Forward and backward; the loss."""
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16 if cuda else None, enabled=cuda):
            loss = self.host.loss(self.model, self.batch)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Of every weight, in the order of the optimiser; dropout is the same at every call."""
        torch.manual_seed(0)
        self.backward()
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        found = [p.grad.clone() for p in weights if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return found


class Alone(nn.Module):
    """A memory layer as a graph takes it: tokens in, tokens out."""

    def __init__(self, layer: MemoryResidual) -> None:
        super().__init__()
        self.layer = layer
        self.memory = layer.memory  # a graph trains what is registered: a shared memory is not

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, d) -> the same shape; nothing is carried."""
        return self.layer(x)[0]


class Stateless(nn.Module):
    """What a model calls in place of a memory layer that is a graph."""

    def __init__(self, alone: Alone) -> None:
        super().__init__()
        self.alone = alone

    def forward(self, x: Tensor, state: None = None) -> tuple[Tensor, None]:
        """x (B, N, d) -> the same shape, no state."""
        return self.alone(x), None


def graph_layers(step: Training) -> None:
    """Make every memory layer two CUDA graphs, one for its forward and one for its backward."""
    model, host = step.model, step.host
    found = [n for n, layer in model.named_modules() if isinstance(layer, MemoryResidual)]
    layers = tuple(Alone(cast(MemoryResidual, model.get_submodule(name))) for name in found)
    x = torch.randn(host.batch, host.tokens[1], host.dim, device=step.device)
    samples = tuple((x.clone().requires_grad_(),) for _ in layers)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        torch.cuda.make_graphed_callables(layers, samples)  # in place
    for name, alone in zip(found, layers, strict=True):
        model.set_submodule(name, Stateless(alone))


def measure_host(
    host: TrainedHost, layers: list[int], device: torch.device, budget: Budget, seed: int
) -> dict[str, Any]:
    """Agreement of the scan first; then both steps. Plain values for JSON."""
    cuda, config = device.type == "cuda", host.memory
    shape = host.scan_shape(torch.bfloat16 if cuda else torch.float32)
    row: dict[str, Any] = {
        "batch": host.batch,
        "memory": config.to_dict(),
        "layers_with_memory": layers,
        "layers": host.layers,
        "scan": shape.to_dict(),
        "agreement": check(shape, shape.scan(config.backend), device, seed),
        "parameters": {},
        "peak_bytes": {},
    }
    if row["agreement"]["failures"]:
        return row
    torch.manual_seed(seed)
    batch = host.draw(device)
    steps: dict[str, Training] = {}
    for name in (WITHOUT, WITH):
        held = torch.cuda.memory_allocated(device) if cuda else 0
        torch.manual_seed(seed)
        model = host.build(config if name == WITH else None, layers)
        steps[name] = Training(host, model, batch, device)
        row["parameters"][name] = sum(p.numel() for p in model.parameters())
        steps[name]()  # from now on the optimiser has its state
        row["peak_bytes"][name] = peak_bytes(steps[name], device, held)
    row |= _compared(measure_alternately(steps, device, budget))
    # A step that trains nothing would be fast too.
    row["loss_at_the_end"] = {name: step().item() for name, step in steps.items()}
    row["extra_peak_gib"] = None
    if cuda:
        with torch.autograd.set_multithreading_enabled(False):
            row["one_thread"] = _compared(measure_alternately(steps, device, budget))
        row["graph"] = {}
        with report.recorded(row["graph"], "not_captured"):  # the times above stand without it
            graphs = {name: captured(step) for name, step in steps.items()}
            row["graph"] = _compared(measure_alternately(graphs, device, budget))
        if host.tokens[0] == 1:  # else a layer's state goes from piece to piece
            row["layer_graphs"] = {}
            with report.recorded(row["layer_graphs"], "not_captured"):
                _check_layer_graphs(steps[WITH], row["agreement"])
                if not row["agreement"]["failures"]:
                    row["layer_graphs"] = _compared(measure_alternately(steps, device, budget))
        peaks = row["peak_bytes"]
        row["extra_peak_gib"] = (peaks[WITH] - peaks[WITHOUT]) / report.GIB
    return row


def _check_layer_graphs(step: Training, agreement: dict[str, Any]) -> None:
    """Graph the layers, and compare the gradients of the weights with those before."""
    expected = step.gradients()
    graph_layers(step)
    found = step.gradients()
    worst = max(rms_ratio(got, grad) for got, grad in zip(found, expected, strict=True))
    agreement["rms_ratios"]["layer_graphs"] = worst
    if not worst <= (bound := agreement["bounds"]["gradients"]):
        agreement["passed"] = False
        agreement["failures"].append(
            f"layer graphs: error {worst:.1e} of a gradient's size, allowed {bound:.0e}"
        )


def _compared(timed: dict[str, Timing]) -> dict[str, Any]:
    base, memory = timed[WITHOUT]["median"], timed[WITH]["median"]
    return {"ms": timed, "added_ms": memory - base, "ratio": memory / base}


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every model asked for; one that fails is recorded and the others go on."""
    budget = QUICK if options.quick else Budget(seconds=8.0, least=10, most=100, warm_up=3)
    rows: dict[str, Any] = {}
    with progress("train-step", len(options.models), unit="models") as advance:
        for name in options.models:
            host = _host(name, options, batch=2 if device.type == "cpu" else 32)
            named = options.layers_with_memory
            layers = list(range(host.layers)) if named is None else sorted(set(named))
            rows[name] = {"errors": {}}
            # Out of memory, or a shape that the backend refuses, costs this model alone.
            with report.recorded(rows[name]["errors"], "all"):
                host = replace(host, memory=replace(host.memory, **options.changes))
                rows[name] |= measure_host(host, layers, device, budget, options.seed)
            if device.type == "cuda":
                torch.cuda.empty_cache()
            advance(note=name)
    return {"models": rows}


def _host(name: str, options: argparse.Namespace, **sizes: Any) -> TrainedHost:
    memory = {"memory": options.memory} if name == "language" else {}
    return HOSTS[name](quick=options.quick, **sizes, **memory)


def table(result: dict[str, Any]) -> report.Rows:
    """A line per model."""
    number = report.number
    rows = []
    for name, row in result["models"].items():
        if "ms" not in row:
            continue
        memory = row["memory"]
        kind = f"K {memory['chunk_size']}" if "chunk_size" in memory else f"H {memory['heads']}"
        way = f"a read per {memory['reads']}" if "reads" in memory else f"{memory['rule']} rule"
        grid = "x".join(map(str, memory["grid"]))
        line = {
            "model": name,
            "memory": f"C {memory['channels']}, {grid}, {kind}, "
            f"{len(row['layers_with_memory'])} of {row['layers']} layers, "
            f"{way}, {memory['backend']}",
            "parameters, M": " / ".join(f"{n / 1e6:.2f}" for n in row["parameters"].values()),
        }
        ways = {"": row} | {
            f"{name.replace('_', ' ')}: ": row.get(name)
            for name in ("one_thread", "layer_graphs", "graph")
        }
        for called, way in ways.items():
            if way is None:
                continue
            medians = [number(ms["median"], 4) for ms in way.get("ms", {}).values()]
            line[f"{called}base / with, ms"] = " / ".join(medians)
            line[f"{called}ratio"] = number(way.get("ratio"))
        line["added, ms"] = number(row["added_ms"])
        line["extra peak, GiB"] = number(row["extra_peak_gib"])
        rows.append(line)
    return rows


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where a scan disagreed or a part died."""
    parser = report.make_parser(
        "train-step", "Time a training step of the compared models with and without memory."
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=HOSTS, help="what carries the memory (default: all)")
    add_memory_options(parser)
    add("--layers-with-memory", type=int, nargs="+", help="indices from 0 (default: all layers)")
    add("--chunk-size", type=count, help="tokens per write (default: the published)")
    options, device = report.parse(parser, argv)
    options.changes = memory_changes(parser, options)
    if options.models is None:
        options.models = ["language"] if options.memory == "place" else list(HOSTS)
    if options.memory == "place" and options.models != ["language"]:
        parser.error("--memory place: expected --models language, which is the one that takes it")
    for name in options.models:
        layers = _host(name, options).layers
        for index in options.layers_with_memory or ():
            if not 0 <= index < layers:
                parser.error(
                    f"--layers-with-memory: expected indices from 0 to {layers - 1} for the "
                    f"{name} model, got {index}"
                )
    result = run(options, device)
    cuda = device.type == "cuda"
    config = {
        "optimizer": "AdamW, fused" if cuda else "AdamW",
        "autocast": "bfloat16" if cuda else None,
        "memory": options.memory,
    }
    complaints = report.failures(result["models"])
    return report.finish("train-step", options, device, config, result, [table(result)], complaints)
