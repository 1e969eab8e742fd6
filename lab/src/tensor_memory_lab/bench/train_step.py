"""A training step with and without memory, turn by turn in one run.

    tensor-memory bench train-step

Forward, backward and AdamW of the language and the video model at their published sizes, bfloat16
autocast on a GPU; there each step is also timed with its backward on the calling thread, where
autograd has a thread of its own otherwise, and captured as a CUDA graph, which spares both models
the time that Python takes to launch. The scan they use is compared with the float64 reference
first; where that fails no speed is given and the status is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensor_memory import MemoryConfig
from tensor_memory_lab.bench import agreement, aims, report
from tensor_memory_lab.bench.hosts import HOSTS, Host
from tensor_memory_lab.bench.shapes import ScanShape
from tensor_memory_lab.bench.timing import (
    QUICK,
    Budget,
    Timing,
    captured,
    describe,
    measure_alternately,
    part_failures,
)
from tensor_memory_lab.models import Model
from tensor_memory_lab.progress import progress
from tensor_memory_lab.tasks import Batch

GIB = 2**30
WITHOUT, WITH = "base", "memory"
WAYS = {"one_thread": "one thread", "graph": "graph"}
"""Ways to launch a step on a GPU, beside the usual one."""


class Training:
    """A model, its optimiser and one batch; calling it takes one step."""

    def __init__(self, host: Host, model: Model, batch: Batch, device: torch.device) -> None:
        self.device, self.host = device, host
        self.model = model.to(device).train()
        self.batch = batch
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=3e-4,
            weight_decay=0.1,
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )

    def __call__(self) -> Tensor:
        """Forward, backward, update; the loss, which nobody waits for."""
        cuda = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16 if cuda else None, enabled=cuda):
            loss = self.host.loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measure_host(
    host: Host,
    config: MemoryConfig,
    layers: list[int],
    device: torch.device,
    budget: Budget,
    seed: int,
) -> dict[str, Any]:
    """Agreement of the scan first; then both steps. Plain values for JSON."""
    row: dict[str, Any] = {
        "batch": host.batch,
        "memory": config.to_dict(),
        "layers_with_memory": layers,
        "layers": host.layers,
    }
    shape = ScanShape(
        host.batch,
        host.steps(config.chunk_size),
        config.channels,
        config.grid,
        torch.bfloat16 if device.type == "cuda" else torch.float32,
        reads=config.chunk_size if config.reads == "token" else 1,
    )
    row["scan"] = shape.to_dict()
    agreed = agreement.check(shape, config.backend, device, seed)
    row["agreement"] = agreed.to_dict()
    if agreed.failures:
        return row

    torch.manual_seed(seed)
    batch = host.draw(device)
    steps: dict[str, Training] = {}
    peaks: dict[str, int | None] = {}
    for name in (WITHOUT, WITH):
        held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        torch.manual_seed(seed)
        model = host.build(config if name == WITH else None, layers)
        steps[name] = Training(host, model, batch, device)
        row.setdefault("parameters", {})[name] = sum(p.numel() for p in model.parameters())
        peaks[name] = _peak_of_training(steps[name], held)
    timed = measure_alternately(steps, device, budget)
    losses = {name: step().item() for name, step in steps.items()}
    row |= _compared(timed)
    if device.type == "cuda":
        row["one_thread"] = _compared(measure_on_one_thread(steps, device, budget))
        try:  # a model that asks the device a question cannot be captured; its times above stand
            graphs = {name: captured(step) for name, step in steps.items()}
            row["graph"] = _compared(measure_alternately(graphs, device, budget))
        except part_failures() as error:
            row["graph"] = {"not_captured": describe(error)}
    row["peak_bytes"] = peaks
    before, after = peaks[WITHOUT], peaks[WITH]
    row["extra_peak_gib"] = None if before is None or after is None else (after - before) / GIB
    row["loss_at_the_end"] = losses  # a step that trains nothing would be fast too
    return row


def measure_on_one_thread(
    steps: Mapping[str, Callable[[], Any]], device: torch.device, budget: Budget
) -> dict[str, Timing]:
    """Time steps whose backward runs on the calling thread."""
    with torch.autograd.set_multithreading_enabled(False):
        return measure_alternately(steps, device, budget)


def _compared(timed: dict[str, Timing]) -> dict[str, Any]:
    return {
        "ms": {name: timing.to_dict() for name, timing in timed.items()},
        "added_ms": timed[WITH].median - timed[WITHOUT].median,
        "ratio": timed[WITH].median / timed[WITHOUT].median,
    }


def _peak_of_training(step: Training, held: int) -> int | None:
    """The most memory a step holds, weights and optimiser included; None on a CPU."""
    for _ in range(2):  # the optimiser's state exists from the first on
        step()
    if step.device.type != "cuda":
        return None
    torch.cuda.synchronize(step.device)
    torch.cuda.reset_peak_memory_stats(step.device)
    step()
    torch.cuda.synchronize(step.device)
    return torch.cuda.max_memory_allocated(step.device) - held


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Every model asked for; one that fails is recorded and the others go on."""
    budget = QUICK if options.quick else Budget(seconds=8.0, least=10, most=100, warm_up=3)
    result: dict[str, Any] = {"models": {}, "aims": []}
    with progress("train-step", len(options.models), unit="models") as advance:
        for name in options.models:
            host = HOSTS[name](quick=options.quick, batch=2 if device.type == "cpu" else 32)
            config = chosen_memory(host, options)
            layers = chosen_layers(host, options)
            try:  # out of memory, or a shape the backend refuses, costs this model alone
                row = measure_host(host, config, layers, device, budget, options.seed)
            except part_failures() as error:
                row = {"errors": {"all": describe(error)}}
            result["models"][name] = row
            if device.type == "cuda":
                torch.cuda.empty_cache()
            advance(note=name)
    published = HOSTS["language"]()
    row = result["models"].get("language", {})
    as_published = (
        row.get("memory") == replace(published.memory, backend=options.backend).to_dict()
        and row["layers_with_memory"] == list(range(published.layers))
        and aims.applies(report.device_name(device))
    )
    if as_published:
        for key, aim in aims.LANGUAGE_STEP.items():
            result["aims"].append(aim.judge(row.get(key), "eager"))
            for way, called in WAYS.items():
                if key in row.get(way, {}):
                    result["aims"].append(aim.judge(row[way][key], called))
    return result


