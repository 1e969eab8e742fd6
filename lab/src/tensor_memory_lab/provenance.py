"""Where a number comes from: commit, versions, hardware, date."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tensor_memory
from tensor_memory_lab.records import append

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy", "fla-core")


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """What must stand beside a measured number for it to be repeated; plain values for JSON.

    With the `device` of the measurement a GPU is named only where it is the one; without, the one
    that is there.

    >>> sorted(provenance())
    ['commit', 'date', 'dirty', 'hardware', 'versions']
    """
    commit, dirty = _commit()
    return {
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "hardware": _hardware(device),
    }


def write_record(
    path: str | os.PathLike[str],
    *,
    benchmark: str,
    config: dict[str, Any],
    seed: int,
    result: dict[str, Any],
    device: torch.device | None = None,
) -> None:
    """Add what was run, what came out and where to a study's file."""
    record = {"kind": "benchmark", "benchmark": benchmark, "config": config}
    append(path, record | {"seed": seed, "result": result} | provenance(device))


def _commit() -> tuple[str | None, bool | None]:
    """HEAD of this package's repository and whether tracked code differs from it.

    Results and pages are no code: a sweep itself adds to a study that is tracked. Where the
    package is not run from a checkout with commits, or git is not there: what TENSOR_MEMORY_COMMIT
    says (a copy sent to another machine), and None.
    """
    package = Path(tensor_memory.__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    # An installed copy may lie inside somebody else's repository, whose commit says nothing.
    ours = top is not None and Path(top).resolve() / "src" / "tensor_memory" == package
    head = _git(package, "rev-parse", "--verify", "HEAD") if ours else None
    if head is None:
        return os.environ.get("TENSOR_MEMORY_COMMIT"), None
    code = [":/", *(f":(top,exclude){folder}" for folder in ("results", "docs"))]
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", *code)
    return head, None if changed is None else changed != ""


def _git(folder: Path, *arguments: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"tensor-memory": tensor_memory.__version__, "python": platform.python_version()}
    # With its build, which tells CPU from CUDA.
    return versions | _package_versions() | {"torch": torch.__version__}


@functools.cache  # a search through every folder of the path
def _package_versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _hardware(device: torch.device | None) -> dict[str, Any]:
    gpu = None
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        gpu = torch.cuda.get_device_name(device)
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """What the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
