"""Images: which there are, decoded once into one block of bytes, cropped and cut into patches.

CUB-200-2011 in its official layout, or any folder of images; a folder or a `.zip` of one. Every
image is decoded once, its short side resized to `side`, and laid into one flat array with its
height and width beside it: whole images of any shape, no padding. A batch of crops is one gather
on the device.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tensor_memory_lab.tasks.cache import cached_array, decode_all

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
"""What counts as an image in a plain folder."""

CUB_LAYOUT = (
    "CUB_200_2011/{images.txt, train_test_split.txt, image_class_labels.txt, classes.txt, "
    "images/<class>/<name>.jpg}"
)
PLAIN_LAYOUT = "<class>/<name>.jpg, or images without class folders"

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, per channel on the scale [0, 1]: fixed, so no split tells another."""


@dataclass(frozen=True)
class ImageFile:
    """One image of a list."""

    id: str
    """`<class>/<name>.jpg`, wherever the file lies. Its mask and its split are made of this."""
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
        self.sizes: dict[str, int]
        """Bytes of every file by name."""
        self._zips = threading.local()  # a ZipFile may not be read by two threads at once
        if self.path.is_dir():
            files = [file for file in self.path.rglob("*") if file.is_file()]
            self.sizes = {f.relative_to(self.path).as_posix(): f.stat().st_size for f in files}
        elif self.path.is_file() and zipfile.is_zipfile(self.path):
            with _whole_zip(self.path), zipfile.ZipFile(self.path) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
            self.sizes = {member.filename: member.file_size for member in members}
        else:
            raise FileNotFoundError(
                f"{self.path}: expected a folder or a .zip of one, found neither; in it should be "
                f"{layout}. Name it with --data-dir"
            )

    def open(self, name: str) -> BinaryIO:
        """The bytes of a file."""
        if self.path.is_dir():
            return (self.path / name).open("rb")
        with _whole_zip(self.path / name):
            archive = getattr(self._zips, "archive", None)
            if archive is None:
                archive = self._zips.archive = zipfile.ZipFile(self.path)
            return io.BytesIO(archive.read(name))

    def table(self, name: str) -> dict[str, str]:
        """A text file with a key and a value on every line that is not empty."""
        if name not in self.sizes:
            raise FileNotFoundError(
                f"{self.path / name}: not there; expected CUB-200-2011 in its official layout, "
                f"{CUB_LAYOUT}. Other images: --task.layout folder, where the task has it"
            )
        with self.open(name) as file:
            lines = [line for line in file.read().decode("utf-8").splitlines() if line.strip()]
        pairs = [line.split(maxsplit=1) for line in lines]
        wrong = next((line for line, pair in zip(lines, pairs, strict=True) if len(pair) != 2), "")
        if wrong:
            raise ValueError(
                f"{self.path / name}: expected `<image id> <value>` on every line, got {wrong!r}; "
                "take the lists from the original archive again"
            )
        return {key: value.strip() for key, value in pairs}


@contextmanager
def _whole_zip(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected a .zip that is whole, but it is damaged here ({error}); take "
            "the archive from its source again"
        ) from error


def cub_images(source: Source) -> list[ImageFile]:
    """CUB-200-2011 with its official split, in the order of `images.txt`.

    The layout may lie in the folder itself or one folder down, as the archive unpacks.
    """
    prefix = "" if "images.txt" in source.sizes else "CUB_200_2011/"
    names, train, labels = (
        source.table(f"{prefix}{name}.txt")
        for name in ("images", "train_test_split", "image_class_labels")
    )
    for list_name, table in (("train_test_split", train), ("image_class_labels", labels)):
        lost = next((number for number in names if number not in table), None)
        if lost is not None:
            raise ValueError(
                f"{source.path / prefix / list_name}.txt: image {lost} of images.txt is missing; "
                "take the three lists from the same archive"
            )
    images = [
        ImageFile(name, f"{prefix}images/{name}", int(labels[number]) - 1, train[number] == "1")
        for number, name in names.items()
    ]
    missing = [image.path for image in images if image.path not in source.sizes]
    if missing:
        raise FileNotFoundError(
            f"{source.path / missing[0]}: listed but not there "
            f"({len(missing):,} of {len(images):,} images are missing); expected {CUB_LAYOUT}"
        )
    return images


