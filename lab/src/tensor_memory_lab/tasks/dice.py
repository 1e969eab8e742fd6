"""Throws of a fair die as text: the best that any honest model can do is known exactly.

Every throw is independent of all others, so what came before says nothing, and no model that sees
only that can score below the number of sides (exp of the mean loss). What scores below it has seen
the throw. Rows are drawn afresh: there is nothing to learn by heart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tensor_memory_lab.tasks import Annotations, Batch
from tensor_memory_lab.tasks.language import (
    PREFIX,
    WINDOW,
    ScoredTokens,
    cut_after,
    places,
    scored_at_places,
)
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask


@dataclass(frozen=True)
class DiceConfig(DrawnConfig):
    """How many sides, how many throws."""

    sides: int = 6
    """Of the die: the best score that sees only earlier throws."""
    length: int = 16
    """Throws per row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(2, "sides")
        self._at_least(1, "length")

    def build(self, seed: int) -> Dice:
        """The task; `seed` draws the training rows."""
        return Dice(self, seed)


class Dice(ScoredTokens, DrawnTask):
    """Batches of the language task: ids (B, N), each the throw before, and targets (B, N).

    The first id of a row is `sides`, a start token. "score" is exp(loss).
    """

    metric = "score"
    higher_is_better = False
    test_splits: tuple[str, ...] = ("test", WINDOW, PREFIX)
    inputs = "dice"

    def __init__(self, config: DiceConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        self.length = config.length
        self.name = f"dice {config.sides} sides"

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """`rows` rows of independent throws."""
        c = self.config
        throws = torch.randint(c.sides, (rows, c.length), generator=random)
        start = torch.full((rows, 1), c.sides)
        return {
            "ids": torch.cat([start, throws[:, :-1]], dim=1),
            "targets": throws,
            "scored": torch.ones(rows, c.length, dtype=torch.bool),
            "fresh": torch.ones(rows, dtype=torch.bool),
        }

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Rows of a split; of test@prefix each cut after one of `places`."""
        if split == WINDOW:
            return scored_at_places(super().batch("test", index, size))
        if split == PREFIX:
            ends = places(self.length)
            rows = super().batch("test", index // len(ends), size)
            return cut_after(rows, ends[index % len(ends)])
        return super().batch(split, index, size)

    def batches(self, split: str, size: int) -> int:
        """Batches of one pass."""
        cuts = len(places(self.length)) if split == PREFIX else 1
        return super().batches(split.partition("@")[0], size) * cuts

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """The score: the number of sides a die would have that is as hard to predict."""
        return means | {"score": math.exp(min(means["loss"], 50.0))}

    def describe(self, batch: Batch) -> Annotations:
        """The throws as they lie on the table, from 1."""
        start = self.config.sides
        rows = batch["ids"].tolist()
        return {"texts": [[f"{i + 1} " if i < start else "start " for i in row] for row in rows]}

    def ceiling(self, split: str) -> float:
        """The number of sides: nothing that sees only the past comes below it."""
        return float(self.config.sides)

    def facts(self) -> dict[str, Any]:
        """Vocabulary and window, as a model of text asks for them."""
        return {
            "vocabulary": self.config.sides + 1,
            "window": self.length,
            "carried": False,
            "evaluation": f"rows of {self.length} throws, each from an empty state",
            "chance": float(self.config.sides),
        }
