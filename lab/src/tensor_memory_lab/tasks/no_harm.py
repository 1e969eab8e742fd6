"""No-harm: repeat the symbol `lag` places back. What is needed is in plain sight of attention.

16 symbols, length 32, the answer at every place is the symbol `lag` tokens before it: 1 is the
paper's short copy/shift control, which needs no memory beside attention. With a lag beyond the
reach of windowed attention it is a delay line: then everything depends on what is carried.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensor_memory_lab.tasks import Annotations, Batch
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask


@dataclass(frozen=True)
class NoHarmConfig(DrawnConfig):
    """Which symbol is to be repeated."""

    symbols: int = 16
    """Symbols to choose from; chance is 1 / symbols."""
    tokens: int = 32
    """Length of a row."""
    lag: int = 1
    """How far back the symbol lies that is asked for; 0 copies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(2, "symbols")
        if not 0 <= self.lag < self.tokens:
            raise ValueError(
                f"task.lag: expected 0 to tokens - 1 = {self.tokens - 1}, got {self.lag}"
            )

    def build(self, seed: int) -> NoHarm:
        """The task; `seed` draws the training rows."""
        return NoHarm(self, seed)


class NoHarm(DrawnTask):
    """Batches: symbols (B, N), ask (B, N - lag) every place that has a symbol `lag` before it,
    target (B, N - lag)."""

    inputs = "no-harm"

    def __init__(self, config: NoHarmConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        self.classes = config.symbols
        self.length = self.positions = config.tokens
        self.distance = config.lag
        self.name = f"no-harm lag={config.lag}"

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """`rows` rows of uniform symbols."""
        c = self.config
        symbols = torch.randint(c.symbols, (rows, c.tokens), generator=random)
        ask = torch.arange(c.lag, c.tokens).expand(rows, -1).contiguous()
        return {
            "symbols": symbols,
            "ask": ask,
            "target": symbols[:, : c.tokens - c.lag].contiguous(),
        }

    def describe(self, batch: Batch) -> Annotations:
        """The symbols by number."""
        return {"texts": [[f"{symbol} " for symbol in row] for row in batch["symbols"].tolist()]}

    def ceiling(self, split: str) -> float:
        """Everything needed is in the row."""
        return 1.0
