"""No-harm: a task that attention solves alone; does a memory beside it cost anything?

    tensor-memory-lab run no-harm --model.method tensor

Expected: 100 % for every method, as the paper reports. What the memory does there is in the
result: σ(γ), ‖σ(γ)m‖ / ‖x‖ per layer, and the loss with the memory switched off.
"""

from __future__ import annotations

from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.recipes.binding import PUBLISHED, Toy, diagnostic
from tensor_memory_lab.tasks.no_harm import NoHarmConfig


@recipe("no-harm", expected="10 s on one H200", settings=("task.lag",))
def no_harm() -> Toy:
    """No-harm as published: repeat the symbol before, 16 symbols, length 32."""
    task = NoHarmConfig(symbols=16, tokens=32, lag=1)
    model = ToyModelConfig(dim=64, layers=2, heads=4, dropout=0.0)
    return diagnostic("no-harm", task, model, PUBLISHED, steps=1500)
