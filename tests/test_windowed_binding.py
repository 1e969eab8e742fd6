"""The demonstration: trains both models, ends in a table, curves, a page and the next command."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "windowed_binding.py"


@pytest.fixture
def example(monkeypatch):
    """The example's module, its runs scored on few rows."""
    spec = importlib.util.spec_from_file_location("example_windowed_binding", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    whole = module.demo

    def small():
        config = whole()
        return replace(config, task=replace(config.task, valid_rows=8, test_rows=16))

    monkeypatch.setattr(module, "demo", small)
    return module


def test_the_demo_ends_in_a_table_curves_a_page_and_the_full_command(example, tmp_path, capsys):
    assert example.main(["--steps", "2", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    cells = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:4]]
        for line in out.splitlines()
        if "│" in line
    }
    assert cells["chance, 1 of 8"] == ["12.5%", "12.5%"]
    assert cells["state carried past attention"] == ["0 B", "27.0 KiB"]
    assert all(cell.endswith("%") for cell in cells["answers right"])
    assert cells["the same, memory switched off"][0] == "–"
    assert list(cells)[:2] == ["answers right", "the same, memory switched off"]
    assert "2 of 2 steps" in err
    assert (tmp_path / "curves.png").stat().st_size > 1000
    page = (tmp_path / "memory.html").read_text(encoding="utf-8")
    assert "what is at (" in page
    plan = example.FULL.split("--plan ")[1].split()[0]
    assert (EXAMPLE.parents[1] / plan).is_file()
    assert example.FULL in out


def test_a_second_demo_shows_what_the_first_has_trained(example, tmp_path, capsys):
    arguments = ["--steps", "1", "--output", str(tmp_path)]
    assert example.main(arguments) == 0
    first = capsys.readouterr().out
    assert example.main(arguments) == 0
    second = capsys.readouterr().out
    assert "training" in first
    assert second.count("trained already") == 2

    def results(text):
        return next(line for line in text.splitlines() if "answers right" in line)

    assert results(first) == results(second)


def test_a_demo_of_no_steps_is_refused(example, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(["--steps", "0"])
    assert stopped.value.code == 2
    assert "--steps: expected 1 or more, got 0" in capsys.readouterr().err
