"""The viewer's controls in a real browser, by mouse, keyboard and fingers: each does as it says."""

import re

import pytest
from browsing import PATIENCE, PHONE, image, orange, picture, settle, slide, text
from invented import invented

from tensor_memory import Recording

sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")


def voxels_above(recording: Recording, level: int, *, layer=0, t=0, row=0) -> str:
    norms = recording[layer].hidden_norm
    levels = (norms / norms.max() * 255).round()[t, row]
    return f"{int((levels >= max(level, 1)).sum())} of {levels.numel()} shown"


def test_the_time_slider_changes_picture_panel_and_charts(opened, recording):
    page = opened(recording)
    first, cursor = picture(page), page.locator("#gate-chart .cursor").get_attribute("x1")
    window = page.screenshot()
    slide(page, "#time", 9)
    assert picture(page) != first
    assert page.screenshot() != window
    assert text(page, "#chunk-name").startswith("Chunk 9 ")
    assert text(page, "#position") == "9 / 23"
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
    assert text(page, "#position") == "1 / 23"
    page.keyboard.press("ArrowLeft")
    assert picture(page) == first
    page.keyboard.press("ArrowLeft")
    assert text(page, "#position") == "0 / 23"
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    assert text(page, "#position") == "23 / 23"
    page.keyboard.press("Home")
    assert picture(page) == first


def test_one_arrow_is_one_step_while_the_slider_has_the_focus(opened, recording):
    page = opened(recording)
    page.focus("#time")
    page.keyboard.press("ArrowRight")
    assert text(page, "#position") == "1 / 23"
    page.keyboard.press("ArrowDown")
    assert text(page, "#position") == "0 / 23"


def test_a_control_keeps_its_own_arrows(opened, recording):
    page = opened(recording)
    page.focus("#threshold")
    before = int(page.input_value("#threshold"))
    page.keyboard.press("ArrowRight")
    assert int(page.input_value("#threshold")) == before + 1
    assert text(page, "#position") == "0 / 23"


def test_space_plays_and_stops(opened):
    page = opened(invented(1, chunks=1200, rows=1))  # 100 s: the end is not reached meanwhile
    page.select_option("#speed", "12")
    page.locator("#volume").focus()
    page.keyboard.press("Space")
    running = re.compile(r"^([2-9]|\d\d+) / 1199")
    sync_api.expect(page.locator("#position")).to_have_text(running, timeout=PATIENCE)
    assert page.locator("#play").get_attribute("aria-label") == "Pause"
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    stopped = text(page, "#position")
    page.wait_for_timeout(250)  # three chunks
    assert text(page, "#position") == stopped != "1199 / 1199"


def test_the_play_button_runs_to_the_end_and_starts_again(opened):
    page = opened(invented(1, chunks=5))
    page.select_option("#speed", "30")
    for _ in range(2):
        page.click("#play")
        sync_api.expect(page.locator("#play[aria-pressed=false]")).to_be_visible(timeout=PATIENCE)
        assert text(page, "#position") == "4 / 4"


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


def test_the_view_can_be_turned_and_zoomed_by_keyboard(opened, recording):
    page = opened(recording)
    first = picture(page)
    for key in ("Shift+ArrowLeft", "Shift+ArrowUp", "+", "-"):
        page.keyboard.press(key)
        assert picture(page) != first, key
        assert text(page, "#position") == "0 / 23"
        page.keyboard.press("0")
        assert picture(page) == first, key


def test_the_wheel_zooms_and_a_finger_on_a_chart_goes_there(opened, recording):
    page = opened(recording)
    first = picture(page)
    page.locator("#volume").hover()
    page.mouse.wheel(0, -300)
    assert picture(page) != first
    chart = page.locator("#use-chart").bounding_box()
    page.mouse.click(chart["x"] + chart["width"] * 0.4, chart["y"] + 20)
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


# Fingers: one turns the volume, two zoom it, the page can still be scrolled.


