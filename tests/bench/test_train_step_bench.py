"""The lean models are what they claim to be; no step is timed before its scan agrees."""

import json

import pytest
import torch
import torch.nn.functional as F

from tensor_memory import bench, find_leak, ops
from tensor_memory.bench import lean_models, train_step
from tensor_memory.bench.lean_models import LinearCrossEntropy, give_memory


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
    honest = ops.memory_scan

    def planted(*arguments, **options):
        reads, hidden, cell = honest(*arguments, **options)
        return reads * 1.01, hidden, cell

    monkeypatch.setattr(ops, "memory_scan", planted)
    status, record = run_quick(tmp_path, "--models", "language")
    assert status == 1
    assert "ms" not in record["result"]["models"]["language"]
    assert "language DISAGREES with the reference: reads" in capsys.readouterr().err


def test_a_model_that_dies_is_recorded_and_the_other_goes_on(tmp_path, monkeypatch):
    def dying(self, clips, targets):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(lean_models.VideoModel, "forward", dying)
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
    host = lean_models.HOSTS[name]()
    with torch.device("meta"):
        model = host.build()
        base = sum(p.numel() for p in model.parameters())
        give_memory(model, host.dim, host.memory, range(host.layers), gate_init=0.0, dropout=0.0)
        full = sum(p.numel() for p in model.parameters())
    assert base == pytest.approx(without, rel=1e-4)
    assert full == pytest.approx(with_memory, rel=1e-3)  # the published heads have biases


def test_scans_have_the_published_lengths():
    assert lean_models.language_host().steps(16) == 32
    assert lean_models.video_host().steps(8) == 8 * 25


def test_the_video_models_scan_is_as_long_as_was_compared(monkeypatch):
    seen = []
    honest = ops.scan_checked

    def watching(request, *options):
        seen.append(tuple(request.write_at.shape[:2]))
        return honest(request, *options)

    monkeypatch.setattr("tensor_memory.module.scan_checked", watching)
    host = lean_models.video_host(quick=True)
    model = host.build()
    give_memory(model, host.dim, host.memory, range(host.layers), gate_init=0.0, dropout=0.0)
    model(*host.draw(torch.device("cpu")))
    assert seen == [(host.batch, host.steps(host.memory.chunk_size))] * host.layers


def test_the_language_model_with_memory_does_not_look_ahead():
    host = lean_models.language_host(quick=True)
    model = host.build()
    give_memory(model, host.dim, host.memory, range(host.layers), gate_init=0.0, dropout=0.0)
    model.norm = torch.nn.Identity()  # catch the tokens before they meet the loss
    ids, targets = host.draw(torch.device("cpu"))

    def features(ids):
        caught = []
        handle = model.norm.register_forward_hook(lambda m, given, out: caught.append(out))
        model(ids, targets[: ids.shape[0]])
        handle.remove()
        return caught[0]

    model.eval()
    report = find_leak(features, ids)
    assert not report, report


@pytest.mark.parametrize("part", [3, 5, 100])
def test_the_lean_loss_and_its_gradients_are_the_plain_ones(monkeypatch, part):
    monkeypatch.setattr(lean_models, "LOSS_TOKENS", part)
    h = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (10,))
    lean = LinearCrossEntropy.apply(h, weight, targets)
    plain = F.cross_entropy(h @ weight.t(), targets)
    torch.testing.assert_close(lean.double(), plain, rtol=1e-6, atol=1e-6)
    for got, expected in zip(
        torch.autograd.grad(2 * lean, (h, weight)),
        torch.autograd.grad(2 * plain, (h, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_step_trains():
    host = lean_models.language_host(quick=True)
    model = host.build()
    step = train_step.Training(model, host.draw(torch.device("cpu")), torch.device("cpu"))
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
