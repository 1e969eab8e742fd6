"""The compiled opponent of a scan is the plain loop, and one step is compiled for all."""

import json
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tensor_memory import memory_scan
from tensor_memory_lab import bench
from tensor_memory_lab.bench import scan
from tensor_memory_lab.bench.compiled_loop import compile_and_check, compiled_loop
from tensor_memory_lab.bench.shapes import ScanShape, draw_inputs

CPU = torch.device("cpu")
COMPILE = torch.compile


@pytest.mark.parametrize(
    ("way", "products"),
    [("step", torch.float32), ("step", torch.bfloat16), ("whole", torch.float32)],
)
def test_a_compiled_loop_gives_what_the_reference_gives(way, products, monkeypatch):
    torch._dynamo.reset()
    # Everything but the code that is written, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="aot_eager"))
    _, agreed, seconds = compile_and_check(way, ScanShape(2, 3, 2, (3,), products), CPU, seed=0)
    assert agreed.failures == []
    assert seconds > 0


def compiled(way, steps, monkeypatch):
    """What the compiler was given for so many steps."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=counter))
    inputs = draw_inputs(ScanShape(2, steps, 2, (3,), torch.float32), CPU, seed=0)
    with torch.no_grad():
        compiled_loop(way)(**inputs.arguments)
    return counter


def test_more_steps_are_no_more_to_compile(monkeypatch):
    few, many = (compiled("step", steps, monkeypatch) for steps in (3, 8))
    assert few.op_count == many.op_count
    assert few.frame_count == many.frame_count <= 2  # a fresh state may lie otherwise in memory
    once, twice = (compiled("whole", steps, monkeypatch).op_count for steps in (2, 4))
    assert twice > 1.5 * once


def run_quick(tmp_path, *arguments):
    output = tmp_path / "scan.json"
    options = ["--device", "cpu", "--quick", "--shapes", "language", "--sweeps"]
    status = bench.main(["scan", *options, "--output", str(output), *arguments])
    return status, json.loads(output.read_text())["result"]


@pytest.fixture
def uncompiled(monkeypatch):
    """The loop as it is in place of the compiled one, multiplied by `factor`; ways asked for."""
    asked = []

    def loop(way, factor=1):
        asked.append(way)
        return lambda **given: tuple(factor * x for x in memory_scan(**given, backend="reference"))

    def replace(factor):
        place = "tensor_memory_lab.bench.compiled_loop.compiled_loop"
        monkeypatch.setattr(place, partial(loop, factor=factor))
        return asked

    return replace


@pytest.mark.parametrize(("given", "way"), [([], "step"), (["step"], "step"), (["whole"], "whole")])
def test_the_record_says_what_was_compiled_and_that_it_agreed(tmp_path, uncompiled, given, way):
    asked = uncompiled(factor=1)
    status, result = run_quick(tmp_path, "--compiled", *given)
    assert status == 0
    assert asked == [way]
    found = result["shapes"]["language"]["compiled_plain_loop"]
    assert found["compiled"] == way
    assert found["agreement"]["passed"]
    assert found["compiled_and_checked_s"] > 0
    assert found["ratio"].keys() == set(scan.KINDS)


def test_a_compiled_loop_that_disagrees_gets_no_speed(tmp_path, uncompiled, capsys):
    uncompiled(factor=1.1)
    status, result = run_quick(tmp_path, "--compiled")
    assert status == 1
    row = result["shapes"]["language"]
    assert "compiled_plain_loop" not in row
    assert "plain_loop" in row
    assert "language, compiled plain loop: DISAGREES: reads: error" in capsys.readouterr().err


def test_an_unknown_way_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["scan", "--device", "cpu", "--compiled", "half"])
    assert "--compiled: invalid choice: 'half'" in capsys.readouterr().err
