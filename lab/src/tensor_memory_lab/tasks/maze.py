"""A maze that is remembered: walk through it, say what stands at a place seen long ago.

Layouts come from `labmaze`, the generator of Memory Maze. Some free cells hold an object of one of
a few colours. An agent walks on, turns left or turns right; it sees the 5 × 5 cells around itself,
turned so that ahead is up. At each step it is then asked what is at some offset from it: a cell
that it last saw more than `FAR` steps ago, where there is one. So the whole of it is known to
whoever remembers everything seen: the ceiling is 1, and nothing is asked that was not seen. Whoever
remembers nothing can guess from the place alone: `accuracy_guess_far` and the like are of that.

With the same weights other mazes are walked through, each a test split of its own: smaller and
larger ones, longer walks. Positions are told in cells, from a corner that is somewhere else in
every walk, so that a larger maze has no positions that a smaller one had not.

Layouts are made once, as many as are asked for and no two alike, and kept on disk. A walk needs no
labmaze then.

Letters: B batch, T steps, W cells along a side of a padded layout, V = 25 cells of a view.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tensor_memory_lab.progress import progress
from tensor_memory_lab.tasks import Batch, Outputs, Sums
from tensor_memory_lab.tasks.cache import cached_array
from tensor_memory_lab.tasks.epochs import sent
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask, generator

FREE, WALL, OBJECT = 0, 1, 2
"""What is in a cell; objects are OBJECT and above, one number per colour."""
REACH = 2
"""Cells that are seen in each direction."""
VIEW = (2 * REACH + 1) ** 2
"""V, cells in a view."""
FAR, VERY_FAR, AGES_AGO = 40, 200, 1000
"""Steps since a cell was last seen. Four windows of 16 tokens reach 30 steps back."""
STAY, ON, LEFT, RIGHT = 0, 1, 2, 3
"""What an agent does; it stays before its first step."""
STEPS = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])
"""Row and column of a step ahead, by heading: up, right, down, left."""
GO_ON = 0.8
"""Probability of walking on where the way is free."""
OBJECTS = 0.25
"""Part of the free cells that hold an object."""
TRIES = 6
"""Cells of which a question takes the best."""
FEWER = 32
"""Longer walks are fewer by as much as they are longer, but by no more than this."""
PERIOD = 40
"""Cells after which positions are told alike."""
LABMAZE = {"room_min_size": 3, "room_max_size": 5, "extra_connection_probability": 0.2}
"""What layouts are made with, besides their size."""


@dataclass(frozen=True)
class Setting:
    """How a test split departs from the walks of training."""

    times: int = 1
    """Steps of a walk, as a multiple of those in training."""
    scale: int = 1
    """Distance from border to border, as a multiple of that in training."""
    fewer: int = 0
    """Cells less along each side."""
    same_grid: bool = False
    """Whether the grids of place memories, and so their bytes, stay those of training."""


SETTINGS = {
    "test": Setting(),
    "test@4x": Setting(times=4),
    "test@128x": Setting(times=128),
    "test@small": Setting(fewer=2),
    "test@large": Setting(times=4, scale=2),
    "test@larger": Setting(times=16, scale=3),
    "test@larger128x": Setting(times=128, scale=3),
    "test@large-same-grid": Setting(times=4, scale=2, same_grid=True),
    "test@larger-same-grid": Setting(times=16, scale=3, same_grid=True),
}
"""The test splits that there are; the last two have the walks of test@large and test@larger."""


@dataclass(frozen=True)
class MazeConfig(DrawnConfig):
    """Which mazes, how they are walked through, what is told of the pose."""

    cache_dir: str = "runs/mazes"
    """Where layouts are kept."""
    side: int = 11
    """Cells along each side of a maze, walls around it included; an odd number."""
    colours: int = 6
    """Colours of objects."""
    steps: int = 256
    """Steps of a walk."""
    pose: Literal["given", "integrated"] = "given"
    """given: row, column and heading in the maze. integrated: the sum of the agent's own moves and
    turns, which says where it is from where and how it stood at first."""
    layouts: int = 4096
    """Different layouts of training; "valid" and "test" have others, one for each walk."""
    valid_rows: int = 256
    """Walks of "valid", the same for every method, seed and budget."""
    test_rows: int = 512
    """Walks of "test", the same for every method, seed and budget; fewer where they are longer."""
    tests: tuple[str, ...] = ("test",)
    """Test splits: test, test@4x and test@128x (longer walks), test@small (two cells less along
    each side), test@large, test@larger and test@larger128x (twice and three times as wide, walks 4,
    16 and 128 times as long), test@large-same-grid and test@larger-same-grid (the same with grids
    as in training)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "colours", "steps", "layouts")
        self._check_tests(self.tests, SETTINGS)
        least = 7 + max(SETTINGS[name].fewer for name in self.tests)
        if self.side % 2 == 0 or self.side < least:
            raise ValueError(
                f"task.side: expected an odd number of {least} or more cells, got {self.side}"
            )

    def build(self, seed: int) -> Maze:
        """Open the layouts of all splits, or make them."""
        return Maze(self, seed)

    def side_of(self, setting: Setting) -> int:
        """Cells along each side of a setting's mazes."""
        return setting.scale * (self.side - 1) + 1 - setting.fewer


