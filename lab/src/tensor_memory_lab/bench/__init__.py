"""Benchmarks: ratios measured side by side in one run, each behind a check of correctness."""

from __future__ import annotations

import argparse
import importlib

COMMANDS = {
    "stream": "a long stream: speed, state, resident memory",
    "scan": "the scan alone: times, memory, shares of ceilings",
    "places": "the place memory alone: both rules, growing grids",
    "train-step": "a model's step with and without memory",
    "decode": "one token at a time: latency and bytes",
    "quantize": "a place memory's state in fewer bytes: errors along a stream",
}


def main(argv: list[str]) -> int:
    """Run the benchmark named first in `argv` with the arguments after it; return its status."""
    parser = argparse.ArgumentParser(
        prog="tensor-memory-lab bench",
        description="Benchmarks of the memory. Each explains its options with --help.",
        epilog="\n".join(f"{name:<12}{shows}" for name, shows in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=COMMANDS, help="the benchmark to run")
    name = parser.parse_args(argv[:1]).name.replace("-", "_")
    return importlib.import_module(f"tensor_memory_lab.bench.{name}").main(argv[1:])
