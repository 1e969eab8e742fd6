"""What every benchmark shares: its options, the table in the terminal, the record."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tensor_memory import backends
from tensor_memory_lab.files import make_folder_of
from tensor_memory_lab.provenance import cpu_model, write_record
from tensor_memory_lab.records.store import check_study
from tensor_memory_lab.terminal import print_table

Rows = list[dict[str, str]]

MIB, GIB = 2**20, 2**30

RECORDS = Path("results/bench.jsonl")
"""Where records go unless told otherwise."""


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that are values; where one is worked out, the help text says how."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default is not None else action.help


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"tensor-memory-lab bench {name}", description=description, formatter_class=_Defaults
    )
    add = parser.add_argument
    there = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cpu", "cuda"), default=there, help="where to measure")
    add("--backend", help="implementation of the scan (default: triton on a GPU, torch on a CPU)")
    add("--seed", type=int, default=0, help="of weights and inputs")
    add("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    add(
        "--output", type=Path,
        help=f"JSON lines to add the record to (default: {RECORDS}, with --quick none)",
    )  # fmt: skip
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, torch.device]:
    """Options and device; what cannot be served or written is refused before any work."""
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a CUDA device, and none is available; use --device cpu")
    if options.backend is None:
        options.backend = "triton" if device.type == "cuda" else "torch"
    reasons = backends(device)
    if options.backend not in reasons:  # a number must say what it measured
        parser.error(f"--backend: expected one of {', '.join(reasons)}, got {options.backend!r}")
    if (reason := reasons[options.backend]) is not None:
        parser.error(f"--backend {options.backend}: {reason}")
    if options.output is None and not options.quick:
        options.output = RECORDS
    if options.output is not None:
        try:
            make_folder_of(options.output, "records")
            check_study(options.output)
        except (OSError, ValueError) as error:
            parser.error(f"--output: {error}")
    return options, device


@contextmanager
def recorded(errors: dict[str, str], part: str) -> Iterator[None]:
    """Note what one measured part dies of; the others keep their numbers.

    RuntimeError: out of memory, a refused launch or capture. ValueError: a shape the backend says
    it cannot serve. Triton's own: a kernel that does not compile or fit.
    """
    known: tuple[type[Exception], ...] = (RuntimeError, ValueError)
    if "triton" in sys.modules:
        from triton.errors import TritonError

        known = (*known, TritonError)
    try:
        yield
    except known as error:
        errors[part] = f"{type(error).__name__}: {str(error).strip()[:2000]}"


def failures(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """What of measured rows, by their names, disagreed or died."""
    found: list[str] = []
    for name, row in rows.items():
        found += [f"{name}, {part}: {error}" for part, error in row.get("errors", {}).items()]
        disagreed = row.get("agreement", {}).get("failures", [])
        found += [f"{name} DISAGREES with the reference: {text}" for text in disagreed]
    return found


def finish(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    config: dict[str, Any],
    result: dict[str, Any],
    tables: list[Rows],
    complaints: list[str],
) -> int:
    """Print the tables, add the record to its file, tell what went wrong; 1 where anything did."""
    for rows in tables:  # first, so that a disk that refuses the record does not take them along
        if rows:
            print_table(rows)
    common = {
        "device": options.device,
        "device_name": device_name(device),
        "backend": options.backend,
        "quick": options.quick,
    }
    if options.output is not None:
        what = {"benchmark": name, "config": common | config, "seed": options.seed}
        write_record(options.output, **what, result=result, device=device)
        print(f"added to {options.output}")
    for complaint in complaints:
        print(f"{name}: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def number(value: float | None, digits: int = 3) -> str:
    """A number to `digits` significant digits, a dash where there is none.

    >>> number(0.12345), number(1234.5), number(None)
    ('0.123', '1234', '–')
    """
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def mib(value: float | None) -> str:
    """Bytes in MiB."""
    return number(None if value is None else value / MIB)
