"""The streaming benchmark sees growth where there is some, and none where there is none."""

import json
import mmap
from contextlib import nullcontext

import pytest

from tensor_memory import MemoryConfig, TensorMemory
from tensor_memory_lab import bench
from tensor_memory_lab.bench import stream

SMALL = ["--dim", "8", "--channels", "2", "--grid", "3", "3", "--chunk-size", "4"]


def make_memory():
    return TensorMemory(8, MemoryConfig(channels=2, grid=(3, 3), chunk_size=4))


def run(memory, **options):
    defaults = {"tokens": 100, "block": 10, "batch": 1, "warm_up": 20, "seed": 0}
    return stream.run_stream(memory, **defaults | {"growth_limit": stream.MIB} | options)


def test_twenty_thousand_tokens_leave_state_and_resident_memory_flat(tmp_path):
    output = tmp_path / "stream.json"
    arguments = ["--tokens", "20000", "--block", "1000"]
    assert bench.main(["stream", *arguments, "--output", str(output)]) == 0
    record = json.loads(output.read_text())
    assert record["benchmark"] == "stream"
    assert record["seed"] == 0
    assert record["config"]["tokens"] == 20_000
    measured = MemoryConfig.from_dict(record["config"]["memory"])
    assert measured == MemoryConfig(backend="torch")  # the one that ran, not "auto"
    assert {"commit", "dirty", "date", "versions", "hardware"} < record.keys()
    result = record["result"]
    assert result["state_bytes_first"] == result["state_bytes_last"]
    assert result["growth"] <= result["growth_limit"] == 16 * stream.MIB
    assert result["resident_maximum"] >= result["resident_end"] > 0
    assert result["tokens_per_second"] > 0


def test_a_memory_that_hoards_its_input_is_caught():
    class Hoarder(TensorMemory):
        def forward(self, x, state=None, **options):
            pages = mmap.mmap(-1, 2 * stream.MIB)  # new ones: the heap may hold freed memory
            pages.write(bytes([1]) * len(pages))
            hoard.append(pages)
            return super().forward(x, state, **options)

    hoard = []
    result = run(Hoarder(8, make_memory().config), growth_limit=8 * stream.MIB)
    assert len(hoard) == 10
    assert result.growth > 8 * stream.MIB
    assert "more than the 8.0 MiB allowed" in result.complaints[0]


def test_growth_beyond_the_limit_is_the_exit_status(monkeypatch, capsys):
    held = iter(range(100, 200))
    monkeypatch.setattr(stream, "resident_bytes", lambda: next(held) * stream.MIB)
    arguments = ["--tokens", "100", "--block", "10", "--warm-up", "10", "--growth-limit"]
    assert bench.main(["stream", *SMALL, *arguments, "8.5"]) == 1
    assert "resident memory grew by 9.0 MiB after the warm-up, more than the 8.5 MiB allowed" in (
        capsys.readouterr().err
    )
    assert bench.main(["stream", *SMALL, *arguments, "9"]) == 0


def test_memory_taken_during_the_warm_up_does_not_count(monkeypatch):
    held = iter([50, 51, 50, 50, 50, 50, 50])
    monkeypatch.setattr(stream, "resident_bytes", lambda: next(held))
    result = run(make_memory(), tokens=100, block=10, warm_up=45)
    assert (result.resident_after_warm_up, result.resident_maximum) == (50, 51)
    assert result.growth == 1
    assert next(held, None) is None  # asked after block 5, cut short, and every one since


@pytest.mark.parametrize(("warm_up", "measured"), [(3, 22), (0, 25)])
def test_a_stream_of_a_single_block_has_a_speed(monkeypatch, warm_up, measured):
    times = iter([4.0, 6.0])  # when the measuring begins and ends
    monkeypatch.setattr(stream.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(stream, "progress", lambda *_, **__: nullcontext(lambda *_: None))
    result = run(make_memory(), tokens=25, block=4096, batch=2, warm_up=warm_up)
    assert (result.seconds, result.tokens_per_second) == (2.0, measured)  # of two rows


def test_a_state_that_changes_its_size_is_a_complaint():
    class Growing(TensorMemory):
        def forward(self, x, state=None, **options):
            m, state = super().forward(x, None, **options)
            return m, state.select([0, 0])

    result = run(Growing(8, make_memory().config))
    first, last = result.state_bytes_first, result.state_bytes_last
    assert last == 2 * first
    assert result.complaints == [f"the state grew from {first:,} to {last:,} bytes"]


def test_a_block_that_does_not_divide_the_stream_is_cut_short():
    seen = []

    class Counting(TensorMemory):
        def forward(self, x, state=None, **options):
            seen.append(x.shape[1])
            return super().forward(x, state, **options)

    run(Counting(8, make_memory().config), tokens=25, block=10)
    assert seen == [10, 10, 5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "--tokens: expected at least 1, got 0"),
        (["--tokens", "10", "--warm-up", "10"], "--warm-up: expected fewer than the 10 --tokens"),
        (["--grid", "1", "4"], "grid: expected at least 2 voxels along every axis"),
        (["--backend", "auto"], "--backend: expected one of reference, torch, triton, got 'auto'"),
        (["--output", "no-such-folder/a.json"], "--output: expected a file in an existing folder"),
    ],
)
def test_a_bad_option_is_refused_before_any_work(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["stream", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_resident_memory_is_known_where_proc_is_missing(monkeypatch, tmp_path):
    now = stream.resident_bytes()
    monkeypatch.setattr(stream, "STATM", tmp_path / "missing")
    assert now // 2 <= stream.resident_bytes() < 100 * now  # a peak, in the same unit
