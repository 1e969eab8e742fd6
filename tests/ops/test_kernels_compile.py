"""Every kernel compiles, which the interpreter cannot tell; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the fused backend needs triton")
PROGRAM = Path(__file__).with_name("compile_kernels.py")
SHARED_MEMORY = 227 * 1024  # bytes that one program can have on Hopper


def compile_kernels(folder: Path, *extent: str) -> dict[str, Any]:
    """What the program found; it fails where a kernel does not compile."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "TRITON_DEFAULT_FP_FUSION": "1",  # what 3.9 does unasked, with a warning
    }
    command = [sys.executable, "-W", "error", PROGRAM, folder / "results.json", *extent]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


def test_every_statement_of_every_kernel_compiles(tmp_path):
    left_out = compile_kernels(tmp_path)["left_out"]
    assert not left_out, "compile_kernels.py should call what reaches:\n" + "\n".join(left_out)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_every_kernel_becomes_machine_code_that_fits_on_hopper(tmp_path):
    found = compile_kernels(tmp_path, "all")
    assert not found["left_out"]
    assert found["kernels"]
    for kernel in found["kernels"]:
        print(*kernel.values())  # pytest -s: registers, bytes of the stack, of shared memory
        assert kernel["shared"] <= SHARED_MEMORY, kernel["name"]
        # The assembler's choice where it gives up; nearly all values then lie in memory.
        assert kernel["registers"] > 32 or kernel["stack"] == 0, kernel["name"]
