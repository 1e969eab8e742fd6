"""The remembered world: walks, glimpses and what counts as seen; every method on tiny images."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import world_pictures as study
from sampled import exhaustive_but
from small_models import small
from tensor_memory import MemoryConfig, PlaceConfig, find_leak
from tensor_memory_lab.commands.inspect import record_run
from tensor_memory_lab.models.peers import PEERS, PeerConfig
from tensor_memory_lab.models.world import METHODS, WorldModel, WorldModelConfig
from tensor_memory_lab.recipes.world import world
from tensor_memory_lab.tasks.world import (
    World,
    WorldConfig,
    glimpses,
    look_up,
    revisits,
    to_pixels,
    walk,
)
from tensor_memory_lab.train import RunOptions, train
from vision_data import write_cub

IN_DEFAULT = ("window", "full", "place", "place-given-delta", "tensor-long", "gla", "xl")
EVERY = exhaustive_but(IN_DEFAULT, METHODS)


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return write_cub(tmp_path_factory.mktemp("world"), per_class=9)


def config_for(birds, **changes) -> WorldConfig:
    small = {"side": 32, "patch": 4, "glimpses": 60, "valid_rows": 6, "test_rows": 6}
    place = {"data_dir": str(birds), "cache_dir": str(birds / "cache")}
    return WorldConfig(**place | small | changes)


@pytest.fixture(scope="module")
def task(birds) -> World:
    return config_for(birds).build(0)


def test_a_walk_keeps_its_stride_and_turns_back_at_the_walls():
    turn = 0.6 * torch.randn(20, 400)
    poses = walk(2 * torch.rand(20, 2) - 1, 6 * torch.rand(20), turn, step=0.16)
    assert poses.abs().max() <= 1
    stride = (poses[:, 1:] - poses[:, :-1]).norm(dim=-1)
    inside = (poses[:, 1:].abs().amax(-1) < 0.84) & (poses[:, :-1].abs().amax(-1) < 0.84)
    assert torch.allclose(stride[inside], torch.tensor(0.16), atol=1e-5)
    assert stride.max() < 0.16 + 1e-5  # a mirrored step goes a part of the way back
    straight = walk(torch.zeros(1, 2), torch.zeros(1), torch.zeros(1, 10), step=0.3)
    expected = torch.tensor([0.3, 0.6, 0.9, 0.8, 0.5, 0.2, -0.1, -0.4, -0.7, -1.0])
    assert torch.allclose(straight[0, :, 0], expected, atol=1e-5)


def test_a_glimpse_at_a_corner_is_the_corner_of_the_image():
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    poses = torch.tensor([[[-1.0, -1.0], [1.0, -1.0], [0.0, 1.0]]]).expand(2, -1, -1)
    seen = glimpses(to_pixels(images), poses, 4).view(2, 3, 4, 4, 3).permute(0, 1, 4, 2, 3)
    pixels = to_pixels(images)
    for number, (y, x) in enumerate([(0, 0), (0, 12), (12, 6)]):
        assert torch.allclose(seen[:, number], pixels[:, :, y : y + 4, x : x + 4], atol=1e-5)


@pytest.mark.parametrize(("block", "own"), [(7, True), (256, True), (7, False)])
def test_revisits_are_what_looking_back_one_by_one_finds(monkeypatch, block, own):
    monkeypatch.setattr("tensor_memory_lab.tasks.world.BLOCK", block)
    poses, asked = 2 * torch.rand(2, 2, 40, 2) - 1
    asked = poses if own else asked
    age, oldest, nearest = revisits(poses, near=0.3, asked=None if own else asked)
    for row in range(2):
        for t in range(1, 40):
            distance = (poses[row, :t] - asked[row, t]).norm(dim=-1)
            seen = (distance < 0.3).nonzero().flatten().tolist()
            assert age[row, t] == (t - seen[-1] if seen else 0)
            assert oldest[row, t] == (seen[0] if seen else 40)
            assert nearest[row, t] == distance.argmin()
    assert not age[:, 0].any()


def test_the_lookup_is_right_where_an_earlier_glimpse_saw_all_of_it(task):
    batch = task.batch("test", 0, 6)
    twice = {name: torch.cat([x, x], 1) for name, x in batch.items()}  # the same walk again
    age, _, nearest = revisits(twice["poses"], 0.12)
    pixels = 14 * twice["poses"]
    again = look_up(twice["seen"], pixels, nearest, pixels)[:, 60:]
    assert torch.allclose(again, batch["seen"], atol=1e-5)
    assert age[:, 60:].min() > 0
    means = {k: (s / n).item() for k, (s, n) in measured(task, twice["seen"], **twice).items()}
    assert task.finish(means)["psnr_lookup_far"] > 30


def test_the_lookup_moves_what_it_saw_by_the_pixels_between():
    image = to_pixels(torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8))
    poses = torch.tensor([[[0.0, 0.0], [2 / 6, -1 / 6]]])  # two pixels to the right, one up
    seen = glimpses(image, poses, 4)
    found = look_up(seen, 6 * poses, torch.tensor([[0, 0]]), 6 * poses).view(2, 4, 4, 3)[1]
    expected = seen.view(2, 4, 4, 3)[1]
    assert torch.allclose(found[1:, :2], expected[1:, :2], atol=1e-5)
    assert not torch.allclose(found[0], expected[0], atol=1e-2)  # a row that was not seen


def measured(task, patches, poses, seen, **more):
    return task.measure({"patches": patches}, {"poses": poses, "seen": seen, **more})


def test_errors_are_told_apart_by_how_long_ago_a_place_was_seen(task):
    batch = task.batch("test", 0, 6)
    age = revisits(batch["poses"], task.config.near).age
    said = batch["seen"] + 2 * (age > 40)[..., None]  # wrong by 1 on the scale [0, 1]
    sums = measured(task, said, **batch)
    means = {name: (s / n).item() for name, (s, n) in sums.items()}
    assert means["psnr_far"] == pytest.approx(1)
    assert means["psnr_never"] == means["psnr_near"] == 0
    assert means["loss"] == pytest.approx((age > 40).float().mean().item())
    assert sums["psnr_far"][1] == (age > 40).sum() > 0
    found = task.finish(means)
    assert found["psnr_far"] == pytest.approx(0, abs=1e-5)
    assert found["psnr_near"] == 100
    assert math.isnan(found["psnr_very_far"])  # 60 glimpses are too few
    assert task.loss({"patches": said}, batch).item() == pytest.approx(means["loss"])


def test_every_setting_is_a_split_of_its_own(birds):
    many = {"test@blind8", "test@4x", "test@large", "test@drift", "test@change"}
    task = config_for(birds, tests=tuple(many), test_rows=8).build(0)
    model = WorldModel(WorldModelConfig(**small("place-given")), values=48, glimpses=60)
    for split in many:
        batch = task.batch(split, 0, 2)
        with torch.no_grad(), task.prepared(model, split):
            outputs, _ = model(batch)
        means = {k: (s / n).item() for k, (s, n) in task.measure(outputs, batch).items()}
        assert math.isfinite(task.finish(means)["psnr"]), split
        assert batch["poses"].shape[1] == (240 if split in ("test@4x", "test@large") else 60)
        assert task.batches(split, 1) == {"test@4x": 2, "test@large": 2, "test@blind8": 1}.get(
            split, 8
        )
    with pytest.raises(ValueError, match=r"task.tests: expected more glimpses than the 128"):
        config_for(birds, tests=("test@blind128",))
    with pytest.raises(ValueError, match=r"task.tests: expected some of test, .*got none; --bud"):
        config_for(birds, tests=())
    with pytest.raises(ValueError, match=r"task.tests: expected some of test, .*got test@far"):
        config_for(birds, tests=("test@far",))


def test_a_drifting_pose_is_told_and_the_true_one_measured(birds):
    batch = config_for(birds, drift=0.05).build(0).batch("train", 0, 3)
    wrong = (batch["poses"] - batch["at"]).norm(dim=-1)
    assert wrong[:, 0].max() < 0.3 < wrong[:, -1].max()
    assert batch["at"].abs().max() <= 1


def test_questions_elsewhere_are_for_any_place_and_measured_there(birds):
    task, still = (config_for(birds, elsewhere=share).build(0) for share in (0.5, 0.0))
    batch = task.batch("test", 0, 6)
    for name, same in still.batch("test", 0, 6).items():  # the walk is the same
        assert torch.equal(batch[name], same)
    moved = (batch["asked"] != batch["poses"]).any(-1)
    assert 0.4 < moved.float().mean() < 0.6
    assert torch.equal(batch["target"][~moved], batch["seen"][~moved])
    expected = glimpses(task.pixels("test", range(6)), batch["asked"], 4)
    assert torch.equal(batch["target"], expected)
    far = revisits(batch["poses"], task.config.near, asked=batch["asked"]).age > 40
    sums = measured(task, batch["target"] + 2 * far[..., None], **batch)
    assert [x.item() for x in sums["psnr_far"]] == pytest.approx([far.sum().item()] * 2)
    assert sums["psnr_never"][0] == 0 < sums["psnr_never"][1]
    again = {"sought": batch["poses"].roll(50, 1), "target": batch["seen"].roll(50, 1)}
    sums = measured(task, again["target"], **{**batch, **again})  # for where it was 50 glimpses ago
    error, count = sums["psnr_lookup_far"]
    assert error < 1e-6 * count
    changed = config_for(birds, elsewhere=0.5, change=True).build(0).batch("test", 0, 6)
    assert torch.equal(changed["asked"], batch["asked"])
    differ = (changed["target"] != batch["target"]).any(-1)
    assert not differ[:, :30].any()
    assert (differ & changed["turned"]).sum() > 0.9 * changed["turned"].sum()
    assert (changed["turned"] & moved).any()
    lost = config_for(birds, elsewhere=0.5, drift=0.05).build(0).batch("train", 0, 3)
    slip, told = lost["poses"] - lost["at"], lost["asked"] - lost["sought"]
    assert torch.allclose(slip, told, atol=1e-6)


@torch.no_grad()
def test_a_question_elsewhere_is_answered_for_its_place_and_before_its_glimpse():
    model = WorldModel(WorldModelConfig(**small("place-given")), values=12, glimpses=9)
    poses, asked, other = 2 * torch.rand(3, 2, 9, 2) - 1
    batch = {"poses": poses, "seen": torch.randn(2, 9, 12), "asked": asked}
    answers = model(batch)[0]["patches"]
    elsewhere = torch.cat([asked[:, :5], other[:, 5:6], asked[:, 6:]], 1)
    later = torch.cat([batch["seen"][:, :5], torch.randn(2, 4, 12)], 1)
    for changes, first in (({"asked": elsewhere}, 5), ({"seen": later}, 6)):
        changed = (model(batch | changes)[0]["patches"] != answers).any(-1).any(0)
        assert changed.nonzero()[0] == first
    at_poses = model(batch | {"asked": poses})[0]["patches"]
    assert torch.equal(at_poses, model.predict(poses, batch["seen"]))


def test_a_large_world_is_walked_in_steps_of_the_same_pixels(birds):
    task = config_for(birds, tests=("test", "test@large", "test@large-same-grid")).build(0)
    large = task.batch("test@large", 0, 1)
    stride = (large["poses"][:, 1:] - large["poses"][:, :-1]).norm(dim=-1)
    whole = (2 * 32 - 4) / 2 * stride.amax()  # in pixels; one at a wall is folded
    assert float(whole) == pytest.approx(0.16 * (32 - 4) / 2, abs=1e-4)
    stride = (large["at"][:, 1:] - large["at"][:, :-1]).norm(dim=-1)
    assert stride.max().item() == pytest.approx(0.16, abs=1e-4)
    assert large["poses"].abs().max() <= 1 < large["at"].abs().max() <= 60 / 28
    model = WorldModel(WorldModelConfig(**small("place")), values=48, glimpses=60)
    memory = model.stack.blocks[1].side.memory
    with task.prepared(model, "test@large"):
        assert memory.config.grid == (6, 6)
    assert memory.config.grid == (3, 3)
    with task.prepared(model, "test@large-same-grid"):
        assert memory.config.grid == (3, 3)
    same_grid = task.batch("test@large-same-grid", 0, 1)
    assert all(torch.equal(x, same_grid[name]) for name, x in large.items())


def test_half_of_the_image_changes_where_the_agent_is_not(birds):
    task = config_for(birds, change=True).build(0)
    batch, still = task.batch("test", 0, 6), config_for(birds).build(0).batch("test", 0, 6)
    assert torch.equal(batch["poses"], still["poses"])
    assert torch.equal(batch["seen"][:, :30], still["seen"][:, :30])
    assert torch.equal(batch["seen"][:, 30], still["seen"][:, 30])  # it is still there
    other = (batch["seen"] - still["seen"]).abs().amax(-1) > 0
    assert (other & batch["turned"]).sum() > 0.9 * batch["turned"].sum() > 0
    later = torch.arange(60) >= 30
    assert not (other & batch["stayed"]).any()
    assert ((batch["stayed"] | batch["turned"]) <= later).all()
    assert (batch["stayed"] | batch["turned"] | ~later).float().mean() > 0.7
    assert {"psnr_renewed", "psnr_stayed"} <= measured(task, batch["seen"], **batch).keys()


def test_renewed_is_what_was_seen_before_the_change_and_last_after_it(task):
    poses = torch.arange(200.0).repeat(2, 1).T[None].clone()  # nowhere twice
    for again, first in ((101, 0), (199, 0), (198, 1), (197, 102), (3, 2)):
        poses[:, again] = poses[:, first]
    turned = torch.zeros(1, 200, dtype=torch.bool)
    turned[:, [101, 102, 197, 198, 199]] = True
    said = torch.zeros(1, 200, 48)
    said[:, 199] = 2  # the one glimpse that counts: 198 was last seen before, 197 first after
    marks = {"turned": turned, "stayed": turned.roll(-1, 1)}  # at 196 nothing was seen before
    sums = measured(task, said, poses, torch.zeros(1, 200, 48), **marks)
    assert [x.item() for x in sums["psnr_renewed"]] == [1, 1]
    assert [x.item() for x in sums["psnr_stayed"]] == [0, 3]  # 101, 197 and 198


@torch.no_grad()
def test_a_roll_out_is_the_walk_with_the_models_own_answers():
    model = WorldModel(WorldModelConfig(**small("place")), values=12, glimpses=9).eval()
    poses, seen = 2 * torch.rand(2, 9, 2) - 1, torch.randn(2, 9, 12)
    answers = model({"poses": poses, "seen": seen[:, :6]})[0]["patches"]
    assert torch.allclose(answers[:, :7], model.predict(poses, seen)[:, :7], atol=1e-5)
    own = torch.cat([seen[:, :6], answers[:, 6:]], 1)
    assert torch.allclose(answers, model.predict(poses, own), atol=1e-5)
    assert not torch.allclose(answers[:, 8], model.predict(poses, seen)[:, 8], atol=1e-5)


def test_scheduled_sampling_rises_and_puts_the_models_answers_in(birds):
    task = config_for(birds, own=0.5, own_steps=10).build(0)
    shares = [task.batch("train", i, 6)["own"].float().mean().item() for i in (0, 5, 10, 40)]
    assert shares[0] == 0
    assert shares[1:] == pytest.approx([0.25, 0.5, 0.5], abs=0.08)
    assert "own" not in task.batch("valid", 0, 6)
    model = WorldModel(WorldModelConfig(**small("window")), values=48, glimpses=60)
    batch = task.batch("train", 40, 2)
    with torch.no_grad():
        shown = torch.where(
            batch["own"][..., None], model.predict(batch["poses"], batch["seen"]), batch["seen"]
        )
        assert torch.equal(model(batch)[0]["patches"], model.predict(batch["poses"], shown))


def test_missing_images_are_told_with_path_and_layout(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: .*\n?.*CUB_200_2011/\{images.txt"):
        WorldConfig(data_dir=str(tmp_path / "nowhere")).build(0)
    with pytest.raises(FileNotFoundError, match=r"no image found; expected <class>/<name>\.jpg"):
        WorldConfig(data_dir=str(tmp_path), layout="folder").build(0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patch": 64},
        {"glimpses": 0},
        {"step": 0.0},
        {"near": 2.0},
        {"layout": "x"},
        {"elsewhere": 2.0},
        {"elsewhere": 0.5, "own": 0.5},
        {"elsewhere": 0.5, "tests": ("test@blind8",)},
    ],
)
def test_settings_that_make_no_world_are_refused(wrong):
    with pytest.raises(ValueError, match=f"task.{next(iter(wrong))}: expected"):
        WorldConfig(**wrong)


def test_walks_too_short_for_what_chooses_are_refused():
    with pytest.raises(ValueError, match=r"task.glimpses: expected 42 or more, got 41"):
        WorldConfig(glimpses=41).build(0)


def test_a_method_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"model\.method: expected one of window, full, .*place"):
        WorldModelConfig(method="maps")


@pytest.mark.parametrize(
    ("method", "field", "changes"),
    [
        ("tensor-open", "memory.forget_bias", {"memory": MemoryConfig(forget_bias=1.0)}),
        ("tensor-long", "memory.forget_bias", {"memory": MemoryConfig(forget_bias=1.0)}),
        ("tensor-long", "memory.gain", {"memory": MemoryConfig(gain=2.0)}),
        ("place-given", "place.places", {"place": PlaceConfig(places="offset")}),
        ("place-delta", "place.rule", {"place": PlaceConfig(rule="delta")}),
        ("window", "slots", {"slots": 4}),
        ("xl", "slots", {"slots": 4}),
        ("window+", "cache", {"cache": 4}),
        ("place", "peer.backend", {"peer": PeerConfig(backend="fla")}),
        ("window", "peer.state_bytes", {"peer": PeerConfig(state_bytes=4096)}),
        ("mamba2", "peer.heads", {"peer": PeerConfig(heads=2)}),
        ("gla", "place.heads", {"place": PlaceConfig(heads=2)}),
        ("full", "place.wrap", {"place": PlaceConfig(wrap=True)}),
    ],
)
def test_a_field_that_the_method_does_not_read_is_refused(method, field, changes):
    complaint = (
        rf"model\.{field}: expected the default, .* for {re.escape(method)}, .* got .*; keep"
    )
    with pytest.raises(ValueError, match=complaint):
        WorldModelConfig(method=method, **changes)


def test_a_field_that_the_method_reads_is_taken():
    place = PlaceConfig(rule="delta", heads=2)
    assert WorldModelConfig(method="place-given", place=place).stack(8).place == replace(
        place, places="given"
    )
    assert WorldModelConfig(method="xl", cache=4).stack(8).cache == 4
    for peer, method in ((PeerConfig(heads=2), "gla"), (PeerConfig(4096), "mamba2")):
        assert WorldModelConfig(method=method, peer=peer).stack(8).peer == peer


def test_a_start_for_long_gaps_keeps_what_else_was_chosen():
    sizes = {"channels": 8, "grid": (4, 4), "chunk_size": 2}
    plain = WorldModelConfig(method="tensor-long", memory=MemoryConfig(**sizes))
    assert plain.stack(8).memory == MemoryConfig.long_gap(**sizes)
    more = {"read_heads": 4, "write_heads": 4, "mixing": "pointwise", "backend": "reference"}
    chosen = replace(plain, memory=MemoryConfig(**sizes, **more))
    assert chosen.stack(8).memory == MemoryConfig.long_gap(**sizes, **more)


class Predictions(nn.Module):
    """From poses and patches, side by side, to predictions at every glimpse."""

    def __init__(self, model: WorldModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        # What is seen at t may not reach the answer for t: it is one place later here.
        seen = torch.cat([x[:, 1:, 2:], torch.zeros_like(x[:, :1, 2:])], 1)
        return self.model({"poses": x[..., :2].tanh(), "seen": seen})[0]["patches"]


@pytest.mark.parametrize("method", EVERY)
def test_no_answer_depends_on_what_is_seen_with_it_or_later(method):
    model = WorldModel(WorldModelConfig(**small(method)), values=12, glimpses=14)
    report = find_leak(Predictions(model), torch.randn(2, 14, 14))
    assert not report, str(report)
    assert "nothing" not in str(report)


@pytest.mark.filterwarnings("ignore::tensor_memory.ForgettingWarning")  # the published start
@pytest.mark.parametrize("method", EVERY)
def test_two_steps_of_every_method(birds, tmp_path, capsys, method):
    config = world()
    config = replace(
        config,
        task=config_for(birds, elsewhere=0.5 if method == "place" else 0.0),
        model=WorldModelConfig(**small(method)),
        budget=replace(config.budget, steps=2, batch_size=2, evaluate_every=2),
        precision="float32",
    )
    record = train(config, RunOptions(tmp_path, quiet=True, device="cpu"))
    assert record["task"] == "world cub200@32px"
    assert math.isfinite(record["test"]["test"]["psnr_far"])
    assert math.isfinite(record["valid"]["psnr_lookup_far"])
    assert record["finished"]
    if method == "place":
        drawn = ["--output", str(tmp_path / "world"), "--after", "3", "9"]
        assert study.main([str(tmp_path), *drawn]) == 0
        assert all((tmp_path / f"world-{theme}.png").stat().st_size for theme in ("light", "dark"))
    if method == "window":
        with pytest.raises(SystemExit):
            study.main([str(tmp_path), "--output", str(tmp_path / "world")])
        assert "for questions anywhere, got task.elsewhere 0" in capsys.readouterr().err


@torch.no_grad()
def test_a_picture_asks_everywhere_and_no_question_is_remembered(birds, tmp_path):
    task = config_for(birds).build(0)
    model = WorldModel(WorldModelConfig(**small("place")), values=48, glimpses=60).eval()
    whole, _, columns = study.remembered(task, {"place": model}, image=1, after=(5, 70))
    batch = task.batch("test", 1, 1)
    assert torch.allclose(
        glimpses(2 * whole[None] - 1, batch["poses"], 4), batch["seen"], atol=1e-4
    )
    shown = columns["seen so far"][0] != study.UNSEEN
    assert 0 < shown.float().mean() < 5 * 25 / 32**2
    walked, seen = study.long_walk(task, 1, 70)
    asked = torch.tensor([[1.0, -1.0]])  # the upper right corner
    alone = {
        "poses": torch.cat([walked, asked])[None],
        "seen": torch.cat([seen, torch.randn(1, 48)])[None],  # what is seen there changes nothing
    }
    corner = model(alone)[0]["patches"][0, -1].view(4, 4, 3).permute(2, 0, 1) / 2 + 0.5
    found = columns["place"][1][:, :2, -2:]  # no other patch has these pixels
    assert torch.allclose(found, corner[:, :2, -2:].clamp(0, 1), atol=1e-5)


def test_methods_of_the_recipe_hold_the_same_bytes_in_two_layers():
    task = type("Task", (), {"values": 192, "config": WorldConfig()})
    peers = ("gla", "gated-deltanet", "window+", "xl")
    for method in ("place", "place-given", "tensor", "linear", *peers):
        held = replace(world().model, method=method).build(task).state_bytes()
        assert 0.98 < held / (2 * 8192 * 4) < (1.2 if method in PEERS else 1.001), method
    assert replace(world().model, method="window").build(task).state_bytes() == 0


def test_the_bytes_of_the_memory_are_those_of_some_methods_alone():
    task = type("Task", (), {"values": 192, "config": WorldConfig()})
    model = world().model
    half = replace(model, memory=replace(model.memory, channels=model.memory.channels // 2))
    for methods, share in (
        (("tensor", "tensor-open", "tensor-long", "linear", "window+", "xl"), 0.5),
        (("gla", "deltanet", "place", "place-given"), 1),
    ):
        for method in methods:
            whole, less = (
                replace(c, method=method).build(task).state_bytes() for c in (model, half)
            )
            assert less / whole == pytest.approx(share, rel=0.05), method


def test_given_places_are_the_poses():
    config = WorldModelConfig(**small("place-given"))
    model = WorldModel(config, values=12, glimpses=6).eval()
    told = []
    memory = model.stack.blocks[1].side.memory
    memory.register_forward_pre_hook(lambda _, args, kw: told.append(kw["where"]), with_kwargs=True)
    poses, asked = 2 * torch.rand(2, 2, 6, 2) - 1
    batch = {"poses": poses, "seen": torch.randn(2, 6, 12)}
    model(batch)
    assert torch.equal(told[0], poses.repeat_interleave(2, dim=1))
    model(batch | {"asked": asked})  # questions are for places, glimpses are at poses
    assert torch.equal(told[1][:, ::2], asked)
    assert torch.equal(told[1][:, 1::2], poses)


def test_a_run_is_inspected_with_the_grid_of_its_split(birds, tmp_path):
    config = world()
    config = replace(
        config,
        task=config_for(birds, tests=("test", "test@large")),
        model=WorldModelConfig(**small("place")),
        budget=replace(config.budget, steps=1, batch_size=2, evaluate_every=1),
        precision="float32",
    )
    train(config, RunOptions(tmp_path, quiet=True, device="cpu", keep_checkpoints=True))
    grids = [
        record_run(tmp_path, "best", split=s, rows=1)[0].config.grid for s in config.task.tests
    ]
    assert grids == [(3, 3), (6, 6)]
