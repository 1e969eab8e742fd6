"""Tokens scored with and without their future, a text nobody can predict, and what it shows."""

import math

import pytest
import torch

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.tasks.dice import DiceConfig
from tensor_memory_lab.tasks.language import PLACES, LanguageTaskConfig, places
from tiny_text import loud, text_task

SPLITS = ("test", "test@window", "test@prefix")


def leaky_text():
    return text_task(torch.arange(203), 211, length=20, leak=True)


def dice_task(**options):
    return DiceConfig(**{"length": 12, "valid_rows": 8, "test_rows": 30} | options).build(0)


def batches(task, split, size=4):
    return [task.batch(split, index, size) for index in range(task.batches(split, size))]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100, 512])
def test_scored_places_are_spread_over_the_window(length):
    found = places(length)
    assert found == places(length)
    assert len(found) == min(length, PLACES)
    part = length / len(found)
    assert all(part * i - 1 < place < part * (i + 1) for i, place in enumerate(found))


@pytest.mark.parametrize("task", [leaky_text(), dice_task()], ids=["text", "dice"])
def test_the_same_tokens_are_scored_with_the_future_and_without(task):
    assert task.test_splits == SPLITS
    assert task.metric == "score"

    def scored(split):
        found = []
        for batch in batches(task, split):
            for ids, targets, mask in zip(
                batch["ids"], batch["targets"], batch["scored"], strict=True
            ):
                for place in mask.nonzero().flatten().tolist():
                    past = ids[: place + 1].tolist()
                    found.append((tuple(past), int(targets[place])))
        return sorted(found)

    assert scored("test@window") == scored("test@prefix")
    for batch in batches(task, "test@prefix"):  # nothing later than the token it scores exists
        assert not batch["scored"][:, :-1].any()
    assert set(scored("test@prefix")) <= set(scored("test"))


def test_what_may_see_the_future_has_no_perplexity():
    assert leaky_text().finish({"loss": math.log(7)}) == pytest.approx(
        {"loss": math.log(7), "score": 7}
    )
    with pytest.raises(ValueError, match=r"task.leak: expected windows that start empty.*carried"):
        LanguageTaskConfig(leak=True, carried=True)


def model_of(method, task):
    config = LanguageModelConfig(
        method=method, dim=8, layers=2, heads=2, dropout=0.0, window=4,
        memory=MemoryConfig(channels=4, grid=(3, 3), chunk_size=3),
        slots=2, segment=4, non_causal=method == "tensor-depth",
    )  # fmt: skip
    torch.manual_seed(0)
    facts = task.facts()
    model = LanguageModel(config, facts["vocabulary"], facts["window"])
    return loud(model).double().eval()


@torch.no_grad()
def loss(model, task, split):
    total = count = 0.0
    for batch in batches(task, split):
        part, number = task.measure(model(batch)[0], batch)["loss"]
        total, count = total + part, count + number
    return total / count


@pytest.mark.parametrize("method", ["base", "tensor", "tensor-depth"])
def test_a_causal_model_scores_alike_without_the_future_and_the_published_one_does_not(method):
    task = dice_task()  # rows of 12 in chunks of 3
    model = model_of(method, task)
    difference = loss(model, task, "test@prefix") - loss(model, task, "test@window")
    assert (difference.abs() > 1e-6) if method == "tensor-depth" else (difference.abs() < 1e-10)


def test_throws_are_independent_uniform_and_drawn_afresh():
    task = dice_task(test_rows=4096)
    (batch,) = batches(task, "test", 4096)
    throws = batch["targets"]
    assert (batch["ids"][:, 0] == 6).all()
    assert torch.equal(batch["ids"][:, 1:], throws[:, :-1])
    pairs = torch.bincount((6 * throws[:, :-1] + throws[:, 1:]).flatten(), minlength=36)
    expected = pairs.sum() / 36
    assert ((pairs - expected).abs() < 5 * expected.sqrt()).all()
    assert task.ceiling("test") == 6.0
    assert task.facts()["vocabulary"] == 7
    first, second = (task.batch("train", index, 64)["targets"] for index in (0, 1))
    assert not torch.equal(first, second)