class Maze(DrawnTask):
    """Batches of walks.

    `view` (B, T, V) what is in the cells around, row by row from the left front one, uint8; `at`
    (B, T, 2) column and row of the agent and `asked` (B, T, 2) those of the cell asked for, in
    cells; `where` (B, 2T, 2) both in turn, on a torus from -1 to 1 that is as wide as the maze, or
    wider by a cell or two: wherever cells are counted from, each has a place of its own there;
    `heading`, `action` (B, T); `target` (B, T) what is in the cell asked for; `age` (B, T) steps
    since it was last seen; `guess` (B, T) what is most often in a cell of its row and column: mazes
    of labmaze have walls where both are even, and ways elsewhere.
    """

    metric = "accuracy_balanced"
    inputs = "maze"
    positions = 0
    block_rows = 256

    def __init__(self, config: MazeConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        self.test_splits = config.tests
        self.classes = OBJECT + config.colours
        self.length = 2 * config.steps
        self.distance = 2 * FAR
        self.name = f"maze {config.side}x{config.side}"
        self._layouts: dict[tuple[int, int], np.ndarray] = {}
        self._whole: dict[str, Batch] = {}
        for split in ("train", *self.test_splits):
            self.layouts(split)  # an error of theirs comes before training

    def to(self, device: torch.device) -> Maze:
        """The same task, its batches on `device`."""
        moved = super().to(device)
        moved._whole = {}
        return moved

    def setting(self, split: str) -> Setting:
        """How the walks of a split go."""
        self.rows(split)
        return SETTINGS.get(split, Setting())

    def rows(self, split: str) -> int | None:
        """Walks of a split; None for "train", which has no end."""
        if split not in ("train", "valid", *self.test_splits):
            raise ValueError(
                f"split: expected train, valid, {', '.join(self.test_splits)}, got {split!r}"
            )
        if split in ("train", "valid"):
            return super().rows(split)
        return max(1, self.config.test_rows // min(SETTINGS[split].times, FEWER))

    def layouts(self, split: str) -> np.ndarray:
        """Layouts (count, side, side) of a split's size: of tests, of "valid", then of training."""
        c, setting = self.config, self.setting(split)
        side, count = c.side_of(setting), c.test_rows + c.valid_rows + c.layouts
        key = (side, count if side == c.side else self.rows(split) or 0)
        if key not in self._layouts:
            self._layouts[key] = open_layouts(c.cache_dir, *key)
        return self._layouts[key]

    def prepared(self, model: Any, split: str) -> AbstractContextManager[None]:
        """Inside, a model is ready for a split: its grids are as wide as the mazes."""
        setting = self.setting(split)
        return model.grids_scaled(1 if setting.same_grid else setting.scale)

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Rows `index * size` to `(index + 1) * size` of a split."""
        end = self.rows(split)
        if end is None:
            return super().batch(split, index, size)
        if not 0 <= index * size < end:
            raise IndexError(f"batch {index} of {size} rows: {split} has {end} rows")
        if split not in self._whole:
            random = generator(0, self.inputs, split.removesuffix("-same-grid"))
            drawn = self.walks(split, end, random)
            self._whole[split] = {name: sent(x, self._device) for name, x in drawn.items()}
        return {n: x[index * size : (index + 1) * size] for n, x in self._whole[split].items()}

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """Walks of training."""
        return self.walks("train", rows, random)

    def walks(self, split: str, rows: int, random: torch.Generator) -> Batch:
        """`rows` walks of a split on the CPU."""
        c, setting = self.config, self.setting(split)
        T, known = setting.times * c.steps, self.layouts(split)
        if split == "train":
            first = c.test_rows + c.valid_rows
            chosen = first + torch.randint(c.layouts, (rows,), generator=random)
        else:
            chosen = torch.arange(rows) + (c.test_rows if split == "valid" else 0)
        cells = furnished(known[chosen.numpy()], c.colours, random)  # (B, W, W)
        path = walk(cells, T, random)
        B, W, _ = cells.shape
        seen = seen_cells(path, W)
        asked, age = questions(cells, path, seen, random)
        answer = np.take_along_axis(cells.reshape(B, -1), asked, 1)
        at, question, heading = place_of(path.cell, W), place_of(asked, W), path.heading
        guess = np.where((question % 2 == 0).all(-1), WALL, FREE)
        if c.pose == "integrated":
            at, question = (integrated(x, at, heading) for x in (at, question))
            heading = (heading - heading[:, :1]) % 4
        around = setting.scale * c.side  # a grid so many times as wide has equal voxels
        where = np.stack([at, question], 2).reshape(B, -1, 2) * (2 / around) - 1
        corner = torch.randint(PERIOD, (B, 1, 2), generator=random)
        return {
            "view": torch.from_numpy(cells.ravel()[seen]),
            "at": torch.from_numpy(at) + corner,
            "asked": torch.from_numpy(question) + corner,
            "where": torch.from_numpy(where).float(),
            "heading": torch.from_numpy(heading),
            "action": torch.from_numpy(path.action),
            "target": torch.from_numpy(answer).long(),
            "age": torch.from_numpy(age),
            "guess": torch.from_numpy(guess),
        }

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Cross-entropy, right answers by how long ago a cell was last seen, and right guesses."""
        logits, target, age = outputs["logits"].float(), batch["target"], batch["age"]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        right = logits.argmax(-1) == target
        far = age > FAR
        kinds = {
            "far": far,
            "free": far & (target == FREE),
            "wall": far & (target == WALL),
            "object": far & (target >= OBJECT),
        }
        guessed = {
            f"guess_{name}": (batch["guess"] == target, kind) for name, kind in kinds.items()
        }
        kinds["near"] = ~far
        for name, least in {"very_far": VERY_FAR, "ages_ago": AGES_AGO}.items():
            if age.shape[1] > 2 * least:  # shorter walks have next to none
                kinds[name] = age > least
        told = guessed | {name: (right, kind) for name, kind in kinds.items()}
        sums = {
            f"accuracy_{name}": ((hit & kind).sum(), kind.sum())
            for name, (hit, kind) in told.items()
        }
        count = torch.ones_like(age).sum()
        return sums | {"accuracy": (right.sum(), count), "loss": (loss, count)}

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """Balanced accuracy: the mean over free cells, walls and objects, far ones alone.

        Half of the far cells are free. By the plain accuracy a model that says so of all of them is
        better than one that begins to remember.
        """
        balanced = {}
        for who in ("accuracy", "accuracy_guess"):
            parts = [means.get(f"{who}_{kind}", math.nan) for kind in ("free", "wall", "object")]
            balanced[f"{who}_balanced"] = sum(parts) / len(parts)
        return means | balanced

    def ceiling(self, split: str) -> float:
        """1: whatever is asked for was seen."""
        return 1.0

    def facts(self) -> dict[str, Any]:
        """Sizes, which layouts they are, and what the measures are over."""
        untold = ("cache_dir", "chance")  # answers are not equally likely
        plain = {name: x for name, x in super().facts().items() if name not in untold}
        known = self.layouts("train")
        return plain | {
            "answers": f"free, wall, {self.config.colours} colours",
            "chance_object": 1 / self.config.colours,
            "balanced": f"mean over free, wall and object, last seen more than {FAR} steps ago",
            "far": f"last seen more than {FAR} steps ago, very far {VERY_FAR}, ages ago {AGES_AGO}",
            "guess": "a wall where row and column are even, else free: all that a place tells",
            "object": f"right colours, last seen more than {FAR} steps ago",
            "layouts_digest": hashlib.sha256(known.tobytes()).hexdigest()[:16],
            "layouts_made_with": f"labmaze {LABMAZE}",
        }


def open_layouts(folder: str, side: int, count: int) -> np.ndarray:
    """`count` different layouts (count, side, side), true where a wall is; found or made now.

    They depend on their number and size alone, and come from labmaze seeds 0, 1, 2 …
    """
    rooms = max(1, round(6 * (side / 11) ** 2))
    options = {"max_rooms": rooms} | LABMAZE

    def make(path: Path) -> dict[str, Any]:
        random_maze = _labmaze(folder, side)
        found: dict[bytes, np.ndarray] = {}
        number = 0
        with progress("making mazes", count, unit="mazes") as advance:
            while len(found) < count:
                if number >= 100 * count:
                    raise ValueError(
                        f"task.layouts: expected at most {len(found)} different ones of {side} × "
                        f"{side} cells, got {count}; make mazes larger or ask for fewer"
                    )
                maze = random_maze(height=side, width=side, random_seed=number, **options)
                lines = str(maze.entity_layer).splitlines()
                walls = np.array([list(line) for line in lines]) == "*"
                number += 1
                if walls.tobytes() not in found:
                    found[walls.tobytes()] = walls
                    advance()
        with path.open("wb") as file:
            np.save(file, np.stack(list(found.values())))
        return {"seeds": number}

    key = {"side": side, "count": count} | options
    return cached_array(folder, "mazes", key, {}, make)[0]


def _labmaze(folder: str, side: int) -> Any:
    """labmaze's generator, which only the first run needs."""
    try:
        return importlib.import_module("labmaze").RandomMaze
    except ModuleNotFoundError as error:
        if error.name != "labmaze":
            raise
        raise ModuleNotFoundError(
            f"{folder}: expected layouts of {side} × {side} cells that were made before, or the "
            "package labmaze to make them, got neither; `pip install labmaze`, or name the folder "
            "with --task.cache-dir",
            name="labmaze",
        ) from error


def furnished(walls: np.ndarray, colours: int, random: torch.Generator) -> np.ndarray:
    """Layouts (B, side, side) as cells (B, W, W) uint8 with objects, and walls all around."""
    some = torch.rand(walls.shape, generator=random).numpy() < OBJECTS
    colour = torch.randint(colours, walls.shape, generator=random).numpy()
    cells = np.where(walls, WALL, np.where(some, OBJECT + colour, FREE)).astype(np.uint8)
    around = (REACH, REACH)
    return np.pad(cells, ((0, 0), around, around), constant_values=WALL)


class Walks(NamedTuple):
    """Walks, each (B, T)."""

    cell: np.ndarray
    """Number of the cell in a padded layout, row by row."""
    heading: np.ndarray
    action: np.ndarray
    """What brought the agent there."""


def walk(cells: np.ndarray, T: int, random: torch.Generator) -> Walks:
    """Walks of T steps from a free cell.

    Where the way is free the agent goes on with probability `GO_ON`; else it turns, to the side
    that it turned to last if that was the step before.
    """
    B, W, _ = cells.shape
    free = (cells != WALL).reshape(B, -1)
    draws = torch.rand(2, T, B, generator=random).numpy()
    rank = np.cumsum(free, 1)
    wanted = 1 + (draws[0, 0] * rank[:, -1]).astype(np.int64)
    cell = (rank == wanted[:, None]).argmax(1)
    heading = torch.randint(4, (B,), generator=random).numpy()
    action, ahead = np.full(B, STAY), STEPS @ (W, 1)
    row, side = np.arange(B), np.full(B, LEFT)
    found = Walks(*(np.empty((B, T), np.int64) for _ in range(3)))
    for t in range(T):
        if t:
            on = free[row, cell + ahead[heading]] & (draws[0, t] < GO_ON)
            side = np.where(action > ON, side, np.where(draws[1, t] < 0.5, LEFT, RIGHT))
            action = np.where(on, ON, side)
            cell = np.where(on, cell + ahead[heading], cell)
            heading = np.where(on, heading, (heading + np.where(side == LEFT, 3, 1)) % 4)
        found.cell[:, t], found.heading[:, t], found.action[:, t] = cell, heading, action
    return found


def questions(
    cells: np.ndarray, path: Walks, seen: np.ndarray, random: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cells (B, T) asked for, and how many steps ago each was last seen.

    Of a few cells of earlier views one is taken that was last seen more than `FAR` steps ago, if
    there is any, and in half of the questions one with an object, if there is any.
    """
    (B, T), W = path.cell.shape, cells.shape[1]
    time = np.arange(T)[:, None, None]
    draws = torch.rand(2, T, B, TRIES, generator=random).numpy()
    then = (draws[0] * np.where(time > FAR, time - FAR, time + 1)).astype(np.int64)  # (T, B, TRIES)
    row = np.arange(B)[:, None]
    part = seen_from(W)[path.heading[row, then], (draws[1] * VIEW).astype(np.int64)]
    tried = path.cell[row, then] + part
    tried = mirrored(W)[tried] + row * (W * W)  # numbers over all rows
    last = np.full(B * W * W, -1)  # when a cell was last seen
    ages = np.empty((T, B, TRIES), np.int64)
    for t in range(T):
        last[seen[:, t]] = t
        ages[t] = t - last[tried[t]]
    prefers = torch.rand(T, B, 1, generator=random).numpy() < 0.5
    objects = (cells.ravel()[tried] >= OBJECT) & prefers
    best = (2 * (ages > FAR) + objects).argmax(2)[..., None]
    found, age = (np.take_along_axis(x, best, 2)[..., 0].T for x in (tried % (W * W), ages))
    return np.ascontiguousarray(found), np.ascontiguousarray(age)


def mirrored(W: int) -> np.ndarray:
    """(W²,) for each cell of a padded layout the one to ask for: itself, if it is within.

    At the border and beyond are walls alone, which a place tells without memory. They are mirrored
    at the outermost cells within: whoever sees such a cell sees its image too.
    """
    place, last = place_of(np.arange(W * W), W), W - 2 * REACH - 2
    place = last - abs(last - 1 - abs(place - 1))
    return (place + REACH) @ (1, W)


def seen_cells(path: Walks, W: int) -> np.ndarray:
    """(B, T, V): the cells of every view, numbered over all rows of padded layouts."""
    first = np.arange(len(path.cell))[:, None] * (W * W)
    return (path.cell + first)[..., None] + seen_from(W)[path.heading]


def seen_from(W: int) -> np.ndarray:
    """(4, V) by heading: what is to be added to a cell's number for each cell of its view.

    The first is the one furthest ahead and to the left; the agent is in the middle.
    """
    ahead, right = STEPS, np.roll(STEPS, -1, 0)
    line = np.arange(-REACH, REACH + 1)
    offsets = -line[:, None, None, None] * ahead + line[:, None, None] * right  # (5, 5, 4, 2)
    return (offsets @ (W, 1)).reshape(VIEW, 4).T


def place_of(cell: np.ndarray, W: int) -> np.ndarray:
    """Numbers of cells in a padded layout -> column and row (..., 2) in the layout itself."""
    return np.stack([cell % W, cell // W], -1) - REACH


def integrated(place: np.ndarray, at: np.ndarray, heading: np.ndarray) -> np.ndarray:
    """Places (B, T, 2) as column and row from where the agent stood, turned as it stood at first.

    It is what the sum of its moves and turns says, since no move fails.
    """
    x, y = np.moveaxis(place - at[:, :1], -1, 0)
    # By what was ahead at first: up, right, down, left becomes up.
    ways = np.stack([np.stack(way, -1) for way in ((x, y), (y, -x), (-x, -y), (-y, x))])
    return ways[heading[:, 0], np.arange(len(heading))]


def main(argv: Sequence[str] | None = None) -> None:
    """Make the layouts of a config, for a machine that has no labmaze."""
    import tyro

    try:
        task = tyro.cli(MazeConfig, args=argv).build(0)
        made = dict.fromkeys(task.layouts(s).shape for s in ("train", *task.test_splits))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error
    for count, side, _ in made:
        print(f"{count} layouts of {side} × {side} cells in {task.config.cache_dir}")


if __name__ == "__main__":
    main()
