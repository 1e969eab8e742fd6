"""The runs of the diagnostics: published settings, answers out of reach, grids that expand."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quoted import records_of

from tensor_memory import MemoryResidual
from tensor_memory_lab.commands.grid import expand, read_plan
from tensor_memory_lab.recipes import load_recipes, windowed
from tensor_memory_lab.records import config_from_dict, run_name

FOLDER = Path(__file__).parents[2] / "grids"
GRIDS = sorted(FOLDER.glob("[1-6]-*.toml"))
PUBLISHED = ("binding", "map", "occlusion-published", "no-harm")
LONG = ("binding-long", "map-long", "occlusion-valid", "occlusion-long")
WINDOWED = (
    "windowed-binding",
    "windowed-binding-long",
    "windowed-map",
    "windowed-occlusion",
    "windowed-delay",
    "windowed-ablation",
)
ALL = (*PUBLISHED, *LONG, *WINDOWED, "windowed-no-harm")


def config_of(name):
    return load_recipes()[name]()


def test_every_diagnostic_is_there_as_published_long_and_windowed():
    assert set(ALL) <= set(load_recipes())
    assert all(config_of(name).recipe == name for name in ALL)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs_have_the_published_settings(name):
    config = config_of(name)
    large = name in ("map", "occlusion-published")
    assert (config.model.dim, config.model.layers) == ((96, 3) if large else (64, 2))
    assert config.model.heads == 4
    assert config.model.dropout == (0.0 if name == "no-harm" else 0.1)
    assert config.model.window is None
    memory = config.model.memory
    assert (memory.channels, memory.grid, memory.chunk_size) == (16, (6, 6, 6), 1)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip) == (3e-4, 0.01, 1.0)
    assert (optimizer.schedule, optimizer.warmup) == ("constant", 0)
    assert config.budget.batch_size == (64 if large else 128)
    assert config.budget.steps == (1500 if large or name == "no-harm" else 2000)


def answer_positions(name, batch):
    """Per question the position of the latest token that holds its answer, by brute force."""
    batch = {key: tensor.numpy() for key, tensor in batch.items()}
    for row in range(len(batch["target"])):
        for question, at in enumerate(batch["ask"][row]):
            if "kind" in batch:
                writes = np.flatnonzero(batch["kind"][row] == 0)
                away = ((batch["place"][row][writes] - batch["place"][row][at]) ** 2).sum(-1)
                same = batch["value"][row][writes] == batch["target"][row][question]
                assert same[away.argmin()]
                yield at, writes[-1]  # any write may be the nearest: all must be out of reach
            elif "features" in batch:
                tokens = batch["features"][row]
                yield at, np.flatnonzero(tokens[:, 6] == 0)[-1]
            elif "frames" in batch:
                shown = np.flatnonzero(batch["frames"][row].std((1, 2)) > 0)
                yield at, 16 * shown[-1] + 15
            else:
                lag = config_of(name).task.lag
                assert batch["symbols"][row][at - lag] == batch["target"][row][question]
                yield at, at - lag


@pytest.mark.parametrize("name", WINDOWED)
def test_no_answer_lies_within_the_reach_of_the_stacked_windows(name):
    config = config_of(name)
    reach = config.model.layers * (config.model.window - 1)
    questions = list(answer_positions(name, config.task.build(0).batch("test", 0, 200)))
    assert len(questions) >= 200
    assert all(at - held > reach for at, held in questions)


def test_the_long_task_is_beyond_the_cache_of_the_memorys_bytes_too():
    config = config_of("windowed-binding-long")
    task = config.task.build(0)
    stack = replace(config.model, method="xl").stack(task.length)
    assert stack.cache * stack.layers * stack.dim * 4 == config.model.memory.state_values * 4
    assert task.distance > stack.layers * (stack.cache + config.model.window - 1)


def test_windowed_no_harm_needs_nothing_beyond_its_window():
    config = config_of("windowed-no-harm")
    assert config.task.build(0).distance <= config.model.window - 1


@pytest.mark.parametrize("window", [3, None])
def test_a_window_that_reaches_an_answer_is_refused(window):
    config = config_of("windowed-binding")
    seen = replace(config, model=replace(config.model, window=window))
    with pytest.raises(
        ValueError, match=r"windowed-binding: expected answers more than \d+ tokens"
    ):
        windowed.out_of_reach(seen)


@functools.cache
def runs_of(plan):
    return expand(read_plan(plan))


@pytest.mark.parametrize("plan", GRIDS, ids=lambda path: path.stem)
def test_a_grid_expands_to_runs_that_differ(plan):
    runs = runs_of(plan)
    assert len({run.name for run in runs}) == len(runs) >= 8
    assert {run.config.recipe for run in runs} <= set(ALL)


@functools.cache
def names_of_records(folder):
    return {run_name(config_from_dict(record["config"])) for record in records_of(folder)}


@pytest.mark.parametrize("plan", [*GRIDS, FOLDER / "7-rate.toml"], ids=lambda path: path.stem)
def test_every_run_of_a_grid_has_its_record(plan):
    folder = {"6-cost": "diagnostics-cost", "7-rate": "diagnostics-rate"}
    found = names_of_records(folder.get(plan.stem, "diagnostics"))
    assert [run.name for run in runs_of(plan) if run.name not in found] == []


def test_what_is_left_open_has_no_record_yet():
    found = names_of_records("diagnostics")
    assert [run.name for run in runs_of(FOLDER / "8-open.toml") if run.name in found] == []


def test_the_first_two_grids_hold_the_minimum():
    first, second = (runs_of(path) for path in GRIDS[:2])
    methods = {"base", "wide", "slots", "slots-matched", "tensor", "xl", "recurrent-slots"}
    for name in ("windowed-binding", "windowed-map"):
        done = {run.config.model.method for run in first if run.config.recipe == name}
        assert done == {*methods, "linear"}
    for name in ("binding", "map", "no-harm", "occlusion-published"):
        done = {run.config.model.method for run in second if run.config.recipe == name}
        assert done == {"base", "wide", "slots", "tensor"}
    assert all(len(stage.over["seed"]) >= 3 for path in GRIDS[:2] for stage in read_plan(path))


def test_the_ablations_change_one_choice_at_a_time():
    unchanged = config_of("windowed-ablation").model.memory.to_dict()
    pairs = {("reads", "chunk_size"), ("read_heads", "write_heads")}  # one choice, two fields
    seen = set()
    for run in runs_of(FOLDER / "4-ablations.toml"):
        memory = run.config.model.memory.to_dict()
        changed = tuple(name for name in memory if memory[name] != unchanged[name])
        assert len(changed) <= 1 or set(changed) in [set(pair) for pair in pairs]
        seen.update(changed)
    assert seen == {
        "write",
        "share_coordinates",
        "mixing",
        "grid",
        "chunk_size",
        "reads",
        "read_heads",
        "write_heads",
        "forget_bias",
        "spread_bias",
    }


def test_what_a_memory_adds_at_the_start_does_not_drown_its_input():
    config = config_of("windowed-binding")
    task = config.task.build(0)
    model = replace(config.model, method="tensor").build(task)
    shares = []

    def compare(_, inputs, outputs):
        shares.append(float((outputs[0] - inputs[0]).norm() / inputs[0].norm()))

    for module in model.modules():
        if isinstance(module, MemoryResidual):
            module.register_forward_hook(compare)
    with torch.no_grad():
        model(task.batch("train", 0, 32))
    assert len(shares) == 2
    assert max(shares) < 0.2
