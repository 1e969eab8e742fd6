"""Layouts for tests of the maze, by a generator that stands in for labmaze's."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from tensor_memory_lab.tasks.maze import open_layouts


def scattered(*, height: int, width: int, random_seed: int, **options):
    """Walls around and in every second cell of every second row, and between some of these.

    The first column inside is free, so that there is a way to every cell.
    """
    draw = random.Random(random_seed)
    lines = [["*"] * width, *(["*", *" " * (width - 2), "*"] for _ in range(height - 2))]
    lines.append(["*"] * width)
    for row in range(2, height - 2, 2):
        for column in range(2, width - 2, 2):
            lines[row][column] = "*"
            lines[row][column + draw.randrange(2)] = "*"
    return SimpleNamespace(entity_layer="".join("".join(line) + "\n" for line in lines))


def write_layouts(folder: Path, side: int, count: int) -> None:
    """Keep so many layouts where a task looks for them."""
    with patch("tensor_memory_lab.tasks.maze._labmaze", lambda *_: scattered):
        open_layouts(str(folder), side, count)
