"""Decoded clips on disk, memory-mapped: (clips, F, H, W, 3) uint8.

F frames spread over each clip are kept once; a model that takes T of them, T dividing F, takes
every (F / T)-th. A clip that cannot be decoded is named in a warning, counted and left out, or an
error with `strict`; nothing ever stands in for it.

    python -m tensor_memory_lab.tasks.video_cache \
        --data DIR --lists DIR --cache DIR --frames 64 --size 96 128
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from tensor_memory_lab.progress import progress
from tensor_memory_lab.tasks.decoded_cache import (
    CacheWriter,
    Wanted,
    open_or_make,
    require_same_sizes,
)
from tensor_memory_lab.tasks.video_decoding import Decoder, VideoError, decode_spread
from tensor_memory_lab.tasks.video_files import (
    Clip,
    find_lists,
    find_videos,
    read_lists,
    require_videos,
)
from tensor_memory_lab.wording import counted


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
    """The clips, decoded now or found in `cache`; a cache serves without its videos."""
    names = [clip.name for clip in clips]
    how = {"frames": frames, "height": size[0], "width": size[1], "decoder": decoder}
    wanted = Wanted("clips", how, names)

    def decode(folder: Path) -> None:
        videos = find_videos(data)
        require_videos(videos, clips)
        decode_clips(videos, wanted, folder, decoder=decoder, strict=strict)

    folder, arrays, facts = open_or_make(cache, wanted, decode)
    left_out = facts["left_out"]
    if left_out and strict:
        many = counted(len(left_out), "clip was", "clips were")
        raise VideoError(f"{folder}: {many} left out: {_first(left_out)}")
    if left_out:
        warnings.warn(
            f"{len(left_out)} of {counted(len(names), 'clip')} cannot be decoded, left out: "
            + "; ".join(left_out.values()),
            stacklevel=2,
        )
    if Path(data).is_dir():
        videos = find_videos(data)
        now = {n: (videos / n).stat().st_size for n in names if (videos / n).is_file()}
        require_same_sizes(folder, facts["sizes"], now)
    return VideoStore(
        frames=torch.from_numpy(arrays["frames"]),
        row={name: row for row, name in enumerate(names) if name not in left_out},
        left_out=left_out,
    )


def decode_clips(
    videos: Path,
    wanted: Wanted,
    folder: Path,
    *,
    decoder: Decoder,
    strict: bool,
) -> None:
    """Decode with a pool of threads (both decoders let go of the interpreter) into a new cache."""
    F, size = wanted.how["frames"], (wanted.how["height"], wanted.how["width"])
    left_out: dict[str, str] = {}
    with (
        CacheWriter(folder, wanted) as writer,
        progress("decoding", len(wanted.files), unit="clips") as advance,
    ):
        whole = writer.array("frames", (len(wanted.files), F, *size, 3))

        def decode(row: int) -> None:
            whole[row] = decode_spread(videos / wanted.files[row], F, size, decoder)

        pool = ThreadPoolExecutor(os.cpu_count())
        try:
            jobs = [pool.submit(decode, row) for row in range(len(wanted.files))]
            for name, job in zip(wanted.files, jobs, strict=True):
                error = job.exception()
                if isinstance(error, VideoError) and not strict:
                    left_out[name] = str(error)
                elif error is not None:
                    raise error
                advance(note=f"{len(left_out)} left out" if left_out else "")
        finally:  # whatever ends it early, Ctrl-C too, drops what is not begun
            pool.shutdown(cancel_futures=True)
        if len(left_out) == len(wanted.files):
            raise VideoError(f"{videos}: not one clip can be decoded; {_first(left_out)}")
        sizes = {name: (videos / name).stat().st_size for name in wanted.files}
        writer.finish({"frames": whole}, {"left_out": left_out, "sizes": sizes})


def _first(left_out: dict[str, str]) -> str:
    return next(iter(left_out.values()))


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a cache, so that a machine without a decoder, or without the videos, can train."""
    parser = argparse.ArgumentParser(prog="python -m tensor_memory_lab.tasks.video_cache")
    parser.add_argument("--data", required=True, help="folder of UCF-101 or of its class folders")
    parser.add_argument("--lists", required=True, help="folder of the official lists")
    parser.add_argument("--cache", required=True, help="folder to put the cache into")
    parser.add_argument("--classes", nargs="*", default=[], help="use these only (default: all)")
    parser.add_argument("--frames", type=int, default=64, help="F, frames kept per clip")
    parser.add_argument("--size", type=int, nargs=2, default=(96, 128), metavar=("H", "W"))
    parser.add_argument("--decoder", choices=get_args(Decoder), default="pyav")
    parser.add_argument("--strict", action="store_true", help="stop at a clip that is broken")
    options = parser.parse_args(argv)
    for name, value in (("--frames", options.frames), ("--size", min(options.size))):
        if value < 1:
            parser.error(f"{name}: expected 1 or more, got {value}")
    try:
        lists = read_lists(find_lists(options.lists), classes=options.classes)
        store = load_videos(
            options.data,
            lists.all(),
            frames=options.frames,
            size=tuple(options.size),
            cache=options.cache,
            decoder=options.decoder,
            strict=options.strict,
        )
    except (ValueError, OSError, ImportError) as error:  # data that are not there, or broken
        parser.error(str(error))
    ready = counted(len(store.row), "clip")
    print(f"{ready} ready, {len(store.left_out)} left out, in {options.cache}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
