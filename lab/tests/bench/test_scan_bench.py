"""No speed before agreement; what is promised is in the record; the work is counted right."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tensor_memory_lab import bench
from tensor_memory_lab.bench import agreement, aims, report, scan, timing
from tensor_memory_lab.bench.shapes import PUBLISHED, ScanShape, draw_inputs, work

CPU = torch.device("cpu")
TINY = ScanShape(2, 3, 4, (3, 2), torch.float32)


def run_quick(tmp_path, *arguments):
    output = tmp_path / "scan.json"
    options = ["--device", "cpu", "--quick", "--output", str(output)]
    status = bench.main(["scan", *options, *arguments])
    return status, json.loads(output.read_text())


def test_a_quick_run_writes_all_that_is_promised(tmp_path, capsys):
    status, record = run_quick(tmp_path, "--sweeps", "steps")
    assert status == 0
    assert {"commit", "versions", "hardware", "date", "seed", "config"} < record.keys()
    assert record["config"]["backend"] == "torch"
    result = record["result"]
    assert result["ceilings"].keys() == {
        "matmul_bfloat16_tflops",
        "matmul_float32_tflops",
        "copy_gbytes_per_s",
        "matmul_side",
    }
    assert result["shapes"].keys() == {"language", "video", "binding"}
    for row in (*result["shapes"].values(), *result["sweeps"]["steps"]):
        assert row["agreement"]["passed"]
        assert set(row["ms"]) == set(scan.KINDS)
        for ways in row["ms"].values():
            assert ways["eager"].keys() == {"median", "p10", "p90", "repeats"}
            assert ways["eager"]["p10"] <= ways["eager"]["median"] <= ways["eager"]["p90"]
        assert row["share_of_ceiling"]["forward"]["matmul"] > 0
        assert row["us_per_step"]["forward"]["eager"] == pytest.approx(
            row["ms"]["forward"]["eager"]["median"] * 1e3 / row["shape"]["steps"]
        )
    assert result["shapes"]["language"]["plain_loop"]["ratio"]["forward_backward"] > 0
    assert result["cpu_memory"]["ratio"] > 0
    assert result["compiled_plain_loop"].startswith("skipped")
    out = capsys.readouterr().out
    assert "forward + backward, ms (eager)" in out
    assert "written to" in out


def plant(monkeypatch, spoil):
    """Let every scan but the reference return what `spoil` makes of its results."""
    honest = agreement.memory_scan

    def planted(*arguments, backend="auto", **options):
        results = honest(*arguments, backend=backend, **options)
        return results if backend == "reference" else spoil(*results)

    monkeypatch.setattr(agreement, "memory_scan", planted)


def wrong_gradient(reads, hidden, cell):
    hidden.register_hook(lambda grad: grad * 1.001)
    return reads, hidden, cell


def nan_output(reads, hidden, cell):
    return reads * float("nan"), hidden, cell


@pytest.mark.parametrize(
    ("spoil", "named"), [(wrong_gradient, "grad_content: error"), (nan_output, "reads: error nan")]
)
def test_a_wrong_result_gets_no_speed_and_status_1(tmp_path, monkeypatch, capsys, spoil, named):
    plant(monkeypatch, spoil)
    status, record = run_quick(tmp_path, "--shapes", "binding", "--sweeps")
    assert status == 1
    row = record["result"]["shapes"]["binding"]
    assert not row["agreement"]["passed"]
    assert "ms" not in row
    assert "ms" not in record["result"]["cpu_memory"]
    printed = capsys.readouterr()
    assert "ms" not in printed.out.replace(str(tmp_path), "")
    assert f"binding DISAGREES with the reference: {named}" in printed.err


def test_a_part_that_dies_is_recorded_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    honest = scan.measure_shape

    def dying(shape, *arguments, **options):
        if shape.steps == 3 and not options["compiled"] and options["against_plain_loop"]:
            raise torch.OutOfMemoryError("no room")
        return honest(shape, *arguments, **options)

    monkeypatch.setattr(scan, "measure_shape", dying)
    status, record = run_quick(tmp_path, "--shapes", "video", "--sweeps", "batch")
    assert status == 1
    assert record["result"]["shapes"]["video"] == {"errors": {"all": "OutOfMemoryError: no room"}}
    assert "ms" in record["result"]["sweeps"]["batch"][0]
    assert "video, all: OutOfMemoryError: no room" in capsys.readouterr().err


def test_a_time_limit_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    honest, asked = scan.measure_shape, []

    def stopped_at_the_second(*arguments, **options):
        asked.append(arguments)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(*arguments, **options)

    monkeypatch.setattr(scan, "measure_shape", stopped_at_the_second)
    status, record = run_quick(tmp_path, "--shapes", "video", "binding", "--sweeps", "batch")
    assert status == 1
    assert record["result"]["interrupted"] is True
    assert record["result"]["shapes"].keys() == {"video"}
    assert record["result"]["sweeps"] == {}
    said = capsys.readouterr()
    assert "video" in said.out
    assert "interrupted: what is not in the tables was not measured" in said.err


def test_a_mistake_in_the_code_is_not_swallowed(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "measure_shape", lambda *arguments, **options: [][0])
    with pytest.raises(IndexError):
        run_quick(tmp_path, "--sweeps")


def test_rows_taken_in_blocks_change_nothing_in_the_reference(monkeypatch):
    inputs = draw_inputs(TINY, CPU, seed=0)
    whole = agreement._expected(inputs, TINY)
    monkeypatch.setattr(agreement, "REFERENCE_VALUES", 1)
    parts = agreement._expected(inputs, TINY)
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(parts[name], value, rtol=1e-12, atol=1e-12)


def test_every_output_and_every_gradient_is_compared():
    ratios = agreement.check(TINY, "torch", CPU, seed=0).ratios
    arguments = ("read_at", "write_at", "spread", "content", "taps", "mix", "bias", "hidden")
    assert set(ratios) == {"reads", "hidden", "cell", "grad_cell"} | {
        f"grad_{name}" for name in arguments
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_coordinates_keep_away_from_the_kinks_of_the_interpolation(name):
    at = draw_inputs(PUBLISHED[name], CPU, seed=0).arguments["read_at"]
    position = (at + 1) / 2 * (PUBLISHED[name].grid[0] - 1)
    assert (at.abs() < 1).all()
    assert ((position - position.round()).abs() > 0.04).all()


def test_the_work_of_a_tiny_scan_is_counted_by_hand():
    # B 1, S 2, C 2, a line of 3 voxels, one read: per step a deposit of 2·2·3, filters of
    # 3 taps · 2 operations · 4 channels · 3 voxels, a mix of 2·8·4·3, an update of 4·2·3 and a
    # read of 2 corners · 2 channels · 2 operations.
    counted = work(ScanShape(1, 2, 2, (3,), torch.float32))
    assert counted.flops_forward == 2 * (12 + 72 + 192 + 24 + 8)
    assert counted.flops_forward_backward == 3 * counted.flops_forward
    assert counted.transcendentals_forward == 2 * 5 * 2 * 3
    # Floats in: per step 1 + 1 coordinates, a spread, 2 of content; 12 taps, 32 of the mix,
    # 8 biases; 6 hidden, 6 cell. Out: 2 read per step, 6 + 6 of state. Kept: 12 per step.
    inputs, outputs, kept = 2 * 5 + 52 + 12, 2 * 2 + 12, 2 * 12
    assert counted.bytes_forward == 4 * (inputs + outputs)
    assert counted.bytes_forward_kept == 4 * (inputs + outputs + kept)
    assert counted.bytes_forward_backward == 4 * (3 * inputs + 2 * outputs + 2 * kept)


def test_the_language_scan_asks_for_what_is_known_of_it():
    counted = work(PUBLISHED["language"])
    assert counted.transcendentals_forward == 32 * 32 * 81_920
    assert counted.bytes_forward_kept - counted.bytes_forward == 96 * 2**20


def test_an_aim_is_reached_from_the_right_side():
    shorter = aims.SCAN["language", "forward"].judge(0.3)
    assert (shorter["meets_needed"], shorter["meets_aim"]) == (True, False)
    faster = aims.CPU_MEMORY.judge(5.0)
    assert (faster["meets_needed"], faster["meets_aim"]) == (True, False)
    assert aims.CPU_MEMORY.judge(None)["meets_needed"] is None


def test_alternated_calls_take_turns():
    order = []
    turns = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timed = timing.measure_alternately(turns, CPU, timing.QUICK)
    assert order == ["a", "b", "a", "b", "a", "b"]  # one round warms up, two count
    assert timed["a"].repeats == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
        (["--backend", "auto"], "--backend: expected one of reference, torch, triton, got 'auto'"),
        (["--backend", "triton"], "--backend triton: it needs a CUDA device, got cpu"),
        (["--shapes", "audio"], "invalid choice: 'audio'"),
        (["--output", "no-such-folder/a.json"], "--output: expected a file in an existing folder"),
        (["--output", "."], "--output: expected the name of a file, got the folder ."),
    ],
)
def test_a_bad_option_is_refused_before_any_work(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["scan", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_refuses_files_is_told_before_any_work(tmp_path, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(SystemExit):
        bench.main(["scan", "--device", "cpu", "--output", str(tmp_path / "a.json")])
    said = f"expected a file that can be written, got {tmp_path / 'a.json'} (Permission denied);"
    assert said in capsys.readouterr().err


def test_a_table_repeats_the_numbers_of_the_record(tmp_path, capsys):
    _, record = run_quick(tmp_path, "--shapes", "binding", "--sweeps")
    capsys.readouterr()
    assert bench.main(["table", str(tmp_path / "scan.json")]) == 0
    out = capsys.readouterr().out
    median = record["result"]["shapes"]["binding"]["ms"]["forward"]["eager"]["median"]
    assert f"| {report.number(median)} |" in out
    assert record["versions"]["torch"] in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "expected the record of a benchmark as JSON, got a truncated or foreign file"),
        (b"\xff\xfe", "expected the record of a benchmark as JSON, got a truncated or foreign"),
        (b"[]", "expected the record of a benchmark, an object in JSON, got []"),
        (b'{"benchmark": "scan", "result": {}}', "expected the record of a benchmark"),
    ],
)
@pytest.mark.parametrize("command", ["table", "plot"])
def test_a_file_that_is_no_record_is_refused_by_name(tmp_path, capsys, command, content, said):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit):
        bench.main([command, str(path)])
    error = capsys.readouterr().err
    assert f"{path}: {said}" in error
    assert "leave it out, or measure it again with `tensor-memory bench`" in error


@pytest.mark.parametrize("command", ["table", "plot"])
def test_a_record_of_something_else_is_refused_by_name(capsys, command):
    path = Path(__file__).parents[2] / "results" / "bench" / "stream-cpu.json"
    with pytest.raises(SystemExit):
        bench.main([command, str(path)])
    assert f"{path}: expected a record of scan, " in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["scan", "train-step", "decode"])
def test_every_benchmark_runs_on_a_gpu(tmp_path, name):
    output = tmp_path / f"{name}.json"
    options = ["--device", "cuda", "--quick", "--output", str(output)]
    assert bench.main([name, *options]) == 0
    result = json.loads(output.read_text())["result"]
    if name == "scan":
        assert result["shapes"]["language"]["ms"]["forward_backward"].keys() == {"eager", "graph"}
        assert result["shapes"]["language"]["peak_bytes"]["forward_backward"] > 0
    elif name == "train-step":
        row = result["models"]["language"]
        assert isinstance(row["extra_peak_gib"], float)
        for way in (row, row["one_thread"], row["graph"]):
            assert way["ms"].keys() == {"base", "memory"}
    else:
        assert result["batches"]["1"]["launches"]["by_memory_per_layer"]["last"] >= 1
