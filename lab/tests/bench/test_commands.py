"""The benchmarks are found by name, and imported only when one is asked for."""

import importlib
import subprocess
import sys

import pytest

from tensor_memory_lab import bench


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_every_benchmark_is_where_the_table_says(name):
    module, function = bench.COMMANDS[name][0].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_arguments_after_the_name_reach_the_benchmark(monkeypatch):
    received = []
    monkeypatch.setattr(
        "tensor_memory_lab.bench.stream.main", lambda argv: received.append(argv) or 7
    )
    assert bench.main(["stream", "--tokens", "5"]) == 7
    assert received == [["--tokens", "5"]]


def test_help_lists_what_there_is(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert all(shows in out for _, shows in bench.COMMANDS.values())


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_help_shows_no_default_that_is_no_value(name, capsys):
    with pytest.raises(SystemExit):
        bench.main([name, "--help"])
    assert "(default: None)" not in " ".join(capsys.readouterr().out.split())


def test_an_unknown_name_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["nonesuch"])
    assert stopped.value.code == 2
    assert "'nonesuch' (choose from" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    command = [sys.executable, "-m", "tensor_memory_lab.bench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the benchmark to run" in done.stdout
