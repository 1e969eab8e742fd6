"""The runs of the diagnostics: published settings, answers out of reach."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tensor_memory import MemoryResidual
from tensor_memory_lab.recipes import load_recipes, windowed

PUBLISHED = ("binding", "map", "occlusion-published", "no-harm")
WINDOWED = (
    "windowed-binding",
    "windowed-binding-long",
    "windowed-map",
    "windowed-occlusion",
    "windowed-delay",
    "windowed-ablation",
)


def config_of(name):
    return load_recipes()[name]()


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
