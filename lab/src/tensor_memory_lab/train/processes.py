"""Devices and processes, through Accelerate: one of each, or many started by a launcher."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tensor_memory_lab.train.options import RunOptions

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_accelerator(options: RunOptions) -> Accelerator:
    """The processes this run belongs to, the device of this one, and the trackers asked for.

    `torchrun` and `accelerate launch` say in the environment how many processes there are. What
    else a launcher configures (precision, accumulation, sharding) is the run's own affair.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    device = find_device(options.device)
    known = PartialState._shared_state
    if known and (known["device"].type == "cpu") != (device == "cpu"):
        if known["num_processes"] > 1:
            raise ValueError(
                f"device: expected {known['device'].type} like the run before in these processes, "
                f"got {options.device!r}; start it with a launcher of its own"
            )
        AcceleratorState._reset_state(reset_partial_state=True)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no",  # the config decides it, and the loop applies it
        log_with=_trackers(options.trackers) or None,
        project_dir=str(options.output / "trackers"),
    )
    kinds = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in kinds:
        raise ValueError(
            "accelerate launch: expected one process or data-parallel ones (NO, MULTI_GPU, "
            f"MULTI_CPU), got {accelerator.distributed_type.value}; choose another configuration"
        )
    return accelerator


def share_gradients(
    accelerator: Accelerator, model: nn.Module, loss: Callable[[], Tensor]
) -> nn.Module:
    """The model with its gradients averaged over the processes.

    `loss` makes one loss of the run. It tells whether there are weights that get no gradient, such
    as those of a memory that reads and never writes, in rows shorter than a chunk. Only then are
    they looked for at every step, which costs time, and a warning where the search is in vain.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    loss().backward()
    idle = any(p.grad is None for p in model.parameters() if p.requires_grad)
    model.zero_grad(set_to_none=True)
    votes = torch.tensor(int(idle), device=accelerator.device)
    anywhere = bool(cast(Tensor, accelerator.reduce(votes, reduction="sum")).item())
    handler: Any = DistributedDataParallelKwargs(find_unused_parameters=anywhere)
    accelerator.ddp_handler = handler
    return accelerator.prepare_model(model)


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


def _trackers(names: tuple[str, ...]) -> list[Any]:
    """Accelerate passes over a tracker that is not installed in silence; here it is an error."""
    if not names:
        return []
    from accelerate.tracking import get_available_trackers

    logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)
    installed = sorted(str(tracker.value) for tracker in get_available_trackers())
    missing = [name for name in names if name != "all" and name not in installed]
    if missing:
        raise ValueError(
            f"trackers: expected one of those installed ({', '.join(installed) or 'none'}), "
            f"got {', '.join(missing)}; check the name, or install it with pip"
        )
    return list(names)
