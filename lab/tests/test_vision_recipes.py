"""Every vision recipe and method for two steps, on tiny data in the official layouts."""

import math
from dataclasses import replace

import pytest

from tensor_memory import MemoryConfig
from tensor_memory_lab.commands.arguments import parse_run
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.recipes.images import cub, cub_published
from tensor_memory_lab.recipes.video import NINE, ucf101_nine, ucf101_published
from tensor_memory_lab.train import RunOptions, train
from vision_data import CLASSES, tiny_actions, tiny_birds

MEMORY = MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    return tiny_birds(folder), tiny_actions(folder, 4, classes=CLASSES[:2])


def two_steps(config, task, model):
    budget = replace(config.budget, steps=2, batch_size=4, evaluate_every=1, checkpoint_every=2)
    return replace(
        config,
        task=replace(config.task, **task),
        model=replace(config.model, memory=MEMORY, heads=2, **model),
        optimizer=replace(config.optimizer, warmup=1),
        budget=budget,
        precision="float32",
    )


def image_run(data, **model):
    small = {"dim": 16, "decoder_dim": 8, "decoder_heads": 2, "layers": 3, "window": 3}
    return two_steps(cub(), data[0], small | model)


def video_run(data, **model):
    return two_steps(ucf101_nine(), data[1], {"dim": 16, "layers": 2} | model)


@pytest.mark.parametrize(
    "model",
    [
        {"method": "base"},
        {"method": "local"},
        {"method": "registers"},
        {"method": "wide"},
        {"method": "spatial", "scope": "layer"},
        {"method": "spatial", "scope": "depth"},
    ],
)
def test_every_image_method_trains_and_is_measured(data, tmp_path, model):
    record = train(image_run(data, **model), RunOptions(tmp_path, quiet=True))
    assert record["task"] == "cub200@40px"
    assert record["method"] == model["method"]
    assert set(record["test"]) == {"test@25%", "test@50%", "test@75%"}
    for measures in record["test"].values():
        assert {"psnr", "ssim", "published_psnr", "published_psnr_zero"} <= set(measures)
        assert all(math.isfinite(value) for value in measures.values())
    assert (record["memory"] is not None) == (model["method"] == "spatial")
    assert record["finished"]


@pytest.mark.parametrize(
    "model",
    [
        {"method": "joint"},
        {"method": "frames"},
        {"method": "registers"},
        {"method": "wide"},
        {"method": "spatial", "scope": "layer"},
        {"method": "spatial", "scope": "depth", "readout": "last"},
        {"method": "spatial", "memory_layers": (1,)},
    ],
)
def test_every_video_method_trains_and_is_measured(data, tmp_path, model):
    record = train(video_run(data, **model), RunOptions(tmp_path, quiet=True))
    assert record["task"] == "ucf101-2@64x32 T=4"
    assert record["facts"]["classes"] == list(CLASSES[:2])
    assert set(record["test"]) == {
        "test",
        *(f"test@{kind}={k}" for kind in ("missing", "last") for k in (1, 2, 3)),
        "test@region=25%",
    }
    for measures in record["test"].values():
        assert 0 <= measures["accuracy"] <= measures["top5"] == 1
    assert record["peak_memory_bytes"] > 0
    assert "step_ms" in record  # None here: the first steps are not timed
    assert record["labels"]["frames"] == 4
    assert record["finished"]


def test_flags_reach_every_choice():
    frames = ["--task.frames", "32", "--task.classes", "Archery", "Bowling", "--task.strict"]
    memory = ["--model.memory.chunk-size", "16", "--model.memory-layers", "0", "2", "4"]
    config, _ = parse_run(find_recipe("ucf101-9"), [*frames, "--model.method", "spatial", *memory])
    assert config.task.frames == 32
    assert config.model.memory.chunk_size == 16
    assert config.model.with_memory == (0, 2, 4)
    assert config.task.classes == ("Archery", "Bowling")
    assert config.task.strict
    config, _ = parse_run(
        find_recipe("cub"), ["--model.scope", "depth", "--task.test-ratios", "0.4", "0.8"]
    )
    assert config.model.scope == "depth"
    assert config.task.test_ratios == (0.4, 0.8)


def test_recipes_state_the_protocols_they_are_named_after():
    assert (cub().task.crop // cub().task.patch) ** 2 == 196
    assert (cub_published().task.crop, cub_published().task.patch) == (224, 16)
    assert cub_published().optimizer.lr == 1.5e-4
    published = ucf101_published()
    assert (published.task.crop, published.task.patch, published.task.frames) == ((224, 224), 16, 8)
    assert (published.task.classes, published.budget.batch_size) == ((), 16)
    assert published.model.memory == MemoryConfig(channels=64, grid=(8, 8, 8), chunk_size=8)
    assert ucf101_nine().task.classes == NINE
    assert len(NINE) == 9
