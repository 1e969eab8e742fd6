"""Records and their tables: where a result is written, how it is printed and put into docs.

tensor-memory bench table results/bench/scan-nvidia-h200.json
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tensor_memory_lab.files import read_json
from tensor_memory_lab.provenance import cpu_model, write_record
from tensor_memory_lab.wording import counted

Rows = list[dict[str, str]]

MIB = 2**20


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def slug(name: str) -> str:
    """A name as part of a file name.

    >>> slug("NVIDIA H200"), slug("Intel(R) Xeon(R) CPU @ 2.20GHz")
    ('nvidia-h200', 'intel-xeon-cpu-2-20ghz')
    """
    plain = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def write(
    options: argparse.Namespace,
    benchmark: str,
    device: torch.device,
    config: dict[str, Any],
    result: dict[str, Any],
) -> Path:
    """Write the record to `--output`, or under its default name into `results/bench`."""
    path: Path | None = options.output
    if path is None:
        tried = "quick-" if options.quick else ""
        path = Path("results/bench") / f"{benchmark}-{tried}{slug(device_name(device))}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, benchmark=benchmark, config=config, seed=options.seed, result=result)
    return path


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that are values; where one is worked out, the help text says how."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default is not None and action.default is not False
        return super()._get_help_string(action) if shown else action.help


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """The options that all measuring commands share."""
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs")
    add("--backend", help="implementation of the scan (triton on a GPU, torch on a CPU)")
    add("--quick", action="store_true", help="tiny shapes, two repeats: does it run?")
    add("--seed", type=int, default=0, help="of weights and inputs")
    add("--output", type=Path, help="the JSON file (default: results/bench/NAME-DEVICE.json)")


def check_common_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> torch.device:
    """The device asked for; what cannot be served is refused before any work."""
    from tensor_memory import backends

    if options.device not in ("cpu", "cuda"):
        parser.error(f"--device: expected cpu or cuda, got {options.device!r}")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a CUDA device, and none is available; use --device cpu")
    if options.backend is None:
        options.backend = "triton" if device.type == "cuda" else "torch"
    reasons = backends(device)
    if options.backend not in reasons:  # a number must say what it measured
        parser.error(f"--backend: expected one of {', '.join(reasons)}, got {options.backend!r}")
    reason = reasons[options.backend]
    if reason is not None:
        parser.error(f"--backend {options.backend}: {reason}")
    if options.output is not None:
        _check_output(parser, options.output)
    return device


def _check_output(parser: argparse.ArgumentParser, path: Path) -> None:
    """Refuse now what could not be written after everything has been measured."""
    if not path.parent.is_dir():
        parser.error(f"--output: expected a file in an existing folder, got {path}")
    if path.is_dir():
        parser.error(f"--output: expected the name of a file, got the folder {path}")
    tried = path.with_name(f".{path.name}.tried")
    try:
        tried.touch()
        tried.unlink()
    except OSError as error:
        parser.error(
            f"--output: expected a file that can be written, got {path} ({error.strerror}); "
            "choose another folder"
        )


def aligned(rows: Rows) -> str:
    """Rows as plain text, columns aligned.

    >>> print(aligned([{"a": "1", "bb": "x"}, {"a": "100", "bb": "y"}]))
    a    bb
    1    x
    100  y
    """
    if not rows:
        return ""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown(rows: Rows) -> str:
    """Rows as a Markdown table."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


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


def aim_rows(aims: Sequence[dict[str, Any]]) -> Rows:
    """What had to be reached, and was."""
    said = {True: "yes", False: "NO", None: "–"}
    return [
        {
            "work": f"{aim['work']}{', ' + aim['how'] if aim['how'] else ''}",
            "published": aim["published"],
            "needed": f"{'≥' if aim['at_least'] else '≤'} {number(aim['needed'])} {aim['unit']}",
            "aim": f"{number(aim['aim'])} {aim['unit']}",
            "measured": f"{number(aim['value'])} {aim['unit']}",
            "needed reached": said[aim["meets_needed"]],
            "aim reached": said[aim["meets_aim"]],
        }
        for aim in aims
    ]


def tables(record: dict[str, Any]) -> list[Rows]:
    """The tables of a record, by its benchmark."""
    from tensor_memory_lab.bench import decode, scan_tables, train_step

    known = {"scan": scan_tables.rows, "train-step": train_step.rows, "decode": decode.rows}
    if record.get("benchmark") not in known:
        raise ValueError(
            f"expected a record of {', '.join(known)}, got one of {record.get('benchmark')!r}"
        )
    found = known[record["benchmark"]](record["result"])
    return [rows for rows in (*found, aim_rows(record["result"]["aims"])) if rows]


def load(path: Path) -> dict[str, Any]:
    """A record written by `write`; anything else is a `ValueError` that names the file."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; expected a JSON record of a benchmark")
    remedy = "leave it out, or measure it again with `tensor-memory bench`"
    record = read_json(path, "the record of a benchmark", remedy)
    missing = [name for name in _NEEDED if name not in record]
    if missing:
        raise ValueError(
            f"{path}: expected the record of a benchmark ({', '.join(_NEEDED)}), got one without "
            f"{', '.join(missing)}; {remedy}"
        )
    return record


_NEEDED = ("benchmark", "config", "result", "commit", "dirty", "date", "versions", "hardware")


def main(argv: list[str]) -> int:
    """Print records as Markdown tables, with what they were measured on."""
    parser = argparse.ArgumentParser(
        prog="tensor-memory bench table", description="Print results as Markdown tables."
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON records")
    for path in parser.parse_args(argv).results:
        try:
            record = load(path)
        except ValueError as error:
            parser.error(str(error))
        try:
            parts = [markdown(rows) for rows in tables(record)]
        except ValueError as error:
            parser.error(f"{path}: {error}; leave it out")
        hardware, versions = record["hardware"], record["versions"]
        where = record["config"]["device_name"]
        changed = ", with changes" if record["dirty"] else ""
        print(
            f"`{path.name}`: {where}, torch {versions['torch']}, "
            f"{counted(hardware['torch_threads'], 'thread')}, commit "
            f"{(record['commit'] or 'unknown')[:12]}{changed}, {record['date'][:10]}\n"
        )
        print("\n\n".join(parts), end="\n\n")
    return 0


def finish(
    name: str,
    options: argparse.Namespace,
    device: torch.device,
    config: dict[str, Any],
    result: dict[str, Any],
    tables: list[Rows],
    complaints: list[str],
) -> int:
    """Print the tables, write the record, tell what went wrong; 1 where anything did."""
    common = {
        "device": options.device,
        "device_name": device_name(device),
        "backend": options.backend,
        "quick": options.quick,
    }
    for table in tables:  # first, so that a disk that refuses the record does not take them along
        print(aligned(table), end="\n\n" if table else "", flush=True)
    path = write(options, name, device, common | config, result)
    print(f"written to {path}")
    for complaint in complaints:
        print(f"{name}: {complaint}", file=sys.stderr)
    return 1 if complaints else 0
