"""A task, a method and a recipe of your own, in one file. Copy it and change what you need.

    cd lab/examples
    tensor-memory-lab run own_task_and_method:first_symbol --model.method memory
    tensor-memory-lab sweep own_task_and_method:first_symbol \\
        --over model.method=nothing,average,memory --over seed=0,1,2
    tensor-memory-lab report runs

Time: 20 seconds a run on one CPU core.
Result: the accuracy is 12.5 % (chance) with nothing, and 100 % with the average and the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory
from tensor_memory_lab.models import Carry, Model
from tensor_memory_lab.recipes import recipe
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig, RunConfig
from tensor_memory_lab.tasks import Batch
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask


# The task. Its config is a frozen dataclass: every field is a flag, `--task.gap 20`, with the text
# below it as help.
@dataclass(frozen=True)
class FirstSymbolConfig(DrawnConfig):
    """Say at the end of a row which symbol it began with."""

    symbols: int = 8
    """Symbols to choose from; chance is 1 / symbols."""
    gap: int = 10
    """Blank tokens between the symbol and the question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(2, "symbols")  # what a wrong flag is answered with
        self._at_least(0, "gap")

    def build(self, seed: int) -> FirstSymbol:
        """The task; `seed` draws the training rows."""
        return FirstSymbol(self, seed)


class FirstSymbol(DrawnTask):
    """Batches: ids (B, N), a symbol and then blanks; ask (B, 1) the last place; target (B, 1).

    `DrawnTask` gives the splits, the loss (cross-entropy) and the accuracy. A task of another kind
    writes what `tensor_memory_lab.tasks.Task` lists.
    """

    inputs = "first-symbol"  # names the rows, so that other tasks draw other ones

    def __init__(self, config: FirstSymbolConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.name = f"first symbol, gap {config.gap}"
        self.classes = self.blank = config.symbols
        self.length = self.positions = config.gap + 2
        self.distance = config.gap + 1

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """`rows` rows on the CPU, from this generator alone."""
        ids = torch.full((rows, self.length), self.blank)
        ids[:, 0] = torch.randint(self.classes, (rows,), generator=random)
        return {"ids": ids, "ask": torch.full((rows, 1), self.length - 1), "target": ids[:, :1]}

    def ceiling(self, split: str) -> float:
        """The best accuracy that anything could reach."""
        return 1.0


# The model. The compared methods differ in `method` and in nothing else.
@dataclass(frozen=True)
class SmallModelConfig:
    """An embedding, what mixes the tokens, and a head."""

    method: Literal["nothing", "average", "memory"] = "memory"
    """What brings earlier tokens to later ones."""
    dim: int = 32
    """Width of a token."""
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig.long_gap(grid=(4, 4)))
    """Of the method "memory"."""

    def build(self, task: Any) -> SmallModel:
        """The model, with weights from torch's global generator."""
        return SmallModel(self, task)


class RunningAverage(nn.Module):
    """The method of our own: each channel adds the mean of all tokens so far, times a gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(B, N, d) to (B, N, d), and no state."""
        count = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]  # (N, 1)
        return x + self.gate * x.cumsum(1) / count, None


class SmallModel(Model):
    """Logits (B, Q, classes) at the places that are asked for."""

    def __init__(self, config: SmallModelConfig, task: FirstSymbol) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.classes + 1, config.dim)
        self.mix: nn.Module | None = None
        if config.method == "average":
            self.mix = RunningAverage(config.dim)
        elif config.method == "memory":
            self.mix = MemoryResidual(TensorMemory(config.dim, config.memory))
        self.head = nn.Sequential(nn.LayerNorm(config.dim), nn.Linear(config.dim, task.classes))
        # What one row carries past its last token. The average carries a sum and a count.
        values = {"memory": config.memory.state_values, "average": config.dim + 1}
        self.values = values.get(config.method, 0)

    def forward(
        self, batch: Batch, carry: Carry | None = None
    ) -> tuple[dict[str, Tensor], Carry | None]:
        """Outputs by name, for the task to score, and what the next batch needs: nothing."""
        x = self.embed(batch["ids"])  # (B, N, d)
        if self.mix is not None:
            x, _ = self.mix(x)
        rows = torch.arange(len(x), device=x.device)[:, None]  # (B, 1)
        return {"logits": self.head(x[rows, batch["ask"]])}, None

    def state_bytes(self) -> int:
        """Bytes that one row carries."""
        return 4 * self.values


# The recipe. It declares which fields are settings, under which methods are compared; the fields of
# the model are the method unless it says otherwise.
@recipe("first-symbol", expected="20 s on one CPU core", settings=("task.symbols", "task.gap"))
def first_symbol() -> RunConfig[FirstSymbolConfig, SmallModelConfig]:
    """Say which symbol a row began with, after ten blanks."""
    return RunConfig(
        recipe="first-symbol",
        task=FirstSymbolConfig(valid_rows=512, test_rows=2048),
        model=SmallModelConfig(),
        optimizer=OptimizerConfig(lr=5e-3, schedule="cosine", warmup=20),
        budget=BudgetConfig(steps=300, batch_size=64, evaluate_every=50, evaluation_batch_size=512),
    )
