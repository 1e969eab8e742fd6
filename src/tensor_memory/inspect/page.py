"""A recording as one HTML page that opens from disk, with everything it needs inside.

Measured values travel as base64 of little-endian arrays, ‖h‖ as one byte per voxel with one scale
per layer; `viewer/` holds the page that draws them. A head of a place memory has a grid of its own
and is put on the page as a layer of its own. All text is put in a JSON element in which no
`<` stands unescaped, so no token can end it, and the page shows it as text only.

Letters: T chunks on the page, B rows, n axes, V voxels, Q reads and M writes per chunk.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
import zlib
from base64 import b64encode
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from tensor_memory.config import PlaceConfig
from tensor_memory.inspect.annotations import checked_images
from tensor_memory.inspect.layer_recording import GridRecording, LayerRecording
from tensor_memory.inspect.place_layer import PlaceLayerRecording
from tensor_memory.inspect.place_lives import WriteLives
from tensor_memory.inspect.progress import LongWork
from tensor_memory.wording import counted

LIMIT_MB = 32.0
"""Size above which `page` refuses: browsers still open such a page within seconds."""

MAX_VOXELS = 4096
"""Voxels drawn at once: 16³, what a plain canvas still turns smoothly."""

CONTEXT = 24
"""Tokens of text kept on both sides of a chunk that is shown."""

SOURCES = 8
"""Writes told of each read and head; the part of all others is told as one number."""

WORK = 2**34
"""Multiplications, about, that following the writes of a page may take: half a minute."""

_SCRIPTS = (
    "data.js", "view.js", "scene.js", "measures.js", "charts.js", "strip.js", "overview.js",
    "panel.js", "sources.js", "share.js", "live.js",
    "app.js",
)  # fmt: skip


AnyLayer = LayerRecording | PlaceLayerRecording


class Recorded(Protocol):
    """What a page is made of; `Recording` is one."""

    layers: list[AnyLayer]
    every: int
    rows_left_out: int
    texts: list[list[str]] | None
    frames: Tensor | None
    tokens_per_frame: int

    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def dropped(self) -> int: ...  # noqa: D102


def page(
    recording: Recorded,
    *,
    title: str = "Tensor Memory recording",
    every: int = 1,
    rows: int | None = None,
    limit_mb: float = LIMIT_MB,
    first: int | None = None,
    image: Tensor | None = None,
) -> str:
    """The interactive viewer of a recording: one HTML document, no network needed.

    `Recording.save_page` explains the options. Where two recordings are shown beside each other,
    `first` layers are of the first. A recording without layers makes a page that says so.
    """
    text = filled_page(title, _values(recording, every, rows, first, image))
    size = len(text.encode()) / 1e6
    if size > limit_mb:
        viewer = len(filled_page(title, "").encode()) / 1e6  # there however little is recorded
        shown = min(recording.rows, recording.rows if rows is None else rows)
        chunks = max((-(-len(layer) // every) for layer in recording.layers), default=0)
        unit = recording.layers[0].unit if recording.layers else "chunk"
        share = (size - viewer) / max(limit_mb - viewer, 1e-6)
        raise ValueError(
            f"page: expected at most {limit_mb:g} MB, got {size:.1f} MB for "
            f"{counted(len(recording.layers), 'layer')}, {counted(shown, 'row')} and "
            f"{counted(chunks, unit)}; put fewer {unit}s on it with "
            f"every={every * min(math.ceil(share), max(chunks, 1))}, fewer rows with rows=1, "
            "or raise limit_mb (--every, --rows, --limit-mb of `tensor-memory inspect`)"
        )
    return text


def fitting_values(recording: Recorded, *, live: str, work: int) -> str:
    """A recording of this moment as JSON, thinned until a page of `LIMIT_MB` can hold it."""
    every, most = 1, max(map(len, recording.layers), default=0)
    while True:
        text = _values(recording, every, None, None, None, live, work)
        if len(text) <= LIMIT_MB * 1e6 or every >= most:
            return text
        every *= 2


def _values(
    recording: Recorded,
    every: int,
    rows: int | None,
    first: int | None,
    image: Tensor | None,
    live: str | None = None,
    work: int = WORK,
) -> str:
    """What a page carries, as JSON. `live` is the version of a recording that goes on."""
    for name, value in (("every", every), ("rows", rows)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
    groups = [[view[::every, :rows] for view in layer.views()] for layer in recording.layers]
    layers = [view for views in groups for view in views]
    shown_rows = layers[0].rows if layers else 0
    lives = _lives(recording, shown_rows, work)
    encoded = [
        {
            **_encoded_layer(view),
            "group": index,
            "head": head,
            "sources": _encoded_sources(view, lives[index], head),
            "overImage": image is not None and _lies_over_image(view),
        }
        for index, views in enumerate(groups)
        for head, view in enumerate(views)
    ]
    values = {
        "layers": encoded,
        "layerCount": len(recording.layers),
        "rows": shown_rows,
        "beside": None if first is None else sum(map(len, groups[:first])),
        "every": recording.every * every,
        "notices": _notices(recording, layers, encoded, every) + _untold(recording, lives),
        "texts": _texts(recording, layers, lives),
        "frames": _frames(recording, layers),
        "tokensPerFrame": recording.tokens_per_frame,
        "live": live,
        "images": None if image is None else _images(image, encoded, recording.rows),
    }
    return json.dumps(values, allow_nan=False, separators=(",", ":"))


def filled_page(title: str, recording: str, *, live: bool = False) -> str:
    """The viewer with a recording in it; a live one may ask where it came from for more."""
    viewer = files("tensor_memory.inspect") / "viewer"
    parts = {
        "title": escape(title),
        "style": (viewer / "viewer.css").read_text("utf-8"),
        "connect": "; connect-src 'self'" if live else "",
        "recording": recording.replace("<", "\\u003c"),
        "script": "\n".join((viewer / name).read_text("utf-8") for name in _SCRIPTS),
    }
    # Cut at the slots once, so that nothing put in is searched for slots again.
    text = (viewer / "viewer.html").read_text("utf-8")
    cut = text.replace("{{", "\0{{").replace("}}", "}}\0").split("\0")
    return "".join(parts[part[2:-2]] if part.startswith("{{") else part for part in cut)


def _encoded_layer(layer: GridRecording) -> dict[str, Any]:
    norms, points, blocks = _pooled(layer.hidden_norm.float())  # (T, B, *shown grid)
    finite = norms.isfinite()
    top = float(norms[finite].max()) if finite.any() else 0.0
    levels = (norms.nan_to_num(0, 0, 0) / (top or 1.0) * 255).round().to(torch.uint8)
    present = layer.present.reshape(*layer.present.shape, *[1] * layer.config.axes)
    readout = layer.readout.float().norm(dim=-1)  # (T, B, Q)
    return {
        "name": layer.name,
        "grid": list(layer.config.grid),
        "shown": list(norms.shape[2:]),
        "points": points,
        "blocks": blocks,
        "channels": layer.config.channels,
        "gate": "–" if layer.gate is not None and not math.isfinite(layer.gate) else layer.gate,
        "unit": layer.unit,
        "normName": layer.norm_name,
        "gateNames": list(layer.gate_names),
        "tokenReads": layer.read_at.shape[2] > layer.read_heads,
        "heads": layer.read_heads,
        "chunks": len(layer),
        "reads": layer.read_at.shape[2],
        "writes": layer.write_at.shape[2],
        "top": top,
        "notFinite": int((present & ~finite).sum()),
        "levels": _base64(levels),
        "peaks": _base64(levels.flatten(2).amax(2)),
        "readAt": _base64(layer.read_at.float()),
        "writeAt": _base64(layer.write_at.float()),
        "spread": None if layer.spread is None else _base64(layer.spread.float()),
        "content": _base64(layer.content_norm.float()),
        "gates": _base64(layer.gates.float()),
        "use": _base64(layer.use.float()),
        "readout": _base64(readout.nanmean(dim=-1)),
        "span": _base64(layer.span.to(torch.int32)),
        "flags": _base64(layer.present.to(torch.uint8) + 2 * layer.written.to(torch.uint8)),
        "chunk": _base64(layer.chunk.to(torch.int32)),
    }


def _lives(recording: Recorded, rows: int, most: int) -> list[dict[int, WriteLives]]:
    """Of every layer the rows whose writes are followed: row by row as long as the work lasts."""
    found: list[dict[int, WriteLives]] = [{} for _ in recording.layers]
    work, told = 0, LongWork("page", "layers and rows followed from write to read")
    for row in range(rows):
        work += sum(layer.follow_work(row) for layer in recording.layers)
        if work > most:
            break
        for layer, lives in zip(recording.layers, found, strict=True):
            followed = layer.follow(row, SOURCES)
            if followed is not None:
                lives[row] = followed
            told.add(1)
    told.close()
    return found


def _untold(recording: Recorded, lives: list[dict[int, WriteLives]]) -> list[str]:
    """Which rows have no sources, though their memory is one that could tell."""
    missing = {
        row
        for layer, known in zip(recording.layers, lives, strict=True)
        for row in range(recording.rows)
        if layer.follow_work(row) and row not in known
    }
    if not missing:
        return []
    told = counted(len(missing), "row")
    return [
        f"Where reads came from is not on this page for {told}: too long, or moved by beam search; "
        "`recording[layer].trace` tells it."
    ]


def _encoded_sources(
    layer: GridRecording, lives: dict[int, WriteLives], head: int
) -> dict[str, Any] | None:
    """What each read on the page came from, and what became of each write."""
    if not lives:
        return None
    T, B = layer.present.shape
    kinds = {"position": (SOURCES,), "share": (SOURCES,), "part": (SOURCES,), "others": ()}
    kinds |= dict.fromkeys(("rest", "joint", "half", "left", "taker", "taken"), ())
    whole = ("position", "half", "taker")
    arrays = {
        name: torch.full((T, B, *shape), -1, dtype=torch.int32)
        if name in whole
        else torch.full((T, B, *shape), torch.nan)
        for name, shape in kinds.items()
    }
    for row, life in lives.items():
        at = layer.chunk - life.first
        shown = (at >= 0) & (at < len(life.rest)) & layer.present[:, row]
        for name, array in arrays.items():
            values = getattr(life, name)[at[shown], ..., head].to(array.dtype)
            if values.ndim == 2:
                array[shown, row, : values.shape[1]] = values
            else:
                array[shown, row] = values
    return {"top": SOURCES} | {name: _base64(array) for name, array in arrays.items()}


def _pooled(norms: Tensor) -> tuple[Tensor, list[list[float]], list[int]]:
    """The largest ‖h‖ of each block of voxels, blocks just large enough for `MAX_VOXELS`.

    The first of four axes is never pooled: the page shows one slice of it, or its maximum.
    Returns the norms (T, B, *shown grid), where each shown voxel lies per axis, the blocks' sides.
    """
    grid = norms.shape[2:]
    blocks = [1] * len(grid)
    first = 1 if len(grid) == 4 else 0
    shown = list(grid)
    while math.prod(shown[first:]) > MAX_VOXELS:
        longest = max(shown[first:])
        for axis in range(first, len(grid)):
            if shown[axis] == longest:
                blocks[axis] += 1
                shown[axis] = math.ceil(grid[axis] / blocks[axis])
    points = []
    for axis, (size, block) in enumerate(zip(grid, blocks, strict=True)):
        place = torch.linspace(-1, 1, size).split(block)
        points.append([round(float(part.mean()), 5) for part in place])
        if block > 1:
            parts = [part.amax(axis + 2) for part in norms.split(block, dim=axis + 2)]
            norms = torch.stack(parts, dim=axis + 2)
    return norms, points, blocks


def _notices(
    recording: Recorded, layers: list[GridRecording], encoded: list[dict[str, Any]], every: int
) -> list[str]:
    """What this page does not show, in words: nothing is left out silently."""
    found = []
    unit = layers[0].unit if layers else "chunk"
    if recording.every > 1:
        dropped = counted(recording.dropped, unit)
        found.append(
            f"One {unit} in {recording.every} was recorded; "
            f"{dropped}, over all layers and rows, seen and not kept."
        )
    if every > 1:
        before, after = (max(map(len, some), default=0) for some in (recording.layers, layers))
        found.append(f"One recorded {unit} in {every} is on this page: {after} of {before}.")
    if layers and layers[0].rows < recording.rows:
        found.append(f"The first {layers[0].rows} of {recording.rows} recorded rows are shown.")
    if recording.rows_left_out:
        more = counted(recording.rows_left_out, "more row was", "more rows were")
        found.append(f"{more} not recorded.")
    for layer in encoded:
        if max(layer["blocks"]) > 1:
            full, shown, block = (
                " × ".join(map(str, layer[name])) for name in ("grid", "shown", "blocks")
            )
            found.append(
                f"{layer['name']}: its {full} voxels are drawn as {shown}, each the largest of "
                f"a block of {block}."
            )
        if layer["notFinite"]:
            norm = layer["normName"]
            broken = counted(layer["notFinite"], f"value of {norm} is", f"values of {norm} are")
            found.append(f"{layer['name']}: {broken} not finite, drawn as 0.")
    return found


def _texts(
    recording: Recorded, layers: list[GridRecording], lives: list[dict[int, WriteLives]]
) -> list[list[Any]] | None:
    """Per row, [start, [texts...]] for each stretch of tokens at, near or told of a chunk shown."""
    if recording.texts is None or not layers:
        return None
    rows = []
    for row in range(layers[0].rows):
        texts = recording.texts[row]
        wanted = bytearray(len(texts) + 1)  # one more, always 0, ends the last stretch
        for layer in layers:
            for start, stop in layer.span[layer.present[:, row], row].tolist():
                for at in range(max(0, start - CONTEXT), min(len(texts), stop + CONTEXT)):
                    wanted[at] = 1
        followed = zip(recording.layers, lives, strict=True)
        for life in (known[row] for of, known in followed if of.unit == "token" and row in known):
            told = torch.cat([life.position.flatten(), life.taker.flatten()]).unique()
            for at in told[(told >= 0) & (told < len(texts))].tolist():
                wanted[at] = 1
        edges = [at for at, (a, b) in enumerate(pairwise(b"\0" + bytes(wanted))) if a != b]
        stretches = zip(edges[::2], edges[1::2], strict=True)
        rows.append([[start, texts[start:stop]] for start, stop in stretches])
    return rows


def _frames(recording: Recorded, layers: list[GridRecording]) -> list[dict[int, str]] | None:
    """Per row, the PNG of every frame in which a chunk shown begins."""
    if recording.frames is None or not layers:
        return None
    rows = []
    for row in range(layers[0].rows):
        frames = recording.frames[row]
        starts = [layer.span[layer.present[:, row], row, 0] for layer in layers]
        wanted = (torch.cat(starts) // recording.tokens_per_frame).unique().tolist()
        kept = (at for at in wanted if 0 <= at < len(frames))
        rows.append({at: b64encode(_png(frames[at])).decode() for at in kept})
    return rows


def _lies_over_image(layer: GridRecording) -> bool:
    """Whether a picture can lie under a grid: it has two axes, and the caller gave its places."""
    config = layer.config
    return config.axes == 2 and isinstance(config, PlaceConfig) and config.places != "learned"


def _images(image: Tensor, layers: list[dict[str, Any]], rows: int) -> list[str]:
    """The PNG under the grids of every row; one where all rows have the same."""
    pictures = checked_images(image, rows)
    if not any(layer["overImage"] for layer in layers):
        raise ValueError(
            "image: expected a place memory with two axes whose places are given, got none; "
            "leave image out"
        )
    return [b64encode(_png(picture)).decode() for picture in pictures]


def _png(image: Tensor) -> bytes:
    """A PNG of (h, w, 3) uint8, without an imaging library."""
    height, width, _ = image.shape
    lines = torch.cat([image.new_zeros(height, 1), image.flatten(1)], dim=1)  # filter 0 per line
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(_bytes(lines), 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def _base64(array: Tensor) -> str:
    return b64encode(_bytes(array)).decode()


def _bytes(array: Tensor) -> bytes:
    """The tensor's memory, without asking for NumPy, which the core does not depend on."""
    array = array.detach().cpu().contiguous()
    return ctypes.string_at(array.data_ptr(), array.nbytes) if array.nbytes else b""
