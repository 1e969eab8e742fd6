"""Map building under full attention: the paper's cell, and long enough to come near the ceiling.

    tensor-memory-lab run map --model.method tensor
    tensor-memory-lab run map-long --model.method base --task.observations 64

The ceiling at T 32 is 91.6 %, chance 50 %; the paper reports 50.6 / 51.0 / 50.2 / 58.5 % (base,
wide, slots, tensor), which is a budget too short to learn anything: `map-long` is the same model
with eight questions per row, a larger learning rate and three times the steps.
"""

from __future__ import annotations

from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.recipes.binding import LONGER, PUBLISHED, Toy, diagnostic
from tensor_memory_lab.tasks.map_building import MapConfig


@recipe("map", expected="10 s on one H200", settings=("task.observations",))
def map_published() -> Toy:
    """Map building as published: T 32, one question, 1,500 steps of 64."""
    model = ToyModelConfig(dim=96, layers=3, heads=4, dropout=0.1)
    task = MapConfig(observations=32)
    return diagnostic("map", task, model, PUBLISHED, steps=1500, batch_size=64)


@recipe("map-long", expected="35 s on one H200", settings=("task.observations",))
def map_long() -> Toy:
    """Map building to convergence: eight questions per row, 5,000 steps of 64 at 1e-3."""
    model = ToyModelConfig(dim=96, layers=3, heads=4, dropout=0.0)
    task = MapConfig(observations=32, queries=8)
    return diagnostic(
        "map-long", task, model, LONGER, steps=5000, batch_size=64, evaluate_every=200
    )
