"""UCF-101: the official lists, exact frames of a video, decoded clips on disk.

Clips of one group are cut from one recording. A group in two splits would let a model recognise the
room instead of the action, so validation is held out of train by group and an overlap is an error.
There is no split without the lists.

Frames are counted as they come out of the decoder, from the first: no seeking, so no key frame is
taken for another, and frame 17 is the eighteenth picture in either decoder. A clip that cannot be
decoded is named in a warning, counted and left out, or is an error with `strict`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor_memory_lab.tasks.cache import cached_array, decode_all
from tensor_memory_lab.tasks.images import chosen_by_hash

LAYOUT = (
    "videos as <data>/UCF-101/<Class>/v_<Class>_gNN_cNN.avi (or <data>/<Class>/…), and "
    "classInd.txt, trainlist01.txt … trainlist03.txt, testlist01.txt … testlist03.txt in "
    "<data>/ucfTrainTestlist (or in <data>), <data> being --data-dir"
)
NAME = re.compile(r"v_\w+_g(\d+)_c(\d+)\.\w+$")

Decoder = Literal["pyav", "opencv"]

SLACK = 1
"""Frames that may be missing at the end: some encoders declare one that they never wrote."""


@dataclass(frozen=True)
class Clip:
    """One video of a list."""

    name: str
    """`<Class>/v_<Class>_gNN_cNN.avi`, as the lists write it."""
    label: int
    """Place of its class among the classes used, counted from 0."""
    group: str
    """`<Class>/gNN`: the recording it was cut from."""


@dataclass(frozen=True)
class ClipLists:
    """The three splits and the classes that label them."""

    classes: tuple[str, ...]
    splits: dict[str, list[Clip]]

    def all(self) -> list[Clip]:
        """Every clip once, in a fixed order."""
        return sorted((c for clips in self.splits.values() for c in clips), key=lambda c: c.name)


def read_lists(
    folder: str | Path,
    *,
    split: int = 1,
    classes: Sequence[str] = (),
    valid_fraction: float = 0.15,
) -> ClipLists:
    """Official split 1, 2 or 3 in `folder` or its `ucfTrainTestlist`, of `classes` or of all.

    Of each class, `valid_fraction` of its training groups, chosen by their hash, are "valid".
    """
    folder = _inside(folder, "ucfTrainTestlist")
    if split not in (1, 2, 3):
        raise ValueError(f"split: UCF-101 has the official splits 1, 2 and 3, got {split}")
    order = _read_classes(folder / "classInd.txt")
    unknown = sorted(set(classes) - set(order))
    if unknown:
        raise ValueError(
            f"classes: {', '.join(unknown)} not in {folder / 'classInd.txt'}, "
            f"which names {len(order)} classes such as {', '.join(order[:3])}"
        )
    used = tuple(name for name in order if not classes or name in classes)
    train = _read_list(folder / f"trainlist{split:02}.txt", used, order)
    test = _read_list(folder / f"testlist{split:02}.txt", used, order)

    held_out: set[str] = set()
    for label, name in enumerate(used):
        groups = sorted({clip.group for clip in train if clip.label == label})
        if len(groups) < 2:
            raise ValueError(
                f"{folder / f'trainlist{split:02}.txt'}: expected at least 2 groups of class "
                f"{name}, one of them for validation, got {len(groups)}"
            )
        held_out |= set(chosen_by_hash(groups, valid_fraction, salt="valid"))
    splits = {
        "train": [clip for clip in train if clip.group not in held_out],
        "valid": [clip for clip in train if clip.group in held_out],
        "test": test,
    }
    require_disjoint_groups(splits)
    return ClipLists(used, splits)


def require_disjoint_groups(splits: Mapping[str, Sequence[Clip]]) -> None:
    """Raise where any two splits share a group."""
    owner: dict[str, str] = {}
    for split, clips in splits.items():
        for clip in clips:
            first = owner.setdefault(clip.group, split)
            if first != split:
                raise ValueError(
                    f"group {clip.group} is in {first} and in {split} ({clip.name}); clips of one "
                    "group show one recording and may not be split: use the official lists as "
                    "they are"
                )


def _read_classes(path: Path) -> list[str]:
    """Names of `classInd.txt` in the order of their numbers, which must be 1, 2, 3 …"""
    pairs = [line.split() for line in _lines(path)]
    numbers = [str(number) for number in range(1, len(pairs) + 1)]
    if not pairs or [pair[0] for pair in pairs if len(pair) == 2] != numbers:
        raise ValueError(f"{path}: expected `<number> <Class>` on every line, numbered from 1 on")
    return [name for _, name in pairs]


def _read_list(path: Path, used: Sequence[str], known: Sequence[str]) -> list[Clip]:
    """The clips of a list whose class is used; the number a train list adds must be the class's."""
    clips = []
    for line in _lines(path):
        name, *number = line.split()
        folder, _, file = name.partition("/")
        match = NAME.match(file)
        if folder not in known or match is None or len(number) > 1:
            raise ValueError(
                f"{path}: expected `<Class>/v_<Class>_gNN_cNN.avi [number]`, got {line!r}"
            )
        if number and int(number[0]) != known.index(folder) + 1:
            raise ValueError(
                f"{path}: {name} has class number {number[0]}, but classInd.txt calls {folder} "
                f"number {known.index(folder) + 1}"
            )
        if folder in used:
            clips.append(Clip(name, used.index(folder), f"{folder}/g{match[1]}"))
    if not clips:
        raise ValueError(f"{path}: lists no clip of {', '.join(used)}")
    return clips


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: not there, and clips are never split without the official lists; "
            f"expected {LAYOUT}"
        )
    return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]


