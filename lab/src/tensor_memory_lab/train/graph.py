"""Work on a batch as one CUDA graph, so that small models do not wait for kernel launches.

The first calls run eagerly on the stream that is captured later. They warm up kernels, workspaces
and the optimiser's state. In the last of them an operation that waits for the device is an error:
it could not be captured, and a capture that fails may leave the generator unusable. The capture
itself executes nothing, so nothing has to be restored after it.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tensor_memory_lab.tasks import Batch, HasShapes

WARM_UP = 3
"""Eager calls before the capture, of each shape of a batch."""


def why_not_graph(device: torch.device, processes: int) -> str | None:
    """The reason no CUDA graph can be captured here, or None."""
    if device.type != "cuda":
        return f"a CUDA graph needs a CUDA device, got {device.type}"
    return f"a CUDA graph is captured for one process, got {processes}" if processes > 1 else None


def refuse_graph(reason: str, error: BaseException | None = None) -> None:
    """Raise for a run that asks for a graph and cannot get one."""
    raise ValueError(
        f"speed 'graph' cannot serve this run: {reason}; choose --speed auto or eager"
    ) from error


@dataclass
class _Captured:
    """The graph of one shape of a batch."""

    calls: int = 0
    graph: Any = None
    batch: Batch = field(default_factory=dict)
    result: Any = None


class Graphed:
    """Calls `work(batch)`: eagerly at first, then by replaying a CUDA graph of it.

    Each replay overwrites what the one before returned. The first shapes that batches come in have
    a graph each; a batch of another shape is worked on eagerly.

    Args:
        work: takes a batch and reads nothing from the host.
        before: what the host does before each call, such as seeding.
        required: raise where no graph can be captured; otherwise go on eagerly.
        shapes: how many shapes have a graph.
    """

    def __init__(
        self,
        work: Callable[[Batch], Any],
        *,
        before: Callable[[], None] = lambda: None,
        required: bool = False,
        shapes: int = 1,
    ) -> None:
        self.work, self.before, self.required, self.shapes = work, before, required, shapes
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self._others = 0
        self._reason: str | None = None

    @property
    def described(self) -> str:
        """How work is launched, and why not otherwise."""
        if self._reason is not None:
            return f"eager (no CUDA graph: {self._reason})"
        if all(captured.calls <= WARM_UP for captured in self._captured.values()):
            return f"eager (a CUDA graph is captured after {WARM_UP} steps)"
        return f"graph ({self._others} steps eager, of other shapes)" if self._others else "graph"

    def __call__(self, batch: Batch) -> Any:
        """What `work` returns for this batch."""
        self.before()
        if self._reason is not None:
            return self.work(batch)
        shape = tuple((name, x.shape, x.dtype) for name, x in batch.items())
        if shape not in self._captured and len(self._captured) == self.shapes:
            if self.required:
                told = ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())
                first = "first" if self.shapes == 1 else f"first {self.shapes}"
                refuse_graph(f"a batch has other shapes than the {first}: {told}")
            self._others += 1
            return self.work(batch)
        captured = self._captured.setdefault(shape, _Captured())
        captured.calls += 1
        if captured.calls <= WARM_UP:
            return self._warm_up(batch, last=captured.calls == WARM_UP)
        if captured.graph is None:
            try:
                captured.graph = self._capture(batch, captured)
            except RuntimeError as error:
                return self._instead(batch, error)
        for name, x in batch.items():
            captured.batch[name].copy_(x, non_blocking=True)
        captured.graph.replay()
        return captured.result

    def close(self) -> None:
        """Free what the graphs hold."""
        for captured in self._captured.values():
            if captured.graph is not None:
                captured.graph.reset()
            captured.graph, captured.batch, captured.result = None, {}, None

    def _warm_up(self, batch: Batch, *, last: bool) -> Any:
        """An eager call on the stream of the capture; the last one may not wait for the device."""
        try:
            with aside(), no_waiting(last):
                return self.work(batch)
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            self._give_up(f"the step waits for the device{_place(error)}", error)
            # The frames of the error hold the autograd graph of the failed call, which would
            # take the gradients of the next one on the wrong stream.
            traceback.clear_frames(error.__traceback__)
        self.before()  # the call that failed has updated nothing: do it again
        return self.work(batch)

    def _capture(self, batch: Batch, captured: _Captured) -> torch.cuda.CUDAGraph:
        captured.batch = {name: x.clone() for name, x in batch.items()}

        def work() -> None:
            captured.result = self.work(captured.batch)

        # No two graphs run at once, and none reads what another left: they share their memory.
        pools = (other.graph.pool() for other in self._captured.values() if other.graph is not None)
        return capture(work, next(pools, None))

    def _instead(self, batch: Batch, error: RuntimeError) -> Any:
        """Go on eagerly after a capture that failed, where the device still lets us."""
        reason = f"capturing failed: {str(error).strip().splitlines()[0]}"
        self._give_up(reason, error)
        try:
            return self.work(batch)
        except RuntimeError as after:  # the generator may be left in the middle of the capture
            raise RuntimeError(
                f"no CUDA graph ({reason}), and no step is possible after it ({after}); run it "
                "with --speed eager"
            ) from error

    def _give_up(self, reason: str, error: BaseException) -> None:
        if self.required:
            refuse_graph(reason, error)
        self._reason = reason


def shapes_of(task: Any) -> int:
    """How many shapes the batches of a task come in."""
    return task.shapes if isinstance(task, HasShapes) else 1


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """One stream per device: cuBLAS keeps a workspace for every stream that it has met."""
    return torch.cuda.Stream(device)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, work runs on the stream that is captured."""
    current, stream = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def capture(work: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of `work`, in memory of its own or in the pool of another graph."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    stream = _stream(torch.cuda.current_device())
    try:
        # Other threads may make batches meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
    except RuntimeError:
        torch.cuda.set_stream(current)
        torch.cuda.synchronize()
        raise
    return graph


@contextmanager
def no_waiting(refused: bool = True) -> Iterator[None]:
    """Inside, an operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _watch_waits("error" if refused else before)
        yield
    finally:
        _watch_waits(before)


def _watch_waits(mode: str | int) -> None:
    with warnings.catch_warnings():  # torch warns that it does not notice every wait
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


def _place(error: BaseException) -> str:
    """Where the error arose in code that is neither torch's nor the loop's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/torch/" not in frame.filename and "tensor_memory_lab/train/" not in frame.filename:
            return f" at {'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}"
    return ""
