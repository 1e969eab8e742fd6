"""Occlusion under full attention: the published protocol, and one that hides what it asks for.

    tensor-memory-lab run occlusion-published --model.method base
    tensor-memory-lab run occlusion-valid --model.method tensor --task.hidden 5

`occlusion-published` shows the answer in its last frame (the paper reports 100 / 99.5 / 100 /
100 %); it can show harm, and nothing else. `occlusion-valid` hides the last L frames: the ceiling
is 100 % up to L 5, chance 25 %. `occlusion-long` gives it three times the steps.
"""

from __future__ import annotations

from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.recipes.binding import LONGER, PUBLISHED, Toy, diagnostic
from tensor_memory_lab.tasks.occlusion import OcclusionConfig

ROWS = {"batch_size": 64, "evaluation_batch_size": 512}
"""Of every batch."""


@recipe("occlusion-published", expected="25 s on one H200", settings=("task.hidden",))
def occlusion_published() -> Toy:
    """Occlusion as published, L 4: solvable from the last frame alone."""
    task = OcclusionConfig("published", frames=8, hidden=4)
    model = ToyModelConfig(dim=96, layers=3, heads=4, dropout=0.1)
    return diagnostic("occlusion-published", task, model, PUBLISHED, steps=1500, **ROWS)


@recipe("occlusion-valid", expected="50 s on one H200", settings=("task.hidden",))
def occlusion_valid() -> Toy:
    """Occlusion with the last four frames behind a drawn occluder, 3,000 steps of 64 at 1e-3."""
    return _valid("occlusion-valid", steps=3000)


@recipe("occlusion-long", expected="105 s on one H200", settings=("task.hidden",))
def occlusion_long() -> Toy:
    """Occlusion with the last four frames hidden, to convergence: 9,000 steps."""
    return _valid("occlusion-long", steps=9000)


def _valid(name: str, steps: int) -> Toy:
    task = OcclusionConfig("valid", frames=8, hidden=4)
    model = ToyModelConfig(dim=96, layers=3, heads=4, dropout=0.0)
    return diagnostic(name, task, model, LONGER, steps=steps, evaluate_every=150, **ROWS)
