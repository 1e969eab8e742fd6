"""How a model uses its memory: gates, contributions, and the measures without it."""

import pytest
import torch
from tiny_runs import TinyModelConfig, TinyTaskConfig, tiny_run

from tensor_memory import MemoryConfig
from tensor_memory.experiments.train import RunOptions, load_run, train
from tensor_memory.experiments.train.memory_use import memory_backend, memory_off
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


def test_a_model_without_memory_has_no_use(tmp_path):
    record = run(tmp_path / "run", tiny_run())
    assert record["memory"] is None
    assert memory_backend(torch.nn.Linear(2, 2)) is None
