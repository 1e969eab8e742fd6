"""Image and video models: the paper's sizes, one start for all methods, what joins frames."""

from dataclasses import replace

import pytest
import torch

from tensor_memory import MemoryConfig, TensorMemory
from tensor_memory_lab.models.image import ImageModel, ImageModelConfig
from tensor_memory_lab.models.video import VideoModel, VideoModelConfig
from tensor_memory_lab.models.vision import window_mask
from tensor_memory_lab.tasks.masked_images import drawn_visible, fixed_visible, hidden_mask

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
    dim=16, heads=2, layers=2, registers=3, memory=TINY_MEMORY, gate_init=0.0
)
IMAGE_METHODS = ("base", "local", "registers", "spatial", "wide")
VIDEO_METHODS = ("joint", "frames", "registers", "spatial", "wide")


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def image_model(**changes):
    torch.manual_seed(3)
    return ImageModel(replace(TINY_IMAGE, **changes), (4, 4), 12).eval()


def video_model(frames=3, **changes):
    torch.manual_seed(3)
    return VideoModel(replace(TINY_VIDEO, **changes), (2, 3), 4, frames, 5).eval()


@pytest.mark.parametrize(
    ("method", "published", "tolerance"),
    [("base", 2_301_408, 0), ("registers", 2_302_944, 0), ("spatial", 2_901_814, 0.001)],
)
def test_the_image_model_has_the_papers_size(method, published, tolerance):
    with torch.device("meta"):
        model = ImageModel(ImageModelConfig(method=method), (14, 14), 3 * 16 * 16)
    assert count(model) == pytest.approx(published, rel=tolerance, abs=0)


@pytest.mark.parametrize(
    ("method", "published", "tolerance"),
    [
        ("joint", 5_014_373, 0),
        ("frames", 5_014_373, 0),
        ("registers", 5_014_373, 0.001),  # published without a temporal embedding
        ("spatial", 5_608_623, 0.001),
    ],
)
def test_the_video_model_has_the_papers_size(method, published, tolerance):
    with torch.device("meta"):
        model = VideoModel(VideoModelConfig(method=method), (14, 14), 16, 8, 101)
    assert count(model) == pytest.approx(published, rel=tolerance, abs=0)


def test_wide_has_the_weights_of_the_memory():
    with torch.device("meta"):
        images = [
            count(ImageModel(ImageModelConfig(method=m), (14, 14), 192))
            for m in ("wide", "spatial")
        ]
        videos = [
            count(VideoModel(VideoModelConfig(method=m), (5, 7), 16, 32, 9))
            for m in ("wide", "spatial")
        ]
    assert images[0] == pytest.approx(images[1], rel=0.01)
    assert videos[0] == pytest.approx(videos[1], rel=0.01)


@pytest.mark.parametrize("method", IMAGE_METHODS[1:])
def test_image_methods_start_from_the_same_values(method):
    base = dict(image_model().named_parameters())
    other = dict(image_model(method=method).named_parameters())
    assert set(base) <= set(other)
    same = [n for n in base if base[n].shape == other[n].shape]
    assert all(torch.equal(base[name], other[name]) for name in same)
    widened = {n for n in base if "blocks" in n and ("widen" in n or "narrow.weight" in n)}
    assert set(base) - set(same) <= (widened if method == "wide" else set())


@pytest.mark.parametrize("method", VIDEO_METHODS[1:])
def test_video_methods_start_from_the_same_values(method):
    base = dict(video_model(method="joint").named_parameters())
    other = dict(video_model(method=method).named_parameters())
    assert set(base) <= set(other)
    same = [n for n in base if base[n].shape == other[n].shape]
    assert all(torch.equal(base[name], other[name]) for name in same)
    assert method == "wide" or len(same) == len(base)


def picture_batch(rows=2, ratio=0.5):
    visible = fixed_visible([str(i) for i in range(rows)], 16, ratio)
    return {"patches": torch.randn(rows, 16, 12), "visible": visible}


@pytest.mark.parametrize("method", IMAGE_METHODS)
def test_hidden_patches_are_never_seen(method):
    model, batch = image_model(method=method), picture_batch()
    hidden = torch.ones(2, 16, dtype=torch.bool).scatter(1, batch["visible"], False)
    changed = batch["patches"].masked_fill(hidden[..., None], 99.0)
    with torch.no_grad():
        first, _ = model(batch)
        second, _ = model(batch | {"patches": changed})
    assert torch.equal(first["patches"], second["patches"])
    assert first["patches"].shape == (2, 16, 12)


