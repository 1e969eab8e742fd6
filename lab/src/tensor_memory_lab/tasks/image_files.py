"""Which images there are: CUB-200-2011 in its official layout, or any folder of images.

Both come from a folder or straight from a `.zip` of it. Nothing is decoded here.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
"""What counts as an image in a plain folder."""

CUB_LAYOUT = (
    "CUB_200_2011/{images.txt, train_test_split.txt, image_class_labels.txt, classes.txt, "
    "images/<class>/<name>.jpg}"
)
PLAIN_LAYOUT = "<class>/<name>.jpg, or images without class folders"


@dataclass(frozen=True)
class ImageFile:
    """One image: its id never changes, whichever subset it is listed in and wherever it lies."""

    id: str
    """`<class>/<name>.jpg`: its mask and whether it is for validation are made of this."""
    path: str
    """Under the data folder, `/` between the parts."""
    label: int
    train: bool
    """Of the training part; the official one where there is one."""


class Source:
    """Files by name, from a folder or from inside a zip.

    Args:
        path: the folder or the zip.
        layout: what should lie there, for the error where nothing does.
    """

    def __init__(self, path: str | os.PathLike[str], layout: str = PLAIN_LAYOUT) -> None:
        self.path = Path(path)
        self._zips = threading.local()  # a ZipFile may not be read by two threads at once
        if self.path.is_dir():
            self.names = frozenset(
                str(file.relative_to(self.path).as_posix())
                for file in self.path.rglob("*")
                if file.is_file()
            )
            self.sizes = {name: (self.path / name).stat().st_size for name in self.names}
        elif self.path.is_file() and zipfile.is_zipfile(self.path):
            with self._unharmed(self.path), zipfile.ZipFile(self.path) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
            self.sizes = {member.filename: member.file_size for member in members}
            self.names = frozenset(self.sizes)
        else:
            raise FileNotFoundError(
                f"{self.path}: expected a folder or a .zip of one, found neither; in it should be "
                f"{layout}. Name it with --data-dir"
            )

    def open(self, name: str) -> BinaryIO:
        """The bytes of a file."""
        if self.path.is_dir():
            return (self.path / name).open("rb")
        with self._unharmed(self.path / name):
            archive = getattr(self._zips, "archive", None)
            if archive is None:
                archive = self._zips.archive = zipfile.ZipFile(self.path)
            return io.BytesIO(archive.read(name))

    @staticmethod
    @contextmanager
    def _unharmed(path: Path) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: expected a .zip that is whole, but it is damaged here ({error}); take "
                "the archive from its source again"
            ) from error

    def lines(self, name: str) -> list[str]:
        """The lines of a text file that are not empty."""
        with self.open(name) as file:
            text = file.read().decode("utf-8")
        return [line.strip() for line in text.splitlines() if line.strip()]


def cub_images(source: Source) -> list[ImageFile]:
    """CUB-200-2011 with its official split, in the order of `images.txt`.

    The layout may lie in the folder itself or one folder down, as the archive unpacks.
    """
    prefix = next((p for p in ("", "CUB_200_2011/") if f"{p}images.txt" in source.names), None)
    if prefix is None:
        raise FileNotFoundError(
            f"{source.path / 'CUB_200_2011' / 'images.txt'}: not there; expected CUB-200-2011 in "
            f"its official layout, {CUB_LAYOUT}"
        )
    tables = {}
    for name in ("images", "train_test_split", "image_class_labels"):
        if f"{prefix}{name}.txt" not in source.names:
            raise FileNotFoundError(
                f"{source.path / prefix / name}.txt: not there; expected CUB-200-2011 in its "
                f"official layout, {CUB_LAYOUT}"
            )
        pairs = [line.split(maxsplit=1) for line in source.lines(f"{prefix}{name}.txt")]
        wrong = next((pair for pair in pairs if len(pair) != 2), None)
        if wrong is not None:
            raise ValueError(
                f"{source.path / prefix / name}.txt: expected `<image id> <value>` on every line, "
                f"got {' '.join(wrong)!r}"
            )
        tables[name] = dict(pairs)
    names = tables["images"]
    for name in ("train_test_split", "image_class_labels"):
        lost = next((number for number in names if number not in tables[name]), None)
        if lost is not None:
            raise ValueError(
                f"{source.path / prefix / name}.txt: image {lost} of images.txt is missing; "
                "take the three lists from the same archive"
            )
    images = [
        ImageFile(
            id=name,
            path=f"{prefix}images/{name}",
            label=int(tables["image_class_labels"][number]) - 1,
            train=tables["train_test_split"][number] == "1",
        )
        for number, name in names.items()
    ]
    _require_files(source, images, CUB_LAYOUT)
    return images


def folder_images(source: Source, *, test_fraction: float = 0.2) -> list[ImageFile]:
    """Any folder of images; without an official split, ids are assigned by their hash.

    Sub-folders are classes in alphabetical order; images lying directly in the folder have class 0.
    """
    names = sorted(n for n in source.names if n.lower().endswith(SUFFIXES))
    if not names:
        raise FileNotFoundError(
            f"{source.path}: no image found; expected {PLAIN_LAYOUT} ({', '.join(SUFFIXES)})"
        )
    classes = {name: i for i, name in enumerate(sorted({n.rpartition("/")[0] for n in names}))}
    images = [ImageFile(n, n, classes[n.rpartition("/")[0]], train=True) for n in names]
    test = set(chosen_by_hash(names, test_fraction, salt="test"))
    return [replace(image, train=image.id not in test) for image in images]


def chosen_by_hash(ids: Sequence[str], fraction: float, *, salt: str) -> list[str]:
    """The `fraction` of ids (at least one, not all) whose hash is smallest: the same ones always.

    >>> chosen_by_hash(["a", "b", "c", "d"], 0.5, salt="valid")
    ['c', 'a']
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction: expected a number between 0 and 1, got {fraction}")
    if len(ids) < 2:
        raise ValueError(f"expected at least 2 items to hold some out of, got {len(ids)}")
    ranked = sorted(ids, key=lambda i: (hashlib.sha256(f"{salt}:{i}".encode()).digest(), i))
    return ranked[: min(max(round(fraction * len(ids)), 1), len(ids) - 1)]


def split_images(
    images: Sequence[ImageFile], *, valid_fraction: float = 0.1
) -> dict[str, list[ImageFile]]:
    """Train, valid (held out of train by id) and test."""
    train = [image for image in images if image.train]
    test = [image for image in images if not image.train]
    held_out = set(chosen_by_hash([i.id for i in train], valid_fraction, salt="valid"))
    return {
        "train": [image for image in train if image.id not in held_out],
        "valid": [image for image in train if image.id in held_out],
        "test": test,
    }


def _require_files(source: Source, images: Sequence[ImageFile], layout: str) -> None:
    missing = [image.path for image in images if image.path not in source.names]
    if missing:
        raise FileNotFoundError(
            f"{source.path / missing[0]}: listed but not there "
            f"({len(missing):,} of {len(images):,} images are missing); expected {layout}"
        )
