"""The figures show the numbers they say, in colours and type that can be read."""

import itertools

import numpy as np
import pytest
import torch
from invented import invented_layer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import MemoryResidual, Recording, record
from tensor_memory.inspect import figure_files, figures
from tensor_memory.inspect.theme import DARK, LIGHT, WIDTH, is_dark, palette, theme

LAYERS = {
    "one axis": {"grid": (9,)},
    "two axes, heads": {"grid": (5, 8), "heads": 2},
    "three axes": {"grid": (6, 6, 6)},
    "nearest, token reads": {"grid": (4, 6, 8), "write": "nearest", "reads": "token"},
    "four axes": {"grid": (2, 3, 4, 5)},
}
OF_A_LAYER = [kind for kind, how in figure_files.KINDS.items() if not how.all_layers]


@pytest.fixture(scope="module")
def recording():
    """Two rows of 102 tokens in chunks of 4: the last chunk is unfinished and was not written."""
    layers = []
    for number, options in enumerate(LAYERS.values()):
        layer = invented_layer(f"blocks.{number}", chunks=26, seed=number, **options)
        layer.span[-1, :, 1] = 102
        layer.written[-1] = False
        for values in (layer.write_at, layer.spread, layer.content_norm, layer.gates):
            if values is not None:
                values[-1] = float("nan")
        layers.append(layer)
    return Recording(layers)


@pytest.fixture
def axis():
    return Figure(layout="constrained").add_subplot()


@pytest.fixture
def solid():
    return Figure().add_subplot(projection="3d")


def lines(axis):
    return {line.get_label(): line.get_xydata() for line in axis.lines}


@pytest.mark.parametrize("number", [0, 1, 2], ids=[*LAYERS][:3])
def test_projections_show_the_largest_norm_along_each_line(axis, recording, number):
    layer = recording[number]
    figures.draw_projection(axis, layer, row=1, tiles=1)
    (image,) = axis.images
    shown = image.get_array().compressed()
    values = layer.hidden_norm[0, 1]
    if layer.config.axes == 3:  # with fewer nothing lies in the line of sight: all are shown
        values = torch.cat([values.amax(axis).flatten() for axis in range(3)])
    assert np.array_equal(np.unique(shown), np.unique(values.numpy()))


