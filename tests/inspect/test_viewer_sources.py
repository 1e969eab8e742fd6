"""Where a read came from, and time, in a real browser: arcs, list, strip, overview, link."""

import re

import pytest
import torch
from browsing import PATIENCE, PHONE, image, keep, orange, picture, settle, slide, text
from invented import invented
from PIL import Image
from test_place_pages import recorded

from tensor_memory import PlaceConfig, PlaceMemory, record

sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")
READ = 11


def parts_of(layer, read, head):
    """The part of every write in a read of one head, by `trace`."""
    trace = layer.trace([read])
    whole = trace.read[0, head]
    along = trace.content(0)[:, head] @ whole
    return trace.share[0, :, head], trace.share[0, :, head] * along / whole.square().sum()


def arcs(page):
    return page.locator("#arcs .arc").evaluate_all("(arcs) => arcs.map((a) => ({...a.dataset}))")


def press_strip(page, step, count):
    """Press the middle of a step's cell."""
    box = page.locator("#strip").bounding_box()
    style = "getComputedStyle(document.documentElement).getPropertyValue"
    left, keys = (float(page.evaluate(f"parseFloat({style}('--{n}'))")) for n in ("gutter", "keys"))
    x = left + (box["width"] - left - keys) * step / (count - 1)
    page.mouse.click(box["x"] + x, box["y"] + box["height"] / 2)
    settle(page)


def test_a_press_on_an_answer_shows_the_writes_that_fed_it(opened):
    recording = recorded(heads=2, rule="delta")
    page = opened(recording)
    press_strip(page, READ, 16)
    assert text(page, "#chunk-name") == f"Token {READ} of 0 to 15"
    own = 100 * sum(float(arc["part"]) for arc in arcs(page) if int(arc["position"]) == READ)
    assert text(page, "#strip-hover").endswith(f"share {own:.1f} %")  # of this read
    page.uncheck("#head-1")
    settle(page)
    share, part = parts_of(recording[0], READ, 0)
    drawn = arcs(page)
    assert len(drawn) >= 5
    for arc in drawn:
        at = int(arc["position"])
        assert arc["head"] == "0"
        assert float(arc["share"]) == pytest.approx(float(share[at]), rel=1e-5, abs=1e-6)
        assert float(arc["part"]) == pytest.approx(float(part[at]), rel=1e-5, abs=1e-6)
    widths = page.locator("#arcs .arc").evaluate_all(
        "(arcs) => arcs.map((a) => [Math.abs(a.dataset.part), +a.getAttribute('stroke-width')])"
    )
    assert widths == sorted(widths)  # the largest is drawn last and widest
    lines = page.locator("#source-list li").all_inner_texts()
    assert lines[-1].split() == ["together", "100.0", "%"]
    assert lines[-3].startswith("all other writes")
    assert lines[-2].startswith("a state from before the recording")
    best = int(part.abs().argmax())
    assert f"word{best}" in lines[0]
    assert ("itself" if best == READ else f"token {best}") in lines[0]
    # Both heads: each weighs as much as it is of ‖r‖².
    page.check("#head-1")
    settle(page)
    assert {arc["head"] for arc in arcs(page)} == {"0", "1"}
    readout = recording[0].readout[READ, 0].float().norm(dim=-1) ** 2
    weights = readout / readout.sum()
    for arc in arcs(page):
        head = int(arc["head"])
        want = float(weights[head] * parts_of(recording[0], READ, head)[1][int(arc["position"])])
        assert float(arc["part"]) == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert text(page, "#source-list .sum").split() == ["together", "100.0", "%"]
    keep(page, "sources")
    # An arc and the strip tell who they are; a line of the list goes there.
    page.locator("#arcs .arc").last.dispatch_event("pointerenter")
    told = text(page, "#strip-hover")
    assert all(word in told for word in ("word", "token", "head", "% of the read", "share"))
    page.locator("#source-list button").first.click()
    settle(page)
    assert text(page, "#chunk-name").split()[1] == arcs_position(told)


def arcs_position(told):
    return told.split("token ")[1].split()[0]


def test_the_life_of_a_write_is_told_with_who_took_most_of_it(opened):
    recording = recorded(heads=1, rule="delta", tokens=24)
    page = opened(recording)
    lives = recording[0].follow(0, 8)
    slide(page, "#time", 2)
    told = text(page, "#life")
    half, taker = int(lives.half[2, 0]), int(lives.taker[2, 0])
    assert f"token {taker} “word{taker}” took most" in told
    assert (f"half of it was gone at token {half} " if half >= 0 else "more than half") in told
    assert page.locator("#arcs .life").count() == 1
    # In the volume its mark has a name too; of the first read it gave all.
    slide(page, "#time", 0)
    page.uncheck("#show-reads")
    left, top, right, bottom = orange(image(page))
    page.locator("#volume").hover(position={"x": (left + right) / 2, "y": (top + bottom) / 2})
    assert text(page, "#hover").startswith("“word0” token 0 · 100.0 % of the read")


