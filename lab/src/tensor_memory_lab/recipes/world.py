"""An agent walks over an image and must say what it will see before it looks.

    tensor-memory-lab run world --task.data-dir cub200-2011-120px.zip --model.method place
    tensor-memory-lab sweep --plan lab/plans/world.toml --task.data-dir cub200-2011-120px.zip

Walks of 256 glimpses of 8 × 8 pixels over images of 64 × 64. Attention sees 16 tokens, eight
glimpses; four layers of it reach 30 glimpses back. What was last seen more than 40 glimpses ago is
answered from memory alone: `psnr_far`.
"""

from __future__ import annotations

from tensor_memory_lab.models.world import WorldModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.world import WorldConfig

Run = RunConfig[WorldConfig, WorldModelConfig]


@recipe(
    "world",
    expected="one minute on one H200",
    settings=("task",),
    # Each method has the rate that is best for it, and at equal time the steps that take it.
    method=("model", "optimizer", "budget.steps"),
)
def world() -> Run:
    """A walk over an image: what will be seen there, and what was seen long ago?"""
    return RunConfig(
        recipe="world",
        task=WorldConfig(),
        model=WorldModelConfig(),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.05, warmup=100),
        budget=BudgetConfig(steps=3000, batch_size=64, evaluate_every=500, checkpoint_every=1500),
        precision="bf16",
    )