def test_the_window_is_two_dimensional():
    every = torch.arange(16)[None]
    seen = window_mask(every, columns=4, window=3)[0, 0, 1:, 1:]
    for a in range(16):
        for b in range(16):
            near = abs(a // 4 - b // 4) <= 1 and abs(a % 4 - b % 4) <= 1
            assert seen[a, b] == near


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


def test_hidden_patches_are_soon_told_by_their_neighbours():
    """Pictures of four quarters, each of one shade: answering the mean shade leaves about 0.9."""
    torch.manual_seed(0)
    small = {"dim": 32, "layers": 2, "decoder_dim": 16, "memory_layers": (0,), "drop_path": 0.0}
    model = ImageModel(replace(TINY_IMAGE, **small), (6, 6), 4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(150):
        shades = torch.randn(64, 2, 2).repeat_interleave(3, 1).repeat_interleave(3, 2)
        patches = shades.reshape(64, 36, 1).expand(-1, -1, 4)
        visible = drawn_visible(torch.rand(64, 36), 0.75)
        outputs, _ = model({"patches": patches, "visible": visible})
        hidden = hidden_mask(visible, 36)
        loss = (outputs["patches"] - patches)[hidden].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[:25]) / 25 > 0.8
    assert sum(losses[-25:]) / 25 < 0.4


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
    ],
)
def test_what_reaches_the_last_frame_from_the_first(method, scope, joins):
    model, clip = video_model(method=method, scope=scope, readout="last"), clips()
    changed = clip.clone()
    changed[:, 0] = 255 - changed[:, 0]
    assert (not torch.equal(answer(model, clip), answer(model, changed))) == joins


@pytest.mark.parametrize("method", ["frames", "registers", "spatial", "wide"])
@pytest.mark.parametrize("scope", ["layer", "depth"])
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


def test_the_mean_readout_weighs_all_frames_alike():
    model, clip = video_model(method="frames"), clips()
    model.time.data.zero_()
    assert torch.allclose(answer(model, clip), answer(model, clip.flip(1)), atol=1e-6)


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


@pytest.mark.parametrize(("scope", "scans", "frames"), [("layer", 2, 3), ("depth", 6, 1)])
def test_a_scan_takes_all_frames_it_may_and_no_chunk_holds_two(monkeypatch, scope, scans, frames):
    """Seven tokens per frame in chunks of two: the fourth chunk of each frame is half empty."""
    taken, scan = [], TensorMemory.scan

    def noted(self, tokens, *arguments, **options):
        taken.append(tokens)
        return scan(self, tokens, *arguments, **options)

    monkeypatch.setattr(TensorMemory, "scan", noted)
    answer(video_model(method="spatial", scope=scope), clips())
    assert [tokens.shape for tokens in taken] == [(2, 4 * frames, 2, 16)] * scans
    for tokens in taken:
        places = tokens.reshape(2, frames, 8, 16).any(-1)
        assert places[:, :, :7].all()
        assert not places[:, :, 7].any()


def test_bytes_carried_over_frames():
    assert video_model(method="joint").state_bytes() == 0
    assert video_model(method="registers").state_bytes() == 3 * 16 * 4
    assert video_model(method="spatial").state_bytes() == 2 * 2 * 4 * 27 * 4
    assert video_model(method="spatial", scope="depth").state_bytes() == 2 * 4 * 27 * 4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"method": "slots"}, "model.method: expected one of base, local, registers"),
        ({"scope": "time"}, "model.scope: expected layer or depth, got 'time'"),
        ({"window": 4}, "model.window: expected an odd number of patches, got 4"),
        ({"memory_layers": (0, 3)}, r"different layers of 0 to 2, got \(0, 3\)"),
    ],
)
def test_a_wrong_image_model_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(TINY_IMAGE, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"method": "base"}, "model.method: expected one of joint, frames"),
        ({"scope": "clip"}, "model.scope: expected layer or depth, got 'clip'"),
        ({"readout": "first"}, "model.readout: expected mean or last, got 'first'"),
        ({"memory_layers": (0, 0)}, "expected different layers of 0 to 1"),
    ],
)
def test_a_wrong_video_model_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(TINY_VIDEO, **changes)