def test_a_token_whose_rate_is_zero_has_written_nothing(opened):
    recording = recorded(heads=1, rule="delta", tokens=6)
    recording[0].rate[3] = 0
    page = opened(recording)
    slide(page, "#time", 3)
    assert text(page, "#chunk-status") == "read; nothing written, its rate is 0"
    assert text(page, "#life") == ""
    assert page.locator("#arcs .life").count() == 0


def test_a_state_from_before_the_recording_is_named_with_its_part(opened):
    memory = PlaceMemory(8, PlaceConfig(grid=(5, 4), channels=4))
    _, state = memory(torch.randn(1, 12, 8))
    with record(memory, dtype=torch.float32) as recording:
        memory(torch.randn(1, 6, 8), state)
    trace = recording[0].trace([0])
    part = float((trace.rest[0] * trace.read[0]).sum() / trace.read[0].square().sum())
    page = opened(recording)
    shown = text(page, "#source-list .rest output").replace("−", "-").removesuffix(" %")
    assert float(shown) == pytest.approx(part * 100, abs=0.51)
    assert abs(part) > 0.01


def test_a_brush_shows_less_time_and_keys_and_boxes_go_there(opened):
    page = opened(invented(3, chunks=400, rows=1))
    box = page.locator("#overview canvas").bounding_box()
    y = box["y"] + box["height"] * 0.5
    page.mouse.move(box["x"] + box["width"] * 0.5, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=3)
    page.mouse.up()
    settle(page)
    assert page.locator("#overview .window").is_visible()
    at = int(text(page, "#position").split(" / ")[0])
    assert 199 <= at <= 241
    press_strip(page, 1, 2)  # the right end of what is shown
    assert int(text(page, "#position").split(" / ")[0]) == pytest.approx(240, abs=2)
    page.keyboard.press("a")
    settle(page)
    assert page.locator("#overview .window").is_hidden()
    page.mouse.click(box["x"] + box["width"] * 100.5 / 400, box["y"] + box["height"] * 0.9)
    settle(page)
    assert page.locator("#layer").input_value() == "2"
    assert text(page, "#position") == "100 / 399"
    assert text(page, "#strip-hover").startswith("blocks.2, chunk 100 · use ")
    page.keyboard.press("g")
    page.keyboard.type("17")
    page.keyboard.press("Enter")
    assert text(page, "#chunk-name").startswith("Chunk 17 ")
    page.locator("#goto").fill("they")
    page.keyboard.press("Enter")
    assert "they" in text(page, "#text")
    assert text(page, "#chunk-name").startswith("Chunk 19 ")  # words 76 to 79
    page.locator("#goto").fill("nowhere to be found")
    page.keyboard.press("Enter")
    assert text(page, "#copied") == "not found"


def test_it_opens_where_the_memory_is_used_most(opened):
    recording = invented(2, chunks=30, rows=2)
    recording[1].use[17, 0] = 3.0
    recording[1].hidden_norm[17] *= 0.2  # below what is shown at most steps
    page = opened(recording, at="")
    assert text(page, "#chunk-name").startswith("Chunk 17 ")
    assert page.locator("#layer").input_value() == "1"
    assert int(text(page, "#shown").split()[0]) > 20  # not the largest alone