def test_slices_go_through_the_voxel_that_held_most(axis):
    layer = invented_layer("block", chunks=2, rows=1, grid=(6, 6, 6))
    layer.hidden_norm.zero_()
    layer.hidden_norm[:, 0, 4, 2, 1] = 7.0  # z, y, x
    figures.draw_slices(axis, layer)
    assert axis.get_title("left").startswith("slices of ‖h‖ through voxel x 1, y 2, z 4")
    assert [label.get_text() for label in axis.get_yticklabels()] == ["y, x", "z, x", "z, y"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["after 4", "after 8"]
    image = axis.images[0].get_array()
    cells = (image == 7.0).sum()
    repeated = round(16 / 6) ** 2
    assert cells == 3 * 2 * repeated  # one voxel in each of three planes at two moments


def test_moments_are_spread_over_the_whole_stream(axis, recording):
    figures.draw_slices(axis, recording[2])
    heads = [label.get_text() for label in axis.get_xticklabels()]
    assert heads == ["after 4", "after 24", "after 44", "after 64", "after 84", "after 102"]


def test_the_mask_of_a_write_is_shown_through_its_peak(axis, recording):
    figures.draw_mask(axis, recording[2], chunk=1)
    image = axis.images[0].get_array()
    mask = recording[2].mask(1, 0)
    assert image.max() == pytest.approx(float(mask.max()))
    sigma = float(recording[2].spread[1, 0])
    assert axis.get_title("left") == f"mask of chunk 1, tokens 4 to 7, σ = {sigma:.2f}"


def test_a_mask_that_was_never_written_says_so(axis, recording):
    figures.draw_mask(axis, recording[2], chunk=25)
    assert axis.get_title("left") == "mask of chunk 25, nothing was written"


def test_gates_are_drawn_where_chunks_were_written(axis, recording):
    layer = recording[0]
    figures.draw_gates(axis, layer, row=1)
    drawn = lines(axis)
    assert list(drawn) == ["input", "forget", "output"]
    for gate, points in enumerate(drawn.values()):
        assert points[:, 0].tolist() == list(range(4, 101, 4))
        np.testing.assert_allclose(points[:, 1], layer.gates[:25, 1, gate])


def test_the_state_norm_is_that_of_the_whole_grid(axis, recording):
    figures.draw_state_norm(axis, recording)
    drawn = lines(axis)
    assert list(drawn) == recording.names
    norms = recording[3].hidden_norm[:, 0].flatten(1).norm(dim=1)
    np.testing.assert_allclose(drawn["blocks.3"][:, 1], norms, rtol=1e-6)


def test_gate_and_use_show_the_gate_and_the_median_share(axis, recording):
    figures.draw_use(axis, recording)
    marks = [line.get_xydata() for line in axis.lines if len(line.get_xydata()) == 1]
    gates = [float(point[0, 0]) for point in marks[1::2]]
    assert gates == pytest.approx([layer.gate for layer in recording.layers])
    medians = [float(point[0, 0]) for point in marks[::2]]
    expected = [layer.use.double().flatten().quantile(0.5).item() for layer in recording.layers]
    assert medians == pytest.approx(expected)
    assert [label.get_text() for label in axis.get_yticklabels()] == recording.names


def made_layer(norms):
    layer = invented_layer("block", chunks=len(norms), rows=1, grid=(4,), chunk_size=1)
    layer.hidden_norm[:, 0] = torch.tensor(norms)
    return layer


def test_occupancy_counts_voxels_and_how_evenly_they_are_used(axis):
    layer = made_layer([[1.0, 0, 0, 0], [1.0, 1, 1, 1], [1.0, 1, 0.01, 0]])
    figures.draw_occupancy(axis, layer)
    above, effective = (points[:, 1] for points in lines(axis).values())
    assert above.tolist() == [0.25, 1.0, 0.5]
    assert effective[:2].tolist() == [0.25, 1.0]
    assert effective[2] == pytest.approx(0.5, abs=1e-3)


def test_occupancy_of_an_empty_grid_is_none(axis):
    figures.draw_occupancy(axis, made_layer([[0.0, 0, 0, 0]]))
    assert [points[0, 1] for points in lines(axis).values()] == [0, 0]


def test_saturation_counts_coordinates_at_the_border(axis):
    layer = made_layer([[1.0] * 4] * 4)
    layer.read_at.copy_(torch.tensor([0.99, -0.96, 0.2, 0.0]).reshape(4, 1, 1, 1))
    layer.write_at.copy_(torch.tensor([-1.0, 1.0, 0.99, float("nan")]).reshape(4, 1, 1, 1))
    figures.draw_saturation(axis, layer)
    labels = [text.get_text() for text in axis.get_legend().get_texts()]
    assert sorted(labels) == ["reads:\n50% beyond 0.95", "writes:\n100% beyond 0.95"]


def test_trajectories_pass_through_the_recorded_places(solid, recording):
    layer = recording[2]
    figures.draw_trajectories(solid, layer, shown=5)
    middles = [np.stack(path._offsets3d, -1)[0] for path in solid.collections]
    for chunk in range(21, 26):
        at = layer.read_at[chunk, 0, 0].numpy()
        assert any(np.allclose(at, middle) for middle in middles)
    assert solid.get_title("left").endswith("tokens 84 to 101")
    ring = layer.spread[21, 0, 0]
    circles = [np.stack(line.get_data_3d(), -1) for line in solid.lines if len(line.get_xdata())]
    far = np.linalg.norm(circles[0] - layer.write_at[21, 0, 0].numpy(), axis=1)
    np.testing.assert_allclose(far[~np.isnan(far)], float(ring), rtol=1e-4)
    assert all((np.abs(circle) <= 1)[~np.isnan(circle)].all() for circle in circles)


def test_a_flat_axis_is_refused_where_space_is_needed(axis, recording):
    with pytest.raises(ValueError, match="expected a 3-D axis, got a flat one; make it with"):
        figures.draw_trajectories(axis, recording[0])


@pytest.mark.parametrize("kind", sorted({*figure_files.KINDS} - {"trajectories"}))
def test_nothing_recorded_is_said_not_drawn(axis, kind):
    empty = invented_layer("block", chunks=0, rows=0)
    how = figure_files.KINDS[kind]
    how.draw(axis, [empty] if how.all_layers else empty)
    assert [text.get_text() for text in axis.texts] == ["nothing recorded"]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_lines_and_type_stand_out_from_the_paper(dark):
    with theme(dark=dark):
        axis = Figure().add_subplot()
    paper = luminance(axis.get_facecolor())
    assert is_dark(axis) == dark
    type_colour = axis.title.get_color()
    contrasts = {}
    for colour in (*palette(axis)[:4], type_colour):
        high, low = sorted([luminance(colour), paper], reverse=True)
        contrasts[colour] = (high + 0.05) / (low + 0.05)
    assert contrasts.pop(type_colour) > 7  # what accessibility guides ask of small type
    assert min(contrasts.values()) > 3  # and of graphics


# How the three kinds of colour blindness see linear RGB (Machado and others, 2009, severity 1).
BLINDNESS = {
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def lab(linear):
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt((np.array(to_xyz) @ linear) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_that_meet_in_one_figure_differ_to_every_eye(colours, kind):
    def seen(colour):
        srgb = np.array(to_rgb(colour))
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        return lab(np.clip(np.array(BLINDNESS[kind]) @ linear, 0, 1))

    for one, other in itertools.combinations(colours[:3], 2):
        assert np.linalg.norm(seen(one) - seen(other)) > 15, (one, other)


def drawn_texts(figure):
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    hidden = set()
    for axis in figure.axes:
        for side in (axis.xaxis, axis.yaxis, *([axis.zaxis] if hasattr(axis, "zaxis") else [])):
            shown = [t for tick in side._update_ticks() for t in (tick.label1, tick.label2)]
            labels = [text for tick in side.majorTicks for text in (tick.label1, tick.label2)]
            hidden |= {text for text in labels if text not in shown}
    if any(hasattr(axis, "zaxis") for axis in figure.axes):
        figure.draw(renderer)  # asking for ticks has moved those of a 3-D axis
    return [
        (text.get_text(), text.get_window_extent(renderer))
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text not in hidden
    ]


MORE = {"three axes", "nearest, token reads", "four axes", "one axis"}


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, id=name, marks=[pytest.mark.exhaustive] * (name in MORE))
        for n, name in enumerate(LAYERS)
    ],
)
def test_no_label_overlaps_another_or_leaves_the_figure(tmp_path, recording, number, monkeypatch):
    looked_at = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: looked_at.append(self))
    monkeypatch.setattr(figure_files, "write_whole", lambda path, write: write(path))
    once = {} if number == 1 else {"kinds": OF_A_LAYER}  # figures of all layers are the same
    recording.save_figures(tmp_path, layers=[number], **once)
    assert len(looked_at) == (7 if once else 9)
    for figure in looked_at:
        assert figure.get_size_inches()[0] == WIDTH
        texts = drawn_texts(figure)
        width, height = figure.bbox.width, figure.bbox.height
        for name, box in texts:
            assert box.x0 > -2, name
            assert box.x1 < width + 2, name
            assert box.y0 > -2, name
            assert box.y1 < height + 2, name
        for (name, box), (other, others) in itertools.combinations(texts, 2):
            assert not box.overlaps(others), (name, other)


