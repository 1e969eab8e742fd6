"""The file that a user copies: its commands are ones that work, for two steps."""

import re
import sys
from pathlib import Path

import pytest

from tensor_memory_lab.cli import main
from tensor_memory_lab.records import read_result

FOLDER = Path(__file__).parents[1] / "examples"
RECIPE = "own_task_and_method:first_symbol"
TWO_STEPS = "--budget.steps 2 --task.valid-rows 8 --task.test-rows 8 --device cpu --quiet"


@pytest.fixture(autouse=True)
def beside_the_file(monkeypatch):
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", list(sys.path))  # recipes of one's own add the folder


@pytest.mark.parametrize("method", ["nothing", "average", "memory"])
def test_two_steps_of_every_method(tmp_path, method):
    flags = [*TWO_STEPS.split(), "--task.gap", "3", "--model.method", method]
    assert main(["run", RECIPE, *flags, "--output", str(tmp_path)]) == 0
    record = read_result(tmp_path / "result.json")
    assert (record["recipe"], record["method"], record["steps"]) == ("first-symbol", method, 2)
    assert record["settings"]["task.gap"] == 3
    assert record["variant"] == {}
    assert (record["state_bytes"] > 0) == (method != "nothing")


def test_an_error_names_the_command_that_works(capsys):
    with pytest.raises(SystemExit):
        main(["run", RECIPE, "--task.gap", "-1"])
    assert f"tensor-memory-lab run {RECIPE} --help" in " ".join(capsys.readouterr().err.split())


def test_the_sweep_that_the_file_shows_lists_nine_runs(capsys):
    text = (FOLDER / "own_task_and_method.py").read_text(encoding="utf-8")
    (command,) = re.findall(r"tensor-memory-lab (sweep .*?)\n    tensor", text, re.S)
    assert main([*command.replace("\\\\", "").split(), "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("9 runs, 0 of them finished\n")
