"""tensor-memory-lab run, from the arguments to the files."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from invented_runs import sign
from tensor_memory_lab.cli import main
from tensor_memory_lab.commands.arguments import CONFIG_FIELDS, RunFlags
from tensor_memory_lab.records import config_from_dict, read_records, run_name
from tensor_memory_lab.run_config import RunConfig

SIGN = "invented_runs:sign"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # recipes of one's own add the folder


def test_a_run_takes_values_by_flag_and_leaves_its_result(capsys):
    arguments = ["--task.numbers", "3", "--model.method", "tensor", "--model.memory.grid", "3", "2"]
    arguments += ["--model.wide", "--seed", "2", "--optimizer.lr", "0.5", "--quiet"]
    assert main(["run", SIGN, *arguments, "--device", "cpu", "--results", "kept.jsonl"]) == 0
    (record,) = read_records(["runs"])
    config = config_from_dict(record["config"])
    assert (config.task.numbers, config.model.method, config.seed) == (3, "tensor", 2)
    assert (config.model.memory.grid, config.model.wide) == ((3, 2), True)
    assert config.optimizer.lr == 0.5
    assert config.budget == sign().budget
    assert Path("runs", run_name(config), "result.json").is_file()
    assert read_records(["kept.jsonl"]) == [record | {"study": "kept"}]
    assert record["settings"] == {"task.numbers": 3, "optimizer.lr": 0.5}
    assert record["variant"] == {"model.wide": True, "model.memory.grid": [3, 2]}
    shown = capsys.readouterr()
    assert "sign, tensor, seed 2: 8 parameters, 0 B of state" in shown.out
    *_, head, _, test, path = shown.out.splitlines()
    assert head.split() == ["split", "accuracy", "loss", "ceiling"]
    assert test.startswith("test ")
    assert path == str(Path("runs", run_name(config), "result.json"))
    assert shown.err == ""


def test_a_run_that_diverges_is_in_the_study():
    arguments = ["run", SIGN, "--optimizer.lr", "1e38", "--budget.steps", "6", "--quiet"]
    assert main([*arguments, "--device", "cpu", "--results", "kept.jsonl"]) == 2
    (record,) = read_records(["kept.jsonl"])
    assert record["test"] == {"test": {"accuracy": None}}


def test_a_run_that_a_study_has_already_is_refused_before_training(capsys):
    arguments = ["run", SIGN, "--device", "cpu", "--quiet", "--results", "kept.jsonl"]
    assert main(arguments) == 0
    assert main([*arguments, "--resume"]) == 0  # finished: it says the same
    assert len(read_records(["kept.jsonl"])) == 1
    assert main([*arguments, "--output", "again"]) == 2
    assert "kept.jsonl, line 1: expected no record of this config" in capsys.readouterr().err
    assert not Path("again").exists()


def test_a_run_says_at_its_start_what_to_expect_and_where_to_look(capsys):
    assert main(["run", SIGN, "--device", "cpu", "--output", "here"]) == 0
    header = capsys.readouterr().err.splitlines()
    names = [line.split()[0] for line in header]
    assert names[:5] == ["run", "device", "steps", "expected", "folder"]
    assert header[0].endswith(" sign, method base, seed 0")
    assert header[1].split()[1] == "cpu,"
    assert header[2].endswith(" 4 of 8 rows, validation every 2")
    assert "here: metrics.jsonl grows during training" in header[4]
    assert header[5] == "model      10 parameters, 0 bytes of state"


def test_a_finished_run_is_continued_only_when_told(capsys):
    arguments = ["run", SIGN, "--quiet", "--output", "here", "--device", "cpu"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys):
    assert main(["run", "bindng", "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert "recipe 'bindng': no such recipe; did you mean binding or " in error
    assert "Traceback" not in error
    assert main(["run", "--seed", "1"]) == 2
    assert "expected the name of a recipe first, got '--seed'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--task.nubmers", "3", "--task.numbers"),
        ("--model.memory.gird", "3", "--model.memory.grid"),
        ("--budget.step", "3", "--budget.steps"),
        ("--task.numbers", "0", "task.numbers: expected 1 or more, got 0"),
        ("--seed", "x", "--seed"),
        ("--seed", str(2**64), "seed: expected a number from -2**63"),
        ("--model.method", "tensr", "'base', 'tensor'"),
        ("--recipe", "other", "Unrecognized options: --recipe"),
    ],
)
def test_a_wrong_flag_ends_with_status_2_and_what_to_do(capsys, flag, value, said):
    with pytest.raises(SystemExit) as ended:
        main(["run", SIGN, flag, value])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("invented_runs:nothing", "expected a function 'nothing' in invented_runs, got None"),
        ("no_such_module:sign", "no module named 'no_such_module'; expected a Python file of the"),
        ("invented_runs:SignTaskConfig", "expected a function that returns a RunConfig, got one"),
        ("invented_runs:SignTask", "got one that needs numbers, seed, waits; name one"),
        ("no_such.module:sign", "no_such.module: no module named 'no_such'; expected a Python"),
    ],
)
def test_a_function_that_is_not_there_is_named(capsys, name, said):
    assert main(["run", name]) == 2
    assert said in capsys.readouterr().err


def test_help_shows_every_field_with_its_value_and_meaning(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", SIGN, "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("Say the sign of a number.", "--task.numbers INT", "Numbers per row.",
                  "--model.method {base,tensor}", "--budget.steps INT", "(default: 4)",
                  "--optimizer.lr FLOAT", "--resume", "--results"):  # fmt: skip
        assert words in shown


def test_flags_cover_every_field_of_a_config():
    assert {field.name for field in fields(RunConfig)} == {"recipe", *CONFIG_FIELDS}
    assert {field.name for field in fields(RunFlags)} == {*CONFIG_FIELDS, "settings"}


def test_a_results_folder_that_cannot_be_is_refused_before_anything_is_trained(capsys):
    Path("taken").write_text("a file")
    assert main(["run", SIGN, "--device", "cpu", "--results", "taken/study.jsonl"]) == 2
    error = capsys.readouterr().err
    assert "taken: cannot be made a folder for results (File exists)" in error
    Path("folder").mkdir()
    assert main(["run", SIGN, "--device", "cpu", "--results", "folder"]) == 2
    assert "folder: expected a file for results, got a folder" in capsys.readouterr().err
    Path("plan.toml").write_text("[[stage]]\n")
    for command in ("run", "sweep"):
        assert main([command, SIGN, "--device", "cpu", "--results", "plan.toml"]) == 2
        assert "plan.toml: expected a study to add records to" in capsys.readouterr().err
        assert main([command, SIGN, "--device", "cpu", "--results", "new.json"]) == 2
        assert "new.json: expected the name of a study's file" in capsys.readouterr().err
    assert Path("plan.toml").read_text() == "[[stage]]\n"
    assert not list(Path().glob("runs/*"))
