"""UCF-101's official lists: which clip is in which split, of which class, of which group.

Clips of one group are cut from one recording. A group in two splits would let a model recognise the
room instead of the action, so validation is held out of train by group and an overlap is an error.
There is no split without the lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensor_memory_lab.tasks.image_files import chosen_by_hash
from tensor_memory_lab.wording import counted

LAYOUT = (
    "videos as <data>/UCF-101/<Class>/v_<Class>_gNN_cNN.avi (or <data>/<Class>/…), and "
    "classInd.txt, trainlist01.txt … trainlist03.txt, testlist01.txt … testlist03.txt in "
    "<data>/ucfTrainTestlist (or in <data>), <data> being --data-dir"
)
NAME = re.compile(r"v_\w+_g(\d+)_c(\d+)\.\w+$")


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
    """Official split 1, 2 or 3, restricted to `classes` where some are named.

    Of each class, `valid_fraction` of its training groups, chosen by their hash, are "valid".
    """
    folder = Path(folder)
    if split not in (1, 2, 3):
        raise ValueError(f"split: UCF-101 has the official splits 1, 2 and 3, got {split}")
    order = read_classes(_require(folder / "classInd.txt"))
    unknown = sorted(set(classes) - set(order))
    if unknown:
        raise ValueError(
            f"classes: {', '.join(unknown)} not in {folder / 'classInd.txt'}, "
            f"which names {counted(len(order), 'class', 'classes')} such as {', '.join(order[:3])}"
        )
    used = tuple(name for name in order if not classes or name in classes)
    train = read_list(_require(folder / f"trainlist{split:02}.txt"), used, order)
    test = read_list(_require(folder / f"testlist{split:02}.txt"), used, order)

    held_out: set[str] = set()
    for label, name in enumerate(used):
        groups = sorted({clip.group for clip in train if clip.label == label})
        if len(groups) < 2:
            raise ValueError(
                f"{folder / f'trainlist{split:02}.txt'}: class {name} has "
                f"{counted(len(groups), 'group')}; expected at least 2, one of them for validation"
            )
        held_out |= set(chosen_by_hash(groups, valid_fraction, salt="valid"))
    splits = {
        "train": [clip for clip in train if clip.group not in held_out],
        "valid": [clip for clip in train if clip.group in held_out],
        "test": test,
    }
    require_disjoint_groups(splits)
    return ClipLists(used, splits)


def read_classes(path: Path) -> list[str]:
    """Names of `classInd.txt` in the order of their numbers, which must be 1, 2, 3 …"""
    pairs = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{path}: expected `<number> <Class>` on every line")
    if [int(number) for number, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise ValueError(f"{path}: expected the numbers 1 to {len(pairs)} in order")
    return [name for _, name in pairs]


def read_list(path: Path, used: Sequence[str], known: Sequence[str]) -> list[Clip]:
    """The clips of a list whose class is used; the number a train list adds must be the class's."""
    clips = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        name, *number = line.split()
        folder, _, file = name.partition("/")
        match = NAME.match(file)
        if folder not in known or match is None or len(number) > 1:
            raise ValueError(
                f"{path}: expected `<Class>/v_<Class>_gNN_cNN.avi [number]`, got {line.strip()!r}"
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


def find_lists(folder: str | Path) -> Path:
    """The folder that holds the lists: `folder` itself, or its `ucfTrainTestlist`."""
    folder = Path(folder)
    inside = folder / "ucfTrainTestlist"
    return inside if inside.is_dir() else folder


def find_videos(folder: str | Path) -> Path:
    """The folder that holds the class folders: `folder` itself, or its `UCF-101`."""
    folder = Path(folder)
    inside = folder / "UCF-101"
    chosen = inside if inside.is_dir() else folder
    if not chosen.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected UCF-101 as {LAYOUT}")
    return chosen


def require_videos(folder: Path, clips: Sequence[Clip]) -> None:
    """Every clip must be there; the error names the first that is not."""
    missing = [clip.name for clip in clips if not (folder / clip.name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder / missing[0]}: listed but not there ({len(missing):,} of {len(clips):,} "
            f"clips are missing); expected {LAYOUT}. To use some classes only, name them"
        )


def _require(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: not there, and clips are never split without the official lists; "
            f"expected {LAYOUT}"
        )
    return path
