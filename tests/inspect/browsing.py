"""What the tests of the viewer do to a page, and what they take from it."""

import io
import os
from base64 import b64decode
from pathlib import Path

import torch
from PIL import Image

DESKTOP, WINDOW, PHONE = (1280, 800), (1000, 700), (390, 844)
PATIENCE = 120_000  # ms that a page gets for what it does at once where nothing else runs
SCREENSHOTS = Path(
    os.environ.get("TENSOR_MEMORY_SCREENSHOTS", Path(__file__).parents[2] / "build/screenshots")
)


def settle(page) -> None:
    """Wait until what was asked for is drawn: a frame draws, the next follows a change of size."""
    page.evaluate(
        """() => new Promise((done) =>
          requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"""
    )


def picture(page, canvas="#volume") -> int:
    """A number that tells pictures of the volume apart: a third of the time of a PNG."""
    return drawn(page, canvas, as_png=False)


def image(page) -> bytes:
    """The volume alone on its ground, as PNG: a tenth of the time of a screenshot."""
    return b64decode(drawn(page, "#volume", as_png=True).partition(",")[2])


def drawn(page, canvas, *, as_png):
    settle(page)
    return page.locator(canvas).evaluate(
        """(volume, asPng) => {
          const copy = document.createElement("canvas");
          [copy.width, copy.height] = [volume.width, volume.height];
          const pen = copy.getContext("2d", {willReadFrequently: true});
          pen.fillStyle = getComputedStyle(document.documentElement).backgroundColor;
          pen.fillRect(0, 0, copy.width, copy.height);
          pen.drawImage(volume, 0, 0);
          if (asPng) return copy.toDataURL();
          const pixels = pen.getImageData(0, 0, copy.width, copy.height).data.buffer;
          return new Uint32Array(pixels).reduce((all, one) => (Math.imul(all, 31) + one) | 0);
        }""",
        as_png,
    )


def text(page, selector: str) -> str:
    settle(page)
    return page.locator(selector).inner_text()


def slide(page, selector: str, value: int) -> None:
    page.locator(selector).fill(str(value))
    settle(page)


def orange(screenshot: bytes) -> tuple[int, int, int, int]:
    """The box around everything in the colour of writes."""
    image = torch.frombuffer(
        bytearray(Image.open(io.BytesIO(screenshot)).convert("RGB").tobytes()), dtype=torch.uint8
    ).reshape(*Image.open(io.BytesIO(screenshot)).size[::-1], 3)
    r, g, b = image.int().unbind(-1)
    rows, columns = ((r > 170) & (g < 120) & (b < 80)).nonzero().unbind(-1)
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


def keep(page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    settle(page)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)
