"""Masked images and clips as tasks: one draw per clip, what is blanked; batches by number.

The last also of walks, over images and through mazes.
"""

from dataclasses import replace

import pytest
import torch

from maze_data import write_layouts
from tensor_memory_lab.tasks import Task
from tensor_memory_lab.tasks.images import (
    DEVIATION,
    MEAN,
    Source,
    cub_images,
    decode_image,
    split_images,
)
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig
from tensor_memory_lab.tasks.maze import MazeConfig
from tensor_memory_lab.tasks.video import BLANK, VideoTaskConfig
from tensor_memory_lab.tasks.world import WorldConfig
from tolerances import assert_same
from vision_data import number_of, tiny_actions, tiny_birds, write_ucf


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    return MaskedImagesConfig(**tiny_birds(tmp_path_factory.mktemp("birds"), patch=4))


@pytest.fixture(scope="module")
def actions(tmp_path_factory):
    return VideoTaskConfig(**tiny_actions(tmp_path_factory.mktemp("actions"), 16) | {"frames": 8})


@pytest.fixture(scope="module")
def world(birds):
    places = {"data_dir": birds.data_dir, "cache_dir": birds.cache_dir}
    return WorldConfig(**places, side=32, patch=4, glimpses=60, valid_rows=6, test_rows=6)


