"""Exact frames of a video, by PyAV or, where it is not installed, by OpenCV.

Frames are counted as they come out of the decoder, from the first: no seeking, so no key frame is
taken for another, and frame 17 is the eighteenth picture in either decoder. A file with fewer
frames than its container declares is truncated and raises `VideoError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    import numpy as np

Decoder = Literal["pyav", "opencv"]

SLACK = 1
"""Frames that may be missing at the end: some encoders declare one that they never wrote."""


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
    declared = declared_frames(path, decoder)
    wanted = spread_indices(declared, count) if declared > 0 else []
    frames, decoded = _decode(path, wanted, decoder)
    if decoded == 0:
        raise VideoError(f"{path}: not one frame can be decoded by {decoder}")
    if decoded < declared - SLACK:
        raise VideoError(
            f"{path}: truncated, {decoded} of the declared {declared} frames can be decoded"
        )
    if decoded != declared:  # counted now: ask for the frames of a clip this long
        wanted = spread_indices(decoded, count)
        frames, _ = _decode(path, wanted, decoder)
    return _stack(frames, wanted, size)


def declared_frames(path: Path, decoder: Decoder) -> int:
    """What the container says; 0 where it does not say."""
    if decoder == "opencv":
        capture = _capture(path)
        declared = int(capture.get(_cv2().CAP_PROP_FRAME_COUNT))
        capture.release()
        return max(declared, 0)
    with _container(path) as container:
        return container.streams.video[0].frames


def _decode(
    path: Path, indices: Sequence[int], decoder: Decoder
) -> tuple[dict[int, np.ndarray], int]:
    """Wanted frames by number, and how many frames there are at all."""
    if decoder not in ("pyav", "opencv"):
        raise ValueError(f"decoder: expected pyav or opencv, got {decoder!r}")
    wanted, kept, decoded = set(indices), {}, 0
    read = _read_pyav if decoder == "pyav" else _read_opencv
    for number, frame in enumerate(read(path)):
        decoded = number + 1
        if number in wanted:
            kept[number] = frame()
    return kept, decoded


def _read_pyav(path: Path) -> Iterator[Any]:
    av = _av()
    with _container(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # clips are decoded side by side already
        try:
            for frame in container.decode(stream):
                if frame.is_corrupt:
                    raise VideoError(f"{path}: the decoder marks a frame at {frame.pts} as corrupt")
                yield lambda frame=frame: frame.to_ndarray(format="rgb24")
        except av.FFmpegError as error:
            raise VideoError(f"{path}: decoding stopped ({error})") from error


def _read_opencv(path: Path) -> Iterator[Any]:
    cv2 = _cv2()
    capture = _capture(path)

    def picture() -> np.ndarray:
        there, frame = capture.retrieve()
        if not there:
            raise VideoError(f"{path}: a frame cannot be converted")
        return cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)

    try:
        while capture.grab():
            yield picture
    finally:
        capture.release()


def _container(path: Path) -> Any:
    av = _av()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such video")
    try:
        container = av.open(str(path))
    except av.FFmpegError as error:
        raise VideoError(f"{path}: expected a video, but it cannot be opened ({error})") from error
    if not container.streams.video:
        container.close()
        raise VideoError(f"{path}: expected a video, but it holds no picture")
    return container


def _capture(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such video")
    cv2 = _cv2()
    one_thread = [cv2.CAP_PROP_N_THREADS, 1]  # clips are decoded side by side already
    capture = cv2.VideoCapture(str(path), cv2.CAP_ANY, one_thread)
    if not capture.isOpened():
        raise VideoError(f"{path}: expected a video, but it cannot be opened")
    return capture


def _stack(
    frames: dict[int, np.ndarray], order: Sequence[int], size: tuple[int, int]
) -> np.ndarray:
    import numpy as np

    # Each once, by one method whatever the decoder.
    resized = {number: _resize(frame, size) for number, frame in frames.items()}
    return np.stack([resized[number] for number in order])


def _resize(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if frame.shape[:2] == tuple(size):
        return frame
    picture = torch.from_numpy(frame).permute(2, 0, 1)[None]
    small = F.interpolate(picture, size, mode="bilinear", antialias=True, align_corners=False)
    return small[0].permute(1, 2, 0).numpy()


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ImportError(
            "decoder pyav: PyAV is not installed; install it with `pip install av`, or choose the "
            "decoder opencv"
        ) from error
    return av


def _cv2() -> Any:
    try:
        import cv2
    except ImportError as error:
        raise ImportError(
            "decoder opencv: OpenCV is not installed; install it with `pip install "
            "opencv-python-headless`, or choose the decoder pyav"
        ) from error
    return cv2
