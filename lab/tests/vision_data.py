"""Tiny images and videos in the official layouts, written by the tests that read them."""

import zipfile
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

BLOCK = 16  # pixels; blocks this large survive lossy codecs and chroma subsampling


def write_cub(folder: Path, *, classes: int = 2, per_class: int = 6) -> Path:
    """CUB_200_2011 with noise images of several shapes; every third one is for testing."""
    root = folder / "CUB_200_2011"
    generator = np.random.default_rng(0)
    lists: dict[str, list[str]] = {"images": [], "train_test_split": [], "image_class_labels": []}
    number = 0
    for c in range(1, classes + 1):
        name = f"{c:03}.Bird_{c}"
        (root / "images" / name).mkdir(parents=True)
        for i in range(per_class):
            number += 1
            shape = [(40, 52), (48, 40), (40, 40)][number % 3]
            smooth = np.kron(generator.integers(0, 255, (5, 5, 3)), np.ones((11, 11, 1)))
            picture = smooth[: shape[0], : shape[1]].astype(np.uint8)
            path = f"{name}/Bird_{number:04}.jpg"
            Image.fromarray(picture).save(root / "images" / path)
            lists["images"].append(f"{number} {path}")
            lists["train_test_split"].append(f"{number} {int(i % 3 != 0)}")
            lists["image_class_labels"].append(f"{number} {c}")
    lists["classes"] = [f"{c} {c:03}.Bird_{c}" for c in range(1, classes + 1)]
    for name, lines in lists.items():
        (root / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def zipped(folder: Path, to: Path, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(to, "w", compression) as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder))
    return to


def numbered_picture(number: int, tint: int = 0) -> np.ndarray:
    """A picture (32, 64, 3) that shows its number as eight black or white blocks."""
    bits = np.array([number >> bit & 1 for bit in range(8)], dtype=np.uint8).reshape(2, 4)
    grey = np.kron(bits * 200 + 20, np.ones((BLOCK, BLOCK), dtype=np.uint8))
    picture = np.repeat(grey[..., None], 3, axis=-1)
    picture[..., 2] = np.minimum(picture[..., 2] + tint, 255)
    return picture


def number_of(picture: np.ndarray) -> int:
    """The number that `numbered_picture` shows, read from the middle of each block."""
    middles = picture[BLOCK // 2 :: BLOCK, BLOCK // 2 :: BLOCK, 0].reshape(-1) > 120
    return int(sum(1 << bit for bit, white in enumerate(middles) if white))


def write_video(
    path: Path,
    frames: int,
    *,
    codec: str = "mpeg4",
    tint: int = 0,
) -> Path:
    """A video whose frames show their number, with few key frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 4 * BLOCK, 2 * BLOCK, "yuv420p"
        stream.codec_context.gop_size = 12
        stream.bit_rate = 2_000_000
        for number in range(frames):
            picture = numbered_picture(number, tint)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


CLASSES = ("Archery", "Basketball", "Bowling")


def write_ucf(folder: Path, *, groups: int = 4, clips: int = 2, frames: int = 12) -> Path:
    """UCF-101 with three classes; the first group of each is the official test part of split 1."""
    lists = folder / "ucfTrainTestlist"
    lists.mkdir(parents=True)
    (lists / "classInd.txt").write_text(
        "\n".join(f"{i} {name}" for i, name in enumerate(CLASSES, 1)) + "\n"
    )
    for split in (1, 2, 3):
        train, test = [], []
        for i, name in enumerate(CLASSES, 1):
            for group in range(1, groups + 1):
                for clip in range(1, clips + 1):
                    path = f"{name}/v_{name}_g{group:02}_c{clip:02}.avi"
                    if split == 1:
                        write_video(folder / "UCF-101" / path, frames, tint=20 * i)
                    if group == split:
                        test.append(path)
                    else:
                        train.append(f"{path} {i}")
        (lists / f"trainlist{split:02}.txt").write_text("\n".join(train) + "\n")
        (lists / f"testlist{split:02}.txt").write_text("\n".join(test) + "\n")
    return folder


def tiny_birds(folder: Path, **fields: Any) -> dict[str, Any]:
    """Fields of a task of tiny birds, which are written into the folder."""
    places = {"data_dir": str(write_cub(folder / "birds", per_class=9)), "cache_dir": str(folder)}
    return places | {"side": 40, "crop": 32, "patch": 8} | fields


def tiny_actions(folder: Path, frames: int, **fields: Any) -> dict[str, Any]:
    """Fields of a task of tiny actions, all of whose frames are kept."""
    data = write_ucf(folder / "actions", frames=frames)
    places = {"data_dir": str(data), "cache_dir": str(folder), "classes": ()}
    sizes = {"height": 32, "width": 64, "crop": (16, 32), "patch": 8}
    return places | sizes | {"frames": frames, "cached_frames": frames} | fields
