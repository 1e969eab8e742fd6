"""The compiled loss, made by one run for all that need the same code.

Runs of a sweep that differ in rate and seed compile the same. Where several start at once, the
first compiles; the others wait, and find the code in the compiler's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tensor_memory_lab.run_config import RunConfig
from tensor_memory_lab.tasks import Batch

CACHED = {f"torch.amp.autocast_mode._{way}_autocast": "1" for way in ("enter", "exit")}
"""What keeps PyTorch up to 2.13 from caching a graph, and need not: the arguments, which are in the
graph, say all that it does (pytorch/pytorch#191106). Else every run traces its backward again."""


def compiled(loss: Callable[..., Any], task: Any) -> Callable[..., Any]:
    """`loss(batch, carry)` compiled for each shape of a batch, but for sizes the task leaves open.

    What depends on a length is faster when the length is known. Dropout is as without a compiler.
    """
    options: dict[str, Any] = {"fallback_random": True}
    if (name := "unsafe_marked_cacheable_functions") in torch._inductor.list_options():
        options[name] = CACHED
    made = torch.compile(loss, dynamic=False, options=options)
    free = frozenset(getattr(task, "any_size", ()))

    def call(batch: Batch, *more: Any) -> Any:
        # Copies: code with an open size serves either views or whole tensors, and to compile once
        # more would break the capture of a CUDA graph.
        copies = {name: batch[name].clone() for name in free & batch.keys()}
        for x in copies.values():
            torch._dynamo.maybe_mark_dynamic(x, 1)
        return made(batch | copies, *more)

    return call


@contextmanager
def one_compiles(config: RunConfig[Any, Any], shape: tuple[torch.Size, ...]) -> Iterator[None]:
    """Inside, a run is alone among those with the same code, or comes after the one that was.

    Args:
        config: the run.
        shape: of the tensors of a batch, all parts that gradients are gathered over together.
    """
    # Slow to load; newer versions have it elsewhere too.
    from torch._inductor.codecache import cache_dir  # pyright: ignore[reportPrivateImportUsage]

    code = (config.task, config.model, config.precision, config.budget.accumulate, shape)
    name = hashlib.blake2b(repr(code).encode(), digest_size=8).hexdigest()
    with Path(cache_dir(), f"{name}.lock").open("a") as file:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(file, fcntl.LOCK_SH)  # those that waited go on beside each other
        try:
            yield
        finally:
            with suppress(OSError):  # a process that was forked inside would hold it
                fcntl.flock(file, fcntl.LOCK_UN)
