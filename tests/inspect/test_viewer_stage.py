"""The stage in a real browser: never empty where it opens, cut open, in heads, over a picture."""

import io

import pytest
import torch
from browsing import PATIENCE, PHONE, image, keep, orange, picture, settle, slide, text
from invented import invented
from PIL import Image
from test_place_pages import recorded
from test_viewer_sources import arcs

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory, record

sync_api = pytest.importorskip("playwright.sync_api", reason="the viewer needs playwright")


def test_it_opens_where_something_is_held_and_says_why_a_stage_is_empty(opened):
    recording = invented(2, chunks=12, rows=2, texts=False)
    recording[0].present[:, 0] = recording[1].present[:, 0] = False  # the first row has nothing
    for layer in (recording[0], recording[1]):
        layer.hidden_norm[:7] = 0
        layer.hidden_norm[7:9] *= 1e-2
        layer.use.fill_(float("nan"))
    recording[1].use[2, 1], recording[1].use[8, 1] = 0.9, 0.5  # at chunk 2 it is empty
    page = opened(recording, at="")
    assert text(page, "#chunk-name").startswith("Chunk 8 ")
    assert (page.locator("#layer").input_value(), page.locator("#row").input_value()) == ("1", "1")
    assert int(text(page, "#shown").split()[0]) > 0  # below the usual threshold of this recording
    assert page.locator("#nothing").is_hidden()
    slide(page, "#time", 2)
    assert text(page, "#nothing") == "the memory is empty here"
    slide(page, "#time", 8)
    slide(page, "#threshold", 200)
    assert text(page, "#nothing").startswith(
        "all voxels are below the threshold; the largest is 0.0"
    )
    page.select_option("#row", "0")
    assert text(page, "#nothing") == "this row has no such chunk"


def test_a_volume_is_cut_by_a_plane_into_slices_or_projected(opened):
    recording = invented(1, chunks=3, rows=1, grid=(4, 6, 8), texts=False)
    page = opened(recording, at="#t=2")
    slide(page, "#threshold", 30)
    levels = (recording[0].hidden_norm / recording[0].hidden_norm.max() * 255).round()[2, 0]
    levels = torch.where(levels >= 30, levels, 0)
    seen = {picture(page)}
    choices = page.locator("#cut option").all_inner_texts()
    for axis, name in ((2, "x"), (1, "y"), (0, "z")):
        for kind, at in (("up to", 1), ("slice", 2)):
            page.select_option("#cut", str(choices.index(f"{kind} {name}")))
            slide(page, "#cut-at", at)
            part = levels.narrow(
                axis, 0 if kind == "up to" else at, at + 1 if kind == "up to" else 1
            )
            assert text(page, "#shown") == f"{int((part > 0).sum())} of 192 shown"
            where = torch.linspace(-1, 1, levels.shape[axis])[at]
            assert text(page, "#cut-value") == f"{name} = {where:.3f}".replace("-", "−")
            seen.add(picture(page))
        page.select_option("#cut", str(choices.index(f"largest along {name}")))
        assert text(page, "#shown") == f"{int((levels.amax(axis) > 0).sum())} of 192 shown"
        assert page.locator("#cut-at").is_hidden()
        seen.add(picture(page))
    assert len(seen) == 10
    page.select_option("#cut", "5")
    slide(page, "#cut-at", 3)
    page.keyboard.press("l")
    settle(page)
    again = opened(recording, at=page.evaluate("location.hash"))
    assert text(again, "#cut-value") == "y = 0.200"


def test_marks_are_projected_with_the_volume(opened):
    places = []
    for x, cut in ((0.9, 7), (-1.0, 0)):  # the largest along x, the whole
        recording = invented(1, chunks=1, rows=1, texts=False)
        recording[0].write_at[0, 0, 0] = torch.tensor([x, 0.3, -0.3])
        recording[0].spread.fill_(5)  # no ball
        page = opened(recording, at=f"#t=0&cut={cut}")
        page.uncheck("#show-reads")
        places.append(orange(image(page)))
    assert places[0] == places[1]


