"""The command line: help at once, mistakes told without a traceback, a closed pipe in silence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensor_memory_lab.cli import COMMANDS, guarded, main
from tensor_memory_lab.terminal import print_table

OWN = ("list", "run", "sweep", "generate", "positions")


@pytest.mark.parametrize("arguments", [[], ["list"], *([name, "--help"] for name in OWN)])
def test_help_and_list_import_no_torch(arguments):
    program = (
        "import sys; from tensor_memory_lab.cli import main\n"
        f"try: status = main({arguments})\nexcept SystemExit as ended: status = ended.code\n"
        "print(status, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stderr == ""
    assert found.stdout.endswith("0 False\n")
    assert len(found.stdout.splitlines()) > 3


def test_a_command_without_its_arguments_prints_its_help_and_is_no_success(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    for command in ("run", "sweep"):
        assert main([command]) == 2
        assert f"usage: tensor-memory-lab {command} RECIPE" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    assert main(["swep"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "tensor-memory-lab: expected a command, got 'swep'; did you mean 'sweep"
    )
    assert "Traceback" not in error
    assert main(["--version"]) == 2  # near to nothing
    assert "got '--version'; `tensor-memory-lab --help`" in capsys.readouterr().err


def test_ctrl_c_ends_with_its_status(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert guarded(interrupted) == 130
    assert capsys.readouterr().err == "tensor-memory-lab: interrupted\n"


def test_what_goes_wrong_in_code_of_ones_own_is_shown_with_its_place(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # recipes of one's own add the folder
    Path("my_wrong_runs.py").write_text(
        "def broken():\n    first, second = [1]\n    return first\n"
    )
    assert main(["run", "my_wrong_runs:broken"]) == 2
    error = capsys.readouterr().err
    assert "first, second = [1]" in error
    assert error.splitlines()[-1].startswith("tensor-memory-lab: not enough values to unpack")


def test_a_reader_that_goes_away_is_no_error():
    reading, writing = os.pipe()
    listing = subprocess.Popen(
        [sys.executable, "-m", "tensor_memory_lab.cli", "list"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    os.close(reading)
    assert listing.communicate()[1] == ""
    assert listing.returncode == 141


def test_a_command_without_a_place_to_write_to_runs_all_the_same():
    command = f"{sys.executable} -m tensor_memory_lab.cli list >&- 2>&-"
    assert subprocess.run(command, shell=True).returncode == 0


ROWS = [{"name": "a [b]", "loss": "1.25", "about": "many words"}, {"name": "c", "loss": "10.5"}]


def test_a_table_in_a_file_has_a_line_per_row(capsys):
    print_table([{"name": "x" * 300, "loss": "1"}])
    assert f"{'x' * 300}" in capsys.readouterr().out
    print_table(ROWS)
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a [b]")
    assert head.index("loss") + 4 == first.index("1.25") + 4 == second.index("10.5") + 4


@pytest.mark.parametrize(("width", "lines"), [(80, 4), (24, 5), (14, 6)])
def test_a_table_fits_a_terminal_of_any_width(monkeypatch, capsys, width, lines):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(ROWS)
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, shown)) <= width
    assert len(shown) == lines
    assert "…" not in "".join(shown)
