"""Image and video models: the paper's sizes, one start for all methods, what joins frames."""

from dataclasses import replace

import pytest
import torch

from tensor_memory import MemoryConfig, PlaceConfig
from tensor_memory_lab.models.image import ImageModel, ImageModelConfig
from tensor_memory_lab.models.video import VideoModel, VideoModelConfig
from tensor_memory_lab.tasks.masked_images import fixed_visible, hidden_mask

TINY_MEMORY = MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2)
TINY_IMAGE = ImageModelConfig(
    dim=16,
    heads=2,
    layers=3,
    decoder_dim=8,
    decoder_heads=2,
    decoder_layers=1,
    registers=3,
    window=3,
    memory=TINY_MEMORY,
    memory_layers=(0, 2),
    gate_init=0.0,
)
TINY_VIDEO = VideoModelConfig(
    dim=16,
    heads=2,
    layers=2,
    registers=3,
    memory=TINY_MEMORY,
    place=PlaceConfig(grid=(3, 3, 3), channels=4, heads=2),
    gate_init=0.0,
)
IMAGE_METHODS = ("base", "local", "registers", "spatial", "wide")
VIDEO_METHODS = ("joint", "frames", "registers", "spatial", "wide", "place-given", "place-offset")


def image_model(**changes):
    torch.manual_seed(3)
    return ImageModel(replace(TINY_IMAGE, **changes), (4, 4), 12).eval()


def video_model(frames=3, **changes):
    torch.manual_seed(3)
    return VideoModel(replace(TINY_VIDEO, **changes), (2, 3), 4, frames, 5).eval()


def paper_count(config):
    with torch.device("meta"):
        if isinstance(config, ImageModelConfig):
            model = ImageModel(config, (14, 14), 3 * 16 * 16)
        else:
            model = VideoModel(config, (14, 14), 16, 8, 101)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config", "published", "tolerance"),
    [
        (ImageModelConfig(method="base"), 2_301_408, 0),
        (ImageModelConfig(method="registers"), 2_302_944, 0),
        (ImageModelConfig(method="spatial"), 2_901_814, 0.001),
        (ImageModelConfig(method="wide"), 2_901_814, 0.01),
        (VideoModelConfig(method="joint"), 5_014_373, 0),
        (VideoModelConfig(method="frames"), 5_014_373, 0),
        (VideoModelConfig(method="registers"), 5_014_373, 0.001),  # theirs has no time embedding
        (VideoModelConfig(method="spatial"), 5_608_623, 0.001),
        (VideoModelConfig(method="wide"), 5_608_623, 0.01),
    ],
)
def test_the_models_have_the_papers_sizes(config, published, tolerance):
    assert paper_count(config) == pytest.approx(published, rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("make", "method"),
    [(image_model, m) for m in IMAGE_METHODS if m != TINY_IMAGE.method]
    + [(video_model, m) for m in VIDEO_METHODS if m != TINY_VIDEO.method],
)
def test_methods_start_from_the_same_values(make, method):
    base, other = (dict(made.named_parameters()) for made in (make(), make(method=method)))
    assert set(base) <= set(other)
    same = [n for n in base if base[n].shape == other[n].shape]
    assert all(torch.equal(base[name], other[name]) for name in same)
    widened = {n for n in base if "blocks" in n and ("widen" in n or "narrow.weight" in n)}
    assert set(base) - set(same) <= (widened if method == "wide" else set())


def picture_batch(rows=2, ratio=0.5):
    visible = fixed_visible([str(i) for i in range(rows)], 16, ratio)
    return {"patches": torch.randn(rows, 16, 12), "visible": visible}


@pytest.mark.parametrize("method", IMAGE_METHODS)
def test_hidden_patches_are_never_seen(method):
    model, batch = image_model(method=method), picture_batch()
    hidden = hidden_mask(batch["visible"], 16)
    changed = batch["patches"].masked_fill(hidden[..., None], 99.0)
    with torch.no_grad():
        first, _ = model(batch)
        second, _ = model(batch | {"patches": changed})
    assert torch.equal(first["patches"], second["patches"])
    assert first["patches"].shape == (2, 16, 12)


def test_local_attention_reaches_its_square_and_no_further():
    model = image_model(method="local", layers=1, memory_layers=(0,))
    batch = {"patches": torch.randn(1, 16, 12), "visible": torch.arange(15)[None]}
    patches = batch["patches"].clone()
    patches[0, 0] += 1.0  # the corner; the square around patch 5 holds it, that around 10 does not
    with torch.no_grad():
        before, after = (
            model.encode(p[:, :15], batch["visible"])[0, 1:] for p in (batch["patches"], patches)
        )
    moved = (before - after).abs().amax(1) > 0
    assert moved.nonzero().flatten().tolist() == [0, 1, 4, 5]


def test_places_start_far_enough_apart_to_be_told():
    image, video = image_model(), video_model()
    for table in (image.position[1:], image.decoder_position[1:], video.place):
        apart = torch.cdist(table, table) + torch.eye(len(table)) * 9
        assert apart.min() > 0.5


@pytest.mark.parametrize("scope", ["layer", "depth"])
@pytest.mark.parametrize("chunk_size", [1, 4, 16])
def test_the_memory_runs_in_every_scope_and_chunk_size(scope, chunk_size):
    memory = replace(TINY_MEMORY, chunk_size=chunk_size)
    model = image_model(method="spatial", scope=scope, memory=memory)
    outputs, _ = model(picture_batch(ratio=0.25))
    outputs["patches"].square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.labels() == {"scope": scope, "K": chunk_size}
    assert model.state_bytes() == (1 if scope == "depth" else 2) * 2 * 4 * 27 * 4


