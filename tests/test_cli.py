"""The command line: what it prints, and what it returns to the shell."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensor_memory
from tensor_memory import doctor, ops
from tensor_memory.cli import FIGURES, guarded, main
from tensor_memory.inspect.figure_files import KINDS
from tensor_memory.inspect.page import LIMIT_MB

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


def scan_quickly(*args: object, backend: str, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Interpreted, the fused kernels take many seconds; whether they agree is tested elsewhere."""
    return ops.memory_scan(*args, backend="torch" if backend == "triton" else backend, **tensors)  # type: ignore[arg-type]


def test_doctor_shows_versions_devices_and_that_backends_agree(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "memory_scan", scan_quickly)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert f"tensor-memory {tensor_memory.__version__}" in printed
    assert torch.__version__.partition("+")[0] in printed
    assert "cpu: " in printed
    assert "reference     agrees with the reference" in printed
    assert "timm " in printed
    for backend in ops.BACKENDS:
        reason = ops.why_not(backend, torch.device("cpu"))
        assert backend == "auto" or (reason or f"{backend:<14}agrees") in printed
    assert printed.endswith("all well\n")


def test_doctor_fails_where_a_backend_disagrees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: object, backend: str, **tensors: torch.Tensor) -> object:
        reads, hidden, cell = scan_quickly(*args, backend=backend, **tensors)
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


def test_an_example_is_of_ids_or_of_embeddings(
    models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--dim", "4", "--vocab-size", "5"]
    assert main(["leak-check", f"{models}:floats", *both]) == 2
    assert "expected --dim or --vocab-size, got both; --dim draws" in capsys.readouterr().err


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["cure"])
    assert stopped.value.code == 2
    assert "usage: tensor-memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--dim", "-4"], ["--batch", "-1", "--dim", "4"], ["--seed", str(2**64)]]
)
def test_an_example_that_cannot_be_drawn_is_no_leak(
    models: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leak-check", f"{models}:causal", *options]) == 2
    assert "leak-check: no example can be drawn: " in capsys.readouterr().err


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: tensor-memory")


@pytest.mark.parametrize("command", ["leak-check", "inspect", "watch"])
def test_a_command_without_its_argument_is_no_success(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command])
    assert stopped.value.code == 2
    assert "the following arguments are required" in capsys.readouterr().err


def test_help_and_version_load_no_torch() -> None:
    code = """
import sys
from tensor_memory.cli import main
for command in (["--help"], ["--version"], ["doctor", "--help"], ["leak-check", "--help"]):
    try:
        main(command)
    except SystemExit as stopped:
        assert stopped.code == 0
print(sorted(name for name in ("torch", "numpy", "safetensors") if name in sys.modules))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"
    assert tensor_memory.__version__ in shown.stdout


def test_the_figures_and_the_limit_that_help_names_are_those_of_inspect() -> None:
    assert tuple(KINDS) == FIGURES
    assert LIMIT_MB == 32


def test_the_exit_status_reaches_the_shell(models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tensor-memory", "leak-check", f"{models}:leaking"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("tensor_memory", run_name="__main__")
    assert stopped.value.code == 1


def test_a_model_finds_its_neighbours_in_the_current_folder(
    models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_model.py").write_text("import models_to_check\nmake = models_to_check.causal\n")
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    assert main(["leak-check", "my_model:make"]) == 0
    assert main(["leak-check", "my_model:make"]) == 0
    assert sys.path.count(str(tmp_path)) == 1


def test_what_a_terminal_cannot_show_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr("tensor_memory.doctor.run_doctor", lambda _: print("σ") or 0)
    assert main(["doctor"]) == 0
    assert shown.buffer.getvalue() == b"\\u03c3\n"


def test_a_reader_that_has_seen_enough_is_no_mistake() -> None:
    """As `tensor-memory doctor | head -1` ends; stdout is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    code = """
import sys
from tensor_memory import cli
sys.exit(cli.guarded(lambda: print("a line") or 0))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_broken_pipe_of_another_kind_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def lose_worker() -> int:
        raise BrokenPipeError("a worker has gone")

    assert guarded(lose_worker) == 2
    assert "a worker has gone" in capsys.readouterr().err


def test_ctrl_c_ends_with_its_own_status(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert guarded(interrupt) == 130
    assert capsys.readouterr().err == "tensor-memory: interrupted\n"


def test_a_mistake_in_code_of_the_users_own_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert guarded(lambda: int("a")) == 2
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert told.endswith("tensor-memory: invalid literal for int() with base 10: 'a'\n")
