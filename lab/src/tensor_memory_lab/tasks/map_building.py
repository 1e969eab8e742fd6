"""Map building: a hidden 8×8 grid of bits, seen through 2×2 patches, then asked for one cell.

T observation tokens, each a patch at a random place, then, after `gap` blank tokens, a query token
that names a cell. A cell that was seen is known, one that was not is a coin toss: so the ceiling is
1 - P(not seen) / 2, in closed form: .697, .809, .916, .977, .997 at T = 8, 16, 32, 64, 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensor_memory_lab.tasks import Annotations, Batch
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask

FEATURES = 7
"""Four cells of the patch (row by row), row, column, flag (0 patch, 1 query, -1 blank)."""


@dataclass(frozen=True)
class MapConfig(DrawnConfig):
    """How large the map is and how long it is looked at."""

    observations: int = 32
    """T: patches seen."""
    queries: int = 1
    """Cells asked for, one token each."""
    side: int = 8
    """Cells along each side of the grid."""
    gap: int = 0
    """Blank tokens between the last patch and the first query."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(0, "gap")
        self._at_least(1, "observations", "queries")
        self._at_least(2, "side")

    def build(self, seed: int) -> MapBuilding:
        """The task; `seed` draws the training rows."""
        return MapBuilding(self, seed)


class MapBuilding(DrawnTask):
    """Batches: features (B, N, 7), ask (B, Q) the queries' positions, target (B, Q) bits."""

    inputs = "map"
    classes = 2

    def __init__(self, config: MapConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        self.length = config.observations + config.gap + config.queries
        self.positions = max(65, self.length)
        """65 as published; longer rows need more."""
        self.distance = config.gap + 1
        gap = f" gap={config.gap}" if config.gap else ""
        self.name = f"map T={config.observations}{gap}"

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """Grids, patches and questions of `rows` rows."""
        c = self.config
        cells = torch.randint(2, (rows, c.side * c.side), generator=random)  # (B, cells)
        corner = torch.randint(c.side - 1, (rows, c.observations, 2), generator=random)
        asked = torch.randint(c.side, (rows, c.queries, 2), generator=random)
        number = corner[..., 0] * c.side + corner[..., 1]  # (B, T): the patch's upper left cell
        patch = [cells.gather(1, number + step) for step in (0, 1, c.side, c.side + 1)]

        first = c.observations + c.gap
        features = torch.zeros(rows, self.length, FEATURES)
        features[:, : c.observations, :4] = torch.stack(patch, -1).float()
        features[:, : c.observations, 4:6] = self._place(corner)
        features[:, c.observations : first, 6] = -1
        features[:, first:, 4:6] = self._place(asked)
        features[:, first:, 6] = 1
        ask = torch.arange(first, self.length).expand(rows, -1).contiguous()
        target = cells.gather(1, asked[..., 0] * c.side + asked[..., 1])
        return {"features": features, "ask": ask, "target": target}

    def describe(self, batch: Batch) -> Annotations:
        """The patches with their place, row by row, and the cells asked for."""
        cells = batch["features"][..., :4].long().tolist()
        place = (batch["features"][..., 4:6] + 1) * ((self.config.side - 1) / 2)
        places, flags = place.round().long().tolist(), batch["features"][..., 6].long().tolist()
        rows = []
        for tokens in zip(cells, places, flags, strict=True):
            row = []
            for (a, b, c, d), (down, across), flag in zip(*tokens, strict=True):
                at = f"row {down}, column {across}"
                row.append((f"{a}{b}/{c}{d} at {at}; ", f"{at}? ", "pause; ")[flag])
            rows.append(row)
        return {"texts": rows}

    def _place(self, cell: torch.Tensor) -> torch.Tensor:
        """Row and column as numbers from -1 to 1."""
        return cell.float() * (2 / (self.config.side - 1)) - 1

    def unseen(self) -> float:
        """Probability that the cell asked for was never seen.

        A cell in the middle lies in 4 of the (side - 1)² patches, one at an edge in 2, a corner
        in 1.
        """
        side, places = self.config.side, (self.config.side - 1) ** 2
        cover = [1 if i in (0, side - 1) else 2 for i in range(side)]  # along one axis
        missed = [(1 - a * b / places) ** self.config.observations for a in cover for b in cover]
        return sum(missed) / len(missed)

    def ceiling(self, split: str) -> float:
        """Seen cells known, the others guessed."""
        return 1 - self.unseen() / 2
