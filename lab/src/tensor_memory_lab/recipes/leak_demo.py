"""The leak on a text that nobody can predict: throws of a fair die.

    tensor-memory-lab run leak-demo
    tensor-memory-lab sweep --plan lab/plans/leak-demo.toml --device cpu

Nothing that sees only earlier throws can score below the number of sides. A minute or two per run
on a CPU core of its own; `tensor-depth` comes below 2.5 where 6 is the floor, `tensor` and `base`
stay at 6.
"""

from __future__ import annotations

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.language import LanguageModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks.dice import DiceConfig


@recipe("leak-demo", expected="2 min on a CPU core; a score below 6 where 6 is the floor")
def leak_demo() -> RunConfig[DiceConfig, LanguageModelConfig]:
    """The published depth-threaded memory on throws of a die: it sees them before they fall."""
    return RunConfig(
        recipe="leak-demo",
        task=DiceConfig(sides=6, length=16, valid_rows=512, test_rows=1024),
        model=LanguageModelConfig(
            method="tensor-depth",
            non_causal=True,
            dim=64,
            layers=2,
            heads=4,
            dropout=0.0,
            memory=MemoryConfig(channels=32, grid=(8,), chunk_size=8),
        ),
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.01, schedule="cosine", warmup=50),
        budget=BudgetConfig(
            steps=1200, batch_size=64, evaluate_every=100, evaluation_batch_size=512
        ),
    )
