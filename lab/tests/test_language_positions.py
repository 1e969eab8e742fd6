"""Loss against position: the same tokens at every distance, with what was carried to them."""

import json
import math
import statistics

import pytest
import torch

from tensor_memory import MemoryConfig
from tensor_memory_lab.cli import main
from tensor_memory_lab.language_runs import loss_by_position, window_losses
from tensor_memory_lab.models.language import LanguageModel, LanguageModelConfig
from tensor_memory_lab.records import read_records
from tensor_memory_lab.run_config import RunConfig
from tiny_text import loud, text_task, write_text
from tolerances import assert_same

WORDS, N = 11, 6


def made(method, *, carried=True, tokens=45, length=N):
    torch.manual_seed(0)
    task = text_task(torch.randint(WORDS, (tokens,)), WORDS, length=length, carried=carried)
    config = RunConfig(
        recipe="language",
        task=task.config,
        model=LanguageModelConfig(
            method=method, dim=8, layers=2, heads=2, dropout=0.1, window=3,
            memory=MemoryConfig(channels=4, grid=(3, 3), chunk_size=4),
        ),
    )  # fmt: skip
    model = LanguageModel(config.model, WORDS, length, carried=True)
    return config, task, loud(model).double().eval()


@pytest.mark.parametrize("method", ["tensor-local", "linear", "xl", "local"])
@pytest.mark.parametrize("size", [2, 32])
def test_every_window_is_scored_after_each_length_of_history(method, size):
    config, task, model = made(method)
    H, tokens = 3, task.splits["test"]
    found = window_losses(config, task, model, windows=H, size=size)
    W = len(tokens) // N
    assert found.shape == (H, W - H + 1, N)
    before = torch.cat([torch.tensor([task.vocabulary.start]), tokens[:-1]])
    for j in range(H - 1, W):
        for h in range(H):
            carry = None
            for window in range(j - h, j + 1):
                part = slice(window * N, (window + 1) * N)
                given = {"ids": before[None, part], "targets": tokens[None, part]}
                outputs, carry = model(given, carry)
            assert_same(found[h, j - H + 1], outputs["nll"][0].detach())


def test_a_model_that_carries_nothing_gains_nothing():
    record = loss_by_position(*made("local"), step=2, windows=4)
    assert [window["gain"] for window in record["windows"]] == [0.0] * 4
    record = loss_by_position(*made("tensor-local"), step=2, windows=4)
    assert all(window["gain"] != 0 for window in record["windows"][1:])


def test_a_record_holds_means_over_windows_and_over_parts_of_them():
    config, task, model = made("tensor-local")
    record = loss_by_position(config, task, model, step=2, windows=4)
    nll = window_losses(config, task, model, windows=4, size=32)
    assert [w["history"] for w in record["windows"]] == [0, 6, 12, 18]
    assert record["windows"][2]["loss"] == pytest.approx(nll[2].mean().item())
    assert record["windows"][2]["gain"] == pytest.approx((nll[0] - nll[2]).mean().item())
    assert record["positions"][:2] == [0.5, 1.5]
    assert record["losses"][:2] == pytest.approx(nll[0, :, :2].mean(0).tolist())
    assert record["tokens"] == 4 * N
    assert record["step"] == 2
    assert {"commit", "versions", "hardware"} <= record.keys()
    assert json.loads(json.dumps(record)) == record


def test_a_window_longer_than_its_parts_is_cut_into_eight_at_whole_tokens():
    config, task, model = made("tensor-local", tokens=60, length=12)
    record = loss_by_position(config, task, model, step=2, windows=2)
    nll = window_losses(config, task, model, windows=2, size=32)
    assert record["positions"][:3] == [0.5, 2.0, 3.5]  # the first token, two, one
    assert record["positions"][8:10] == [12.5, 14.0]
    assert record["losses"][8] == pytest.approx(nll[1, :, 0].mean().item())
    assert record["losses"][9] == pytest.approx(nll[1, :, 1:3].mean().item())
    assert len(record["losses"]) == len(record["positions"]) == 2 * 8


