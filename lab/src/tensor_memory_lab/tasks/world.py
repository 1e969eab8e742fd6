"""A world that is remembered: walk over an image, say what will be seen before it is seen.

An agent walks over an image with momentum and turns back at its borders. At each step it is asked
for the patch at its pose, then sees it. Where it has been before, a memory can tell the patch;
where it has not, the surroundings can be guessed from. So errors are told apart by how long ago a
place was last seen: an earlier glimpse within `near` of the pose counts as having seen it. Some
questions may be for any place instead (`elsewhere`), about which the last few glimpses tell little.

With the same weights other worlds are walked over, each a test split of its own: longer walks,
larger images, a pose that drifts, a stretch in which nothing is seen and the model's own answers
stand for what it would have seen, an image half of which changes while the agent is in the other.

Poses are (x, y) in [-1, 1], the extremes being the outermost places at which a patch lies within
the image. Pixels are in [-1, 1], their errors on the scale [0, 1], PSNR in dB of an error that is
averaged over all glimpses of a kind.

Letters: B batch, T glimpses, S of them shown, P numbers in a patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory_lab.tasks import Batch, Outputs, Sums, Task
from tensor_memory_lab.tasks.epochs import epoch_rows, sent
from tensor_memory_lab.tasks.images import Images, open_images
from tensor_memory_lab.tasks.synthetic import DrawnConfig, generator

REACH = 8
"""Glimpses back that attention over 16 tokens sees: two tokens each."""
FAR, VERY_FAR = 40, 200
"""Glimpses since a place was last seen. Four windows of 16 tokens reach 30 glimpses back."""
BLOCK = 256
"""Glimpses that are compared with all earlier ones at once, which bounds the memory it takes."""


@dataclass(frozen=True)
class Setting:
    """How a test split departs from the walks of training."""

    times: int = 1
    """Glimpses of a walk, as a multiple of those in training."""
    scale: int = 1
    """Width and height of the images, as a multiple of those in training; glimpses and steps keep
    their pixels."""
    same_grid: bool = False
    """Whether the grids of place memories, and so their bytes, stay those of training."""
    drift: float = 0.0
    """Standard deviation of what each step adds to the error of the pose, in half widths."""
    blind: int = 0
    """Glimpses at the end of a walk at which nothing is seen."""
    change: bool = False
    """Whether half of the image is another one from the middle of the walk on."""


SETTINGS = {
    "test": Setting(),
    "test@4x": Setting(times=4),
    "test@16x": Setting(times=16),
    "test@large": Setting(times=4, scale=2),
    "test@drift": Setting(drift=0.01),
    "test@blind8": Setting(blind=8),
    "test@blind32": Setting(blind=32),
    "test@blind128": Setting(blind=128),
    "test@change": Setting(change=True),
    "test@large-same-grid": Setting(times=4, scale=2, same_grid=True),
}
"""The test splits that there are; the last has the walks of test@large."""


@dataclass(frozen=True)
class WorldConfig(DrawnConfig):
    """Which images, what the agent sees of them, how it walks."""

    data_dir: str = "CUB_200_2011.zip"
    """Folder of the images, or a .zip of it."""
    cache_dir: str = "runs/decoded"
    """Where decoded images are kept."""
    layout: Literal["cub", "folder"] = "cub"
    """cub: CUB-200-2011 with its official split. folder: any images, split by the hash of ids."""
    side: int = 64
    """Pixels along each side of the square that is walked over, the short side of an image."""
    patch: int = 8
    """Pixels along each side of a glimpse."""
    glimpses: int = 256
    """Steps of a walk."""
    step: float = 0.16
    """Length of a step, in half widths."""
    turn: float = 0.6
    """Standard deviation of the turn before a step, in radians."""
    near: float = 0.12
    """Distance in half widths within which an earlier glimpse has seen a place."""
    valid_rows: int = 512
    """Walks of "valid", the same for every method, seed and budget."""
    test_rows: int = 2048
    """Walks of "test", the same for every method, seed and budget."""
    tests: tuple[str, ...] = ("test",)
    """Test splits: test, test@4x and test@16x (longer walks), test@large (images twice as wide and
    high), test@large-same-grid (the same with grids as in training), test@drift, test@blind8,
    test@blind32, test@blind128, test@change."""
    drift: float = 0.0
    """Standard deviation of what each step adds to the error of the pose, everywhere but in the
    splits that have their own."""
    change: bool = False
    """Whether half of the image changes in the middle of every walk, in training too."""
    elsewhere: float = 0.0
    """Share of the questions that are for any place of the image, not for the next glimpse."""
    own: float = 0.0
    """Scheduled sampling: the share of glimpses in training whose place the model's own answers
    take, when it has risen to its full."""
    own_steps: int = 1500
    """Steps in which that share rises from zero."""
    valid_fraction: float = 0.1
    """Part of the training images held out to choose by."""
    test_fraction: float = 0.2
    """Part of a plain folder that is for testing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least(1, "glimpses")
        if not 1 <= self.patch < self.side:
            raise ValueError(
                f"task.patch: expected 1 pixel or more and less than task.side = {self.side}, got "
                f"{self.patch}"
            )
        self._check_tests(self.tests, SETTINGS)
        for name in self.tests:
            if SETTINGS[name].blind >= self.glimpses:
                raise ValueError(
                    f"task.tests: expected more glimpses than the {SETTINGS[name].blind} of {name} "
                    f"in which nothing is seen, got task.glimpses = {self.glimpses}"
                )
        if not 0 <= self.elsewhere <= 1 or (self.elsewhere and self._answers_stand_for_glimpses):
            raise ValueError(
                "task.elsewhere: expected a share in [0, 1], and 0 with task.own or blind tests, "
                f"where answers stand for glimpses, got {self.elsewhere}"
            )
        if self.drift < 0 or not 0 <= self.own < 1 or self.own_steps < 1:
            raise ValueError(
                "task: expected drift of 0 or more, own in [0, 1) and own_steps of 1 or more, got "
                f"{self.drift}, {self.own} and {self.own_steps}"
            )
        for name in ("step", "near"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"task.{name}: expected a part of the half width, above 0 and below 1, got "
                    f"{getattr(self, name)}"
                )

    @property
    def _answers_stand_for_glimpses(self) -> bool:
        return self.own > 0 or any(SETTINGS[name].blind for name in self.tests)

    def build(self, seed: int) -> World:
        """Read the lists and decode what is not decoded yet."""
        if self.glimpses < FAR + 2:
            raise ValueError(
                f"task.glimpses: expected {FAR + 2} or more, got {self.glimpses}; psnr_far, which "
                f"chooses, is over places last seen more than {FAR} glimpses ago"
            )
        return World(self, seed, {1: self.images(1)})

    def images(self, scale: int) -> Images:
        """The images that are walked over, so many times as wide and as high as in training."""
        return open_images(
            self.data_dir,
            self.layout,
            side=scale * self.side,
            cache=self.cache_dir,
            valid_fraction=self.valid_fraction,
            test_fraction=self.test_fraction,
        )


