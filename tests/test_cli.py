"""The command line: what it prints, and what it returns to the shell."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensor_memory
from tensor_memory import doctor, ops
from tensor_memory.cli import main

MODELS = """
import torch
from torch import nn


class Sums(nn.Module):
    def __init__(self, ahead):
        super().__init__()
        self.embedding, self.ahead = nn.Embedding(20, 4), ahead

    def forward(self, ids):
        x = self.embedding(ids)
        return x - x.mean(1, keepdim=True) if self.ahead else x.cumsum(1)


def causal():
    return Sums(False)


def leaking():
    return Sums(True)


def floats():
    return nn.Linear(4, 4)


def with_example():
    return (lambda x: x.flip(1)), torch.randn(1, 6, 4)


class Nested:
    factory = staticmethod(causal)


number = 3


def nothing():
    return 3


def crashing():
    raise RuntimeError("no weights here")


class Crashes(nn.Module):
    def forward(self, ids):
        raise RuntimeError("too large for this machine")


def crashes_when_called():
    return Crashes(), torch.randn(1, 6, 4)


def deaf():
    return (lambda x: torch.ones_like(x)), torch.randn(1, 6, 4)


def broken():
    raise ImportError("the model needs a package that is missing")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "models_to_check.py").write_text(MODELS)
    (tmp_path / "crashing_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_to_check", raising=False)
    return "models_to_check"


def test_doctor_shows_versions_devices_and_that_backends_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"tensor-memory {tensor_memory.__version__}" in printed
    assert torch.__version__.partition("+")[0] in printed
    assert "cpu: " in printed
    assert "reference     agrees with the reference" in printed
    assert "timm          not installed" in printed or "timm" in printed
    for backend in ops.BACKENDS:
        reason = ops.why_not(backend, torch.device("cpu"))
        assert backend == "auto" or (reason or f"{backend:<14}agrees") in printed
    assert printed.endswith("all well\n")


def test_doctor_fails_where_a_backend_disagrees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: object, backend: str, **tensors: torch.Tensor) -> object:
        backend = "torch" if backend == "triton" else backend  # interpreted, it takes seconds
        reads, hidden, cell = ops.memory_scan(*args, backend=backend, **tensors)  # type: ignore[arg-type]
        return reads, hidden * 1.01 if hidden.dtype == torch.float32 else hidden, cell

    monkeypatch.setattr(doctor, "memory_scan", wrong)
    assert main(["doctor"]) == 1
    assert "reference     DISAGREES with the reference" in capsys.readouterr().out


def test_leak_check_tells_causal_from_leaking(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leak-check", f"{models}:causal"]) == 0
    assert "no leak" in capsys.readouterr().out
    assert main(["leak-check", f"{models}:leaking", "--length", "8"]) == 1
    assert main(["leak-check", f"{models}:floats", "--dim", "4"]) == 0
    assert main(["leak-check", f"{models}:with_example"]) == 1
    assert main(["leak-check", f"{models}:Nested.factory", "--vocab-size", "10"]) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("models_to_check", "expected package.module:factory, got 'models_to_check'"),
        ("models_to_check:absent", "module models_to_check has no absent"),
        ("models_to_check:number", "to be a function that returns a model, got int"),
        ("models_to_check:nothing", "returns a model or (model, example), got int"),
        ("models_to_check:floats", "pass --vocab-size for ids or --dim for embeddings"),
        ("models_to_check:broken", "the model needs a package that is missing"),
        ("models_to_check:crashing", "crashing raised RuntimeError: no weights here"),
        ("models_to_check:crashes_when_called", "RuntimeError: too large for this machine"),
        ("models_to_check:deaf", "no output moved when its inputs did, so nothing is shown"),
        ("crashing_module:factory", "crashing_module cannot be imported: ZeroDivisionError"),
        ("no_such_module:factory", "No module named 'no_such_module'"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(
    name: str, message: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leak-check", name]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tensor-memory: ")
    assert message in told
    assert "Traceback" not in told


def test_an_unknown_command_and_no_command_are_usage_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["cure"], []):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert "usage: tensor-memory" in capsys.readouterr().err


def test_bench_gets_the_arguments_that_follow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = type(sys)("tensor_memory_lab.bench")
    seen: list[list[str]] = []
    bench.main = lambda argv: seen.append(argv) or 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensor_memory_lab.bench", bench)
    assert main(["bench", "scan", "--help", "--steps", "3"]) == 5
    assert seen == [["scan", "--help", "--steps", "3"]]


def test_the_version_and_the_exit_status_reach_the_shell(models: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tensor_memory.cli"]
    shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == tensor_memory.__version__
    leaking = subprocess.run([*command, "leak-check", f"{models}:leaking"], cwd=tmp_path)
    assert leaking.returncode == 1


def test_what_a_terminal_cannot_show_is_written_out(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["list"]) == 0
    assert b"binding" in shown.buffer.getvalue()
    assert b"\\u" in shown.buffer.getvalue()


def test_a_reader_that_has_seen_enough_is_no_mistake():
    """As `tensor-memory list | head -1` ends; stdout is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tensor_memory", "list"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_broken_pipe_of_another_kind_is_told(monkeypatch, capsys):
    def doctor():
        raise BrokenPipeError("a worker has gone")

    monkeypatch.setattr("tensor_memory.cli.run_doctor", doctor)
    assert main(["doctor"]) == 2
    assert "a worker has gone" in capsys.readouterr().err