@pytest.fixture(scope="module")
def gated():
    torch.manual_seed(0)
    config = MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2, read_heads=2, write_heads=2)
    model = MemoryResidual(TensorMemory(8, config))
    texts = [[f" word{t}" for t in range(17)]]
    with torch.no_grad(), record(model, texts=texts, dtype=torch.float32) as recording:
        model(torch.randn(1, 17, 8))
    return recording


def test_a_gated_read_is_told_write_by_write_with_what_is_not_additive(opened, gated):
    page = opened(gated)
    slide(page, "#time", 7)
    trace = gated[0].trace([7])
    size = trace.read.square().sum()
    part = (trace.effect[0] * trace.read[0]).sum((1, 2)) / size
    drawn = arcs(page)
    assert len(drawn) >= 4
    for arc in drawn:
        assert float(arc["part"]) == pytest.approx(float(part[int(arc["position"])]), rel=1e-4)
    best = int(part.abs().argmax())
    first, *_ = page.locator("#source-list li").all_inner_texts()
    assert f"word{2 * best} word{2 * best + 1}" in first
    assert f"chunk {best}" in first
    joint = float((trace.joint * trace.read).sum() / size)
    shown = text(page, "#source-list .joint output").replace("−", "-").removesuffix(" %")
    assert float(shown) == pytest.approx(joint * 100, abs=0.51)
    assert abs(joint) > 0.01
    assert "not additive" in text(page, "#source-list .joint")
    assert text(page, "#source-list .sum").split() == ["together", "100.0", "%"]
    slide(page, "#time", 1)
    half = int(gated[0].follow(0, 8).half[1, 0])
    told = f"half of it was gone at chunk {half} " if half >= 0 else "more than half of it stayed"
    assert told in text(page, "#life")
    assert "took" not in text(page, "#life")


def test_heads_that_share_a_grid_have_colours_and_can_be_switched_off(opened, gated):
    page = opened(gated)
    slide(page, "#time", 6)
    both = picture(page)
    page.uncheck("#head-0")
    one = picture(page)
    assert one != both
    page.uncheck("#head-1")
    none = picture(page)
    page.uncheck("#show-writes")
    page.uncheck("#show-reads")
    assert picture(page) == none
    assert len({both, one, none}) == 3
    colours = page.locator("#points td.write, #points td.read").evaluate_all(
        "(cells) => cells.map((cell) => getComputedStyle(cell, '::before').backgroundColor)"
    )
    assert len(colours) == 4
    assert colours[:2] == colours[2:]
    assert colours[0] != colours[1]


def colour_at(page, x, y) -> list[int]:
    """The colour of the stage at a place of the memory, in a view that was not turned."""
    shown = Image.open(io.BytesIO(image(page))).convert("RGB")
    unit = min(shown.size) * 0.229 * 1.55 * 1.25 / (4 / 3)  # four columns reach beyond the border
    at = round(shown.width / 2 + x * unit), round(shown.height * 0.47 + y * unit)
    return list(shown.crop((*at, at[0] + 1, at[1] + 1)).tobytes())


