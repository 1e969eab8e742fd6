"""Decoding is compared before it is timed; states keep their size and caches are counted."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from tensor_memory import TensorMemory
from tensor_memory_lab import bench
from tensor_memory_lab.bench import decode, plots, report
from tensor_memory_lab.bench.hosts import language_host

RESULTS = Path(__file__).parents[2] / "results" / "bench"


def run_quick(tmp_path, *arguments):
    output = tmp_path / "decode.json"
    options = ["--device", "cpu", "--quick", "--output", str(output)]
    status = bench.main(["decode", *options, *arguments])
    return status, json.loads(output.read_text())


def test_a_quick_run_writes_all_that_is_promised(tmp_path, capsys):
    status, record = run_quick(tmp_path, "--batches", "1", "3")
    assert status == 0
    assert {"commit", "versions", "hardware", "date", "seed", "config"} < record.keys()
    one, three = record["result"]["batches"]["1"], record["result"]["batches"]["3"]
    for row in (one, three):
        assert row["agreement"]["passed"]
        assert row["agreement"]["one_token_at_a_time"] < 1e-5
        without, with_it = (row["ms_per_token"][name]["median"] for name in ("base", "memory"))
        assert row["added_ms"] == pytest.approx(with_it - without)
        assert row["ms_by_place_in_chunk"]["memory"].keys() == {"first", "middle", "last"}
    host = language_host(quick=True)
    assert one["key_value_bytes"]["1000"] == 1000 * 2 * host.layers * host.dim * 4
    assert three["key_value_bytes"]["1000"] == 3 * one["key_value_bytes"]["1000"]
    assert three["state_bytes"] == 3 * one["state_bytes"]
    assert "ms per token" in capsys.readouterr().out
    assert bench.main(["table", str(tmp_path / "decode.json")]) == 0
    assert "| batch |" in capsys.readouterr().out


def test_a_memory_that_forgets_between_tokens_gets_no_speed_and_status_1(
    tmp_path, monkeypatch, capsys
):
    honest = TensorMemory.forward

    def forgetful(self, x, state=None, **options):
        return honest(self, x, None, **options)

    monkeypatch.setattr(TensorMemory, "forward", forgetful)
    status, record = run_quick(tmp_path, "--batches", "1")
    assert status == 1
    assert "ms_per_token" not in record["result"]["batches"]["1"]
    assert "batch 1 DISAGREES with the reference: one token at a time" in capsys.readouterr().err


def test_the_state_does_not_grow_while_decoding():
    host = language_host(quick=True)
    model = decode.build(host, torch.device("cpu"), seed=0, memory=True)
    decoder = decode.Decoder(model, batch=2)
    decoder.step()
    first = decoder.state_bytes
    for _ in range(2 * decode.WINDOW):
        decoder.step()
    assert decoder.state_bytes == first > 0


def test_a_model_served_in_bfloat16_decodes():
    host = language_host(quick=True)
    model = decode.build(host, torch.device("cpu"), seed=0, memory=True).bfloat16()
    decoder = decode.Decoder(model, batch=2)
    for _ in range(host.memory.chunk_size + 1):
        decoder.step()
    assert decoder.ids.shape == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batches", "0"], "--batches: expected at least 1 row, got 0"),
        (["--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
        (["--output", "no-such-folder/a.json"], "--output: expected a file in an existing folder"),
    ],
)
def test_a_bad_option_is_refused_before_any_work(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["decode", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("scan", ["--shapes", "binding", "--sweeps", "steps", "grid"]),
        ("train-step", ["--models", "language"]),
        ("decode", ["--batches", "1"]),
    ],
)
def test_every_record_can_be_drawn(tmp_path, capsys, name, arguments):
    output = tmp_path / f"{name}.json"
    options = ["--device", "cpu", "--quick", "--output", str(output)]
    assert bench.main([name, *options, *arguments]) == 0
    assert bench.main(["plot", str(output)]) == 0
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert f"written to {tmp_path / name}.png" in capsys.readouterr().out


def test_a_record_with_nothing_to_draw_says_so(tmp_path, capsys):
    output = tmp_path / "scan.json"
    options = ["--device", "cpu", "--quick", "--output", str(output)]
    assert bench.main(["scan", *options, "--shapes", "binding", "--sweeps"]) == 0
    record = json.loads(output.read_text())
    del record["result"]["shapes"]["binding"]["ms"]["forward"]  # as where that part died
    output.write_text(json.dumps(record))
    assert bench.main(["plot", str(output)]) == 0
    assert "nothing was measured that could be drawn" in capsys.readouterr().out


def drawn(name, **changes):
    """A committed record's result with changes, and its figure's bars, panel by panel."""
    result = report.load(RESULTS / f"{name}-nvidia-h200.json")["result"] | changes
    figure = Figure()
    assert plots.DRAW[name](result, figure)
    return result, [[bar.get_height() for bar in axis.patches] for axis in figure.axes]


def test_a_scan_without_sweeps_is_drawn_beside_the_plain_loop():
    result, (forward, both) = drawn("scan", sweeps={})
    rows = result["shapes"].values()
    for kind, heights in (("forward", forward), ("forward_backward", both)):
        ours = [row["ms"][kind]["graph"]["median"] for row in rows]
        assert heights == ours + [row["plain_loop"]["ms"][kind]["median"] for row in rows]


def test_a_train_step_is_drawn_in_every_way_it_was_timed():
    result, (heights,) = drawn("train-step")
    rows = result["models"].values()
    ways = [way["ms"] for row in rows for way in (row, row["one_thread"], row["graph"])]
    expected = [ms[which]["median"] for which in ("base", "memory") for ms in ways]
    assert heights == expected


def test_decoding_is_drawn_with_the_time_of_a_token():
    result, (heights, _) = drawn("decode")
    rows = result["batches"].values()
    times = [row["ms_per_token"][which]["median"] for which in ("base", "memory") for row in rows]
    assert heights == times


def test_without_matplotlib_plotting_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["plot", str(tmp_path / "any.json")])
    assert stopped.value.code == 2
    assert "matplotlib is not installed; pip install" in capsys.readouterr().err
