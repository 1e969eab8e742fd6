"""Batches made ahead of time for another device, and the rate that is set on one."""

import pytest
import torch
from torch import nn

from tensor_memory_lab.run_config import BudgetConfig
from tensor_memory_lab.train.batches import AHEAD, TrainingBatches
from tensor_memory_lab.train.schedule import set_learning_rate


class Widths:
    """Batch number i is i + 1 wide, so that one which lost its values still shows its number."""

    def __init__(self):
        self.made = []

    def batch(self, split, index, size):
        self.made.append(index)
        return {"x": torch.zeros(size, index + 1)}


@pytest.mark.parametrize("first", [0, 3])
def test_batches_made_ahead_come_in_order_and_none_past_the_end(monkeypatch, first):
    monkeypatch.setattr(TrainingBatches, "_make_pinned", TrainingBatches._make)  # no GPU, no pins
    task, steps = Widths(), first + 2 * AHEAD
    budget = BudgetConfig(steps=steps, batch_size=4)
    batches = TrainingBatches(task, budget, torch.device("meta"), first=first, processes=2)
    taken = [batches.take()["x"] for _ in range(first, steps)]
    batches.close()
    assert [tuple(x.shape) for x in taken] == [(2, step + 1) for step in range(first, steps)]
    assert {x.device.type for x in taken} == {"meta"}
    assert task.made == list(range(first, steps))


def test_a_rate_that_lies_on_a_device_is_changed_in_place():
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is held  # a captured graph reads this one
    assert held.item() == 0.25
