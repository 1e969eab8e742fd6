"""The viewer's looks in a real browser: legible, nothing on top of anything, light and dark."""

import io

import pytest
import torch
from browsing import DESKTOP, PHONE, keep, picture, settle, slide
from invented import invented
from PIL import Image

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
    light = picture(page)
    page.emulate_media(color_scheme="dark")
    settle(page)
    dark = picture(page)
    assert dark == picture(opened(recording, scheme="dark"))
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
