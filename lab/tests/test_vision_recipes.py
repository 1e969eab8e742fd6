"""Every vision recipe and method for two steps, on tiny data in the official layouts."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from tensor_memory import MemoryConfig
from tensor_memory_lab.commands.arguments import parse_run
from tensor_memory_lab.commands.grid import expand, read_plan
from tensor_memory_lab.models.image import ImageMethod
from tensor_memory_lab.models.video import VideoMethod
from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.recipes.images import cub, cub_published
from tensor_memory_lab.recipes.video import NINE, ucf101_nine, ucf101_published
from tensor_memory_lab.train import RunOptions, train
from vision_data import CLASSES, write_cub, write_ucf

GRIDS = Path(__file__).parents[2] / "grids"
MEMORY = MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    write_cub(folder / "birds", per_class=9)
    write_ucf(folder / "actions", frames=6)
    return folder


def two_steps(config, folder, task, model):
    budget = replace(config.budget, steps=2, batch_size=4, evaluate_every=1, checkpoint_every=2)
    config = replace(
        config,
        task=replace(config.task, cache_dir=str(folder / "cache"), **task),
        model=replace(config.model, memory=MEMORY, heads=2, **model),
        optimizer=replace(config.optimizer, warmup=1),
        budget=budget,
        precision="float32",
    )
    return config


def image_run(data, name="cub", **model):
    layout = {"data_dir": str(data / "birds"), "side": 40, "crop": 32, "patch": 8}
    small = {"dim": 16, "decoder_dim": 8, "decoder_heads": 2, "layers": 3, "window": 3}
    return two_steps(load_recipes()[name](), data, layout, small | model)


def video_run(data, task=None, **model):
    layout = {
        "data_dir": str(data / "actions"),
        "classes": CLASSES[:2],
        "height": 32,
        "width": 64,
        "crop": (16, 32),
        "patch": 8,
        "frames": 4,
        "cached_frames": 4,
    }
    small = {"dim": 16, "layers": 2}
    return two_steps(ucf101_nine(), data, layout | (task or {}), small | model)


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


@pytest.mark.parametrize("frames", [2, 4])
def test_any_number_of_frames_is_a_flag(data, tmp_path, frames):
    record = train(
        video_run(data, {"frames": frames}, method="spatial"), RunOptions(tmp_path, quiet=True)
    )
    assert record["facts"]["frames"] == frames


def test_a_plain_folder_is_reconstructed_too(data, tmp_path):
    config = image_run(data, "images")
    assert config.task.layout == "folder"
    record = train(config, RunOptions(tmp_path, quiet=True))
    assert record["task"] == "birds@40px"


def test_flags_reach_every_choice():
    frames = ["--task.frames", "32", "--task.classes", "Archery", "Bowling", "--task.strict"]
    memory = ["--model.memory.chunk-size", "16", "--model.memory-layers", "0", "2", "4"]
    config, _ = parse_run("ucf101-9", [*frames, "--model.method", "spatial", *memory])
    assert config.task.frames == 32
    assert config.model.memory.chunk_size == 16
    assert config.model.with_memory == (0, 2, 4)
    assert config.task.classes == ("Archery", "Bowling")
    assert config.task.strict
    config, _ = parse_run("cub", ["--model.scope", "depth", "--task.test-ratios", "0.4", "0.8"])
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


@functools.cache  # reading flags takes a while
def planned(plan):
    """The configs of a plan, by stage."""
    stages = read_plan(GRIDS / f"{plan}.toml", ["--task.data-dir", "somewhere"])
    return [[run.config for run in expand([stage])] for stage in stages]


@pytest.mark.parametrize("plan", sorted(path.stem for path in GRIDS.glob("vision-*.toml")))
def test_a_plan_that_is_cut_off_leaves_whole_seeds(plan):
    """In every stage a seed is done by all methods and lengths before the next one begins."""
    for configs in planned(plan):
        seeds = [config.seed for config in configs]
        distinct = sorted(set(seeds))
        assert distinct == ([0] if "cost" in plan else [0, 1, 2])
        assert seeds == sorted(seeds)
        first = [config for config in configs if config.seed == distinct[0]]
        assert configs == [replace(c, seed=seed) for seed in distinct for c in first]


def test_the_methods_and_lengths_of_the_page_are_planned():
    [birds], [actions] = planned("vision-images"), planned("vision-actions")
    assert {config.model.method for config in birds} == set(get_args(ImageMethod))
    assert {config.model.method for config in actions} == set(get_args(VideoMethod))
    assert {config.task.frames for config in actions} == {8}
    long, wide, registers = planned("vision-actions-long")
    assert [(config.task.frames, config.model.method) for config in long[:6]] == [
        (frames, method) for frames in (32, 64) for method in ("spatial", "frames", "joint")
    ]
    for stage, method in ((wide, "wide"), (registers, "registers")):
        assert stage == [
            replace(c, model=replace(c.model, method=method))
            for c in long
            if c.model.method == "frames"
        ]
    [variants] = planned("vision-images-variants")
    assert {(config.model.scope, config.model.memory.chunk_size) for config in variants} == {
        (scope, chunk_size) for scope in ("layer", "depth") for chunk_size in (1, 4, 16)
    }


def test_the_costs_are_planned_at_every_length_and_at_the_published_shape():
    lengths = {(c.model.method, c.task.frames) for stage in planned("vision-cost") for c in stage}
    methods = ("joint", "frames", "registers", "spatial")
    assert lengths == {(method, frames) for method in methods for frames in (8, 16, 32, 64)}
    published = [config for stage in planned("vision-cost-published") for config in stage]
    for config in published:
        task, rows = config.task, config.budget.batch_size
        assert (task.crop, task.patch, task.frames, rows) == ((224, 224), 16, 8, 32)
    assert published[0].model == replace(ucf101_published().model, method="frames")
    assert published[1].model == replace(ucf101_published().model, method="spatial")