def test_depth_hands_the_state_to_the_next_layer_and_layer_does_not():
    """One chunk holds the whole image, so a layer of its own reads an empty memory."""
    memory = replace(TINY_MEMORY, chunk_size=16)
    base, batch = image_model(), picture_batch()
    by_layer, by_depth = (
        image_model(method="spatial", scope=scope, memory=memory) for scope in ("layer", "depth")
    )
    with torch.no_grad():
        plain, layer, depth = (m(batch)[0]["patches"] for m in (base, by_layer, by_depth))
    assert torch.equal(plain, layer)
    assert not torch.allclose(plain, depth)


def clips(rows=2, frames=3):
    return torch.randint(0, 256, (rows, frames, 8, 12, 3), dtype=torch.uint8)


def answer(model, clip):
    with torch.no_grad():
        return model({"clip": clip})[0]["logits"]


@pytest.mark.parametrize(
    ("method", "scope", "joins"),
    [
        ("joint", "layer", True),
        ("frames", "layer", False),
        ("wide", "layer", False),
        ("registers", "layer", True),
        ("spatial", "layer", True),
        ("spatial", "depth", True),
        ("place-given", "layer", True),
        ("place-given-delta", "layer", True),
    ],
)
def test_what_reaches_the_last_frame_from_the_first(method, scope, joins):
    model, clip = video_model(method=method, scope=scope, readout="last"), clips()
    changed = clip.clone()
    changed[:, 0] = 255 - changed[:, 0]
    assert (not torch.equal(answer(model, clip), answer(model, changed))) == joins


@pytest.mark.parametrize(
    ("method", "scope"),
    [(m, "layer") for m in VIDEO_METHODS if m != "joint"] + [("spatial", "depth")],
)
def test_frames_never_see_later_ones(method, scope):
    model, clip = video_model(method=method, scope=scope), clips()
    changed = clip.clone()
    changed[:, 2] = 255 - changed[:, 2]
    with torch.no_grad():
        before, after = (model.summaries(model.embedded(c)) for c in (clip, changed))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_all_frames_in_one_scan_are_the_frames_one_after_the_other():
    """Seven tokens per frame in chunks of two: were frames not flushed, chunks would straddle."""
    model, clip = video_model(method="spatial").double(), clips()
    x = model.embedded(clip)
    together = model.summaries(x)
    states = [None, None]
    for t in range(3):
        y = x[:, t]
        for layer, block in enumerate(model.blocks):
            y, (_, states[layer]) = block(y, (None, states[layer]), flush=True)
        assert torch.allclose(model.norm(y[:, 0]), together[:, t], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "scope"),
    [(m, "layer") for m in VIDEO_METHODS] + [("spatial", "depth")],
)
def test_dropped_paths_take_whole_clips_in_every_method(method, scope):
    """A clip whose sublayers are all dropped answers what its embedding alone would."""
    model = video_model(
        method=method, scope=scope, drop_path=0.7, dropout=0.0, layers=1, gate_init=5.0
    ).train()
    torch.manual_seed(0)
    x = model.embedded(clips(rows=64))
    untouched = torch.isclose(model.summaries(x), model.norm(x[:, :, 0])).all(-1)  # (B, T)
    untouched = untouched[:, 1:]  # the first frame's summary token reads an empty memory
    assert untouched.any()
    assert not untouched.all()
    assert torch.equal(untouched.all(1), untouched.any(1))


def test_bytes_carried_over_frames():
    assert video_model(method="joint").state_bytes() == 0
    assert video_model(method="registers").state_bytes() == 3 * 16 * 4
    assert video_model(method="spatial").state_bytes() == 2 * 2 * 4 * 27 * 4
    assert video_model(method="spatial", scope="depth").state_bytes() == 2 * 4 * 27 * 4
    assert video_model(method="place-given").state_bytes() == 2 * (2 * 4 * 27 + 3) * 4
    spatial, place = (
        VideoModel(VideoModelConfig(method=method), (2, 2), 2, 2, 3).state_bytes()
        for method in ("spatial", "place-given")
    )
    assert place == spatial + 6 * 3 * 4  # and where a frame of reference stands, in six layers


def test_a_place_is_column_row_and_time():
    told = []
    model = video_model(method="place-given")
    model.memory.register_forward_pre_hook(
        lambda _, args, kw: told.append(kw["where"]), with_kwargs=True
    )
    answer(model, clips())
    assert len(told) == 2
    where = told[0][1].view(3, 7, 3)  # of the second clip: frames, tokens, coordinates
    assert where[:, :, 2].tolist() == [[t] * 7 for t in (-1, 0, 1)]
    assert where[1, 0].tolist() == [0, 0, 0]  # the summary
    corners = [[x, y] for y in (-1, 1) for x in (-1, 0, 1)]
    assert where[2, 1:, :2].tolist() == corners


@pytest.mark.parametrize(
    ("config", "changes", "complaint"),
    [
        (TINY_IMAGE, {"method": "slots"}, "model.method: expected one of base, local, registers"),
        (TINY_IMAGE, {"scope": "time"}, "model.scope: expected one of layer, depth, got 'time'"),
        (TINY_IMAGE, {"window": 4}, "model.window: expected an odd number of patches, got 4"),
        (TINY_VIDEO, {"readout": "first"}, "model.readout: expected one of mean, last, got 'fir"),
        (
            TINY_VIDEO,
            {"method": "place-given", "scope": "depth"},
            "model.place.grid and model.scope: expected a grid of time, rows and columns",
        ),
        (TINY_VIDEO, {"memory_layers": (0, 0)}, "expected different layers of 0 to 1"),
    ],
)
def test_a_wrong_model_is_refused(config, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(config, **changes)