@pytest.fixture
def phone(opened):
    """A page on a phone with one wide write in the middle, and the hand that touches it."""
    recording = invented(1, chunks=9, rows=1)
    recording[0].write_at.zero_()
    recording[0].hidden_norm.zero_()
    recording[0].spread.fill_(0.3)
    page = opened(recording, size=PHONE, touch=True)
    page.uncheck("#show-reads")
    page.evaluate("scrollTo(0, 0)")  # to the legend it had to scroll
    return page, Hand(page)


class Hand:
    """Fingers as the browser's own protocol moves them; playwright itself only taps."""

    def __init__(self, page):
        self.page, self.session = page, page.context.new_cdp_session(page)

    def touch(self, kind, *fingers):
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(fingers)]
        self.session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    def move(self, *paths, steps=4):
        """Put fingers down, move each from its start to its end, and leave them there."""
        self.touch("touchStart", *(start for start, _ in paths))
        for step in range(1, steps + 1):
            part = step / steps
            self.touch(
                "touchMove",
                *((a + (c - a) * part, b + (d - b) * part) for (a, b), (c, d) in paths),
            )

    def lift(self):
        self.touch("touchEnd")
        settle(self.page)


def middle(page, selector="#volume"):
    box = page.locator(selector).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def width_of_the_write(page):
    left, _, right, _ = orange(image(page))
    return right - left


def test_a_finger_turns_the_volume_and_scrolls_nothing(phone):
    page, hand = phone
    x, y = middle(page)
    first = picture(page)
    for end in ((x + 80, y), (x, y - 60)):
        before = picture(page)
        hand.move(((x, y), end))
        hand.lift()
        assert picture(page) != before
    assert page.evaluate("scrollY") == 0
    page.keyboard.press("0")  # a tap so soon after a swipe would only end the swipe
    assert picture(page) == first


def test_two_fingers_zoom_by_as_much_as_they_part(phone):
    page, hand = phone
    x, y = middle(page)
    before = width_of_the_write(page)
    hand.move(((x - 40, y), (x - 60, y)), ((x + 40, y), (x + 60, y)))
    hand.lift()
    assert width_of_the_write(page) / before == pytest.approx(1.5, rel=0.1)
    hand.move(((x - 60, y), (x - 40, y)), ((x + 60, y), (x + 40, y)))
    hand.lift()
    assert width_of_the_write(page) / before == pytest.approx(1, rel=0.06)
    assert page.evaluate("visualViewport.scale") == 1  # the page itself was not zoomed


def test_the_finger_that_stays_after_a_pinch_turns_on_without_a_jump(phone):
    page, hand = phone
    x, y = middle(page)
    hand.move(((x - 40, y), (x - 60, y)), ((x + 40, y), (x + 60, y)))
    hand.touch("touchEnd", (x - 60, y))  # the second finger has left
    stayed = picture(page)
    hand.touch("touchMove", (x - 60, y))
    assert picture(page) == stayed
    hand.touch("touchMove", (x - 20, y))
    assert picture(page) != stayed
    hand.lift()


def test_a_finger_on_a_chart_goes_there_and_may_scroll_the_page(phone):
    page, hand = phone
    x, y = middle(page, "#use-chart")
    page.touchscreen.tap(x, y)
    sync_api.expect(page.locator("#position")).not_to_have_text("0 / 8", timeout=PATIENCE)
    assert 3 < int(text(page, "#position").split(" / ")[0]) < 8
    hand.move(((x, y), (x, y - 300)), steps=8)
    hand.lift()
    page.wait_for_function("scrollY > 100")


def test_the_play_button_and_the_slider_take_a_tap(phone):
    page, _ = phone
    page.locator("#speed").evaluate(  # at 6 a second the end would soon stop it by itself
        "(speed) => { speed.add(new Option('0.01')); speed.value = '0.01'; }"
    )
    page.tap("#play")
    page.wait_for_selector("#play[aria-pressed=true]")
    page.tap("#play")
    page.wait_for_selector("#play[aria-pressed=false]")
    box = page.locator("#time").bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] - 10, box["y"] + box["height"] / 2)
    sync_api.expect(page.locator("#position")).to_have_text("8 / 8", timeout=PATIENCE)