def _inside(folder: str | Path, name: str) -> Path:
    """`folder/name` where there is such a folder, else `folder`."""
    inside = Path(folder) / name
    return inside if inside.is_dir() else Path(folder)


@dataclass(frozen=True)
class VideoStore:
    """Decoded clips and which row each is in."""

    frames: Tensor
    """(clips, F, H, W, 3) uint8."""
    row: dict[str, int]
    """Clip name to its row; clips left out have none."""
    left_out: dict[str, str]
    """Clip name to why it could not be decoded."""

    def to(self, device: torch.device) -> VideoStore:
        """The same clips on a device."""
        return VideoStore(self.frames.to(device), self.row, self.left_out)


def load_videos(
    data: str | Path,
    clips: Sequence[Clip],
    *,
    frames: int,
    size: tuple[int, int],
    cache: str | Path,
    decoder: Decoder = "pyav",
    strict: bool = False,
) -> VideoStore:
    """F frames spread over each clip, decoded now or found in `cache`, which needs no videos.

    A model that takes T of F frames, T dividing F, takes every (F / T)-th.
    """
    names = [clip.name for clip in clips]
    videos = _inside(data, "UCF-101")
    sizes = {n: (videos / n).stat().st_size for n in names if (videos / n).is_file()}

    def make(path: Path) -> dict[str, Any]:
        _require_videos(videos, names, sizes)
        shape = (len(names), frames, *size, 3)
        whole = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)

        def decode(name: str) -> None:
            whole[rows[name]] = decode_spread(videos / name, frames, size, decoder)

        skipped = () if strict else VideoError
        _, left_out = decode_all(decode, names, unit="clips", skipped=skipped)
        if len(left_out) == len(names):
            reason = next(iter(left_out.values()))
            raise VideoError(f"{videos}: not one clip can be decoded; {reason}")
        whole.flush()
        return {"left_out": left_out}

    rows = {name: row for row, name in enumerate(names)}
    key = {"frames": frames, "size": size, "decoder": decoder, "files": names}
    pixels, facts = cached_array(cache, "clips", key, sizes, make)
    left_out = facts["left_out"]
    if left_out:
        said = f"{len(left_out)} of {len(names)} clips cannot be decoded, left out: " + "; ".join(
            left_out.values()
        )
        if strict:
            raise VideoError(said)
        warnings.warn(said, stacklevel=2)
    there = {name: row for name, row in rows.items() if name not in left_out}
    return VideoStore(torch.from_numpy(pixels), there, left_out)