def test_a_gain_stands_with_its_error_over_windows():
    config, task, model = made("tensor-local")
    record = loss_by_position(config, task, model, step=2, windows=4)
    nll = window_losses(config, task, model, windows=4, size=32).mean(2)
    gains = (nll[0] - nll[3]).tolist()
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    assert record["windows"][3]["gain_error"] == pytest.approx(error)
    one = loss_by_position(config, task, model, step=2, windows=7)  # of 7: nothing to spread
    assert [window["gain_error"] for window in one["windows"]] == [0.0] * 7
    (alone,) = loss_by_position(config, task, model, step=2, windows=1, size=1)["windows"]
    assert (alone["history"], alone["gain"], alone["gain_error"]) == (0, 0.0, 0.0)


def test_a_text_too_short_is_refused():
    with pytest.raises(ValueError, match="at least 9 windows of 6 tokens, got 7; ask for fewer"):
        loss_by_position(*made("local"), step=2, windows=9)


@pytest.mark.parametrize("option", ["--times", "--rows"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "²"])
def test_a_count_that_is_none_is_refused_by_the_name_of_its_option(capsys, option, value):
    with pytest.raises(SystemExit):
        main(["positions", "run", f"{option}={value}"])
    assert f"argument {option}: expected 1 or more, got {value}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["positions", "generate"])
def test_a_device_that_is_not_there_is_told(capsys, command):
    assert main([command, "run", "--device", "gpu"]) == 2
    assert "device: expected auto, cpu, cuda or cuda:N, got 'gpu'" in capsys.readouterr().err


def test_the_command_measures_draws_and_records(tmp_path, capsys):
    data = write_text(tmp_path / "data")
    flags = (
        f"--task.data-dir {data} --task.corpus any --task.length 16 --model.dim 16 "
        "--model.layers 2 --model.heads 2 --model.memory.grid 3 3 --model.memory.channels 4 "
        "--budget.steps 2 --budget.batch-size 4 --precision float32 --device cpu --quiet"
    ).split()
    for recipe, method in (("language-carried", "tensor-local"), ("language", "local")):
        output = ["--model.method", method, "--output", f"{tmp_path}/{method}"]
        assert main(["run", recipe, *flags, *output]) == 0
    moved = data.rename(tmp_path / "moved")
    command = ["positions", f"{tmp_path}/tensor-local", f"{tmp_path}/local", "--device", "cpu"]
    out = ["--output", f"{tmp_path}/out.jsonl", "--data-dir", str(moved)]
    assert main([*command, *out]) == 0
    assert "history 240" in capsys.readouterr().out
    records = read_records([tmp_path / "out.jsonl"])
    assert {record["method"] for record in records} == {"local", "tensor-local"}
    assert all(len(record["windows"]) == 16 for record in records)
    assert all(record["step"] == 2 for record in records)
    assert {record["config"]["task"]["data_dir"] for record in records} == {"data"}  # no path
    assert (tmp_path / "out.png").is_file()
    assert main([*command, *out, "--rows", "3"]) == 0  # of a batch, not of the text
    again = read_records([tmp_path / "out.jsonl"])[2:]
    for record, other in zip(records, again, strict=True):
        assert record["tokens"] == other["tokens"]
        assert_same(torch.tensor(record["losses"]), torch.tensor(other["losses"]))
    (moved / "train.txt").write_text(" other words \n" * 60)
    assert main([*command, *out]) == 2
    assert "expected the text this run was trained on" in capsys.readouterr().err
    taken = tmp_path / "taken.toml"
    taken.write_text("[[stage]]\n")
    assert main([*command, "--output", str(taken), "--data-dir", str(moved)]) == 2
    assert "taken.toml: expected a study to add records to" in capsys.readouterr().err
