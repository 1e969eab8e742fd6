"""The hosts are what they claim to be; no step is timed before its scan agrees."""

import json

import pytest
import torch

from tensor_memory import memory_scan
from tensor_memory_lab import bench
from tensor_memory_lab.bench import agreement, hosts, train_step
from tensor_memory_lab.bench.timing import QUICK
from tensor_memory_lab.models.video import VideoModel


def run_quick(tmp_path, *arguments):
    output = tmp_path / "step.json"
    options = ["--device", "cpu", "--quick", "--output", str(output)]
    status = bench.main(["train-step", *options, *arguments])
    return status, json.loads(output.read_text())


def test_a_quick_run_writes_all_that_is_promised(tmp_path, capsys):
    status, record = run_quick(tmp_path)
    assert status == 0
    assert {"commit", "versions", "hardware", "date", "seed", "config"} < record.keys()
    assert record["result"]["models"].keys() == {"language", "video"}
    for row in record["result"]["models"].values():
        assert row["agreement"]["passed"]
        without, with_it = row["ms"]["base"]["median"], row["ms"]["memory"]["median"]
        assert row["added_ms"] == pytest.approx(with_it - without)
        assert row["ratio"] == pytest.approx(with_it / without)
        assert row["parameters"]["memory"] > row["parameters"]["base"]
        assert row["memory"]["backend"] == "torch"
        assert row["layers_with_memory"] == [0, 1]
        assert all(loss > 0 for loss in row["loss_at_the_end"].values())
    assert record["result"]["aims"] == []  # they are set for an H200
    assert "with memory, ms" in capsys.readouterr().out
    assert bench.main(["table", str(tmp_path / "step.json")]) == 0
    assert "| language |" in capsys.readouterr().out


def test_a_wrong_scan_gets_no_speed_and_status_1(tmp_path, monkeypatch, capsys):
    honest = agreement.memory_scan

    def planted(*arguments, backend, **options):
        reads, hidden, cell = honest(*arguments, backend=backend, **options)
        return reads if backend == "reference" else reads * 1.01, hidden, cell

    monkeypatch.setattr(agreement, "memory_scan", planted)
    status, record = run_quick(tmp_path, "--models", "language")
    assert status == 1
    assert "ms" not in record["result"]["models"]["language"]
    assert "language DISAGREES with the reference: reads" in capsys.readouterr().err


def test_a_model_that_dies_is_recorded_and_the_other_goes_on(tmp_path, monkeypatch):
    def dying(self, batch):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(VideoModel, "forward", dying)
    status, record = run_quick(tmp_path)
    assert status == 1
    models = record["result"]["models"]
    assert models["video"] == {"errors": {"all": "OutOfMemoryError: no room"}}
    assert "ms" in models["language"]


def test_options_reach_the_memory(tmp_path):
    options = ["--chunk-size", "5", "--reads", "token", "--layers-with-memory", "1"]
    status, record = run_quick(tmp_path, "--backend", "reference", *options)
    assert status == 0
    for row in record["result"]["models"].values():
        memory = row["memory"]
        assert (memory["chunk_size"], memory["reads"], memory["backend"]) == (
            5,
            "token",
            "reference",
        )
        assert row["layers_with_memory"] == [1]
        assert row["scan"]["reads"] == 5


@pytest.mark.parametrize(
    ("name", "without", "with_memory"),
    [("language", 25_912_704, 28_314_156), ("video", 5_014_373, 5_608_623)],
)
def test_full_size_models_have_the_published_numbers_of_weights(name, without, with_memory):
    host = hosts.HOSTS[name]()
    with torch.device("meta"):
        models = host.build(None, ()), host.build(host.memory, range(host.layers))
    base, full = (sum(p.numel() for p in model.parameters()) for model in models)
    assert base == pytest.approx(without, rel=1e-4)
    assert full == pytest.approx(with_memory, rel=1e-3)  # the published heads have biases


def test_scans_have_the_published_lengths():
    assert hosts.language_host().steps(16) == 32
    assert hosts.video_host().steps(8) == 8 * 25


def test_the_video_models_scan_is_as_long_as_was_compared(monkeypatch):
    seen = []

    def watching(read_at, write_at, *others, **options):
        seen.append(tuple(write_at.shape[:2]))
        return memory_scan(read_at, write_at, *others, **options)

    monkeypatch.setattr("tensor_memory.tensor.memory_scan", watching)
    host = hosts.video_host(quick=True)
    model = host.build(host.memory, range(host.layers))
    host.loss(model, host.draw(torch.device("cpu")))
    assert seen == [(host.batch, host.steps(host.memory.chunk_size))] * host.layers


def test_a_step_trains():
    host, cpu = hosts.language_host(quick=True), torch.device("cpu")
    model = host.build(host.memory, [0])
    step = train_step.Training(host, model, host.draw(cpu), cpu)
    before = model.word.weight.detach().clone()
    step()
    assert not torch.equal(before, model.word.weight)
    assert model.word.weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers-with-memory", "9"], "--layers-with-memory: expected indices from 0 to 7 for"),
        (["--chunk-size", "0"], "--chunk-size: expected at least 1, got 0"),
        (["--models", "audio"], "invalid choice: 'audio'"),
        (["--reads", "never"], "invalid choice: 'never'"),
        (["--backend", "none"], "--backend: expected one of reference, torch, triton, got 'none'"),
    ],
)
def test_a_bad_option_is_refused_before_any_work(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["train-step", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_steps_on_one_thread_run_their_backward_there_and_leave_no_trace():
    cpu = torch.device("cpu")
    threaded = []
    step = lambda: threaded.append(torch._C._is_multithreading_enabled())  # noqa: E731
    timed = train_step.measure_on_one_thread({"base": step, "memory": step}, cpu, QUICK)
    assert timed.keys() == {"base", "memory"}
    assert set(threaded) == {False}
    assert torch._C._is_multithreading_enabled()