def _require_videos(folder: Path, names: Sequence[str], there: Mapping[str, int]) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected UCF-101 as {LAYOUT}")
    missing = [name for name in names if name not in there]
    if missing:
        raise FileNotFoundError(
            f"{folder / missing[0]}: listed but not there ({len(missing):,} of {len(names):,} "
            f"clips are missing); expected {LAYOUT}. To use some classes only, name them"
        )


class VideoError(ValueError):
    """A video that is not what its container says, or not one at all."""


def spread_indices(frames: int, count: int) -> list[int]:
    """The middle frames of `count` equal parts; a clip shorter than `count` repeats some.

    >>> spread_indices(100, 4)
    [12, 37, 62, 87]
    >>> spread_indices(3, 5)
    [0, 0, 1, 2, 2]
    """
    return [(2 * i + 1) * frames // (2 * count) for i in range(count)]


def decode_spread(path: Path, count: int, size: tuple[int, int], decoder: Decoder) -> np.ndarray:
    """`count` frames spread over the whole video, (count, H, W, 3) uint8 RGB."""
    read = _read_pyav if decoder == "pyav" else _read_opencv
    declared, frames = _pick(read(path), lambda declared: spread_indices(declared, count))
    decoded = len(frames)
    if decoded == 0:
        raise VideoError(f"{path}: not one frame can be decoded by {decoder}")
    if decoded < declared - SLACK:
        raise VideoError(
            f"{path}: truncated, {decoded} of the declared {declared} frames can be decoded"
        )
    wanted = spread_indices(decoded, count)
    if decoded != declared:  # counted now: ask for the frames of a clip this long
        _, frames = _pick(read(path), lambda _: wanted)
    # Each frame once, by one method whatever the decoder.
    resized = {number: _resize(frames[number], size) for number in set(wanted)}
    return np.stack([resized[number] for number in wanted])


Frames = Iterator[Any]
"""First how many frames the container declares (0: it does not say), then a function per frame
that makes its picture, (H, W, 3) RGB."""


def _pick(frames: Frames, wanted: Callable[[int], Sequence[int]]) -> tuple[int, list[Any]]:
    """The declared number of frames, and every frame there is: wanted ones as pictures."""
    declared = next(frames)
    chosen = set(wanted(declared))
    return declared, [make() if number in chosen else None for number, make in enumerate(frames)]


def _read_pyav(path: Path) -> Frames:
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise ImportError(
            "decoder pyav: PyAV is not installed; install it with `pip install av`, or choose the "
            "decoder opencv"
        ) from error
    try:
        container = av.open(str(path))
    except FFmpegError as error:
        raise VideoError(f"{path}: expected a video, but it cannot be opened ({error})") from error
    with container:
        if not container.streams.video:
            raise VideoError(f"{path}: expected a video, but it holds no picture")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # clips are decoded side by side already
        yield stream.frames
        try:
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise VideoError(f"{path}: the decoder marks a frame at {frame.pts} as corrupt")
                yield lambda frame=frame: frame.to_ndarray(format="rgb24")
        except FFmpegError as error:
            raise VideoError(f"{path}: decoding stopped ({error})") from error


def _read_opencv(path: Path) -> Frames:
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            "decoder opencv: OpenCV is not installed; install it with `pip install "
            "opencv-python-headless`, or choose the decoder pyav"
        ) from error
    one_thread = [cv2.CAP_PROP_N_THREADS, 1]  # clips are decoded side by side already
    capture = cv2.VideoCapture(str(path), cv2.CAP_ANY, one_thread)
    if not capture.isOpened():
        raise VideoError(f"{path}: expected a video, but it cannot be opened")

    def picture() -> np.ndarray:
        there, frame = capture.retrieve()
        if not there:
            raise VideoError(f"{path}: a frame cannot be converted")
        return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)

    try:
        yield max(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        while capture.grab():
            yield picture
    finally:
        capture.release()


def _resize(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame.shape[:2] == tuple(size):
        return frame
    picture = torch.from_numpy(frame).permute(2, 0, 1)[None]
    small = F.interpolate(picture, size, mode="bilinear", antialias=True, align_corners=False)
    return small[0].permute(1, 2, 0).numpy()