def test_a_picture_lies_upright_under_the_places_it_was_taken_at(opened, tmp_path):
    recording = recorded(places="given", heads=1)
    photo = torch.zeros(20, 30, 3, dtype=torch.uint8)
    photo[:10, :15, 0] = 255  # red where x and y are below 0: the upper left
    photo[10:, 15:, 2] = 255  # blue at the lower right
    page = opened(recording, image=photo)
    for mark in ("#show-writes", "#show-reads"):
        page.uncheck(mark)
    slide(page, "#threshold", 255)
    page.wait_for_function("document.querySelector('#show-image').checked")
    assert colour_at(page, -0.5, -0.4) == [255, 0, 0]
    assert colour_at(page, 0.5, 0.4) == [0, 0, 255]
    assert colour_at(page, 0.5, -0.4) == [0, 0, 0]
    page.uncheck("#show-image")
    assert colour_at(page, -0.5, -0.4) == colour_at(page, 1.5, 0)
    # A write is drawn where the picture has its place: downwards on the page for y above 0.
    page.check("#show-writes")
    slide(page, "#trail", 0)
    t = int(recording[0].write_at[:, 0, 0].abs().sum(-1).argmin())
    slide(page, "#time", t)
    x, y = recording[0].write_at[t, 0, 0].tolist()
    red, green, _ = colour_at(page, x, y)
    assert red > 170 > 120 > green
    with pytest.raises(ValueError, match="whose places are given, got none"):
        recorded().save_page(tmp_path / "page.html", image=photo)
    with pytest.raises(TypeError, match=r"uint8 tensor of .*got torch.float32 .*; colours"):
        recording.save_page(tmp_path / "page.html", image=photo.float())
    with pytest.raises(TypeError, match=r"got ndarray; torch.tensor\(numpy.array\(image\)\)"):
        recording.save_page(tmp_path / "page.html", image=photo.numpy())
    with pytest.raises(ValueError, match="with B = 2 rows"):
        recording.save_page(tmp_path / "page.html", image=photo.expand(3, 20, 30, 3))
    with pytest.raises(TypeError, match="beside: expected another Recording, got str"):
        recording.save_page(tmp_path / "page.html", beside="other")  # pyright: ignore[reportArgumentType]


def tab_to(page, control):
    """Press Tab until a control has the focus."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("(control) => document.activeElement.matches(control)", control):
            return
    raise AssertionError(f"{control} cannot be reached")


def test_everything_can_be_reached_and_changed_by_keyboard_alone(opened, gated):
    page = opened(gated)
    tab_to(page, "#cut")
    page.keyboard.press("ArrowDown")
    tab_to(page, "#cut-at")
    page.keyboard.press("Home")
    assert text(page, "#cut-value") == "x = −1.00"
    tab_to(page, "#time")
    page.keyboard.press("End")
    assert text(page, "#position") == "8 / 8"
    page.keyboard.press("]")
    settle(page)
    assert page.locator("#overview .window").is_visible()
    tab_to(page, "#head-0")
    page.keyboard.press("Space")
    assert not page.locator("#head-0").is_checked()
    tab_to(page, "#source-list button")
    wanted = text(page, "#source-list button:focus span").removeprefix("chunk ")
    page.keyboard.press("Enter")
    assert text(page, "#chunk-name").startswith(f"Chunk {wanted} ")
    assert page.locator("#source-list button:focus").count() == 1  # on the line in the same place
    tab_to(page, "#measure")
    page.keyboard.press("ArrowDown")
    assert page.locator("#measure").input_value() == "use"


def test_the_stage_fits_on_a_phone(opened, gated):
    page = opened(gated, size=PHONE, touch=True, scheme="dark", at="#t=6&cut=3&cutAt=1")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    boxes = [page.locator(of).bounding_box() for of in ("#stage", "#cut-place", "#cut")]
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= PHONE[0] for box in boxes)
    keep(page, "gated-phone-dark")


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(browser, gated):
    page = browser.new_page()
    page.set_content(gated.show(title="<b>inline</b>", height=700)._repr_html_())
    inside = page.frame_locator("iframe")
    sync_api.expect(inside.locator("h1")).to_have_text("<b>inline</b>", timeout=PATIENCE)
    sync_api.expect(inside.locator("#chunk-name")).to_contain_text("Chunk ", timeout=PATIENCE)
    inside.locator("#copy-link").click()
    told = "a page inside a notebook has no address"
    sync_api.expect(inside.locator("#copied")).to_have_text(told, timeout=PATIENCE)
    page.close()
    with pytest.raises(TypeError, match="beside: expected another Recording, got int"):
        gated.show(beside=3)
