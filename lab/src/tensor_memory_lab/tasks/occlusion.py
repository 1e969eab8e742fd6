"""Occlusion: a ball bounces in a box, is hidden for L frames; in which quadrant does it end?

Two protocols. `published` hides the L middle frames, so that for every L < T the last frame shows
the answer (and at L = T nothing is ever shown): solvable from the last frame alone, kept as a check
that nothing breaks. `valid` hides the last L frames behind an occluder that is drawn over the whole
box, so that the end of the path must be worked out from where the ball was and how it moved.

The ball moves with constant velocity and is reflected at the walls, so its path along one axis is
a triangle wave. Frames are floats and the ball is drawn with a kernel that keeps its centre of
mass, hence two or three visible frames tell place and velocity exactly: `extrapolate` does, from
pixels alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from tensor_memory_lab.tasks import Annotations, Batch
from tensor_memory_lab.tasks.synthetic import DrawnConfig, DrawnTask

SIDE = 16
"""Pixels along each side of a frame."""
PATCH = 4
"""Pixels along each side of a patch: 16 patches, so 16 tokens, per frame."""
TOKENS_PER_FRAME = (SIDE // PATCH) ** 2
LOW, HIGH = 1.5, SIDE - 2.5
"""Where the ball's centre may be, in pixels: its kernel of radius 2 then stays in the frame."""
MIDDLE = (SIDE - 1) / 2
"""Where the quadrants meet."""
SPEED = (0.5, 2.5)
"""Least and greatest speed along each axis, in pixels per frame; the sign is a coin toss."""
OCCLUDER = 0.5
"""Brightness of the drawn occluder; the ball's peak is near 1, the empty box is 0."""
CLOSE = 1e-3
"""Pixels by which places from float32 frames may differ and still be the same."""


