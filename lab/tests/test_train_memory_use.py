"""How a model uses its memory: gates, contributions, and the measures without it."""

import pytest
import torch
from accelerate import Accelerator

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.train import RunOptions, load_run, train
from tensor_memory_lab.train.evaluation import Evaluator
from tensor_memory_lab.train.memory_use import (
    memory_backend,
    memory_layers,
    memory_off,
    memory_use,
)
from tiny_runs import TinyModelConfig, TinyTaskConfig, tiny_run
from tolerances import assert_same

MEMORY = MemoryConfig(channels=2, grid=(2, 2), chunk_size=2)


def run(folder, config):
    return train(config, RunOptions(folder, device="cpu", quiet=True))


def with_memory():
    return tiny_run(model={"method": "tensor", "memory": MEMORY})


def test_the_record_says_how_much_each_layer_adds(tmp_path):
    record = run(tmp_path / "run", with_memory())
    (layer,) = record["memory"]["layers"]
    assert layer["name"] == "side"
    _, task, model = load_run(tmp_path / "run", "best")
    assert layer["gate"] == pytest.approx(model.side.gate.sigmoid().item())
    with torch.no_grad():
        x = model.embed(task.batch("valid", 0, 12)["x"])
        m, _ = model.side.memory(model.side.norm(x))
        added = (model.side.gate.sigmoid() * m).norm(dim=-1) / x.norm(dim=-1)
    assert layer["use"] == pytest.approx(added.mean().item(), rel=1e-4)
    assert layer["use"] > 0
    assert record["backend"] == "torch"


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


def test_without_its_memory_a_model_is_measured_with_nothing_added(tmp_path, monkeypatch):
    record = run(tmp_path / "run", with_memory())
    without = record["memory"]["test_without_memory"]
    assert without.keys() == record["test"].keys()
    assert without != record["test"]
    _, task, model = load_run(tmp_path / "run", "best")
    monkeypatch.setattr(model.side, "gate", torch.nn.Parameter(torch.tensor([-1e9])))  # σ(γ) = 0
    total = sum(
        task.measure(model(task.batch("test", i, 12))[0], task.batch("test", i, 12))["loss"][0]
        for i in range(6)
    )
    assert without["test"]["loss"] == pytest.approx(total.item() / 70, rel=1e-5)


def test_switching_off_ends_with_the_context():
    task = TinyTaskConfig().build(0)
    model = TinyModelConfig(method="tensor", memory=MEMORY).build(task).eval()
    batch = task.batch("valid", 0, 4)
    before = model(batch)[0]["logits"]
    with memory_off(model):
        off = model(batch)[0]["logits"]
    assert_same(model(batch)[0]["logits"], before)
    assert not torch.allclose(off, before)


@pytest.mark.parametrize("chunk_size", [3, 5])  # windows of whole chunks, and one that waits
def test_switched_off_a_carried_memory_is_as_if_its_gate_were_shut_and_scans_nothing(chunk_size):
    memory = MemoryConfig(channels=2, grid=(2, 2), chunk_size=chunk_size)
    shape = {"dim": 8, "layers": 2, "heads": 2, "window": 4, "memory": memory}
    model = LanguageModel(LanguageModelConfig(method="tensor-local", **shape), 9, 12, True).eval()
    windows = [
        {"ids": ids, "targets": ids, "fresh": torch.tensor([True, first])}
        for ids, first in ((torch.randint(9, (2, 12)), True), (torch.randint(9, (2, 12)), False))
    ]
    scans = []
    for layer in memory_layers(model).values():
        layer.memory.register_forward_hook(lambda *_: scans.append(1))

    def losses():
        found, carry = [], None
        for window in windows:
            outputs, carry = model(window, carry)
            found.append(outputs["nll"])
        return torch.stack(found), {name: tensor.shape for name, tensor in carry.items()}

    open_, shapes = losses()
    assert scans
    scans.clear()
    with memory_off(model), torch.no_grad():
        off, carried = losses()
    assert not scans
    assert carried == shapes
    for layer in memory_layers(model).values():
        layer.gate.data.fill_(-1e9)  # σ(γ) = 0
    shut, _ = losses()
    assert_same(off, shut)
    assert not torch.allclose(open_, shut)


def test_a_forward_of_its_own_is_put_back_after_switching_off():
    model = TinyModelConfig(method="tensor", memory=MEMORY).build(TinyTaskConfig().build(0))
    own = model.side.forward
    model.side.forward = own
    with memory_off(model):
        assert model.side.forward is not own
    assert model.side.forward is own


def test_a_model_without_memory_has_no_use(tmp_path):
    record = run(tmp_path / "run", tiny_run())
    assert record["memory"] is None
    assert memory_backend(torch.nn.Linear(2, 2)) is None
