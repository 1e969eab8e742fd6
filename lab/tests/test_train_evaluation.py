"""Measures over a split, whoever measures it; and how a model uses its memory."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from tensor_memory import MemoryConfig, memory_disabled
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.train import load_run
from tensor_memory_lab.train.evaluation import (
    Evaluator,
    memory_backend,
    memory_layers,
    memory_use,
)
from tiny_runs import run, tiny_run
from tolerances import assert_same

MEMORY = MemoryConfig(channels=2, grid=(2, 2), chunk_size=2)


def with_memory():
    return tiny_run(model={"method": "tensor", "memory": MEMORY})


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_measured_without_dropout_and_left_as_it_was(training):
    found = []
    for dropout in (0.0, 0.9):
        config = tiny_run(model={"dropout": dropout})
        task = config.task.build(0)
        torch.manual_seed(0)
        model = config.model.build(task).train(training)
        found.append(Evaluator(model, task, config, Accelerator(cpu=True)).split("valid"))
        assert model.training == training
    assert found[0] == found[1]


def test_a_graph_serves_valid_alone_where_splits_change_the_model(monkeypatch):
    """It keeps the model that it was captured with."""
    config = tiny_run()
    task = config.task.build(0)
    monkeypatch.setattr(type(task), "prepared", lambda *_: nullcontext(), raising=False)
    evaluator = Evaluator(config.model.build(task), task, config, Accelerator(cpu=True))
    expected, stale = evaluator.split("test"), evaluator.split("valid")
    replayed = {n: (torch.tensor(x), torch.tensor(1.0)) for n, x in stale.items()}
    evaluator._graphed = lambda batch: replayed
    assert evaluator.split("valid") == pytest.approx(stale)
    assert evaluator.split("test") == expected != stale


def test_streams_are_as_many_in_evaluation_as_in_training(tmp_path):
    config = tiny_run(task={"carries": True}, budget={"evaluation_batch_size": 3})
    with pytest.raises(ValueError, match="expected that of training for a task that carries, 12, "):
        run(tmp_path / "run", config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [64, 128])  # of 70 rows: the last batch, or the only one, is short
def test_processes_count_every_row_once_and_none_where_they_have_none(size):
    config = tiny_run(budget={"evaluation_batch_size": size})
    task = config.task.build(0)
    model, totals = config.model.build(task), []

    def measured(index, processes):
        def reduce(total, reduction):
            totals.append(total)
            return total

        group = SimpleNamespace(
            device=torch.device("cpu"),
            num_processes=processes,
            process_index=index,
            reduce=reduce,
        )
        return Evaluator(model, task, config, group).split("test")

    alone = measured(0, 1)
    for index in range(4):
        measured(index, 4)
    together = sum(totals)  # (measures, 2) by name: accuracy, loss
    assert together[:, 1].tolist() == [70, 70]
    means = (together[:, 0] / 70).tolist()
    assert means == pytest.approx([alone["accuracy"], alone["loss"]])


def test_the_record_says_how_much_the_memory_adds_and_what_is_lost_without_it(tmp_path):
    record = run(tmp_path / "run", with_memory())
    (layer,) = record["memory"]["layers"]
    assert layer["name"] == "side"
    assert record["backend"] == "torch"
    _, task, model = load_run(tmp_path / "run", "best")
    assert layer["gate"] == pytest.approx(model.side.gate.sigmoid().item())
    with torch.no_grad():
        x = model.embed(task.batch("valid", 0, 12)["x"])
        m, _ = model.side.memory(model.side.norm(x))
        added = (model.side.gate.sigmoid() * m).norm(dim=-1) / x.norm(dim=-1)
    assert layer["use"] == pytest.approx(added.mean().item(), rel=1e-4)
    assert layer["use"] > 0
    without = record["memory"]["test_without_memory"]
    assert list(without) == list(record["test"])[:1]
    assert without["test"] != record["test"]["test"]
    model.side = None
    evaluator = Evaluator(model, task, with_memory(), Accelerator(cpu=True))
    assert without["test"] == pytest.approx(evaluator.split("test"), rel=1e-5)


def test_the_use_of_a_layer_called_twice_is_the_mean_of_its_calls():
    config = with_memory()
    task = config.task.build(0)
    once = config.model.build(task)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = once

        def forward(self, batch, carry=None):
            self.model(batch)
            return self.model(batch)

    single, double = (
        memory_use(model, Evaluator(model, task, config, Accelerator(cpu=True)))[0]["use"]
        for model in (once, Twice())
    )
    assert single > 0
    assert double == pytest.approx(single)
    assert memory_backend(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize("method", ["tensor", "place"])
def test_the_backend_of_either_memory_is_told(method):
    model = LanguageModel(LanguageModelConfig(method=method, dim=8, layers=1, heads=2), 9, 12)
    assert memory_backend(model) == "torch"


def test_switched_off_a_carried_memory_adds_nothing_and_is_on_again_afterwards():
    memory = MemoryConfig(channels=2, grid=(2, 2), chunk_size=5)
    shape = {"dim": 8, "layers": 2, "heads": 2, "window": 4, "memory": memory}
    model = LanguageModel(LanguageModelConfig(method="tensor-local", **shape), 9, 12, True).eval()
    windows = [
        {"ids": ids, "targets": ids, "fresh": torch.tensor([True, first])}
        for ids, first in ((torch.randint(9, (2, 12)), True), (torch.randint(9, (2, 12)), False))
    ]
    added = []
    for layer in memory_layers(model).values():
        layer.register_forward_hook(lambda _, x, y: added.append(not torch.equal(x[0], y[0])))

    def losses():
        found, carry = [], None
        for window in windows:
            outputs, carry = model(window, carry)
            found.append(outputs["nll"])
        return torch.stack(found)

    before = losses()
    assert all(added)
    added.clear()
    with memory_disabled(model):
        off = losses()
    assert not any(added)
    assert not torch.allclose(off, before)
    assert_same(losses(), before)
