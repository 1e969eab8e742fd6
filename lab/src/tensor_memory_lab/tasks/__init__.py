"""What is asked of a model: one file per task, each with its data, loss, metric and ceiling.

A task is a pure function of its config, a seed and an index: batch number 7 of "train" is the same
batch whoever asks, whichever method is trained and however often the run was interrupted. So the
data position of a run is its step number, and every compared method sees the same data in the same
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""Named tensors whose first dimension is the row; what a model takes and a task scores."""

Outputs = Mapping[str, Tensor]
"""What a model makes of a batch, first dimension the row: logits, losses per token, pixels."""

Sums = dict[str, tuple[Tensor, Tensor]]
"""Per measure its sum and the number of things summed, so that parts of a split add up exactly."""


@runtime_checkable
class Task(Protocol):
    """A task that has been built: it draws batches and scores what a model makes of them.

    One that inherits this has no streams, measures that are means and an unknown ceiling.
    """

    name: str
    """Shown in results, with what tells it from its variants: `binding`, `cub200@120px`."""
    metric: str
    """The measure by which the best checkpoint is chosen, on "valid" and never on a test split."""
    higher_is_better: bool
    test_splits: tuple[str, ...]
    """What is measured once at the end: "test", or several such as "test@25%", "test@50%"."""
    carries: bool = False
    """Whether row i of a batch continues row i of the batch before it (streams of text). A model
    then gets what it returned last; rows where `batch["fresh"]` is true start empty."""

    def to(self, device: torch.device) -> Task:
        """The same task with what it keeps resident on `device`; batches come from there."""
        ...

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Batch number `index` of `size` rows of a split: a function of nothing else.

        "train" has no end (it goes through its epochs); the last batch of another split may have
        fewer rows. Evaluation splits do not depend on the run's seed.
        """
        ...

    def batches(self, split: str, size: int) -> int:
        """How many batches of `size` rows one pass over an evaluation split takes."""
        ...

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """What is minimised: a mean over the batch, so that equal parts of it average exactly."""
        ...

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Sums and counts of every measure, "loss" and `metric` among them."""
        ...

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Measures made of means over a whole split: perplexity = exp(loss). May add, not drop."""
        return means

    def ceiling(self, split: str) -> float | None:
        """The best `metric` anything could reach here, or None where nobody knows."""
        return None

    def facts(self) -> dict[str, Any]:
        """What a reader of the result must know: sizes, protocol, chance level. Plain values."""
        ...


@runtime_checkable
class KeepsAssets(Protocol):
    """A task whose runs keep something of its own, such as a vocabulary; others' is refused."""

    def assets(self) -> dict[str, str]:
        """Text files by name, written into the run's folder."""
        ...


@runtime_checkable
class HasShapes(Protocol):
    """A task whose batches come in a few shapes; a CUDA graph is captured for each.

    It may have `any_size`, names of tensors whose second dimension compiled code takes in any size:
    shapes that differ in nothing else then share their code.
    """

    shapes: int
    """How many, in training or in evaluation."""


class Annotations(TypedDict, total=False):
    """What the tokens of a batch were, as `Recording.annotate` takes it."""

    texts: list[list[str]]
    """Per row, the text of every token."""
    frames: Tensor
    """(B, F, h, w, 3) uint8: the pictures that tokens were cut from."""
    tokens_per_frame: int


@runtime_checkable
class Describes(Protocol):
    """A task that can say, in words or pictures, what the tokens of its batches were."""

    def describe(self, batch: Batch) -> Annotations:
        """For whoever looks inside a model that was given this batch."""
        ...


@runtime_checkable
class PreparesModel(Protocol):
    """A task with splits that a model must be prepared for, such as worlds of another size."""

    def prepared(self, model: Any, split: str) -> AbstractContextManager[None]:
        """Inside, the model is ready for the split."""
        ...


class TaskConfig(Protocol):
    """A frozen dataclass of plain values that says which task it is."""

    def build(self, seed: int) -> Task:
        """The task; `seed` orders and draws the training data."""
        ...
