"""Actions in clips of UCF-101, whole or with frames or a region missing at test.

One crop and one flip are drawn per clip, never per frame. Test splits besides "test" blank a block
of frames somewhere, the last frames, or a region of all frames: which ones belongs to the clip, so
that every method is shown the same. Letters: B batch, T frames, H × W pixels.

`python -m tensor_memory_lab.tasks.video --data-dir DIR --cache-dir DIR` decodes the clips into a
cache, so that a machine without the videos can train from it; the options are the config's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory_lab.choices import check_choices
from tensor_memory_lab.tasks import Annotations, Batch, Outputs, Sums, Task
from tensor_memory_lab.tasks.clips import ClipLists, Decoder, VideoStore, load_videos, read_lists
from tensor_memory_lab.tasks.epochs import drawn, epoch_rows
from tensor_memory_lab.tasks.images import MEAN
from tensor_memory_lab.tasks.synthetic import generator

BLANK = tuple(round(255 * level) for level in MEAN)
"""What is shown where nothing is: the mean colour, zero after normalisation."""


@dataclass(frozen=True)
class VideoTaskConfig:
    """Which clips, how many frames, what is missing at test."""

    data_dir: str = "UCF101"
    """Folder with UCF-101/<Class>/*.avi and the official lists (in it or in ucfTrainTestlist)."""
    cache_dir: str = "runs/decoded"
    """Where decoded clips are kept; a cache made elsewhere serves without the videos."""
    split: int = 1
    """Official split 1, 2 or 3."""
    classes: tuple[str, ...] = ()
    """Use these classes only; none named: all."""
    frames: int = 8
    """T, frames per clip."""
    cached_frames: int = 64
    """F, frames kept of each clip, a multiple of T: training draws which of F / T it starts at."""
    height: int = 96
    """Of the kept frames, in pixels."""
    width: int = 128
    """Of the kept frames, in pixels."""
    crop: tuple[int, int] = (80, 112)
    """Height and width a model sees."""
    patch: int = 16
    """Side of a patch; a divisor of both sides of the crop."""
    decoder: Decoder = "pyav"
    """What reads the video files; opencv is for machines without PyAV."""
    strict: bool = False
    """A clip that cannot be decoded is an error; else it is named, counted and left out."""
    valid_fraction: float = 0.15
    """Part of each class's training groups held out to choose the best checkpoint by."""
    missing: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75)
    """Parts of the frames blanked in test splits of their own."""
    region: float = 0.25
    """Part of the picture's area blanked in one more; 0 for none."""
    label_smoothing: float = 0.1
    """Part of a target that the loss spreads over all classes."""
    resident: Literal["device", "host"] = "device"
    """Where decoded clips lie: on the GPU, or, where they are too many for it, on the host."""

    def __post_init__(self) -> None:
        check_choices(self, "task")
        if self.frames < 1 or self.cached_frames % self.frames:
            raise ValueError(
                f"task.frames: expected a divisor of task.cached_frames = {self.cached_frames}, "
                f"got {self.frames}; for another T set both"
            )
        if self.crop[0] > self.height or self.crop[1] > self.width:
            raise ValueError(
                f"task.crop: expected at most {self.height} x {self.width} pixels, "
                f"got {self.crop[0]} x {self.crop[1]}"
            )
        if self.patch < 1 or self.crop[0] % self.patch or self.crop[1] % self.patch:
            raise ValueError(
                f"task.patch: expected a divisor of task.crop = {self.crop[0]} x {self.crop[1]}, "
                f"got {self.patch}"
            )
        if not 0 <= self.region < 1 or not all(0 < part < 1 for part in self.missing):
            raise ValueError(
                "task.missing and task.region: expected parts between 0 and 1, "
                f"got {self.missing} and {self.region}"
            )

    def build(self, seed: int) -> VideoTask:
        """Read the lists and decode what is not decoded yet."""
        lists = read_lists(
            self.data_dir,
            split=self.split,
            classes=self.classes,
            valid_fraction=self.valid_fraction,
        )
        store = load_videos(
            self.data_dir,
            lists.all(),
            frames=self.cached_frames,
            size=(self.height, self.width),
            cache=self.cache_dir,
            decoder=self.decoder,
            strict=self.strict,
        )
        return VideoTask(self, seed, lists, store)


class VideoTask(Task):
    """Batches: `clip` (B, T, H, W, 3) uint8, `label` (B,)."""

    metric = "accuracy"
    higher_is_better = True

    def __init__(
        self, config: VideoTaskConfig, seed: int, lists: ClipLists, store: VideoStore
    ) -> None:
        self.config, self.seed, self.lists, self.store = config, seed, lists, store
        self.frames, self.classes = config.frames, len(lists.classes)
        self.grid = (config.crop[0] // config.patch, config.crop[1] // config.patch)
        some = f"-{len(lists.classes)}" if config.classes else ""
        self.name = f"ucf101{some}@{config.width}x{config.height} T={config.frames}"
        self.device = store.frames.device
        there = {
            split: [clip for clip in clips if clip.name in store.row]
            for split, clips in lists.splits.items()
        }
        lost = [split for split, clips in there.items() if not clips]
        if lost:
            raise ValueError(
                f"{lost[0]}: expected clips, but not one of its {len(lists.splits[lost[0]])} can "
                "be decoded; take the files from the original archive again"
            )
        self.groups = {split: len({c.group for c in clips}) for split, clips in there.items()}
        """How many recordings are in each split."""
        self.names = {split: [clip.name for clip in clips] for split, clips in there.items()}
        self._rows = {
            split: torch.tensor([store.row[clip.name] for clip in clips], device=self.device)
            for split, clips in there.items()
        }
        self._labels = {
            split: torch.tensor([clip.label for clip in clips], device=self.device)
            for split, clips in there.items()
        }
        counts = sorted({max(round(part * config.frames), 1) for part in config.missing})
        self.blanks = {f"test@missing={k}": ("block", k) for k in counts if k < config.frames}
        self.blanks |= {f"test@last={k}": ("last", k) for k in counts if k < config.frames}
        if config.region:
            self.blanks[f"test@region={100 * config.region:g}%"] = ("region", 0)
        self.test_splits = ("test", *self.blanks)
        self._blank = torch.tensor(BLANK, dtype=torch.uint8, device=self.device)

    def to(self, device: torch.device) -> VideoTask:
        """The same task with its clips on `device`: 2.9 GB for nine classes at 128 × 96."""
        if self.config.resident == "host":
            return self
        return VideoTask(self.config, self.seed, self.lists, self.store.to(device))

    def batch(self, split: str, index: int, size: int) -> Batch:
        """One drawn start, crop and flip per clip in training; the middle elsewhere."""
        if split == "train":
            random = generator(self.seed, "clips", index)
            draws = drawn(size, 4, random=random, device=self.device)
            count, first = len(self.names["train"]), index * size
            at = epoch_rows(count, self.seed, first, first + size, device=self.device)
        else:
            count = len(self.names[self._part(split)])
            at = torch.arange(index * size, min((index + 1) * size, count), device=self.device)
            if not len(at):
                raise IndexError(f"batch {index} of {size} rows: {split} has {count}")
            draws = torch.full((len(at), 4), 0.5, device=self.device)
        part = self._part(split)
        clip = self._cut(self._rows[part][at], draws)
        if split in self.blanks:
            gone = self._gone(split, index * size, len(at))  # (B, T, H, W) or broadcast to it
            clip = torch.where(gone[..., None], self._blank, clip)
        return {"clip": clip, "label": self._labels[part][at]}

    def batches(self, split: str, size: int) -> int:
        """Batches of one pass."""
        return -(-len(self.names[self._part(split)]) // size)

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean cross-entropy, labels smoothed."""
        smoothing = self.config.label_smoothing
        return F.cross_entropy(outputs["logits"].float(), batch["label"], label_smoothing=smoothing)

    def measure(self, outputs: Outputs, batch: Batch) -> Sums:
        """Cross-entropy without smoothing, and whether the class is the first or in the first 5."""
        logits, label = outputs["logits"].float(), batch["label"]
        rows = torch.full((), len(label), device=label.device)  # torch.tensor would travel there
        best = logits.topk(min(5, self.classes)).indices == label[:, None]  # (B, 5)
        return {
            "loss": (F.cross_entropy(logits, label, reduction="sum"), rows),
            "accuracy": (best[:, 0].sum(), rows),
            "top5": (best.any(1).sum(), rows),
        }

    def facts(self) -> dict[str, Any]:
        """Sizes, and which part of the official lists this is."""
        c = self.config
        return {
            "classes": list(self.lists.classes) if c.classes else "all 101",
            "chance": 1 / self.classes,
            "official_split": c.split,
            "clips": {split: len(part) for split, part in self.names.items()},
            "groups": self.groups,
            "left_out": sorted(self.store.left_out),
            "frames": c.frames,
            "crop": list(c.crop),
            "patch": c.patch,
            "decoder": c.decoder,
            "resident_bytes": 0 if c.resident == "host" else self.store.frames.numel(),
        }

    def describe(self, batch: Batch) -> Annotations:
        """The frames as the model sees them, each a summary token and its patches."""
        return {"frames": batch["clip"], "tokens_per_frame": 1 + self.grid[0] * self.grid[1]}

    def _cut(self, rows: Tensor, draws: Tensor) -> Tensor:
        """Clips (B, T, h, w, 3) by four numbers in [0, 1) each: start, top, left, flip."""
        c = self.config
        h, w = c.crop
        every = c.cached_frames // c.frames
        start = (draws[:, 0] * every).long()
        top = (draws[:, 1] * (c.height - h + 1)).long()
        left = (draws[:, 2] * (c.width - w + 1)).long()
        flip = draws[:, 3] > 0.5  # the middle, which evaluation asks for, is not mirrored
        time = start[:, None] + every * torch.arange(c.frames, device=self.device)  # (B, T)
        y = top[:, None] + torch.arange(h, device=self.device)
        across = torch.arange(w, device=self.device)
        x = left[:, None] + torch.where(flip[:, None], w - 1 - across, across)
        return self.store.frames[
            rows[:, None, None, None],
            time[:, :, None, None],
            y[:, None, :, None],
            x[:, None, None, :],
        ]

    def _gone(self, split: str, first: int, count: int) -> Tensor:
        """(B, T, 1, 1) or (B, 1, h, w) bool: what is blanked, chosen by the clip's name."""
        kind, k = self.blanks[split]
        names = self.names["test"][first : first + count]
        if kind == "region":
            h, w = self.config.crop
            tall, wide = (round(length * self.config.region**0.5) for length in (h, w))
            top = torch.tensor([_chosen(name, "top", h - tall + 1) for name in names])
            left = torch.tensor([_chosen(name, "left", w - wide + 1) for name in names])
            inside_y = _between(top, tall, h)[:, None, :, None]
            return (inside_y & _between(left, wide, w)[:, None, None, :]).to(self.device)
        T = self.frames
        starts = [T - k if kind == "last" else _chosen(name, "block", T - k + 1) for name in names]
        return _between(torch.tensor(starts), k, T)[:, :, None, None].to(self.device)

    def _part(self, split: str) -> str:
        part = "test" if split in self.blanks else split
        if part not in self.names:
            raise ValueError(
                f"split: expected train, valid, {', '.join(self.test_splits)}, got {split!r}"
            )
        return part


def _chosen(name: str, what: str, choices: int) -> int:
    """One of `choices`, by the hash of a clip's name."""
    digest = hashlib.sha256(f"{name}:{what}:{choices}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % choices


def _between(start: Tensor, length: int, total: int) -> Tensor:
    """(B,) starts -> (B, total) bool, true on the `length` places from the start."""
    place = torch.arange(total)
    return (place >= start[:, None]) & (place < start[:, None] + length)


def main(argv: Sequence[str] | None = None) -> None:
    """Decode the clips of a config into its cache."""
    import tyro

    try:
        store = tyro.cli(VideoTaskConfig, args=argv).build(0).store
    except (ValueError, OSError, ImportError) as error:  # data that are not there, or broken
        raise SystemExit(f"error: {error}") from error
    print(f"{len(store.row)} clips ready, {len(store.left_out)} left out")


if __name__ == "__main__":
    main()
