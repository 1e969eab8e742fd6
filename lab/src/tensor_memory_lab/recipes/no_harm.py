"""No-harm: a task that attention solves alone; does a memory beside it cost anything?

    tensor-memory-lab run no-harm --model.method tensor

Expected: 100 % for every method, as the paper reports. What the memory does there is in the
result: σ(γ), ‖σ(γ)m‖ / ‖x‖ per layer, and the loss with the memory switched off.
"""

from __future__ import annotations

from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.recipes.binding import PUBLISHED
from tensor_memory_lab.run_config import BudgetConfig, RunConfig
from tensor_memory_lab.tasks.no_harm import NoHarmConfig

Run = RunConfig[NoHarmConfig, ToyModelConfig]


@recipe("no-harm", expected="10 s on one H200", settings=("task.lag",))
def no_harm() -> Run:
    """No-harm as published: repeat the symbol before, 16 symbols, length 32."""
    return RunConfig(
        recipe="no-harm",
        task=NoHarmConfig(symbols=16, tokens=32, lag=1),
        model=ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.0),
        optimizer=PUBLISHED,
        budget=BudgetConfig(
            steps=1500, batch_size=128, evaluate_every=100, evaluation_batch_size=1024
        ),
    )
