"""Streams: what a window leaves is what the next one starts from, in training and in evaluation."""

import math

import pytest
import torch
from accelerate import Accelerator

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.run_config import BudgetConfig, RunConfig
from tensor_memory_lab.train.batches import training_batches
from tensor_memory_lab.train.evaluation import Evaluator
from tensor_memory_lab.train.step import Step, make_optimizer
from tiny_text import loud, text_task

WORDS, N, ROWS = 11, 6, 3
CPU = torch.device("cpu")
CARRIES = [
    "tensor-local", "place-local", "linear", "linear-local", "conv-local", "xl", "tensor-xl",
    "recurrent-slots",
]  # fmt: skip


def made(method, *, tokens=70):
    """A config, its task of random words, and a model that uses what it carries."""
    torch.manual_seed(0)
    task = text_task(torch.randint(WORDS, (tokens,)), WORDS, length=N, carried=True)
    config = RunConfig(
        recipe="language-carried",
        task=task.config,
        model=LanguageModelConfig(
            method=method, dim=8, layers=2, heads=2, dropout=0.0, window=3, slots=2, cache=3,
            memory=MemoryConfig(channels=4, grid=(3, 3), chunk_size=2),
        ),
        budget=BudgetConfig(steps=9, batch_size=ROWS),
    )  # fmt: skip
    return config, task, loud(config.model.build(task))


@pytest.mark.parametrize("method", CARRIES)
def test_training_hands_every_window_what_the_one_before_left(method, monkeypatch):
    config, task, model = made(method)
    calls, forward = [], LanguageModel.forward

    def watched(self, batch, carry=None, **options):
        outputs, after = forward(self, batch, carry, **options)
        given = carry and {name: x.clone() for name, x in carry.items()}
        calls.append((batch["fresh"].tolist(), given, after))
        return outputs, after

    monkeypatch.setattr(LanguageModel, "forward", watched)
    optimizer = make_optimizer(model, config.optimizer, CPU)
    step = Step(model, task, optimizer, config, Accelerator(cpu=True))
    for number, batch in enumerate(training_batches(task, config.budget, CPU, first=0)):
        step(number, batch)
    windows = (70 // ROWS - N + 1) // N  # of an epoch, after which the streams begin anew
    for number, (fresh, carry, after) in enumerate(calls):
        assert fresh == [number % windows == 0] * ROWS
        assert all(not tensor.requires_grad for tensor in after.values())
        if number:
            left = calls[number - 1][2]
            assert carry.keys() == left.keys()
            assert all(torch.equal(carry[name], left[name]) for name in left)


@torch.no_grad()
def loss_of_streams(task, model, split):
    """Each stream of a split read alone, window after window: the mean over its tokens."""
    tokens, start = task.splits[split], task.vocabulary.start
    stream = math.ceil(len(tokens) / ROWS)
    total = torch.zeros((), dtype=torch.float64)
    before = torch.cat([torch.tensor([start]), tokens[:-1]])
    for row in range(ROWS):
        carry, end = None, min((row + 1) * stream, len(tokens))
        for first in range(row * stream, end, N):
            at = torch.arange(first, min(first + N, end))
            outputs, carry = model({"ids": before[None, at], "targets": tokens[None, at]}, carry)
            total += outputs["nll"].double().sum()
    return (total / len(tokens)).item()


@pytest.mark.parametrize("method", [*CARRIES, "local"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_score_of_streams_is_that_of_reading_each_to_its_end(method, split):
    config, task, model = made(method)
    found = Evaluator(model, task, config, Accelerator(cpu=True)).split(split)
    assert found["loss"] == pytest.approx(loss_of_streams(task, model.eval(), split), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.mark.parametrize("method", CARRIES)
def test_windows_that_start_empty_are_scored_beside_the_streams(method):
    config, task, model = made(method, tokens=11 * N)  # the last batch has a row less
    evaluator = Evaluator(model, task, config, Accelerator(cpu=True))
    empty = text_task(task.splits["test"], WORDS, length=N)
    fresh = Evaluator(model, empty, config, Accelerator(cpu=True)).split("test")
    assert evaluator.split("test@fresh")["loss"] == pytest.approx(fresh["loss"], rel=1e-6)
    assert evaluator.split("test")["loss"] != pytest.approx(fresh["loss"], rel=1e-5)
