"""The viewer in a real browser: Debian's chromium, headless, opening pages from disk."""

import io
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from invented import invented
from PIL import Image

from tensor_memory.inspect.page import write_page
from tensor_memory.inspect.recording import Recording

sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")

DESKTOP, PHONE = (1280, 800), (390, 844)
SCREENSHOTS = Path(
    os.environ.get("TENSOR_MEMORY_SCREENSHOTS", Path(__file__).parents[2] / "build/screenshots")
)
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        pytest.skip("no chromium here: the viewer is not tested (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=[*QUIET])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a recording; in the end no page has complained or asked for anything."""
    contexts, complaints, requests = [], [], []

    def open_page(recording: Recording, *, size=DESKTOP, scheme="light", **options):
        path = tmp_path / f"{len(contexts)}.html"
        write_page(recording, path, **options)
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        settle(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    outside = [url for url in requests if not url.startswith(("file:", "data:"))]
    assert (complaints, outside) == ([], [])
    assert len([url for url in requests if url.startswith("file:")]) == len(contexts)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return invented(3, chunks=24, rows=2)


def settle(page) -> None:
    """Wait until what was asked for has been drawn: one frame to run, one to be sure."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 30)))")


def picture(page) -> bytes:
    """The volume alone, without what lies over it."""
    settle(page)
    over_it = ".view, #hover { visibility: hidden }"
    return page.locator("#volume").screenshot(style=over_it)


def text(page, selector: str) -> str:
    settle(page)
    return page.locator(selector).inner_text()


def slide(page, selector: str, value: int) -> None:
    page.locator(selector).fill(str(value))
    settle(page)


def voxels_above(recording: Recording, level: int, *, layer=0, t=0, row=0) -> str:
    norms = recording[layer].hidden_norm
    levels = (norms / norms.max() * 255).round()[t, row]
    return f"{int((levels >= max(level, 1)).sum())} of {levels.numel()} shown"


def test_it_shows_the_first_chunk_of_the_first_layer(opened, recording):
    page = opened(recording, title="A title & <more>")
    assert page.title() == text(page, "h1") == "A title & <more>"
    assert text(page, "#chunk-name").startswith("Chunk 0 of 0 to 23")
    assert text(page, "#chunk-status") == "Tokens 0 to 3 · read, then written"
    assert text(page, "#summary") == "3 layers · 2 rows · 24 chunks · grid 6 × 6 × 6 · 8 channels"
    assert page.locator("#layer option").all_inner_texts() == ["blocks.0", "blocks.1", "blocks.2"]
    assert page.locator("#notice").is_hidden()
    assert page.locator("#empty").is_hidden()


def test_the_numbers_of_a_chunk_are_the_recorded_ones(opened, recording):
    page = opened(recording)
    slide(page, "#time", 5)
    page.select_option("#row", "1")
    page.select_option("#layer", "1")
    chunk = recording[1, 5, 1]
    write, read = (text(page, f"#points tr:has(td.{kind})").split() for kind in ("write", "read"))
    x, y, z = (f"{value:.2f}".replace("-", "−") for value in chunk.write_at[0].tolist())
    assert chunk.spread is not None
    assert write == ["write", x, y, z, f"{chunk.spread[0]:.3f}", f"{chunk.content_norm[0]:.2f}"]
    x, y, z = (f"{value:.2f}".replace("-", "−") for value in chunk.read_at[0].tolist())
    assert read == ["read", x, y, z]
    values = text(page, "#values")
    assert " ".join(f"{gate:.3f}" for gate in chunk.gates.tolist()) in " ".join(values.split())
    assert f"{chunk.use * 100:.2f} %" in values
    assert text(page, "#text .here:first-of-type, #text .near + .here").strip()
    words = page.locator("#text .here").all_text_contents()
    assert words == [word.replace("\n", "↵\n") for word in recording.texts[1][20:24]]  # pyright: ignore[reportOptionalSubscript]


def test_the_time_slider_changes_picture_panel_and_charts(opened, recording):
    page = opened(recording)
    first, cursor = picture(page), page.locator("#gate-chart .cursor").get_attribute("x1")
    slide(page, "#time", 9)
    assert picture(page) != first
    assert text(page, "#chunk-name").startswith("Chunk 9 ")
    assert text(page, "#position") == "10 / 24"
    assert float(page.locator("#gate-chart .cursor").get_attribute("x1")) > float(cursor)
    slide(page, "#time", 0)
    assert picture(page) == first


def test_the_cursor_stands_above_the_thumb_of_the_slider(opened, recording):
    page = opened(recording)
    for t in (0, 23):
        slide(page, "#time", t)
        cursor = page.locator("#use-chart .cursor").bounding_box()
        slider = page.locator("#time").bounding_box()
        thumb = slider["x"] + 8 + (slider["width"] - 16) * t / 23
        assert cursor["x"] + cursor["width"] / 2 == pytest.approx(thumb, abs=1.5)


def test_arrows_step_through_time_and_stop_at_its_ends(opened, recording):
    page = opened(recording)
    first = picture(page)
    page.keyboard.press("ArrowRight")
    second = picture(page)
    assert second != first
    assert text(page, "#position") == "2 / 24"
    page.keyboard.press("ArrowLeft")
    assert picture(page) == first
    page.keyboard.press("ArrowLeft")
    assert text(page, "#position") == "1 / 24"
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert text(page, "#position") == "24 / 24"
    page.keyboard.press("Home")
    assert picture(page) == first


def test_one_arrow_is_one_step_while_the_slider_has_the_focus(opened, recording):
    page = opened(recording)
    page.focus("#time")
    page.keyboard.press("ArrowRight")
    assert text(page, "#position") == "2 / 24"
    page.keyboard.press("ArrowDown")
    assert text(page, "#position") == "1 / 24"


def test_a_control_keeps_its_own_arrows(opened, recording):
    page = opened(recording)
    page.focus("#threshold")
    before = int(page.input_value("#threshold"))
    page.keyboard.press("ArrowRight")
    assert int(page.input_value("#threshold")) == before + 1
    assert text(page, "#position") == "1 / 24"


def test_space_plays_and_stops(opened, recording):
    page = opened(recording)
    page.select_option("#speed", "12")
    page.locator("#volume").focus()
    page.keyboard.press("Space")
    sync_api.expect(page.locator("#position")).to_have_text(re.compile("^([4-9]|1.) / 24"))
    assert page.locator("#play").get_attribute("aria-label") == "Pause"
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    stopped = text(page, "#position")
    page.wait_for_timeout(250)
    assert text(page, "#position") == stopped != "24 / 24"


def test_the_play_button_runs_to_the_end_and_starts_again(opened):
    page = opened(invented(1, chunks=5))
    page.select_option("#speed", "30")
    for _ in range(2):
        page.click("#play")
        sync_api.expect(page.locator("#play[aria-pressed=false]")).to_be_visible()
        assert text(page, "#position") == "5 / 5"


def test_the_layer_and_the_row_choose_what_is_drawn(opened, recording):
    page = opened(recording)
    slide(page, "#time", 12)
    slide(page, "#threshold", 40)
    seen = {}
    for layer in (0, 1, 2):
        for row in (0, 1):
            page.select_option("#layer", str(layer))
            page.select_option("#row", str(row))
            seen[layer, row] = picture(page)
            expected = voxels_above(recording, 40, layer=layer, t=12, row=row)
            assert text(page, "#shown") == expected
            curve = page.locator("#gate-chart .curve").first.get_attribute("d")
            seen[layer, row, "gates"] = curve
    assert len(set(seen.values())) == 12


def test_the_threshold_hides_weaker_voxels(opened, recording):
    page = opened(recording)
    slide(page, "#time", 20)
    pictures = []
    for level in (0, 100, 180, 255):
        slide(page, "#threshold", level)
        assert text(page, "#shown") == voxels_above(recording, level, t=20)
        pictures.append(picture(page))
    assert len(set(pictures)) == 4
    top = float(recording[0].hidden_norm.max())
    slide(page, "#threshold", 128)
    assert float(text(page, "#threshold-value")) == pytest.approx(top * 128 / 255, abs=2e-3)


def test_dragging_turns_the_volume_and_resetting_turns_it_back(opened, recording):
    page = opened(recording)
    first = picture(page)
    box = page.locator("#volume").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for dx, dy in ((120, 0), (0, 60)):
        before = picture(page)
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + dx, y + dy, steps=3)
        page.mouse.up()
        assert picture(page) != before
    page.click("#view-reset")
    assert picture(page) == first


@pytest.mark.parametrize("key", ["Shift+ArrowLeft", "Shift+ArrowUp", "+", "-"])
def test_the_view_can_be_turned_and_zoomed_by_keyboard(opened, recording, key):
    page = opened(recording)
    first = picture(page)
    page.keyboard.press(key)
    assert picture(page) != first
    assert text(page, "#position") == "1 / 24"
    page.keyboard.press("0")
    assert picture(page) == first


def test_the_wheel_zooms_and_a_finger_on_a_chart_goes_there(opened, recording):
    page = opened(recording)
    first = picture(page)
    page.locator("#volume").hover()
    page.mouse.wheel(0, -300)
    assert picture(page) != first
    chart = page.locator("#use-chart").bounding_box()
    page.mouse.click(chart["x"] + chart["width"] / 2, chart["y"] + 20)
    assert 8 < int(text(page, "#position").split(" / ")[0]) < 15


def test_marks_can_be_hidden_and_the_trail_made_longer(opened, recording):
    page = opened(recording)
    slide(page, "#time", 20)
    pictures = [picture(page)]
    for act in (
        lambda: slide(page, "#trail", 3),
        lambda: page.uncheck("#show-reads"),
        lambda: page.uncheck("#show-writes"),
    ):
        act()
        pictures.append(picture(page))
    assert len(set(pictures)) == 4


def test_a_sphere_grows_with_the_spread(opened):
    widths = []
    for spread in (0.3, 0.6):
        recording = invented(1, chunks=1, rows=1)
        recording[0].write_at.zero_()
        recording[0].hidden_norm.zero_()
        recording[0].spread.fill_(spread)
        page = opened(recording)
        page.uncheck("#show-reads")
        left, _, right, _ = orange(picture(page))
        widths.append(right - left)
    assert widths[1] / widths[0] == pytest.approx(2, rel=0.06)


def orange(screenshot: bytes) -> tuple[int, int, int, int]:
    """The box around everything in the colour of writes."""
    image = torch.frombuffer(
        bytearray(Image.open(io.BytesIO(screenshot)).convert("RGB").tobytes()), dtype=torch.uint8
    ).reshape(*Image.open(io.BytesIO(screenshot)).size[::-1], 3)
    r, g, b = image.int().unbind(-1)
    rows, columns = ((r > 170) & (g < 120) & (b < 80)).nonzero().unbind(-1)
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


@pytest.mark.parametrize(
    ("grid", "voxel", "at"),
    [
        ((4, 4, 6), (0, 0, 5), (1, -1, -1)),
        ((4, 4, 6), (3, 3, 0), (-1, 1, 1)),
        ((4, 6), (0, 5), (1, -1)),
        ((6,), (5,), (1,)),
    ],
)
def test_a_write_is_drawn_on_the_voxel_it_addresses(opened, grid, voxel, at):
    recording = invented(1, chunks=1, rows=1, grid=grid, write="nearest")
    recording[0].hidden_norm.zero_()
    recording[0].hidden_norm[(0, 0, *voxel)] = 1
    recording[0].write_at[0, 0, 0] = torch.tensor(at).float()
    page = opened(recording)
    page.uncheck("#show-reads")
    left, top, right, bottom = orange(picture(page))
    page.locator("#volume").hover(position={"x": (left + right) / 2, "y": (top + bottom) / 2})
    assert text(page, "#hover") == f"voxel [{', '.join(map(str, voxel))}] · ‖h‖ 1.00"


def test_tokens_are_shown_as_text_whatever_they_contain(opened):
    recording = invented(1, chunks=2, rows=1, texts=False, chunk_size=2)
    nasty = [
        "<script>document.title = 'taken'</script>",
        "</script><h3>broken</h3>",
        "<img src=x onerror=alert(1)>",
        "&lt;\u2028",
    ]
    recording.annotate(texts=[nasty])
    page = opened(recording, title="<i>safe</i>")
    assert page.locator("#text .here").all_text_contents() == nasty[:2]
    page.keyboard.press("ArrowRight")
    settle(page)
    assert page.locator("#text .here").all_text_contents() == nasty[2:]
    assert page.title() == text(page, "h1") == "<i>safe</i>"
    assert page.locator("h3, #text img, #text script, h1 i").count() == 0


def test_a_chunk_that_was_not_written_or_is_missing_is_said_so(opened):
    recording = invented(1, chunks=3, rows=2)
    layer = recording[0]
    layer.written[1, 0] = layer.written[2, 0] = layer.present[2, 0] = False
    for values in (layer.write_at, layer.spread, layer.content_norm, layer.gates):
        values[1:, 0] = float("nan")  # pyright: ignore[reportOptionalSubscript]
    for values in (layer.read_at, layer.hidden_norm, layer.readout, layer.use):
        values[2, 0] = float("nan")
    page = opened(recording)
    page.keyboard.press("ArrowRight")
    assert "read, never written" in text(page, "#chunk-status")
    assert text(page, "#points tr:has(td.write)").split() == ["write", "–", "–", "–", "–", "–"]
    page.keyboard.press("ArrowRight")
    assert text(page, "#chunk-status") == "This row has no such chunk."
    assert text(page, "#text") == "no text for these tokens"
    assert text(page, "#shown") == "0 of 216 shown"
    assert "NaN" not in page.locator("#instrument").inner_html()


def test_the_frame_of_a_chunk_is_shown(opened):
    recording = invented(1, chunks=4, rows=1, texts=False)
    frames = torch.zeros(1, 2, 6, 9, 3, dtype=torch.uint8)
    recording.annotate(frames=frames, tokens_per_frame=8)
    page = opened(recording)
    slide(page, "#time", 2)
    assert text(page, "#frame-caption") == "Frame 1"
    size = "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"
    assert page.locator("#frame-image").evaluate(size) == [9, 6]
    assert page.locator("#frame-image").get_attribute("alt") == "Frame 1, where this chunk begins"
    assert page.locator("#text").is_hidden()


def test_the_first_of_four_axes_can_be_sliced(opened):
    recording = invented(1, chunks=2, rows=1, grid=(3, 4, 4, 4))
    page = opened(recording)
    assert text(page, "#summary").endswith("the first axis, w, is drawn as its largest value")
    slide(page, "#threshold", 60)
    levels = (recording[0].hidden_norm / recording[0].hidden_norm.max() * 255).round()[0, 0]
    assert text(page, "#shown") == f"{int((levels.amax(0) >= 60).sum())} of 64 shown"
    for slice_ in range(3):
        page.select_option("#slice", str(slice_))
        assert text(page, "#shown") == f"{int((levels[slice_] >= 60).sum())} of 64 shown"
    assert text(page, "#summary").endswith("is drawn as its slice at 1.00")


def test_every_token_that_reads_has_its_point(opened):
    page = opened(invented(1, chunks=6, rows=1, reads="token", heads=2, chunk_size=3))
    slide(page, "#time", 5)
    assert "read 3" in text(page, "#points")
    assert "and 2 more reads" in text(page, "#points")
    with_reads = picture(page)
    page.uncheck("#show-reads")
    assert picture(page) != with_reads


def test_an_empty_recording_says_what_to_do(opened):
    for empty, reason in (
        (Recording(), "holds no memory layer"),
        (invented(2, chunks=0, rows=1), "never saw a token"),
    ):
        page = opened(empty)
        assert reason in text(page, "#empty")
        assert "record(model)" in text(page, "#empty pre")
        assert page.locator("#instrument").is_hidden()
        assert page.locator(".choices").is_hidden()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Space")
    keep(page, "empty")


def test_a_recording_of_one_chunk_has_nothing_to_play(opened):
    page = opened(invented(1, chunks=1, rows=1))
    assert text(page, "#chunk-name") == "Chunk 0 the only one"
    assert page.locator("#play").is_disabled()
    assert page.locator("#time").is_disabled()
    page.keyboard.press("Space")
    page.keyboard.press("ArrowRight")
    assert text(page, "#position") == "1 / 1"
    assert page.locator("#gate-chart .dot").count() == 3
    keep(page, "one-chunk")


def test_what_the_page_leaves_out_is_said_on_it(opened):
    page = opened(invented(1, chunks=9, every=3), every=2)
    assert text(page, "#notice").startswith("One chunk in 3 was recorded; 36 chunks")
    assert "One recorded chunk in 2 is on this page: 5 of 9." in text(page, "#notice")
    page.keyboard.press("ArrowRight")
    assert text(page, "#chunk-name").startswith("Chunk 6 ")


def keep(page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    settle(page)
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


# Every piece of text that can be seen, with the box it covers after clipping by what scrolls.
TEXTS = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, owner = node.parentElement;
    if (!node.data.trim() || owner.closest("script, style, noscript, option, .unseen, [hidden]"))
      continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      let [left, top, right, bottom] = [rect.left, rect.top, rect.right, rect.bottom];
      for (let at = owner; at; at = at.parentElement) {
        if (getComputedStyle(at).overflowY === "visible" || at === document.documentElement)
          continue;
        const clip = at.getBoundingClientRect();
        [left, right] = [Math.max(left, clip.left), Math.min(right, clip.right)];
        [top, bottom] = [Math.max(top, clip.top), Math.min(bottom, clip.bottom)];
      }
      if (right - left > 1 && bottom - top > 1)
        found.push({ text: node.data.trim(), left, top, right, bottom });
    }
  }
  for (const control of document.querySelectorAll("select, button, input, img")) {
    const { left, top, right, bottom, width } = control.getBoundingClientRect();
    if (width && !control.closest(".bar, [hidden]") && control.tagName !== "BUTTON")
      found.push({ text: control.id, left, top, right, bottom });
  }
  return found;
}"""

# Text and ground of every visible label, with the contrast between them as WCAG defines it.
CONTRASTS = """() => {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const mixed = (colours) => {
    probe.clearRect(0, 0, 1, 1);
    for (const colour of colours) { probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1); }
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => {
      c /= 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
  };
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  const found = {};
  for (const node of document.querySelectorAll("body *")) {
    if (node.closest("script, noscript, .unseen, [hidden], :disabled")) continue;
    if (!node.getClientRects().length) continue;
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) continue;
    const grounds = [];
    for (let at = node; at; at = at.parentElement)
      grounds.unshift(getComputedStyle(at).backgroundColor);
    const style = getComputedStyle(node);
    const ink = node.namespaceURI.endsWith("svg") ? style.fill : style.color;
    const [text, ground] = [light(mixed([...grounds, ink])), light(mixed(grounds))];
    found[node.textContent.trim()] = Math.max(text, ground) / Math.min(text, ground);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["1280x800", "390x844"])
def test_the_page_is_legible(opened, size, scheme):
    recording = invented(3, chunks=240, grid=(8, 8, 8), chunk_size=16, every=2)
    recording.annotate(frames=torch.zeros(2, 4, 9, 16, 3, dtype=torch.uint8), tokens_per_frame=3000)
    page = opened(recording, size=size, scheme=scheme, title="A recording with a long title " * 2)
    for t in (0, 130, 239):
        slide(page, "#time", t)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= size[0]
        boxes = page.evaluate(TEXTS)
        assert len(boxes) > 50
        assert max(box["right"] for box in boxes) <= size[0]
        assert min(box["left"] for box in boxes) >= 0
        overlaps = [
            (a["text"], b["text"])
            for i, a in enumerate(boxes)
            for b in boxes[:i]
            if a["text"] != b["text"]
            and min(a["right"], b["right"]) - max(a["left"], b["left"]) > 1
            and min(a["bottom"], b["bottom"]) - max(a["top"], b["top"]) > 2
        ]
        assert overlaps == []
    contrasts = page.evaluate(CONTRASTS)
    assert {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}
    if size == DESKTOP:  # an instrument fits its window; a phone scrolls
        assert page.evaluate("document.documentElement.scrollHeight") <= size[1]
    slide(page, "#time", 130)
    keep(page, f"viewer-{size[0]}x{size[1]}-{scheme}")


def test_the_page_follows_a_change_between_light_and_dark(opened, recording):
    page = opened(recording)
    light = picture(page)
    page.emulate_media(color_scheme="dark")
    settle(page)
    dark = picture(page)
    assert dark != light
    assert Image.open(io.BytesIO(dark)).convert("L").getpixel((5, 5)) < 40
    assert Image.open(io.BytesIO(light)).convert("L").getpixel((5, 5)) > 220
    page.emulate_media(color_scheme="light")
    assert picture(page) == light


def test_every_control_has_a_name_for_those_who_do_not_see_it(opened, recording):
    page = opened(recording)
    names = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, [role=img]")].map((node) => {
          const name = node.getAttribute("aria-label") ?? node.labels?.[0]?.textContent;
          return [node.id, (name ?? "").trim()];
        })"""
    )
    assert len(names) > 14
    assert [control for control, name in names if not name] == []
    assert "voxels above the threshold" in page.locator("#volume").get_attribute("aria-label")