def test_figures_are_written_in_both_themes_and_the_same_each_time(
    tmp_path, recording, monkeypatch
):
    monkeypatch.setattr(figure_files, "DPI", 30)  # small pictures are written fast
    asked = {"layers": [2], "row": 1, "chunks": slice(4), "kinds": ["gates", "use"]}
    files = recording.save_figures(tmp_path / "a", themes=("light", "dark"), **asked)
    assert [path.name for path in files] == [
        f"{figure}-{theme}.png" for theme in ("light", "dark") for figure in ("gates-2", "use")
    ]
    for path in recording.save_figures(tmp_path / "b", **asked):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        ("gate", ["use"]),
        ("tokens", [*figure_files.KINDS]),
        pytest.param("weights", [*figure_files.KINDS], marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_that_has_come_to_nothing_can_still_be_looked_at(
    tmp_path, broken, kinds, monkeypatch
):
    monkeypatch.setattr(figure_files, "DPI", 30)
    layer = MemoryResidual(make_memory(OPTIONS["paper"], dtype=torch.float32))
    x = make_tokens(1, 9, DIM, dtype=torch.float32)
    with torch.no_grad():
        if broken == "tokens":
            x[0, 4:] = float("inf")
        else:
            spoiled = layer.gate if broken == "gate" else layer.memory.mix.weight
            spoiled.fill_(float("nan"))
        with record(layer, dtype=torch.float16) as recording:
            layer(x)
    assert len(recording.save_figures(tmp_path, kinds=kinds)) == len(kinds)
    recording.save_page(tmp_path / "page")
    page = (tmp_path / "page").read_text(encoding="utf-8")
    assert "NaN" not in page.split('id="recording">')[1].split("</script>")[0]
    assert "nan" not in recording.summary()
    recording.save(tmp_path / "a")
    assert Recording.load(tmp_path / "a").names == recording.names


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"row": 2}, "row: expected one of 0 to 1, got 2"),
        ({"layers": ["x"]}, r"layer: expected a number below 5 or one of blocks\.0"),
        ({"kinds": ["gates", "gate"]}, r"kinds: expected some of slices, .*, got 'gate'"),
        ({"themes": ["blue"]}, "themes: expected some of light, dark, got 'blue'"),
    ],
)
def test_figures_of_what_is_not_there_are_refused(tmp_path, recording, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        recording.save_figures(tmp_path, **options)
