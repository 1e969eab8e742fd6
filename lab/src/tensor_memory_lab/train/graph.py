"""A whole step as one CUDA graph, so that small models wait for the GPU and not for launches.

The first steps of a sitting run eagerly, on the stream that is then captured: they are ordinary
steps of the run that also warm up kernels, workspaces and the optimiser's state. The last of them
runs where any wait for the device is an error, which tells whether the step can be captured
without breaking anything. Capturing executes nothing, so nothing has to be put back.
"""

from __future__ import annotations

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensor_memory_lab.models import Carry
from tensor_memory_lab.tasks import Batch, Sums
from tensor_memory_lab.train.steps import Step

WARM_UP = 3
"""Eager calls before a capture; the last one shows whether anything waits for the device."""

_SYNC = "synchronizing CUDA operation"


class GraphStep(Step):
    """`Step` by replaying a graph: batches are copied into its buffers, the carry lives in them.

    Args:
        required: raise where no graph can be captured; otherwise go on eagerly and say why.
    """

    def __init__(self, *arguments: Any, required: bool, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._required = required
        self._stream = capture_stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = {}
        self._gradients_kept: list[Tensor | None] = []
        self._calls = self._odd = 0

    @property
    def described(self) -> str:
        """How steps are launched, and why not otherwise."""
        if self.reason is not None:
            return f"eager ({self.reason})"
        if self._calls <= WARM_UP:
            return f"eager (a CUDA graph is captured after {WARM_UP} steps)"
        return f"graph ({self._odd} steps eager, of other shapes)" if self._odd else "graph"

    def __call__(self, step: int, batch: Batch) -> None:
        """Optimiser step number `step`, counted from 0."""
        self._prepare(step)
        self._calls += 1
        if self.reason is not None:
            self._run(batch)
        elif self._graph is not None:
            self._replay(batch)
        elif self._calls < WARM_UP:
            self._aside(batch)
        elif self._calls == WARM_UP:
            if not self._try_without_waiting(batch):
                self._prepare(step)  # nothing was updated yet: do it again
                self._run(batch)
        elif self._capture(batch):
            self._replay(batch)
        else:
            self._run(batch)

    def close(self) -> None:
        """Free what the graph holds."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._batch, self._gradients_kept = None, {}, []
        self.optimizer.zero_grad(set_to_none=True)

    def _aside(self, batch: Batch) -> None:
        """An eager step on the stream of the capture."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._run(batch)
        current.wait_stream(self._stream)

    def _try_without_waiting(self, batch: Batch) -> bool:
        """A step aside in which a wait is an error; False where there was one."""
        try:
            with no_waiting():
                self._aside(batch)
        except RuntimeError as error:
            if _SYNC not in str(error):
                raise
            self._give_up(f"the step waits for the device{_place(error)}", error)
            # The error's frames hold the failed step's autograd graph. Alive, its nodes would take
            # the gradients of the next step on the stream of this one, and torch warns of that.
            traceback.clear_frames(error.__traceback__)
            return False
        return True

    def _capture(self, batch: Batch) -> bool:
        self._batch = {name: x.clone() for name, x in batch.items()}
        if self.carry is not None:
            self.carry = {name: x.clone() for name, x in self.carry.items()}
        # Without gradients at hand the backward makes them in the graph's own memory, and every
        # replay writes them anew: nothing has to be zeroed.
        self.optimizer.zero_grad(set_to_none=True)
        self._graph, error = capture(lambda: self._run(self._batch), self._stream)
        if self._graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            self._give_up(f"capturing failed: {_first_line(error)}", error)
            return False
        self._gradients_kept = [p.grad for p in self.parameters]
        return True

    def _replay(self, batch: Batch) -> None:
        if not _alike(batch, self._batch):
            if self._required or self.carry is not None:
                self._refuse(f"a batch has other shapes than the first: {_shapes(batch)}", None)
            self._odd += 1
            self._run(batch)
            return
        for name, x in batch.items():
            self._batch[name].copy_(x, non_blocking=True)
        assert self._graph is not None
        self._graph.replay()

    def _keep(self, carry: Carry) -> None:
        """Within the graph the carry stays where the next replay reads it."""
        if self._batch and self.carry is not None:
            for name, x in carry.items():
                self.carry[name].copy_(x)
        else:
            self.carry = carry

    def _give_up(self, reason: str, error: BaseException | None) -> None:
        if self._required:
            self._refuse(reason, error)
        self._batch = {}
        self.reason = f"no CUDA graph: {reason}"

    def _refuse(self, reason: str, error: BaseException | None) -> None:
        raise ValueError(
            f"speed 'graph' cannot serve this run: {reason}; choose --speed auto or eager"
        ) from error


class GraphedMeasure:
    """`Evaluator.measure` by replaying a graph, for batches of the shape it met first.

    What cannot be captured is measured eagerly: the numbers are the same, only slower.
    """

    def __init__(self, measure: Callable[[Batch], Sums]) -> None:
        self._measure = measure
        self._stream = capture_stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Batch = {}
        self._sums: Sums = {}
        self._calls, self._given_up = 0, False

    def __call__(self, batch: Batch) -> Sums:
        """Sums of one batch."""
        if self._given_up or (self._batch and not _alike(batch, self._batch)):
            return self._measure(batch)
        if not self._batch:
            self._batch = {name: x.clone() for name, x in batch.items()}
        self._calls += 1
        if self._calls < WARM_UP:
            return self._measure(batch)
        if self._calls == WARM_UP:
            try:
                with no_waiting():
                    return self._measure(batch)
            except RuntimeError as error:
                if _SYNC not in str(error):
                    raise
                self._given_up = True
                return self._measure(batch)
        for name, x in batch.items():
            self._batch[name].copy_(x, non_blocking=True)
        if self._graph is None:
            self._graph, _ = capture(self._record, self._stream)
            if self._graph is None:
                self._given_up = True
                return self._measure(batch)
        self._graph.replay()
        return {name: (part.clone(), n.clone()) for name, (part, n) in self._sums.items()}

    def close(self) -> None:
        """Free what the graph holds."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._batch, self._sums, self._given_up = None, {}, {}, True

    def _record(self) -> None:
        self._sums = self._measure(self._batch)


def capture_stream() -> torch.cuda.Stream:
    """The stream that this process captures on, one per device.

    cuBLAS keeps a workspace for every stream it has met, for good; a stream per run would fill a
    GPU in a long sweep.
    """
    return _stream_of(torch.cuda.current_device())


@functools.cache
def _stream_of(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def capture(
    work: Callable[[], None], stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph | None, RuntimeError | None]:
    """Capture `work` on a stream; None and the error where it cannot be."""
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads may make batches meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
    except RuntimeError as error:
        torch.cuda.set_stream(current)
        torch.cuda.synchronize()
        return None, error
    return graph, None


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        _watch_waits("error")
        yield
    finally:
        _watch_waits(before)


def _watch_waits(mode: str | int) -> None:
    with warnings.catch_warnings():  # torch warns that it does not notice every wait
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)


def _alike(batch: Batch, other: Batch) -> bool:
    return batch.keys() == other.keys() and all(
        x.shape == other[name].shape and x.dtype == other[name].dtype for name, x in batch.items()
    )


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in batch.items())


def _place(error: BaseException) -> str:
    """Where in code that is not torch's the error arose."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    within = [f for f in frames if "tensor_memory_lab/train/" not in f.filename]
    if not within:
        return ""
    return f" at {'/'.join(within[-1].filename.split('/')[-2:])}:{within[-1].lineno}"


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().split("\n", 1)[0]