def test_a_link_opens_the_same_view_and_the_theme_can_be_switched(opened):
    recording = recorded(heads=2, tokens=40)
    page = opened(recording)
    page.select_option("#layer", "1")
    slide(page, "#time", 9)
    page.select_option("#measure", "rate")
    page.uncheck("#head-0")
    page.locator("#volume").focus()
    for key in ("]", "Shift+ArrowLeft", "+", "d", "l"):
        page.keyboard.press(key)
    settle(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    address = page.evaluate("location.hash")
    shown = [text(page, of) for of in ("#chunk-name", "#source-list", "#summary")]
    again = opened(recording, at=address)
    assert [text(again, of) for of in ("#chunk-name", "#source-list", "#summary")] == shown
    assert again.evaluate("document.documentElement.dataset.theme") == "dark"
    assert again.locator("#layer").input_value() == "1"
    assert again.locator("#measure").input_value() == "rate"
    assert not again.locator("#head-0").is_checked()
    again.keyboard.press("l")
    settle(again)
    assert again.evaluate("location.hash") == address
    told = sync_api.expect(again.locator("#copied"))
    told.to_have_text(re.compile("link (copied|is in)"), timeout=PATIENCE)
    again.click("#copy-picture")
    told.to_have_text(re.compile("picture (copied|saved)"), timeout=PATIENCE)
    opened(recording, at="#layer=99&t=-4&from=9&to=2&measure=%3Cb%3E&theme=x&zoom=abc&hidden=a,1")


def test_hostile_texts_and_names_stay_text_in_strip_arcs_and_list(opened):
    recording = recorded(heads=1, rows=1, tokens=6, rule="delta")
    bad = "<img src=x onerror=\"document.title='taken'\">"
    recording.annotate(texts=[[bad] * 6])
    object.__setattr__(recording.layers[0], "name", bad)
    page = opened(recording, title="safe")
    slide(page, "#time", 5)
    assert bad in text(page, "#source-list")
    slide(page, "#time", 0)
    assert bad in text(page, "#life")
    page.locator("#strip").hover()
    assert bad in text(page, "#strip-hover")
    assert page.locator("#layer option").all_text_contents() == [bad]
    assert page.locator("#instrument img:not(#frame-image)").count() == 0
    assert page.title() == "safe"


def test_sources_fit_on_a_phone(opened):
    page = opened(recorded(heads=2, tokens=60), size=PHONE, touch=True, scheme="dark")
    slide(page, "#time", 50)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert page.locator("#source-list li").count() > 4
    keep(page, "sources-phone-dark")


def test_a_spread_wider_than_the_grid_is_a_badge_and_no_ball(opened):
    recording = invented(1, chunks=2, rows=1)
    recording[0].write_at.zero_()
    recording[0].spread[1] = 5.02
    page = opened(recording)
    page.uncheck("#show-reads")
    assert page.locator("#wide").is_hidden()
    slide(page, "#time", 1)
    slide(page, "#trail", 0)
    assert text(page, "#wide") == "write wider than the grid: σ 5.02"
    left, top, right, bottom = orange(image(page))
    assert max(right - left, bottom - top) < 14  # the point alone
    page.uncheck("#show-writes")
    settle(page)
    assert page.locator("#wide").is_hidden()


def test_two_recordings_are_shown_beside_each_other_at_one_step(opened, tmp_path):
    on, off = invented(2, chunks=12, rows=1), invented(2, chunks=12, rows=1, texts=False)
    off[0].hidden_norm.zero_()
    off[1].hidden_norm.mul_(0.5)
    page = opened(on, beside=off)
    names = page.locator("#layer option").all_inner_texts()
    assert names == ["A: blocks.0", "A: blocks.1", "B: blocks.0", "B: blocks.1"]
    assert page.locator("#beside").input_value() == "2"
    before = picture(page, "#volume-beside")
    slide(page, "#time", 7)
    names = [text(page, of) for of in ("#volume-name", "#beside-name")]
    assert names == ["A: blocks.0, chunk 7", "B: blocks.0, chunk 7"]
    assert picture(page, "#volume-beside") != before
    assert picture(page, "#volume-beside") != picture(page)
    page.select_option("#beside", "0")
    assert picture(page, "#volume-beside") == picture(page)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    with page.expect_download() as download:
        page.keyboard.press("c")
    saved = Image.open(download.value.path())  # both, beside each other
    half = saved.width // 2
    assert (
        saved.crop((0, 0, half, saved.height)).tobytes()
        == saved.crop((half, 0, saved.width, saved.height)).tobytes()
    )
    page.select_option("#layer", "1")
    page.select_option("#beside", "3")  # half as much of everything: the scale is that of the first
    assert picture(page, "#volume-beside") != picture(page)
    page.select_option("#beside", "-1")
    settle(page)
    assert page.locator("#volume-beside").is_hidden()
    with pytest.raises(ValueError, match="expected a recording of 1 row"):
        on.save_page(tmp_path / "refused.html", beside=invented(1, rows=2))


def test_two_methods_stand_at_the_same_token(opened):
    page = opened(recorded(heads=1, tokens=16), beside=invented(1, chunks=4, rows=2, chunk_size=4))
    slide(page, "#time", 9)
    assert text(page, "#volume-name") == "A: memory, token 9"
    assert text(page, "#beside-name") == "B: blocks.0, chunk 2"  # tokens 8 to 11
    box = page.locator("#overview canvas").bounding_box()  # both lines are as long as the tokens
    page.mouse.click(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.8)
    assert text(page, "#chunk-name").startswith("Chunk 1 ")


@pytest.mark.exhaustive
def test_five_thousand_steps_of_eight_layers_can_be_scrubbed(opened):
    page = opened(invented(8, chunks=5000, rows=1, grid=(6, 6, 6)))
    width = page.locator("#gate-chart").bounding_box()["width"]
    curve = page.locator("#gate-chart .curve").first.get_attribute("d")
    assert curve.count("L") + curve.count("M") <= 2 * width  # a line from most to least per pixel
    for t in range(0, 5000, 250):
        slide(page, "#time", t)
        assert text(page, "#chunk-name").startswith(f"Chunk {t} ")
    page.locator("#time-in").click(click_count=6)
    settle(page)
    assert page.locator("#overview .window").is_visible()
    page.select_option("#layer", "7")
    assert text(page, "#position") == "4750 / 4999"
    keep(page, "long")
