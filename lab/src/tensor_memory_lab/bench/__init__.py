"""Benchmarks. `python -m tensor_memory_lab.bench <name>` runs one; `--help` lists them."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "stream": (
        "tensor_memory_lab.bench.stream:main",
        "a long stream: speed, state, resident memory",
    ),
    "scan": (
        "tensor_memory_lab.bench.scan:main",
        "the scan alone: times, memory, shares of ceilings",
    ),
    "train-step": (
        "tensor_memory_lab.bench.train_step:main",
        "a model's step with and without memory",
    ),
    "decode": ("tensor_memory_lab.bench.decode:main", "one token at a time: latency and bytes"),
    "plot": ("tensor_memory_lab.bench.plots:main", "draw results"),
    "table": ("tensor_memory_lab.bench.report:main", "print results as Markdown tables"),
}
"""Name -> where its `main(argv) -> exit status` is, imported only when asked for; what it shows."""


def main(argv: list[str]) -> int:
    """Run the benchmark named first in `argv` with the arguments after it; return its status."""
    parser = argparse.ArgumentParser(
        prog="tensor-memory bench",
        description="Benchmarks of the memory. Each explains its options with --help.",
        epilog="\n".join(f"{name:<12}{shows}" for name, (_, shows) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=COMMANDS, help="the benchmark to run")
    chosen = parser.parse_args(argv[:1]).name
    module, function = COMMANDS[chosen][0].split(":")
    return getattr(importlib.import_module(module), function)(argv[1:])
