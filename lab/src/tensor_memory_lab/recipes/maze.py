"""An agent walks through a maze and must say what stands at a place that it saw long ago.

    tensor-memory-lab run maze --model.method place-given
    tensor-memory-lab sweep --plan lab/plans/maze.toml --jobs 4 --results results/maze.jsonl

Walks of 256 steps through mazes of 11 × 11 cells from labmaze (`pip install labmaze`; layouts are
made once). Attention sees 16 tokens, eight steps; four layers of it reach 30 steps back. Questions
are about cells last seen more than 40 steps ago: `accuracy_balanced` is the mean over free ones,
walls and objects, whose ceiling is 100 %. A guess from the place alone has 49 %, one answer to all
33 %.
"""

from __future__ import annotations

from tensor_memory_lab.models.maze import MazeModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.maze import MazeConfig

Run = RunConfig[MazeConfig, MazeModelConfig]


@recipe(
    "maze",
    expected="under a minute on one H200",
    settings=("task",),
    # Each method has the rate that is best for it.
    method=("model", "optimizer", "budget.steps"),
)
def maze() -> Run:
    """A walk through a maze: what stands at a place that was seen long ago?"""
    return RunConfig(
        recipe="maze",
        task=MazeConfig(),
        model=MazeModelConfig(),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.05, warmup=100),
        budget=BudgetConfig(
            steps=2000,
            batch_size=64,
            evaluate_every=500,
            evaluation_batch_size=4,  # of 65,536 tokens each in the longest walks
            checkpoint_every=2000,
        ),
        precision="bf16",
    )