@dataclass(frozen=True)
class OcclusionConfig(DrawnConfig):
    """What is hidden, and for how long."""

    protocol: Literal["published", "valid"] = "valid"
    """`published`: L middle frames blank, solvable from the last frame. `valid`: the last L frames
    behind a drawn occluder."""
    frames: int = 8
    """T: frames per clip."""
    hidden: int = 4
    """L: frames in which the ball is hidden."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "frames")
        if not 0 <= self.hidden <= self.frames:
            raise ValueError(
                f"task.hidden: expected 0 to frames = {self.frames}, got {self.hidden}"
            )

    def build(self, seed: int) -> Occlusion:
        """The task; `seed` draws the training rows."""
        return Occlusion(self, seed)


class Occlusion(DrawnTask):
    """Batches: frames (B, T, 16, 16), ask (B, 1) the last token, target (B, 1) the quadrant
    (0 upper left, 1 upper right, 2 lower left, 3 lower right)."""

    inputs = "occlusion"
    classes = 4

    def __init__(self, config: OcclusionConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.config = config
        self.frames = config.frames
        self.length = config.frames * TOKENS_PER_FRAME
        self.positions = TOKENS_PER_FRAME + max(8, config.frames)
        """One per patch and one per frame."""
        shown = self.visible().nonzero()
        after = config.frames - 1 - int(shown[-1]) if len(shown) else config.frames
        self.distance = after * TOKENS_PER_FRAME
        self.name = f"occlusion-{config.protocol} L={config.hidden}"

    def visible(self) -> Tensor:
        """(T,) bool: frames in which the ball is shown."""
        c = self.config
        first = c.frames - c.hidden if c.protocol == "valid" else (c.frames - c.hidden) // 2
        shown = torch.ones(c.frames, dtype=torch.bool)
        shown[first : first + c.hidden] = False
        return shown

    def draw(self, rows: int, random: torch.Generator) -> Batch:
        """Clips of `rows` balls."""
        path = self.paths(rows, random)  # (B, T, 2)
        shown = self.visible()
        behind = OCCLUDER if self.config.protocol == "valid" else 0.0
        frames = torch.where(shown[:, None, None], draw_ball(path), behind)  # (B, T, 16, 16)
        return {
            "frames": frames,
            "ask": torch.full((rows, 1), self.length - 1),
            "target": quadrant(path[:, -1])[:, None],
        }

    def paths(self, rows: int, random: torch.Generator) -> Tensor:
        """(B, T, 2): row and column of each ball in each frame."""
        start = LOW + (HIGH - LOW) * torch.rand(rows, 1, 2, generator=random)
        speed = SPEED[0] + (SPEED[1] - SPEED[0]) * torch.rand(rows, 1, 2, generator=random)
        sign = torch.randint(2, (rows, 1, 2), generator=random) * 2 - 1
        time = torch.arange(self.config.frames)[:, None]  # (T, 1)
        return fold(start + time * speed * sign)

    def describe(self, batch: Batch) -> Annotations:
        """The frames, in grey."""
        grey = (batch["frames"].clamp(0, 1) * 255).round().to(torch.uint8)
        frames = grey[..., None].expand(-1, -1, -1, -1, 3)
        return {"frames": frames, "tokens_per_frame": TOKENS_PER_FRAME}

    def ceiling(self, split: str) -> float:
        """What the exact extrapolation of the visible frames scores on the test clips."""
        return _extrapolated(self.config)

    def facts(self) -> dict[str, Any]:
        """Also whether the last frame gives the answer away."""
        return super().facts() | {"solvable_from_last_frame": bool(self.visible()[-1])}


def fold(x: Tensor) -> Tensor:
    """A path without walls, reflected at LOW and HIGH as often as it crosses them.

    >>> fold(torch.tensor([HIGH + 1.0, LOW - 2.0])).tolist() == [HIGH - 1.0, LOW + 2.0]
    True
    """
    width = HIGH - LOW
    phase = torch.remainder(x - LOW, 2 * width)
    return LOW + torch.where(phase > width, 2 * width - phase, phase)


def draw_ball(path: Tensor) -> Tensor:
    """(…, 2) centres → (…, 16, 16) frames: a tent of radius 2 per axis.

    A tent as wide as two whole pixels keeps the centre of mass: Σ pixel · brightness / Σ brightness
    is the centre exactly, wherever between the pixels it lies.
    """
    pixel = torch.arange(SIDE, dtype=path.dtype)
    tent = (1 - (pixel - path[..., None]).abs() / 2).clamp_min(0)  # (…, 2, 16)
    return tent[..., 0, :, None] * tent[..., 1, None, :]


def quadrant(centre: Tensor) -> Tensor:
    """(…, 2) → 0 to 3: lower half counts 2, right half 1."""
    half = (centre >= MIDDLE).long()
    return 2 * half[..., 0] + half[..., 1]


def extrapolate(frames: Tensor, shown: Tensor) -> Tensor:
    """(B, T, 16, 16) clips and the (T,) frames that show the ball → (B,) the likeliest quadrant.

    Every velocity that fits all visible frames is continued from the last sight to the last frame
    and votes for the half it ends in, per axis. Two neighbouring frames leave the few velocities
    that a reflection between them allows, all equally likely; a single frame leaves the whole
    range of speeds, tried in small steps; no frame leaves a guess.
    """
    times = shown.nonzero().flatten()
    if not len(times):
        return torch.zeros(len(frames), dtype=torch.long)
    sight = centres(frames[:, times])  # (B, t, 2)
    last = sight[:, -1]
    if times[-1] == len(shown) - 1:  # the answer is in sight
        return quadrant(last)
    if len(times) > 1 and times[-1] == times[-2] + 1:
        before = sight[:, -2]
        velocity = torch.stack(  # (B, candidates, 2): straight, or off the low or the high wall
            [last - before, last - (2 * LOW - before), last - (2 * HIGH - before)], 1
        )
    else:
        speed = torch.linspace(*SPEED, 401, dtype=last.dtype)
        velocity = torch.cat([speed, -speed])[None, :, None].expand(len(last), -1, 2)
    speed = velocity.abs()
    fits = (speed > SPEED[0] - CLOSE) & (speed < SPEED[1] + CLOSE)
    for time, place in zip((times - times[-1]).tolist(), sight.unbind(1), strict=True):
        there = fold(last[:, None] + time * velocity)
        fits &= (there - place[:, None]).abs() < CLOSE
    end = fold(last[:, None] + (len(shown) - 1 - int(times[-1])) * velocity)
    vote = torch.where(end >= MIDDLE, 1.0, -1.0) * fits
    return quadrant(torch.where(vote.sum(1) >= 0, HIGH, LOW))


def centres(frames: Tensor) -> Tensor:
    """(…, 16, 16) frames → (…, 2): row and column of the centre of mass."""
    frames = frames.double()
    pixel = torch.arange(SIDE, dtype=frames.dtype)
    moments = torch.stack([frames.sum(-1) @ pixel, frames.sum(-2) @ pixel], -1)
    return moments / frames.sum((-2, -1))[..., None]


@functools.cache
def _extrapolated(config: OcclusionConfig) -> float:
    """Part of the test clips that `extrapolate` gets right."""
    task, right, size = Occlusion(config, 0), 0, 1024
    for index in range(task.batches("test", size)):
        batch = task.batch("test", index, size)
        right += int((extrapolate(batch["frames"], task.visible()) == batch["target"][:, 0]).sum())
    return right / config.test_rows