def folder_images(source: Source, *, test_fraction: float = 0.2) -> list[ImageFile]:
    """Any folder of images; without an official split, ids are assigned by their hash.

    Sub-folders are classes in alphabetical order; images lying directly in the folder have class 0.
    """
    hidden = re.compile(r"(^|/)(\.|__MACOSX/)")  # what macOS puts beside the files of a zip
    names = [n for n in source.sizes if n.lower().endswith(SUFFIXES) and not hidden.search(n)]
    names.sort()
    if not names:
        raise FileNotFoundError(
            f"{source.path}: no image found; expected {PLAIN_LAYOUT} ({', '.join(SUFFIXES)})"
        )
    folders = [n.rpartition("/")[0] for n in names]
    classes = {name: i for i, name in enumerate(sorted(set(folders)))}
    shared = f"{os.path.commonpath(folders)}/".lstrip("/")  # a zip's own folder
    images = [
        ImageFile(n.removeprefix(shared), n, classes[folder], train=True)
        for n, folder in zip(names, folders, strict=True)
    ]
    test = set(chosen_by_hash([image.id for image in images], test_fraction, salt="test"))
    return [replace(image, train=image.id not in test) for image in images]


def chosen_by_hash(ids: Sequence[str], fraction: float, *, salt: str) -> list[str]:
    """The `fraction` of ids (at least one, not all) whose hash is smallest: the same ones always.

    >>> chosen_by_hash(["a", "b", "c", "d"], 0.5, salt="valid")
    ['c', 'a']
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction: expected a number between 0 and 1, got {fraction}")
    if len(ids) < 2:
        raise ValueError(
            f"{salt}: expected at least 2 images or clips to hold some out of, got {len(ids)}; a "
            "data set needs 3, for training, validation and testing"
        )
    ranked = sorted(ids, key=lambda i: (hashlib.sha256(f"{salt}:{i}".encode()).digest(), i))
    return ranked[: min(max(round(fraction * len(ids)), 1), len(ids) - 1)]


def split_images(
    images: Sequence[ImageFile], *, valid_fraction: float = 0.1
) -> dict[str, list[ImageFile]]:
    """Train, valid (held out of train by id) and test."""
    train = [image for image in images if image.train]
    held_out = set(chosen_by_hash([i.id for i in train], valid_fraction, salt="valid"))
    return {
        "train": [image for image in train if image.id not in held_out],
        "valid": [image for image in train if image.id in held_out],
        "test": [image for image in images if not image.train],
    }


@dataclass(frozen=True)
class ImageStore:
    """Decoded images, RGB, one after the other."""

    pixels: Tensor
    """(all pixels, 3) uint8."""
    start: Tensor
    """(images,) first pixel of each."""
    height: Tensor
    width: Tensor
    row: dict[str, int]
    """Image id to its place."""
    checksum: str
    """Of the decoded pixels."""

    def to(self, device: torch.device) -> ImageStore:
        """The same images on a device."""
        moved = (t.to(device) for t in (self.pixels, self.start, self.height, self.width))
        return ImageStore(*moved, row=self.row, checksum=self.checksum)

    def crops(self, rows: Tensor, size: int, at: Tensor, flip: Tensor) -> Tensor:
        """Square crops (B, 3, size, size) uint8.

        Args:
            rows: (B,) which images.
            size: side of the crop in pixels, at most the images' short side.
            at: (B, 2) where between top and bottom, left and right, each in [0, 1].
            flip: (B,) bool, mirror left and right.
        """
        height, width = self.height[rows], self.width[rows]
        top = (at[:, 0] * (height - size + 1)).long().clamp(max=height - size)
        left = (at[:, 1] * (width - size + 1)).long().clamp(max=width - size)
        along = torch.arange(size, device=rows.device)
        y = top[:, None] + along  # (B, size)
        x = left[:, None] + torch.where(flip[:, None], size - 1 - along, along)
        index = self.start[rows, None, None] + y[:, :, None] * width[:, None, None] + x[:, None]
        return self.pixels[index].permute(0, 3, 1, 2)


def load_images(
    source: Source,
    images: Sequence[ImageFile],
    *,
    side: int,
    cache: str | os.PathLike[str],
    apart: bool = False,
) -> ImageStore:
    """All images of a source with their short side at `side`, decoded now or found in `cache`.

    `apart`: not taken from another path's, whose files may have the same names.
    """
    files = [image.path for image in images]

    def make(path: Path) -> dict[str, Any]:
        blocks, _ = decode_all(lambda name: decode_image(source, name, side), files, unit="images")
        shape = (sum(block.shape[0] * block.shape[1] for block in blocks), 3)
        whole = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        np.concatenate([block.reshape(-1, 3) for block in blocks], out=whole)
        whole.flush()
        return {
            "heights": [block.shape[0] for block in blocks],
            "widths": [block.shape[1] for block in blocks],
        }

    sizes = {name: source.sizes[name] for name in files}
    key: dict[str, Any] = {"short_side": side, "files": files}
    if apart:
        key["source"] = str(source.path.resolve())
    pixels, facts = cached_array(cache, "images", key, sizes, make)
    height, width = torch.tensor(facts["heights"]), torch.tensor(facts["widths"])
    area = height * width
    return ImageStore(
        pixels=torch.from_numpy(pixels),
        start=area.cumsum(0) - area,
        height=height,
        width=width,
        row={image.id: i for i, image in enumerate(images)},
        checksum=facts["checksum"],
    )


@dataclass(frozen=True)
class Images:
    """Decoded images and which of them are for what."""

    name: str
    """What they are and how large: `cub200@120px`."""
    store: ImageStore
    ids: dict[str, list[str]]
    """Of train, valid and test."""

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Places in the store of the images of every split."""
        at = self.store.pixels.device
        return {
            split: torch.tensor([self.store.row[i] for i in ids], device=at)
            for split, ids in self.ids.items()
        }

    def to(self, device: torch.device) -> Images:
        """The same images on a device."""
        return replace(self, store=self.store.to(device))

    def assets(self) -> dict[str, str]:
        """For the folder of a run, which is resumed with the same images alone."""
        return {"images.txt": f"{self.name}, checksum of the pixels {self.store.checksum}\n"}