class World(Task):
    """Batches: `poses` (B, T, 2), what is `seen` there (B, S, P), and what else a setting needs.

    `target` (B, T, P) where it is not what is seen. `at` (B, T, 2), the true poses in half widths
    of training's images, where those told are not. `asked` (B, T, 2), the places of the questions
    where they are not the poses, and `sought`, which is to them what `at` is to poses. `own`
    (B, T), glimpses that the model's answers stand for. `turned` (B, T), questions for what has
    changed.
    """

    metric = "psnr_far"
    higher_is_better = True

    def __init__(self, config: WorldConfig, seed: int, images: dict[int, Images]) -> None:
        self.config, self.seed, self.images = config, seed, images
        self.name = f"world {images[1].name}"
        self.values = 3 * config.patch**2
        """P, numbers in a patch."""
        self.test_splits = config.tests
        self.device = images[1].store.pixels.device
        self._drawn: dict[str, Batch] = {}

    def to(self, device: torch.device) -> World:
        """The same task with its images on `device`: 0.2 GB for CUB at 64 pixels."""
        moved = {scale: images.to(device) for scale, images in self.images.items()}
        return World(self.config, self.seed, moved)

    def setting(self, split: str) -> Setting:
        """How the walks of a split go."""
        if split not in ("train", "valid", *self.test_splits):
            raise ValueError(
                f"split: expected train, valid, {', '.join(self.test_splits)}, got {split!r}"
            )
        found = SETTINGS.get(split, Setting())
        return replace(
            found,
            drift=found.drift or self.config.drift,
            change=found.change or self.config.change,
        )

    def prepared(self, model: Any, split: str) -> AbstractContextManager[None]:
        """Inside, a model is ready for a split: its grids are as large as the images ask for."""
        setting = self.setting(split)
        return model.grids_scaled(1 if setting.same_grid else setting.scale)

    def batch(self, split: str, index: int, size: int) -> Batch:
        """Walks over random crops in training, over the middle of an image elsewhere."""
        rows = range(index * size, (index + 1) * size)
        if split == "train":
            random = generator(self.seed, "world", index)
            drawn = self._send(self._draw(self.setting(split), size, random))
            crop, flip = drawn["uniform"][:, 3:5], drawn["uniform"][:, 5] < 0.5
        else:
            rows = range(self._rows(split))[rows.start : rows.stop]
            if not rows:
                raise IndexError(f"batch {index} of {size} rows: {split} has {self._rows(split)}")
            drawn = {name: x[rows.start : rows.stop] for name, x in self._fixed(split).items()}
            crop, flip = None, None

        def images(shift: int) -> Tensor:
            later = range(rows.start + shift, rows.stop + shift)
            return self.pixels(split, later, crop, flip)

        batch = self._walked(self.setting(split), drawn, images)
        if split == "train" and self.config.own:
            share = self.config.own * min(1.0, index / self.config.own_steps)
            batch["own"] = drawn["own"] < share
        return batch

    def pixels(
        self, split: str, rows: range, crop: Tensor | None = None, flip: Tensor | None = None
    ) -> Tensor:
        """Images (B, 3, side, side) of walks by number: the middle, unless told which crop.

        When all images of a split have had their walk they come again, in another order.
        """
        scale, device = self.setting(split).scale, self.device
        if scale not in self.images:  # a run that measures no such split does without
            self.images[scale] = self.config.images(scale).to(device)
        if crop is None:
            crop = torch.full((len(rows), 2), 0.5, device=device)
        if flip is None:
            flip = torch.zeros(len(rows), dtype=torch.bool, device=device)
        chosen = self.images[scale].rows[split.partition("@")[0]]
        seed = self.seed if split == "train" else 0
        order = epoch_rows(len(chosen), seed, rows.start, rows.stop, device=device)
        side = scale * self.config.side
        return to_pixels(self.images[scale].store.crops(chosen[order], side, crop, flip))

    def _walked(self, setting: Setting, drawn: Batch, images: Callable[[int], Tensor]) -> Batch:
        """What an agent sees on its walks."""
        c, patch = self.config, self.config.patch
        start, heading = 2 * drawn["uniform"][:, :2] - 1, 2 * math.pi * drawn["uniform"][:, 2]
        # Half a width of training's images over that of the setting's.
        unit = (c.side - patch) / (setting.scale * c.side - patch)
        poses = walk(start, heading, c.turn * drawn["turn"], c.step * unit)
        asked = poses
        if c.elsewhere:
            anywhere = 2 * drawn["anywhere"][..., 1:] - 1
            asked = torch.where(drawn["anywhere"][..., :1] < c.elsewhere, anywhere, poses)
        batch, before, middle = {"poses": poses}, images(0), poses.shape[1] // 2
        parts = [(before, slice(None))]
        if setting.change:
            after, batch["turned"], batch["stayed"] = half_changed(
                before, images(1), poses, asked, patch
            )
            parts = [(before, slice(middle)), (after, slice(middle, None))]

        def shown(at: Tensor) -> Tensor:
            return torch.cat([glimpses(image, at[:, t], patch) for image, t in parts], dim=1)

        batch["seen"] = shown(poses)
        slip = setting.drift * unit * drawn["slip"].cumsum(1) if setting.drift else 0.0
        batch["poses"] = poses + slip
        if setting.drift or setting.scale > 1:
            batch["at"] = poses / unit
        if c.elsewhere:
            batch |= {"asked": asked + slip, "sought": asked / unit, "target": shown(asked)}
        if setting.blind:
            batch["target"] = batch["seen"]
            batch["seen"] = batch["seen"][:, : -setting.blind]
        return batch

    def batches(self, split: str, size: int) -> int:
        """Batches of one pass."""
        return -(-self._rows(split) // size)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean squared error of the patches, on the scale [0, 1]."""
        return errors(outputs["patches"], batch.get("target", batch["seen"])).mean()

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Errors by how long ago a place was last seen, of the model and of the lookup.

        They are named after the PSNR that `finish` makes of their means.
        """
        target, shown = batch.get("target", batch["seen"]), batch["seen"].shape[1]
        at = batch.get("at", batch["poses"])
        sought = batch.get("sought", at)
        # What a split asks for are the glimpses of which none is seen, where there are such.
        first = shown if shown < target.shape[1] else 0
        age, oldest, nearest = revisits(at, self.config.near, shown, sought)
        found = errors(outputs["patches"], target)  # (B, T)
        pixels = (self.config.side - self.config.patch) / 2
        looked_up = errors(look_up(batch["seen"], pixels * at, nearest, pixels * sought), target)
        kinds = {
            "never": age == 0,
            "near": (age > 0) & (age <= REACH),
            "far": age > FAR,
            "very_far": age > VERY_FAR,
        }
        if "turned" in batch:
            turned, middle = batch["turned"], at.shape[1] // 2
            number = torch.arange(at.shape[1], device=at.device)
            # Seen before the change, and last seen after it: the old must have been overwritten.
            kinds["renewed"] = turned & (age > FAR) & (number - age >= middle) & (oldest < middle)
            kinds["stayed"] = batch["stayed"] & (age > FAR)
        counted = torch.ones_like(found)[:, first:]
        sums = {"loss": (found[:, first:].sum(), counted.sum())}
        for kind, chosen in kinds.items():
            chosen = chosen[:, first:]
            sums[f"psnr_{kind}"] = ((found[:, first:] * chosen).sum(), chosen.sum())
            if kind != "never":
                looked = (looked_up[:, first:] * chosen).sum()
                sums[f"psnr_lookup_{kind}"] = (looked, chosen.sum())
        return sums

    def finish(self, means: dict[str, float]) -> dict[str, float]:
        """PSNR of every error."""
        told = {name: decibels(error) for name, error in means.items() if name != "loss"}
        return means | told | {"psnr": decibels(means["loss"])}

    def facts(self) -> dict[str, Any]:
        """Sizes and what the measures are over."""
        c = self.config
        return {
            "images": {split: len(ids) for split, ids in self.images[1].ids.items()},
            "images_checksum": self.images[1].store.checksum,
            "resident_bytes": self.images[1].store.pixels.numel(),
            "glimpses": c.glimpses,
            "far": f"last seen more than {FAR} glimpses ago, very far {VERY_FAR}",
            "near": f"last seen at most {REACH} glimpses ago",
            "seen": f"an earlier glimpse within {c.near:g} of the half width",
            "psnr": "dB of the error averaged over all glimpses of a kind",
            "lookup": "copies the nearest earlier glimpse, moved by the pixels between",
        }

    def assets(self) -> dict[str, str]:
        """Which images it was trained on."""
        return self.images[1].assets()

    def _rows(self, split: str) -> int:
        """Walks of an evaluation split: fewer of those that take longer."""
        setting = self.setting(split)
        if split == "valid":
            return self.config.valid_rows
        return max(1, self.config.test_rows // (8 if setting.blind else setting.times))

    def _fixed(self, split: str) -> Batch:
        """What is drawn for an evaluation split, which no seed changes."""
        if split not in self._drawn:
            random = generator(0, "world", split.removesuffix("-same-grid"))
            drawn = self._draw(self.setting(split), self._rows(split), random)
            self._drawn[split] = self._send(drawn)
        return self._drawn[split]

    def _draw(self, setting: Setting, rows: int, random: torch.Generator) -> Batch:
        """Numbers on the CPU, so that every device gets the same."""
        T = setting.times * self.config.glimpses
        drawn = {
            "uniform": torch.rand(rows, 6, generator=random),  # start, heading, crop, flip
            "turn": torch.randn(rows, T, generator=random),
        }
        if setting.drift:
            drawn["slip"] = torch.randn(rows, T, 2, generator=random)
        if self.config.elsewhere:
            drawn["anywhere"] = torch.rand(rows, T, 3, generator=random)  # whether, and where
        if self.config.own:
            drawn["own"] = torch.rand(rows, T, generator=random)
        return drawn

    def _send(self, drawn: Batch) -> Batch:
        return {name: sent(x, self.device) for name, x in drawn.items()}


def walk(start: Tensor, heading: Tensor, turn: Tensor, step: float) -> Tensor:
    """Poses (B, T, 2) in [-1, 1] of a walk with momentum that is reflected at the borders.

    start (B, 2), heading (B) and turn (B, T) in radians: each step of length `step` goes along the
    heading after its turn.
    """
    heading = heading[:, None] + turn.cumsum(1)
    moves = step * torch.stack([heading.cos(), heading.sin()], dim=-1)
    return reflected(start[:, None] + moves.cumsum(1))


def reflected(at: Tensor) -> Tensor:
    """Any number as the place in [-1, 1] where mirrors at both ends put it.

    >>> reflected(torch.tensor([0.5, 1.25, -1.5, 3.0]))
    tensor([ 0.5000,  0.7500, -0.5000, -1.0000])
    """
    return 1 - ((at + 1) % 4 - 2).abs()


def to_pixels(images: Tensor) -> Tensor:
    """Bytes as numbers in [-1, 1]."""
    return images.float() / 127.5 - 1


def glimpses(images: Tensor, poses: Tensor, patch: int) -> Tensor:
    """Patches (B, T, P) of images (B, 3, side, side) around poses (B, T, 2), interpolated."""
    side, T = images.shape[-1], poses.shape[1]
    at = poses[:, :, None] * (1 - patch / side) + _offsets(patch, poses) * (2 / side)
    seen = F.grid_sample(images, at, align_corners=False)  # at (B, T, patch², 2) -> (B, 3, T, …)
    return seen.permute(0, 2, 3, 1).reshape(len(images), T, -1)


def half_changed(
    images: Tensor, others: Tensor, poses: Tensor, asked: Tensor, patch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 3, side, side) after a change; which questions (B, T) are for what has changed
    since, and which for what has stayed.

    In the middle of the walk the half that the agent is not in becomes that of another image.
    """
    side, middle = images.shape[-1], poses.shape[1] // 2
    here = poses[:, middle - 1]
    axis = here.abs().argmax(1, keepdim=True)  # (B, 1): the one along which it is further out
    away = -here.gather(1, axis).sign()
    centres = (torch.arange(side, device=poses.device) + 0.5) * (2 / side) - 1
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    half = torch.stack([x, y])[axis[:, 0]] * away[..., None] > 0  # (B, side, side)
    along = asked.gather(2, axis[:, None].expand(-1, asked.shape[1], -1))[..., 0]
    later = torch.arange(poses.shape[1], device=poses.device) >= middle
    # A patch at the border shows both halves, and is for neither.
    beyond, whole = along * away * (1 - patch / side), patch / side
    turned, stayed = (beyond > whole) & later, (beyond < -whole) & later
    return torch.where(half[:, None], others, images), turned, stayed


def errors(patches: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each patch (B, T, P) -> (B, T), on the scale [0, 1]."""
    return ((patches.float() - target) / 2).square().mean(-1)


class Revisits(NamedTuple):
    """Of every question (B, T) what earlier glimpses have seen of its place."""

    age: Tensor
    """How many glimpses ago it was last seen; 0 where never."""
    oldest: Tensor
    """The number of the glimpse that saw it first; T where none did."""
    nearest: Tensor
    """The number of the glimpse that came nearest; 0 for the first of all."""


def revisits(
    poses: Tensor, near: float, shown: int | None = None, asked: Tensor | None = None
) -> Revisits:
    """Which earlier ones of the first `shown` glimpses came within `near` of each pose (B, T, 2).

    With `asked` (B, T, 2) of each of these places instead.

    >>> found = revisits(torch.tensor([[[0.0, 0.0], [0.5, 0.0], [0.1, 0.0]]]), near=0.2)
    >>> found.age.tolist(), found.nearest.tolist()
    ([[0, 0, 2]], [[0, 0, 0]])
    """
    T, asked = poses.shape[1], poses if asked is None else asked
    number = torch.arange(T, device=poses.device)
    parts = []
    for queries in number.split(BLOCK):
        earlier = (number < queries[:, None]) & (number < (T if shown is None else shown))
        exact = "donot_use_mm_for_euclid_dist"
        distance = torch.cdist(asked[:, queries], poses, compute_mode=exact)
        distance = distance.masked_fill(~earlier, math.inf)  # (B, queries, T)
        there = distance < near
        last = torch.where(there, number, -1).amax(-1)
        age = torch.where(last >= 0, queries - last, 0)
        oldest = torch.where(there, number, T).amin(-1)
        parts.append((age, oldest, distance.argmin(-1)))
    return Revisits(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


def look_up(patches: Tensor, pixels: Tensor, nearest: Tensor, asked: Tensor) -> Tensor:
    """For each question the patch of an earlier glimpse, moved by the pixels between: (B, T, P).

    patches (B, S, P) were seen around pixels (B, T, 2), nearest (B, T) are numbers of them, asked
    (B, T, 2) are the pixels around which something is to be told. What the earlier glimpse did not
    see is as its border.
    """
    (B, T, _), P = asked.shape, patches.shape[2]
    patch = math.isqrt(P // 3)
    earlier = patches.gather(1, nearest[..., None].expand(-1, -1, P))
    between = asked - pixels.gather(1, nearest[..., None].expand(-1, -1, 2))
    at = (_offsets(patch, pixels) + between.reshape(B * T, 1, 2)) * (2 / patch)  # (BT, patch², 2)
    images = earlier.view(B * T, patch, patch, 3).permute(0, 3, 1, 2)
    found = F.grid_sample(images, at[:, :, None], padding_mode="border", align_corners=False)
    return found[..., 0].mT.reshape(B, T, P)


def _offsets(patch: int, like: Tensor) -> Tensor:
    """(patch², 2) where the pixels of a patch are, x and y from its middle."""
    line = torch.arange(patch, device=like.device, dtype=like.dtype) - (patch - 1) / 2
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=-1).view(-1, 2)


def decibels(error: float) -> float:
    """PSNR of a mean squared error on the scale [0, 1]; at most 100, and no number of none.

    >>> decibels(0.01), decibels(0.0), decibels(math.nan)
    (20.0, 100.0, nan)
    """
    return error if math.isnan(error) else -10 * math.log10(max(error, 1e-10))
