"""The viewer under fingers: one turns the volume, two zoom it, the page can still be scrolled."""

import pytest
from browsing import PATIENCE, PHONE, orange, picture, settle, text
from invented import invented

sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")


@pytest.fixture
def phone(opened):
    """A page on a phone with one wide write in the middle, and the hand that touches it."""
    recording = invented(1, chunks=9, rows=1)
    recording[0].write_at.zero_()
    recording[0].hidden_norm.zero_()
    recording[0].spread.fill_(0.3)
    page = opened(recording, size=PHONE, touch=True)
    page.uncheck("#show-reads")
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
    left, _, right, _ = orange(picture(page))
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
    sync_api.expect(page.locator("#position")).not_to_have_text("1 / 9", timeout=PATIENCE)
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
    sync_api.expect(page.locator("#position")).to_have_text("9 / 9", timeout=PATIENCE)
