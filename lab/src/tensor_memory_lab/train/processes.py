"""Devices and processes, through Accelerate: one of each, or many started by a launcher."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(device: str, trackers: Sequence[str], output: Path) -> Accelerator:
    """The processes this run belongs to, the device of this one, and the trackers asked for.

    `torchrun` and `accelerate launch` say in the environment how many processes there are. What
    else a launcher configures (precision, accumulation, sharding) is the run's own affair.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    device = find_device(device)
    known = PartialState._shared_state
    if known and (known["device"].type == "cpu") != (device == "cpu"):
        if known["num_processes"] > 1:
            raise ValueError(
                f"device: expected {known['device'].type} like the run before in these processes, "
                f"got {device!r}; start it with a launcher of its own"
            )
        AcceleratorState._reset_state(reset_partial_state=True)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no",  # the config decides it, and the loop applies it
        log_with=_installed(trackers) or None,
        project_dir=str(output / "trackers"),
    )
    kinds = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in kinds:
        raise ValueError(
            "accelerate launch: expected one process or data-parallel ones (NO, MULTI_GPU, "
            f"MULTI_CPU), got {accelerator.distributed_type.value}; choose another configuration"
        )
    return accelerator


def find_device(name: str) -> str:
    """What "auto" stands for here, or the name itself; an error where there is no such device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= count:
            raise ValueError(
                f"device: expected one of the {count} CUDA devices there are, got {name!r}; "
                "'auto' takes a CPU where there is none"
            )
    return name if kind == "cuda" else "cpu"


def _installed(trackers: Sequence[str]) -> list[Any]:
    """Accelerate passes over a tracker that is not installed in silence; here it is an error."""
    from accelerate.tracking import get_available_trackers

    logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)
    installed = sorted(str(tracker.value) for tracker in get_available_trackers())
    missing = [name for name in trackers if name != "all" and name not in installed]
    if missing:
        raise ValueError(
            f"trackers: expected one of those installed ({', '.join(installed) or 'none'}), "
            f"got {', '.join(missing)}; check the name, or install it with pip"
        )
    return list(trackers)