@pytest.fixture(scope="module")
def maze(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mazes")
    write_layouts(folder, 9, 26)
    sizes = {"side": 9, "steps": 90, "layouts": 12, "valid_rows": 6, "test_rows": 8}
    return MazeConfig(cache_dir=str(folder), **sizes)


@pytest.fixture(params=["birds", "actions", "world", "maze"])
def config(request):
    return request.getfixturevalue(request.param)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_clips_that_stay_on_the_host_make_their_batches_there(actions):
    task = replace(actions, resident="host").build(0).to(torch.device("meta"))
    assert {x.device.type for x in task.batch("train", 0, 2).values()} == {"cpu"}
    assert task.facts()["resident_bytes"] == 0
    there = actions.build(0).to(torch.device("meta"))
    assert there.device.type == "meta"
    assert there.facts()["resident_bytes"] == 24 * 16 * 32 * 64 * 3


def test_a_batch_is_a_function_of_seed_and_number(config):
    first, second = config.build(0), config.build(0)
    assert isinstance(first, Task)
    second.batch("train", 0, 3)  # history changes nothing
    assert same(first.batch("train", 5, 3), second.batch("train", 5, 3))
    assert not same(first.batch("train", 5, 3), first.batch("train", 6, 3))
    assert not same(first.batch("train", 5, 3), config.build(1).batch("train", 5, 3))


def test_evaluation_depends_on_no_seed_and_covers_every_row_once(config):
    first, second = config.build(0), config.build(1)
    for split in ("valid", *first.test_splits):
        parts = [first.batch(split, i, 3) for i in range(first.batches(split, 3))]
        assert all(same(p, second.batch(split, i, 3)) for i, p in enumerate(parts))
        rows = sum(len(next(iter(part.values()))) for part in parts)
        whole = first.batch(split, 0, 1000)
        assert rows == len(next(iter(whole.values())))
        joined = {name: torch.cat([part[name] for part in parts]) for name in whole}
        assert same(whole, joined)
        with pytest.raises(IndexError, match=split):
            first.batch(split, len(parts), 3)
    with pytest.raises(ValueError, match="expected train, valid, test"):
        first.batch("dev", 0, 2)


def test_the_test_image_is_the_middle_of_the_decoded_file(birds):
    task = birds.build(0)
    batch = task.batch("test@50%", 0, 4)
    source = Source(birds.data_dir)
    for row, file in enumerate(split_images(cub_images(source))["test"][:4]):
        whole = torch.from_numpy(decode_image(source, file.path, 40).copy()).permute(2, 0, 1) / 255
        top, left = ((length - 32 + 1) // 2 for length in whole.shape[1:])
        image = task.images(batch["patches"])[row]
        assert torch.allclose(image, whole[:, top : top + 32, left : left + 32], atol=1e-6)


def test_ratios_hide_what_they_say(birds):
    task = birds.build(0)
    shown = {s: task.batch(s, 0, 2)["visible"].shape[1] for s in ("train", *task.test_splits)}
    assert shown == {"train": 16, "test@25%": 48, "test@50%": 32, "test@75%": 16}
    assert task.name == "cub200@40px"


def test_a_perfect_reconstruction_is_perfect_and_zero_is_the_leaked_means(birds):
    task = birds.build(0)
    batch = task.batch("test@75%", 0, 5)
    sums = task.measure({"patches": batch["patches"]}, batch)
    means = {name: float(total / count) for name, (total, count) in sums.items()}
    assert means["loss"] == 0
    assert means["psnr"] == 100
    assert means["ssim"] == pytest.approx(1)
    shade = (torch.full((3,), 0.3) - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    grey = {"patches": shade.repeat(16).expand_as(batch["patches"])}
    nothing = {k: float(s / n) for k, (s, n) in task.measure(grey, batch).items()}
    assert nothing["psnr"] < nothing["published_psnr"]
    assert nothing["published_psnr"] == pytest.approx(nothing["published_psnr_zero"], abs=1e-3)
    pasted = nothing["published_psnr_mean_of_visible"] - nothing["psnr_mean_of_visible"]
    assert pasted == pytest.approx(1.249, abs=2e-3)  # 10 log10(1 / 0.75): pasting alone


def test_measures_stay_in_float32_under_autocast(birds):
    task = birds.build(0)
    batch = task.batch("test@75%", 0, 5)
    outputs = {"patches": torch.randn_like(batch["patches"])}
    plain = task.measure(outputs, batch)
    with torch.autocast("cpu", torch.bfloat16):
        cast = task.measure(outputs, batch)
    assert all(torch.equal(plain[name][0], cast[name][0]) for name in plain)


def test_the_loss_is_over_hidden_patches(birds):
    task = birds.build(0)
    batch = task.batch("train", 0, 3)
    right_where_visible = batch["patches"] + 2.0
    places = batch["visible"][..., None].expand(-1, -1, 48)
    right_where_visible.scatter_(1, places, batch["patches"].gather(1, places))
    assert task.loss({"patches": right_where_visible}, batch).item() == pytest.approx(4.0)


def whole_frames(actions, **changes):
    """The task without cropping, so that frames still show their number."""
    return replace(actions, crop=(32, 64), **changes).build(0)


def test_a_test_clip_is_spread_over_the_video_and_cut_from_the_middle_of_its_frames(actions):
    task = actions.build(0)
    whole = whole_frames(actions).batch("test", 0, 3)["clip"]  # 32 × 64 pixels, cut to 16 × 32
    assert whole.dtype == torch.uint8
    for row in whole.numpy():
        assert [number_of(frame) for frame in row] == list(range(1, 16, 2))
    assert torch.equal(task.batch("test", 0, 3)["clip"], whole[:, :, 8:24, 16:48])


def test_training_draws_once_per_clip(actions):
    """Start, crop and flip are the same in all frames of a clip, and differ between clips."""
    task, seen = whole_frames(actions), set()
    for index in range(4):
        for row in task.batch("train", index, 4)["clip"].numpy():
            found = {
                (start, flip)
                for start in (0, 1)
                for flip in (1, -1)
                if [number_of(frame[:, ::flip]) for frame in row] == list(range(start, 16, 2))
            }
            assert found
            seen |= found
    assert seen == {(0, 1), (0, -1), (1, 1), (1, -1)}


def test_labels_are_the_classes(actions):
    task = actions.build(0)
    assert task.batch("test", 0, 100)["label"].tolist() == [0, 0, 1, 1, 2, 2]
    assert task.name == "ucf101@64x32 T=8"
    assert replace(actions, classes=("Archery", "Bowling")).build(0).name == "ucf101-2@64x32 T=8"


def test_missing_frames_are_blank_and_the_others_untouched(actions):
    task = actions.build(0)
    assert task.test_splits == (
        "test",
        *(f"test@missing={k}" for k in (1, 2, 4, 6)),
        *(f"test@last={k}" for k in (1, 2, 4, 6)),
        "test@region=25%",
    )
    whole = task.batch("test", 0, 6)
    blank = torch.tensor(BLANK, dtype=torch.uint8)
    normal = (blank / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    assert normal.abs().max() < 0.01  # what a model sees where nothing is
    starts = set()
    for split, (kind, k) in task.blanks.items():
        batch = task.batch(split, 0, 6)
        assert torch.equal(batch["label"], whole["label"])
        gone = (batch["clip"] != whole["clip"]).flatten(2).any(-1)  # (B, T)
        if kind == "region":
            part = (batch["clip"] == blank).all(-1).flatten(1).float().mean(1)
            assert part == pytest.approx([0.25] * 6, abs=0.01)
            continue
        assert (gone.sum(1) == k).all()
        assert (batch["clip"][gone] == blank).all()
        for row in gone:
            places = row.nonzero().flatten()
            assert (places.diff() == 1).all()  # one block
            assert kind == "block" or places[-1] == 7
            if split == "test@missing=4":
                starts.add(int(places[0]))
    assert len(starts) > 1  # which block belongs to the clip


def test_clips_left_out_are_in_no_split_and_in_the_facts(tmp_path):
    data = write_ucf(tmp_path / "data", frames=4)
    (data / "UCF-101/Archery/v_Archery_g01_c01.avi").write_bytes(b"")
    config = VideoTaskConfig(
        data_dir=str(data), cache_dir=str(tmp_path), frames=4, cached_frames=4, crop=(32, 32)
    )
    with pytest.warns(UserWarning, match="1 of 24 clips"):
        task = config.build(0)
    assert len(task.names["test"]) == 5
    assert task.facts()["left_out"] == ["Archery/v_Archery_g01_c01.avi"]
    assert task.facts()["clips"]["test"] == 5
    assert task.facts()["groups"] == {"train": 6, "valid": 3, "test": 3}


def test_a_split_that_cannot_be_decoded_at_all_is_an_error(tmp_path):
    data = write_ucf(tmp_path / "data", frames=4)
    for path in (data / "UCF-101").glob("*/*_g01_*.avi"):  # the official test part
        path.write_bytes(b"")
    config = VideoTaskConfig(
        data_dir=str(data), cache_dir=str(tmp_path), frames=4, cached_frames=4, crop=(32, 32)
    )
    complaint = "test: expected clips, but not one of its 6 can be decoded"
    with pytest.warns(UserWarning, match="6 of 24"), pytest.raises(ValueError, match=complaint):
        config.build(0)


def test_the_loss_spreads_a_part_of_the_label_over_all_classes_and_the_measure_does_not(actions):
    task, given = replace(actions, label_smoothing=0.3).build(0), {"label": torch.tensor([0])}
    nll = -torch.tensor([3.0, 2.0, 1.0]).log_softmax(0)
    assert_same(task.loss({"logits": -nll[None]}, given), 0.7 * nll[0] + 0.3 * nll.mean())
    assert_same(task.measure({"logits": -nll[None]}, given)["loss"][0], nll[0])


def test_top5_counts_the_first_five(actions):
    task = actions.build(0)
    batch = {"label": torch.tensor([0, 1, 2])}
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [0.0, 0.0, 9.0]])
    sums = task.measure({"logits": logits}, batch)
    assert {name: (float(s), int(n)) for name, (s, n) in sums.items() if name != "loss"} == {
        "accuracy": (2.0, 3),
        "top5": (3.0, 3),
    }


@pytest.mark.parametrize(
    ("kind", "changes", "complaint"),
    [
        ("birds", {"patch": 5}, "task.patch: expected a divisor of task.crop = 32, got 5"),
        ("birds", {"crop": 44}, "task.crop: expected at most task.side = 40 pixels, got 44"),
        ("birds", {"layout": "coco"}, "task.layout: expected one of cub, folder, got 'coco'"),
        ("birds", {"mask_ratio": 1.0}, "mask ratio: expected a number between 0 and 1"),
        ("actions", {"frames": 3}, "expected a divisor of task.cached_frames = 16, got 3"),
        ("actions", {"crop": (40, 32)}, "task.crop: expected at most 32 x 64 pixels, got 40 x 32"),
        ("actions", {"patch": 5}, "task.patch: expected a divisor of task.crop = 16 x 32, got 5"),
        ("actions", {"missing": (1.0,)}, "expected parts between 0 and 1"),
        ("actions", {"decoder": "ffmpeg"}, "task.decoder: expected one of pyav, opencv, got 'f"),
    ],
)
def test_a_wrong_task_is_refused(request, kind, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(request.getfixturevalue(kind), **changes)
