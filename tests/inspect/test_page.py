"""The page as a document: what it holds, what it says it leaves out, what it refuses."""

import io
import json
import re
from base64 import b64decode

import pytest
import torch
from invented import invented
from PIL import Image

from tensor_memory import Recording


@pytest.fixture
def page(tmp_path):
    def write(recording: Recording, **options) -> str:
        recording.save_page(tmp_path / "page.html", **options)
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return write


def carried(text: str) -> dict:
    """The recording inside a page, as the page reads it."""
    found = re.findall(r'<script type="application/json" id="recording">(.*?)</script>', text, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def array(text: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=dtype).reshape(shape)


def test_the_values_on_the_page_are_the_recorded_ones(page):
    recording = invented(1, chunks=5, rows=3, grid=(3, 4, 5), heads=2)
    layer, packed = recording[0], carried(page(recording))["layers"][0]
    assert torch.equal(array(packed["writeAt"], torch.float32, 5, 3, 2, 3), layer.write_at)
    assert torch.equal(array(packed["readAt"], torch.float32, 5, 3, 2, 3), layer.read_at)
    assert torch.equal(array(packed["spread"], torch.float32, 5, 3, 2), layer.spread)
    assert torch.equal(array(packed["content"], torch.float32, 5, 3, 2), layer.content_norm)
    assert torch.equal(array(packed["gates"], torch.float32, 5, 3, 3), layer.gates)
    assert torch.equal(array(packed["use"], torch.float32, 5, 3), layer.use)
    assert torch.equal(array(packed["span"], torch.int32, 5, 3, 2).long(), layer.span)
    levels = array(packed["levels"], torch.uint8, 5, 3, 3, 4, 5)
    half_a_level = packed["top"] / 255 / 2
    assert packed["top"] == pytest.approx(float(layer.hidden_norm.max()))
    error = (levels.float() / 255 * packed["top"] - layer.hidden_norm).abs().max()
    assert float(error) <= half_a_level * 1.001


def test_the_page_reaches_for_nothing_outside_itself(page):
    text = page(invented(1, chunks=2))
    assert "Content-Security-Policy" in text
    assert "default-src 'none'" in text
    namespaces = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|\burl\(|<link[^>]+href=\"(?!data:)", namespaces)


def test_a_page_over_the_limit_is_refused_and_the_advice_works(tmp_path):
    recording = invented(2, chunks=40, rows=2, grid=(8, 8, 8))
    target = tmp_path / "page.html"
    with pytest.raises(
        ValueError, match=r"at most 0.1 MB, got .* MB for 2 layers, 2 rows"
    ) as error:
        recording.save_page(target, limit_mb=0.1)
    assert not target.exists()
    every = int(re.search(r"every=(\d+)", str(error.value))[1])  # pyright: ignore[reportOptionalSubscript]
    assert "rows=1" in str(error.value)
    assert "raise limit_mb" in str(error.value)
    recording.save_page(target, limit_mb=0.15, every=every)
    assert target.stat().st_size <= 0.15e6


def test_a_page_is_written_over_nothing_but_a_page(tmp_path):
    path, recording = tmp_path / "run", invented(1, chunks=2)
    recording.save(path)
    kept = path.read_bytes()
    with pytest.raises(FileExistsError, match="run: expected a new file or an earlier page, got"):
        Recording.load(path).save_page(path)
    assert path.read_bytes() == kept
    for page in (tmp_path / "page.html", tmp_path / "page.html"):
        recording.save_page(page)


def test_what_was_left_out_is_said_on_the_page(page):
    recording = invented(1, chunks=10, rows=3, every=5)
    recording.rows_left_out = 7
    values = carried(page(recording, every=4, rows=1))
    assert values["notices"] == [
        "One chunk in 5 was recorded; 120 chunks, over all layers and rows, seen and not kept.",
        "One recorded chunk in 4 is on this page: 3 of 10.",
        "The first 1 of 3 recorded rows are shown.",
        "7 more rows were not recorded.",
    ]
    assert values["rows"] == 1
    assert array(values["layers"][0]["chunk"], torch.int32, 3).tolist() == [0, 20, 40]


def test_a_large_grid_is_drawn_as_the_largest_of_blocks_and_the_page_says_so(page):
    recording = invented(1, chunks=2, rows=1, grid=(20, 18, 20), texts=False)
    values = carried(page(recording))
    packed = values["layers"][0]
    assert packed["shown"] == [10, 18, 10]
    (notice,) = values["notices"]
    assert "20 × 18 × 20 voxels are drawn as 10 × 18 × 10" in notice
    assert "largest of a block of 2 × 1 × 2" in notice
    assert packed["points"][0][0] == pytest.approx(-1 + 1 / 19, abs=1e-4)
    levels = array(packed["levels"], torch.uint8, 2, 10, 18, 10)
    blocks = recording[0].hidden_norm[:, 0].reshape(2, 10, 2, 18, 10, 2).amax((2, 5))
    assert torch.equal(levels, (blocks / blocks.max() * 255).round().to(torch.uint8))
    recording = invented(1, chunks=1, rows=1, grid=(5, 20, 20, 20), texts=False)
    assert carried(page(recording))["layers"][0]["shown"] == [5, 10, 10, 10]  # one slice is shown


def test_values_that_are_not_finite_are_counted_on_the_page(page):
    recording = invented(1, chunks=3, rows=2, texts=False)
    recording[0].hidden_norm[1, 0, 2, 2, :2] = float("nan")
    recording[0].hidden_norm[2, 1, 0, 0, 0] = float("inf")
    recording[0].hidden_norm[0, 1] = float("nan")
    recording[0].present[0, 1] = False
    values = carried(page(recording))
    assert values["notices"] == ["blocks.0: 3 values of ‖h‖ are not finite, drawn as 0."]
    assert values["layers"][0]["top"] < 1


def test_only_text_near_a_chunk_on_the_page_is_carried(page):
    recording = invented(1, chunks=3, rows=1, chunk_size=2, every=100, texts=False)
    tokens = [f"t{at}" for at in range(404)]
    recording.annotate(texts=[tokens])
    stretches = carried(page(recording))["texts"][0]
    assert [(start, len(texts)) for start, texts in stretches] == [(0, 26), (176, 50), (376, 28)]
    assert all(texts == tokens[start : start + len(texts)] for start, texts in stretches)


def test_frames_travel_as_images_with_the_same_pixels(page):
    recording = invented(1, chunks=4, rows=2, chunk_size=3, texts=False)
    frames = torch.randint(0, 256, (2, 3, 5, 7, 3), dtype=torch.uint8)
    recording.annotate(frames=frames, tokens_per_frame=6)
    rows = carried(page(recording))["frames"]
    assert [sorted(row) for row in rows] == [["0", "1"], ["0", "1"]]  # the third is never begun in
    image = Image.open(io.BytesIO(b64decode(rows[1]["1"])))
    assert image.size == (7, 5)
    assert image.tobytes() == bytes(frames[1, 1].flatten().tolist())
