"""tensor-memory run, sweep, list and report, from the arguments to the files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from invented_runs import not_trained, record, sign
from tensor_memory.cli import main
from tensor_memory_lab import recipes
from tensor_memory_lab.commands.arguments import CONFIG_FIELDS, RunFlags
from tensor_memory_lab.commands.sweep import sweep_command
from tensor_memory_lab.records import (
    config_from_dict,
    read_results,
    run_name,
    write_result,
)
from tensor_memory_lab.run_config import RunConfig

SIGN = "invented_runs:sign"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # recipes of one's own add the folder


@pytest.fixture
def start(tmp_path):
    """Starts the command in a process of its own, which does not outlive the test."""
    started = []

    def begin(*command):
        process = subprocess.Popen(
            [sys.executable, "-m", "tensor_memory.cli", *command],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.terminate()  # a sweep takes its workers along
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def wait_for(process, paths, count=1):
    """Wait until a living process has made so many files, however slow the machine is."""
    while len(list(Path().glob(paths))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.fixture
def only_sign(monkeypatch):
    """`sign` as the only recipe, under its plain name."""
    monkeypatch.setattr(recipes, "load_recipes", lambda: {"sign": sign})


def test_a_run_takes_values_by_flag_and_leaves_its_result(capsys):
    arguments = ["--task.numbers", "3", "--model.method", "tensor", "--model.memory.grid", "3", "2"]
    arguments += ["--model.wide", "--seed", "2", "--optimizer.lr", "0.5", "--quiet"]
    assert main(["run", SIGN, *arguments, "--device", "cpu", "--results", "kept"]) == 0
    (record,) = read_results(["runs"])
    config = config_from_dict(record["config"])
    assert (config.task.numbers, config.model.method, config.seed) == (3, "tensor", 2)
    assert (config.model.memory.grid, config.model.wide) == ((3, 2), True)
    assert config.optimizer.lr == 0.5
    assert config.budget == sign().budget
    assert Path("runs", run_name(config), "result.json").is_file()
    assert read_results(["kept"]) == [record]
    shown = capsys.readouterr().out
    assert "sign, tensor, seed 2: 8 parameters, 0 B of state" in shown
    assert "test: accuracy" in shown
    assert str(Path("runs", run_name(config), "result.json")) in shown


def test_a_finished_run_is_continued_only_when_told(capsys):
    arguments = ["run", SIGN, "--quiet", "--output", "here", "--device", "cpu"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_results_folder_that_cannot_be_is_refused_before_anything_is_trained(capsys, command):
    Path("taken").write_text("a file")
    assert main([command, SIGN, "--device", "cpu", "--results", "taken"]) == 2
    error = capsys.readouterr().err
    assert "taken: cannot be made a folder for results (File exists)" in error
    assert not list(Path().glob("runs/*"))


def test_a_sweep_with_a_wrong_device_or_folder_stops_before_its_first_run(capsys):
    assert main(["sweep", SIGN, "--device", "cpu,gpu"]) == 2
    assert "device: expected auto, cpu, cuda or cuda:N, got 'gpu'" in capsys.readouterr().err
    assert not Path("runs").exists()
    Path("taken").write_text("a file")
    assert main(["sweep", SIGN, "--device", "cpu", "--output", "taken"]) == 2
    assert "taken: cannot be made a folder for runs (File exists)" in capsys.readouterr().err


def test_a_result_that_is_cut_short_is_named_before_a_sweep_goes_on(capsys):
    folder = Path("runs", run_name(sign()))
    folder.mkdir(parents=True)
    for text, told in (('{"finished": tr', " as JSON"), ("[]", ", an object"), ("{}", " (kind")):
        (folder / "result.json").write_text(text)
        assert main(["sweep", SIGN, "--dry-run"]) == 2
        error = capsys.readouterr().err
        assert f"{folder / 'result.json'}: expected the result of a run{told}" in error
        assert "delete it: the `tensor-memory sweep` that made it" in error


def test_an_unknown_recipe_is_refused_with_the_nearest(capsys, only_sign):
    assert main(["run", "sing", "--seed", "1"]) == 2
    error = capsys.readouterr().err
    assert "recipe 'sing': no such recipe; did you mean sign? `tensor-memory list`" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--task.nubmers", "3", "--task.numbers"),
        ("--model.memory.gird", "3", "--model.memory.grid"),
        ("--budget.step", "3", "--budget.steps"),
        ("--task.numbers", "0", "task.numbers: expected 1 or more, got 0"),
        ("--seed", "x", "--seed"),
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
        (
            "invented_runs:SignTaskConfig",
            "expected a function that returns a RunConfig, got one that",
        ),
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


@pytest.mark.parametrize("command", ["run", "sweep", "report", "list"])
def test_every_command_has_help(capsys, command):
    asked = [command, "--help"]
    if command == "run":
        assert main(asked) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            main(asked)
        assert ended.value.code == 0
    assert f"usage: tensor-memory {command}" in capsys.readouterr().out


def test_a_command_without_its_recipe_says_what_it_expects(capsys):
    assert main(["run"]) == 2
    assert "usage: tensor-memory run RECIPE" in capsys.readouterr().out
    assert main(["run", "--seed", "1"]) == 2
    assert "expected the name of a recipe first, got '--seed'" in capsys.readouterr().err
    assert main(["sweep", "--over", "seed=1"]) == 2
    assert "expected the names of recipes first, or --plan" in capsys.readouterr().err


def test_flags_cover_every_field_of_a_config():
    assert {field.name for field in fields(RunConfig)} == {"recipe", *CONFIG_FIELDS}
    assert {field.name for field in fields(RunFlags)} == {*CONFIG_FIELDS, "settings"}


def test_list_shows_each_recipe_with_its_first_line_and_time(capsys, monkeypatch):
    from tensor_memory_lab.commands import listing

    monkeypatch.setattr(listing, "load_recipes", lambda: {"sign": sign, "b": lambda: None})
    monkeypatch.setitem(recipes.EXPECTED, "sign", "1 s on a CPU")
    assert main(["list"]) == 0
    assert capsys.readouterr().out == "b\nsign  Say the sign of a number. (1 s on a CPU)\n"


def test_a_name_is_registered_once(monkeypatch):
    monkeypatch.setattr(recipes, "RECIPES", {})
    recipes.recipe("sign")(sign)
    with pytest.raises(ValueError, match="recipe 'sign': expected a new name, got one that exists"):
        recipes.recipe("sign")(sign)


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "needy.py").write_text("import a_package_nobody_has\n")
    assert main(["run", "needy:recipe"]) == 2
    assert "pip install 'tensor-memory[experiments]'" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["list"]) == 2
    assert "pip install 'tensor-memory[experiments]'" in capsys.readouterr().err


def test_a_sweep_runs_its_grid_skips_what_is_done_and_reports_failures(capsys):
    grid = [SIGN, "--over", "task.trouble=raise,die,none", "--jobs", "2", "--results", "kept"]
    assert sweep_command([*grid, "--device", "cpu"], trainer=not_trained) == 1
    out = capsys.readouterr()
    assert "3 runs, 0 of them finished already" in out.out
    assert "3 to do with --jobs 2: nothing is known of their time; metrics.jsonl in" in out.out
    assert "1 run done, 0 skipped, 2 failed" in out.out
    assert "ValueError: task.trouble: expected none, got what was asked for" in out.err
    assert "its process was killed by signal 9" in out.err
    (record,) = read_results(["kept"])
    assert record["shared_device"]
    assert record["device"] == "cpu"
    assert any("Traceback" in path.read_text() for path in Path("runs").glob("*.log"))

    again = [SIGN, "--over", "seed=0,1", "--results", "kept"]
    assert sweep_command([*again, "--dry-run"], trainer=not_trained) == 0
    first, second, count, expected = capsys.readouterr().out.splitlines()
    assert first.startswith("finished ")
    assert second.startswith("new ")
    assert count == "2 runs, 1 of them finished"
    assert expected.startswith("1 to do with --jobs 1: about 0:00:")
    assert sweep_command(again, trainer=not_trained) == 0
    assert "1 run done, 1 skipped, 0 failed" in capsys.readouterr().out
    alone = {record["seed"]: not record["shared_device"] for record in read_results(["kept"])}
    assert alone == {0: False, 1: True}


def test_a_result_of_an_older_version_counts_as_the_run_it_is_of(capsys):
    old = record(sign())
    del old["config"]["speed"]  # a field that has come since, and is at its default
    Path("kept").mkdir()
    Path("kept/under-its-old-name.json").write_text(json.dumps(old))
    assert sweep_command([SIGN, "--results", "kept", "--dry-run"], trainer=not_trained) == 0
    assert capsys.readouterr().out.startswith("finished ")
    other = ["--speed", "eager"]
    assert sweep_command([SIGN, "--results", "kept", "--dry-run", *other]) == 0
    assert capsys.readouterr().out.startswith("new ")


def test_a_run_that_takes_too_long_is_ended_and_the_others_go_on(capsys):
    Path("plan.toml").write_text(
        f"[[stage]]\nrecipes = ['{SIGN}']\nover = {{'task.trouble' = ['sleep']}}\ntimeout = 1\n"
        f"[[stage]]\nrecipes = ['{SIGN}']\nover = {{'task.trouble' = ['none']}}\ntimeout = 300\n"
    )
    assert sweep_command(["--plan", "plan.toml", "--seed", "4"], trainer=not_trained) == 1
    out = capsys.readouterr()
    assert "ended after the 1 s it was given" in out.err
    assert "1 run done, 0 skipped, 1 failed" in out.out
    (record,) = read_results(["runs"])
    assert record["seed"] == 4


def test_a_plan_and_recipes_together_are_refused(capsys):
    assert main(["sweep", SIGN, "--plan", "plan.toml"]) == 2
    assert "expected recipes and --over, or --plan, got both" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--resume", "--from-previous", "--quiet"])
def test_a_sweep_refuses_flags_of_run_that_would_do_nothing(capsys, flag):
    assert main(["sweep", SIGN, "--dry-run", flag]) == 2
    assert "a sweep resumes what is unfinished by itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--jobs", "0", "--jobs: expected 1 or more, got 0"),
        ("--timeout", "-3", "--timeout: expected seconds, more than 0, got -3"),
        ("--timeout", "soon", "--timeout: expected seconds, more than 0, got soon"),
    ],
)
def test_a_sweep_without_jobs_or_time_is_refused(capsys, flag, value, said):
    with pytest.raises(SystemExit):
        main(["sweep", SIGN, flag, value])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_saves_its_run_and_would_resume_it(tmp_path, capsys, start, sent):
    command = ["sweep", SIGN, "--device", "cpu", "--budget.steps", "10000000"]
    command += ["--budget.evaluate-every", "100", "--budget.checkpoint-every", "10000000"]
    process = start(*command)
    wait_for(process, "runs/*/metrics.jsonl")
    process.send_signal(sent)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error.endswith("sweep: interrupted; the same command continues it\n")
    (log,) = tmp_path.glob("runs/*.log")
    assert "saved step" in log.read_text()
    assert "Traceback" not in error + log.read_text()
    (folder,) = (path for path in tmp_path.glob("runs/*") if path.is_dir())
    assert list(folder.glob("checkpoints/step-*"))
    assert not (folder / "result.json").exists()
    assert main([*command, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"unfinished {folder.name}")


def test_workers_whose_sweep_was_killed_save_their_runs_and_end(tmp_path, start):
    command = ["sweep", SIGN, "--device", "cpu", "--budget.steps", "10000000"]
    process = start(*command, "--budget.checkpoint-every", "10000000")
    wait_for(process, "runs/*/metrics.jsonl")
    process.kill()
    (log,) = tmp_path.glob("runs/*.log")
    while "saved step" not in log.read_text():  # as long as a test may take
        time.sleep(0.05)
    assert list(tmp_path.glob("runs/*/checkpoints/step-*"))
    process.communicate()


def test_workers_that_are_stopped_while_they_start_go_without_a_word(start):
    command = ["sweep", SIGN, "--over", "seed=0,1", "--jobs", "2", "--device", "cpu"]
    process = start(*command, "--budget.steps", "10000000")
    wait_for(process, "runs/*.log", count=2)
    process.send_signal(signal.SIGINT)  # they are importing now
    _, error = process.communicate()
    assert process.returncode == 130
    assert error == "sweep: interrupted; the same command continues it\n"


def test_runs_of_the_real_loop_end_in_a_report(capsys):
    grid = ["sweep", SIGN, "--over", "seed=0,1", "--over", "model.method=base,tensor"]
    assert main([*grid, "--device", "cpu", "--results", "kept"]) == 0
    assert main(["report", "kept", "--output", "shown"]) == 0
    shown = capsys.readouterr().out
    assert "| base | 2 |" in shown
    assert "| tensor | 2 |" in shown
    assert "4 runs, written to shown/report.md" in shown
    assert main(["report", "kept", "--output", "shown/report.md"]) == 2
    assert "shown/report.md: cannot be made a folder for the report" in capsys.readouterr().err
    assert Path("shown", "sign-curves.svg").is_file()
    assert not list(Path("runs").glob("*/checkpoints/step-*"))
    record = json.loads(next(Path("kept").glob("*.json")).read_text())
    assert record["finished"]


def test_a_report_of_nothing_says_where_it_looked(capsys):
    Path("empty").mkdir()
    assert main(["report", "empty"]) == 2
    assert "expected results of runs, found none in empty" in capsys.readouterr().err


def test_a_report_counts_runs_that_left_no_result(capsys):
    assert main(["run", SIGN, "--quiet", "--output", "runs/done"]) == 0
    assert main(["run", SIGN, "--quiet", "--output", "runs/begun", "--seed", "1"]) == 0
    Path("runs/begun/result.json").unlink()
    capsys.readouterr()
    assert main(["report", "runs"]) == 0
    told = "1 run without a result is left out, interrupted, failed or still going: runs/begun."
    assert told in capsys.readouterr().out
    assert told in Path("report/report.md").read_text()
    Path("runs/done/result.json").unlink()
    assert main(["report", "runs"]) == 2
    assert "2 runs without a result are left out" in capsys.readouterr().err


def test_what_goes_wrong_in_code_of_ones_own_is_shown_with_its_place(capsys, tmp_path):
    Path("my_wrong_runs.py").write_text(
        "from dataclasses import replace\nfrom invented_runs import sign\n\n\n"
        "def broken():\n    first, second = [sign()]\n    return first\n"
    )
    assert main(["run", "my_wrong_runs:broken"]) == 2
    error = capsys.readouterr().err
    assert "first, second = [sign()]" in error
    assert error.splitlines()[-1] == (
        "tensor-memory: not enough values to unpack (expected 2, got 1)"
    )


def test_a_result_that_cannot_be_copied_costs_its_run_alone(capsys, monkeypatch):
    def full(folder, record):
        if record["seed"] == 0:
            raise OSError(28, "No space left on device", str(folder))
        return write_result(folder, record)

    monkeypatch.setattr("tensor_memory_lab.commands.sweep.write_result", full)
    runs = [SIGN, "--over", "seed=0,1", "--results", "kept"]
    assert sweep_command(runs, trainer=not_trained) == 1
    out = capsys.readouterr()
    assert "1 run done, 0 skipped, 1 failed" in out.out
    assert "its result could not be written into kept ([Errno 28]" in out.err
    assert [record["seed"] for record in read_results(["kept"])] == [1]
