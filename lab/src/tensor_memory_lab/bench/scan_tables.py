"""What a result of `bench scan` says in words and tables; nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensor_memory_lab.bench import report


def complaints(result: dict[str, Any]) -> list[str]:
    """Parts that disagreed or died, or were not reached, in words."""
    parts = dict(result["shapes"])
    if "cpu_memory" in result:
        parts["cpu_memory"] = result["cpu_memory"]
    for name, swept in result["sweeps"].items():
        parts |= {f"sweep over {name}, {row['label']}": row for row in swept}
    found = []
    for name, row in parts.items():
        found += [f"{name}, {part}: {error}" for part, error in row.get("errors", {}).items()]
        disagreements = row.get("agreement", {}).get("failures", [])
        found += [f"{name} DISAGREES with the reference: {text}" for text in disagreements]
    if result.get("interrupted"):
        found.append("interrupted: what is not in the tables was not measured")
    return found


def rows(result: dict[str, Any]) -> list[report.Rows]:
    """Tables of a result: the published shapes, the CPU's row, the sweeps."""
    measured = {name: row for name, row in result["shapes"].items() if "ms" in row}
    found = [[_row(name, row) for name, row in measured.items()]]
    cpu = result.get("cpu_memory", {})
    if "ratio" in cpu:
        ms = {f"{name}, ms": report.number(t["median"]) for name, t in cpu["ms"].items()}
        times = {"times faster": report.number(cpu["ratio"])}
        found.append([{"whole memory": cpu["label"]} | ms | times])
    swept = [(f"over {name}", row) for name, part in result["sweeps"].items() for row in part]
    return [*found, [_row(name, row) for name, row in swept if "ms" in row]]


def _row(name: str, row: dict[str, Any]) -> dict[str, str]:
    number = report.number

    def both(values: dict[str, Any], pick: Callable[[Any], float]) -> str:
        return " / ".join(number(pick(value)) for value in values.values())

    loops = {
        title: number(row[key]["ratio"]["forward_backward"]) if key in row else "–"
        for key, title in (
            ("plain_loop", "× plain loop"),
            ("compiled_plain_loop", "× compiled loop"),
        )
    }
    share = row["share_of_ceiling"]["forward_backward"]
    hows = "/".join(row["ms"]["forward"])
    return {
        "scan": name,
        "shape": row["label"],
        f"forward, ms ({hows})": both(row["ms"]["forward"], lambda t: t["median"]),
        f"kept, ms ({hows})": both(row["ms"]["forward_kept"], lambda t: t["median"]),
        f"forward + backward, ms ({hows})": both(
            row["ms"]["forward_backward"], lambda t: t["median"]
        ),
        "µs per step": both(row["us_per_step"]["forward_backward"], lambda t: t),
        "peak, MiB": report.mib(row["peak_bytes"]["forward_backward"]),
        **loops,
        "of matrix ceiling": f"{100 * share['matmul']:.1f} %",
        "of bandwidth": f"{100 * share['bandwidth']:.1f} %",
    }
