"""The compared models: one Transformer block, one initialiser, the mechanism a config value."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from tensor_memory_lab.tasks import Batch, Task

Carry = dict[str, Tensor]
"""What a model takes from one batch to the next: tensors by name, first dimension the row."""


class ModelConfig(Protocol):
    """A frozen dataclass of plain values that says which model it is."""

    @property
    def method(self) -> str:
        """The compared mechanism: `base`, `tensor`, … The one value in which two methods differ."""
        ...

    def build(self, task: Task) -> Model:
        """The model for a task, initialised from torch's global generator."""
        ...


class Model(nn.Module):
    """What the training loop needs of a model."""

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """Outputs for the task to score, and what the next batch of the same rows needs.

        `carry` is None at the start and for tasks that carry nothing. What comes back is
        detached.
        """
        raise NotImplementedError

    def state_bytes(self) -> int:
        """Bytes that one row carries past what attention can see: memory, slots or cache."""
        return 0

    def labels(self) -> dict[str, Any]:
        """What every table must say about this model, such as `{"non_causal": True}`."""
        return {}