def chosen_memory(host: Host, options: argparse.Namespace) -> MemoryConfig:
    """The host's published memory with what the options change."""
    changes: dict[str, Any] = {"backend": options.backend, "reads": options.reads}
    if options.chunk_size is not None:
        changes["chunk_size"] = options.chunk_size
    return replace(host.memory, **changes)


def chosen_layers(host: Host, options: argparse.Namespace) -> list[int]:
    """Indices of the layers that get a memory; all unless named."""
    named = options.layers_with_memory
    return list(range(host.layers)) if named is None else sorted(set(named))


def complaints(result: dict[str, Any]) -> list[str]:
    """Models that disagreed or died, in words."""
    found = []
    for name, row in result["models"].items():
        found += [f"{name}, {part}: {error}" for part, error in row.get("errors", {}).items()]
        disagreements = row.get("agreement", {}).get("failures", [])
        found += [f"{name} DISAGREES with the reference: {text}" for text in disagreements]
    return found


def rows(result: dict[str, Any]) -> list[report.Rows]:
    """One table: a line per model."""
    number = report.number
    table = []
    for name, row in result["models"].items():
        if "ms" not in row:
            continue
        count, peaks = row["parameters"], row["peak_bytes"]
        memory = row["memory"]
        grid = "x".join(map(str, memory["grid"]))
        table.append(
            {
                "model": name,
                "memory": f"C {memory['channels']}, {grid}, K {memory['chunk_size']}, "
                f"{len(row['layers_with_memory'])} of {row['layers']} layers, "
                f"a read per {memory['reads']}, {memory['backend']}",
                "parameters, M": f"{count[WITHOUT] / 1e6:.2f} / {count[WITH] / 1e6:.2f}",
                "base, ms": number(row["ms"][WITHOUT]["median"], 4),
                "with memory, ms": number(row["ms"][WITH]["median"], 4),
                "added, ms": number(row["added_ms"]),
                "ratio": number(row["ratio"]),
            }
            | {
                f"{called}: {column}": text
                for way, called in WAYS.items()
                if way in row
                for column, text in _shown(row[way]).items()
            }
            | {
                "peak, GiB": " / ".join(
                    number(None if peak is None else peak / GIB) for peak in peaks.values()
                ),
                "extra peak, GiB": number(row["extra_peak_gib"]),
            }
        )
    return [table]


def _shown(way: dict[str, Any]) -> dict[str, str]:
    medians = [report.number(ms["median"], 4) for ms in way.get("ms", {}).values()]
    return {"base / with, ms": " / ".join(medians), "ratio": report.number(way.get("ratio"))}


def main(argv: list[str]) -> int:
    """Run the benchmark; 1 where a scan disagreed or a part died."""
    parser = argparse.ArgumentParser(
        prog="tensor-memory bench train-step",
        description="Time a training step of the compared models with and without memory.",
        formatter_class=report.Defaults,
    )
    report.add_common_options(parser)
    add = parser.add_argument
    add("--models", nargs="+", choices=HOSTS, default=list(HOSTS), help="what carries the memory")
    add("--layers-with-memory", type=int, nargs="+", help="indices from 0 (default: all layers)")
    add("--chunk-size", type=int, help="tokens per write (default: the published)")
    add("--reads", choices=("chunk", "token"), default="chunk", help="what each read is for")
    options = parser.parse_args(argv)
    device = report.check_common_options(parser, options)
    if options.chunk_size is not None and options.chunk_size < 1:
        parser.error(f"--chunk-size: expected at least 1, got {options.chunk_size}")
    for name in options.models:
        layers = HOSTS[name](quick=options.quick).layers
        for index in options.layers_with_memory or ():
            if not 0 <= index < layers:
                parser.error(
                    f"--layers-with-memory: expected indices from 0 to {layers - 1} for the "
                    f"{name} model, got {index}"
                )
    result = run(options, device)
    config = {
        "optimizer": "AdamW, fused" if device.type == "cuda" else "AdamW",
        "autocast": "bfloat16" if device.type == "cuda" else None,
    }
    return report.finish(
        "train-step",
        options,
        device,
        config,
        result,
        [*rows(result), report.aim_rows(result["aims"])],
        complaints(result),
    )
