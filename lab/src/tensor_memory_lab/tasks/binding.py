"""Coordinate binding: values are written at places, then asked for near those places.

W write tokens (a place in [-1, 1]³ and one of 32 values), then, after `gap` blank tokens, Q query
tokens, each the place of one write plus Gaussian noise. The answer is the value written nearest to
the query (the paper's rule: "the value of the nearest written coordinate"), so a look at all
writes gives 100 % at any noise. With `target="source"` it is the value of the write the query was
made from: noise then makes it ambiguous, and the ceiling falls.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tensor_memory_lab.tasks import Annotations, Batch
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask

WRITE, QUERY, BLANK = 0, 1, 2
"""Kinds of token."""


@dataclass(frozen=True)
class BindingConfig(DrawnConfig):
    """How much is written, how it is asked for."""

    writes: int = 20
    """W: write tokens per row."""
    values: int = 32
    """Values to choose from; chance is 1 / values."""
    queries: int = 4
    """Q: questions per row."""
    noise: float = 0.05
    """σ of the Gaussian noise on a query's place, per axis."""
    gap: int = 0
    """Blank tokens between the last write and the first query."""
    target: Literal["nearest", "source"] = "nearest"
    """The value asked for: of the write nearest to the query, or of the one it was made from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "gap")
        self._at_least(1, "writes", "queries")
        self._at_least(2, "values")
        if self.noise < 0:
            raise ValueError(f"task.noise: expected 0 or more, got {self.noise}")

    def build(self, seed: int) -> Binding:
        """The task; `seed` draws the training rows."""
        return Binding(self, seed)


class Binding(DrawnTask):
    """Batches: kind (B, N), place (B, N, 3), value (B, N; zero but at writes), ask (B, Q) the
    queries' positions, target (B, Q)."""

    inputs = "binding"
    positions = 0

    def __init__(self, config: BindingConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        self.classes = config.values
        self.length = config.writes + config.gap + config.queries
        self.distance = config.gap + 1
        self.kinds = 3 if config.gap else 2
        """Kinds of token to embed: blank ones only where there is a gap."""
        gap = f" gap={config.gap}" if config.gap else ""
        self.name = f"binding W={config.writes} σ={config.noise:g}{gap}"

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """Writes and queries of `rows` rows."""
        c = self.config
        places = torch.rand(rows, c.writes, 3, generator=random) * 2 - 1  # (B, W, 3)
        values = torch.randint(c.values, (rows, c.writes), generator=random)  # (B, W)
        source = torch.randint(c.writes, (rows, c.queries), generator=random)  # (B, Q)
        at = places.gather(1, source[..., None].expand(-1, -1, 3))  # (B, Q, 3)
        at = at + c.noise * torch.randn(at.shape, generator=random)
        answer = source if c.target == "source" else squared_distances(at, places).argmin(-1)
        first = c.writes + c.gap
        kind = torch.full((rows, self.length), BLANK)
        kind[:, : c.writes], kind[:, first:] = WRITE, QUERY
        place = torch.zeros(rows, self.length, 3)
        place[:, : c.writes], place[:, first:] = places, at
        value = torch.zeros(rows, self.length, dtype=torch.long)
        value[:, : c.writes] = values
        ask = torch.arange(first, self.length).expand(rows, -1).contiguous()
        target = values.gather(1, answer)
        return {"kind": kind, "place": place, "value": value, "ask": ask, "target": target}

    def describe(self, batch: Batch) -> Annotations:
        """What is where, and what is asked for."""
        rows, named = [], (batch[name].tolist() for name in ("kind", "place", "value"))
        for tokens in zip(*named, strict=True):
            row = []
            for kind, place, value in zip(*tokens, strict=True):
                at = ", ".join(f"{x:+.1f}" for x in place)
                row.append((f"{value} at ({at}); ", f"what is at ({at})? ", "pause; ")[kind])
            rows.append(row)
        return {"texts": rows}

    def ceiling(self, split: str) -> float:
        """1 for the nearest write; for the source, the most probable value's score (simulated)."""
        return 1.0 if self.config.target == "nearest" else _source_ceiling(self.config)


def squared_distances(at: Tensor, places: Tensor) -> Tensor:
    """(B, Q, W): squared distance of every query to every write, without cancellation."""
    total = None
    for axis in range(places.shape[-1]):  # long rows of W, not short ones of 3: four times faster
        part = (at[:, :, None, axis] - places[:, None, :, axis]).square_()
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


@functools.cache
def _source_ceiling(config: BindingConfig) -> float:
    """Part of the test questions that the most probable value answers.

    P(value | query) is the sum of exp(-‖query - place‖² / 2σ²) over the writes of that value.
    """
    if config.noise == 0:
        return 1.0
    task, right, size = Binding(config, 0), 0, 1024
    for index in range(task.batches("test", size)):
        batch = task.batch("test", index, size)
        places, at = batch["place"][:, : config.writes], batch["place"][:, -config.queries :]
        likelihood = torch.exp(-squared_distances(at, places) / (2 * config.noise**2))
        posterior = torch.zeros(*likelihood.shape[:2], config.values)  # (B, Q, values)
        values = batch["value"][:, None, : config.writes].expand_as(likelihood)
        posterior.scatter_add_(2, values, likelihood)
        right += int((posterior.argmax(-1) == batch["target"]).sum())
    return right / (config.test_rows * config.queries)
