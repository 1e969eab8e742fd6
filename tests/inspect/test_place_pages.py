"""A recording of a place memory as a table, as figures and as a page, head by head."""

import pytest
import torch
from browsing import keep, settle, slide, text
from test_page import array, carried

from tensor_memory import MemoryResidual, PlaceConfig, PlaceMemory, record
from tensor_memory.cli import main
from tensor_memory.inspect import figure_files


def recorded(axes=2, *, rows=2, tokens=16, heads=2, **options):
    torch.manual_seed(0)
    config = PlaceConfig(grid=(5, 4, 3, 3)[:axes], channels=4, heads=heads, **options)
    model = MemoryResidual(PlaceMemory(8, config))
    texts = [[f" word{t}" for t in range(tokens)] for _ in range(rows)]
    where = {} if config.places == "learned" else {"where": torch.rand(rows, tokens, axes) * 2 - 1}
    with record(model, texts=texts, dtype=torch.float32) as recording:
        model(torch.randn(rows, tokens, 8), **where)
    return recording


def page_of(recording, tmp_path, **options):
    recording.save_page(tmp_path / "page.html", **options)
    return carried((tmp_path / "page.html").read_text(encoding="utf-8"))


def test_every_head_is_on_the_page_with_its_own_grid_and_places(tmp_path):
    recording = recorded()
    layer, page = recording[0], page_of(recording, tmp_path)
    assert (page["layerCount"], len(page["layers"])) == (1, 2)
    for h, packed in enumerate(page["layers"]):
        assert packed["name"] == f"memory head {h}"
        assert (packed["unit"], packed["normName"]) == ("token", "‖S‖")
        assert packed["gateNames"] == ["rate", "keep"]
        at = array(packed["writeAt"], torch.float32, 16, 2, 1, 2)
        assert torch.equal(at[:, :, 0], layer.write_at[:, :, h])
        gates = array(packed["gates"], torch.float32, 16, 2, 2)
        assert torch.equal(gates, torch.stack([layer.rate, layer.keep], -1)[:, :, h])
        levels = array(packed["levels"], torch.uint8, 16, 2, 5, 4).float() / 255 * packed["top"]
        error = (levels - layer.state_norm[:, :, h]).abs().max()
        assert float(error) <= packed["top"] / 255 / 2 * 1.001


def test_a_layer_that_was_never_called_has_a_page_too(tmp_path):
    config = PlaceConfig(grid=(5, 4), channels=4, heads=2)
    model = torch.nn.ModuleList(MemoryResidual(PlaceMemory(8, config)) for _ in range(2))
    with record(model) as recording:
        model[0](torch.randn(2, 9, 8))
    called, other = page_of(recording, tmp_path)["layers"][1:3]
    assert called["sources"] is not None
    assert other["sources"] is None


def test_the_radius_of_a_write_is_its_width_in_the_units_of_places():
    recording = recorded(1)
    head = recording[0].head(1)
    torch.testing.assert_close(head.spread[..., 0], recording[0].width[..., 1] * (2 / 4))
    peak = head.mask(3, 1)[0].argmax()
    nearest = (torch.linspace(-1, 1, 5) - head.write_at[3, 1, 0, 0]).abs().argmin()
    assert peak == nearest
    torch.testing.assert_close(head.mask(3, 1).norm(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("axes", "kernel"),
    [
        (1, "linear"),
        (2, "gaussian"),
        pytest.param(3, "gaussian", marks=pytest.mark.exhaustive),
        (4, "linear"),
    ],
)
def test_every_figure_is_drawn_of_every_head(tmp_path, axes, kernel, monkeypatch):
    monkeypatch.setattr(figure_files, "DPI", 30)  # small pictures are written fast
    heads = 2 if axes == 2 else 1
    recording = recorded(axes, rows=1, tokens=4, heads=heads, kernel=kernel)
    kinds = None if axes == 2 else ("slices", "trajectories", "mask")
    files = {path.name for path in recording.save_figures(tmp_path, kinds=kinds)}
    wanted = {"slices", "trajectories", "mask"} if kinds else {
        "slices", "projection", "mask", "trajectories", "gates", "occupancy", "saturation"
    }  # fmt: skip
    layers = ("0.0", "0.1") if heads == 2 else ("0",)
    expected = {f"{kind}-{layer}-light.png" for kind in wanted for layer in layers}
    assert files == expected | (set() if kinds else {"use-light.png", "state-norm-light.png"})


def test_the_command_shows_a_recording_of_places(tmp_path, capsys):
    recording = recorded(heads=1)
    recording.save(tmp_path / "run.safetensors")
    page, figures = tmp_path / "page.html", tmp_path / "figures"
    options = ["--html", str(page), "--figures", str(figures), "--only", "gates"]
    assert main(["inspect", str(tmp_path / "run.safetensors"), *options, "--every", "3"]) == 0
    head, line, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["layer", "grid", "kept", "seen", "gate", "use", "rate", "keep", "width"]
    assert line.split()[:4] == ["memory", "5x4", "32", "32"]
    assert [path.name for path in figures.iterdir()] == ["gates-0-light.png"]
    notices = carried(page.read_text(encoding="utf-8"))["notices"]
    assert notices == ["One recorded token in 3 is on this page: 6 of 16."]


def test_the_viewer_shows_heads_tokens_places_and_gates(opened):
    page = opened(recorded())
    assert text(page, "#summary") == "1 layer · 2 rows · 16 tokens · grid 5 × 4 · 4 channels"
    choices = page.locator("#layer option").all_inner_texts()
    assert choices == ["memory head 0", "memory head 1"]
    slide(page, "#time", 7)
    assert text(page, "#chunk-name") == "Token 7 of 0 to 15"
    assert text(page, "#chunk-status") == "written, then read"
    assert "word7" in text(page, "#text .here")
    values = text(page, "#values")
    assert "Rate β, keep α" in values
    assert "Largest ‖S‖ in the grid" in values
    assert text(page, "#norm-name") == "‖S‖"
    assert text(page, "#gate-caption").lower() == "rate and keep"
    label = page.locator("#gate-chart").get_attribute("aria-label")
    assert label.startswith("At this token: rate 0.")
    assert "keep 1.00" in label
    before = text(page, "#points")
    page.locator("#layer").select_option("1")
    settle(page)
    assert text(page, "#points") != before
    overview = page.locator("#overview canvas")
    assert overview.get_attribute("height") == "1"  # a line for the layer, not one for each head
    overview.hover()
    assert text(page, "#strip-hover").startswith("memory head 1, token 8 · use ")
    overview.click()
    assert page.locator("#layer").input_value() == "1"
    keep(page, "places")


def test_a_page_of_both_memories_names_each_ones_gates(opened):
    from invented import invented

    recording = recorded(3, tokens=24, heads=1)
    recording.layers += invented(1, chunks=24, rows=2, texts=False).layers
    page = opened(recording)
    assert "rate" in page.locator("#gate-chart").get_attribute("aria-label")
    page.locator("#layer").select_option("1")
    settle(page)
    label = page.locator("#gate-chart").get_attribute("aria-label")
    assert "input" in label
    assert "output" in label
    assert text(page, "#norm-name") == "‖h‖"
    assert text(page, "#chunk-name").startswith("Chunk")
