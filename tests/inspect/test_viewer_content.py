"""What the viewer shows in a real browser: the recorded values, what is missing, legibly."""

import io

import pytest
import torch
from browsing import DESKTOP, PHONE, image, keep, orange, picture, settle, slide, text
from invented import invented
from PIL import Image

from tensor_memory import Recording


def test_it_shows_the_first_chunk_of_the_first_layer(opened, recording):
    page = opened(recording, title="A title & <more>")
    assert page.title() == text(page, "h1") == "A title & <more>"
    assert text(page, "#chunk-name").startswith("Chunk 0 of 0 to 23")
    assert text(page, "#chunk-status") == "Tokens 0 to 3 · read, then written"
    assert text(page, "#summary") == "3 layers · 2 rows · 24 chunks · grid 6 × 6 × 6 · 8 channels"
    assert page.locator("#layer option").all_inner_texts() == ["blocks.0", "blocks.1", "blocks.2"]
    assert text(page, "#source-list").startswith("Not on this page")
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
    assert " · ".join(f"{gate:.3f}" for gate in chunk.gates.tolist()) in values
    assert f"{chunk.use * 100:.2f} %" in values
    assert text(page, "#text .here:first-of-type, #text .near + .here").strip()
    words = page.locator("#text .here").all_text_contents()
    assert words == [word.replace("\n", "↵\n") for word in recording.texts[1][20:24]]  # pyright: ignore[reportOptionalSubscript]


def test_a_sphere_grows_with_the_spread(opened):
    widths = []
    for spread in (0.3, 0.6):
        recording = invented(1, chunks=1, rows=1)
        recording[0].write_at.zero_()
        recording[0].hidden_norm.zero_()
        recording[0].spread.fill_(spread)
        page = opened(recording)
        page.uncheck("#show-reads")
        left, _, right, _ = orange(image(page))
        widths.append(right - left)
    assert widths[1] / widths[0] == pytest.approx(2, rel=0.06)


def test_a_state_that_grows_is_shown_from_its_quiet_part_on(opened):
    recording = invented(1, chunks=10, rows=1)
    recording[0].hidden_norm[5:] += 4
    page = opened(recording)
    slide(page, "#time", 4)
    assert 5 < int(text(page, "#shown").split()[0]) < 100


@pytest.mark.parametrize(
    ("grid", "voxel", "at"),
    [
        ((4, 4, 6), (0, 0, 5), (1, -1, -1)),
        pytest.param((4, 4, 6), (3, 3, 0), (-1, 1, 1), marks=pytest.mark.exhaustive),
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
    left, top, right, bottom = orange(image(page))
    page.locator("#volume").hover(position={"x": (left + right) / 2, "y": (top + bottom) / 2})
    told = text(page, "#hover")
    assert told.startswith("write of chunk 0 “memory writes where words”")
    assert told.endswith(f" · voxel [{', '.join(map(str, voxel))}] · ‖h‖ 1.00")


def test_tokens_are_shown_as_text_whatever_they_contain(opened):
    recording = invented(1, chunks=2, rows=1, texts=False, chunk_size=2)
    nasty = [
        "<script>document.title = 'taken'</script>",
        "</script><h3>broken</h3>",
        "<img src=x onerror=alert(1)>",
        "&lt;\u2028",
    ]
    recording.annotate(texts=[nasty])
    page = opened(recording, title="</title><i>{{recording}}</i>")
    assert page.locator("#text .here").all_text_contents() == nasty[:2]
    page.keyboard.press("ArrowRight")
    settle(page)
    assert page.locator("#text .here").all_text_contents() == nasty[2:]
    assert page.title() == text(page, "h1") == "</title><i>{{recording}}</i>"
    assert page.locator("h3, #text img, #text script, h1 i").count() == 0


@pytest.mark.parametrize(("length", "near"), [(1, 24), (20, 3)])
def test_as_much_text_before_a_chunk_is_shown_as_can_be_read_at_once(opened, length, near):
    recording = invented(1, chunks=40, rows=1, chunk_size=1, texts=False)
    recording.annotate(texts=[[chr(65 + at % 26) * length for at in range(40)]])
    page = opened(recording)
    slide(page, "#time", 30)
    shown = page.locator("#text span").all_text_contents()
    assert shown == recording.texts[0][30 - near : 31]  # pyright: ignore[reportOptionalSubscript]
    assert page.locator("#text .here").all_text_contents() == shown[-1:]


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
    assert text(page, "#position") == "0 / 0"
    assert page.locator("#gate-chart .dot").count() == 3
    keep(page, "one-chunk")


def test_what_the_page_leaves_out_is_said_on_it(opened):
    page = opened(invented(1, chunks=9, every=3), every=2)
    assert text(page, "#notice").startswith("One chunk in 3 was recorded; 36 chunks")
    assert "One recorded chunk in 2 is on this page: 5 of 9." in text(page, "#notice")
    page.keyboard.press("ArrowRight")
    assert text(page, "#chunk-name").startswith("Chunk 6 ")


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


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        (DESKTOP, "light"),
        (PHONE, "dark"),
        pytest.param(DESKTOP, "dark", marks=pytest.mark.exhaustive),
        pytest.param(PHONE, "light", marks=pytest.mark.exhaustive),
    ],
)
def test_the_page_is_legible(opened, size, scheme):
    recording = invented(3, chunks=240, grid=(8, 8, 8), chunk_size=16, every=2)
    ramp = torch.linspace(40, 220, 16)
    colours = (ramp.expand(9, 16), ramp[:9, None].expand(9, 16), 255 - ramp.expand(9, 16))
    frames = torch.stack(colours, dim=-1).to(torch.uint8).expand(2, 4, 9, 16, 3)
    recording.annotate(frames=frames, tokens_per_frame=3000)
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
    light = image(page)
    page.emulate_media(color_scheme="dark")
    settle(page)
    dark = image(page)
    assert dark == image(opened(recording, scheme="dark"))
    assert Image.open(io.BytesIO(dark)).convert("L").getpixel((5, 5)) < 40
    assert Image.open(io.BytesIO(light)).convert("L").getpixel((5, 5)) > 220
    page.emulate_media(color_scheme="light")
    assert image(page) == light


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