def open_images(
    path: str | os.PathLike[str],
    layout: str,
    *,
    side: int,
    cache: str | os.PathLike[str],
    valid_fraction: float = 0.1,
    test_fraction: float = 0.2,
) -> Images:
    """The images of a folder or a .zip, with their short side at `side`.

    The layout "cub" is CUB-200-2011 with its official split. Of "folder", any images, the part
    `test_fraction` is for testing. The part `valid_fraction` of what trains is held out.
    """
    if layout == "cub":
        source = Source(path, CUB_LAYOUT)
        images, name = cub_images(source), "cub200"
    else:
        source = Source(path)
        images = folder_images(source, test_fraction=test_fraction)
        name = source.path.stem.lower()
    store = load_images(source, images, side=side, cache=cache, apart=layout != "cub")
    splits = split_images(images, valid_fraction=valid_fraction)
    ids = {split: [image.id for image in part] for split, part in splits.items()}
    return Images(f"{name}@{side}px", store, ids)


def decode_image(source: Source, name: str, side: int) -> np.ndarray:
    """One image as (H, W, 3) uint8 with min(H, W) = side; a broken file is an error."""
    from PIL import Image, ImageOps

    try:
        with source.open(name) as file, Image.open(file) as image:
            if image.mode[:1] in "IF":  # Pillow would cut them off at 255
                raise ValueError(
                    f"{source.path / name}: expected 8 bits per channel, got Pillow's mode "
                    f"{image.mode}; convert it, as with ImageMagick's `-depth 8`"
                )
            image = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow refuses
        raise ValueError(
            f"{source.path / name}: expected an image, but it cannot be decoded ({error}); "
            "take the file from the original archive again"
        ) from error
    short = min(image.size)
    if short != side:
        scale = side / short
        width, height = (max(side, round(length * scale)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def to_patches(images: Tensor, patch: int) -> Tensor:
    """(B, 3, H, W) -> (B, P, patch·patch·3), raster order, channels last inside a patch."""
    B, channels, H, W = images.shape
    if H % patch or W % patch:
        raise ValueError(f"patch: expected a divisor of the image's {H} x {W} pixels, got {patch}")
    cut = images.reshape(B, channels, H // patch, patch, W // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, patch * patch * channels)


def from_patches(patches: Tensor, patch: int, height: int, width: int) -> Tensor:
    """The inverse of `to_patches` for images of height × width pixels."""
    B, _, values = patches.shape
    cut = patches.reshape(
        B, height // patch, width // patch, patch, patch, values // (patch * patch)
    )
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(B, -1, height, width)
