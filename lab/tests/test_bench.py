"""Every benchmark runs, no speed comes before agreement, and the record holds what is promised."""

import json
import mmap
import os
import signal
from functools import partial

import pytest
import torch

from tensor_memory import MemoryConfig, PlaceConfig, TensorMemory, memory_scan, place_scan
from tensor_memory_lab import bench
from tensor_memory_lab.bench import (
    decode,
    hosts,
    place_shapes,
    places,
    report,
    scan,
    shapes,
    stream,
    timing,
    train_step,
)
from tensor_memory_lab.bench.place_shapes import PlaceShape
from tensor_memory_lab.bench.shapes import PUBLISHED, ScanShape, work
from tensor_memory_lab.models.video import VideoModel

CPU = torch.device("cpu")
TINY = ScanShape(2, 3, 4, (3, 2), torch.float32)
STREAM = ["--dim", "8", "--channels", "2", "--grid", "3", "3", "--chunk-size", "4"]


def run_quick(tmp_path, name, *arguments, device="cpu"):
    """Status and result of a quick run."""
    output = tmp_path / "bench.jsonl"
    options = ["--device", device, "--quick", "--output", str(output)]
    status = bench.main([name, *options, *arguments])
    record = json.loads(output.read_text().splitlines()[-1])
    assert (record["kind"], record["benchmark"], record["seed"]) == ("benchmark", name, 0)
    assert {"commit", "dirty", "versions", "hardware", "date", "config"} < record.keys()
    return status, record["result"]


def test_help_lists_what_there_is_and_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    out = capsys.readouterr().out
    assert all(shows in out for shows in bench.COMMANDS.values())
    with pytest.raises(SystemExit) as stopped:
        bench.main(["nonesuch"])
    assert stopped.value.code == 2


def test_a_quick_scan_writes_all_that_is_promised(tmp_path, capsys):
    status, result = run_quick(tmp_path, "scan", "--sweeps", "steps")
    assert status == 0
    assert {"matmul_bfloat16_tflops", "copy_gbytes_per_s"} < result["ceilings"].keys()
    assert result["shapes"].keys() == {"language", "video", "binding"}
    for row in (*result["shapes"].values(), *result["sweeps"]["steps"]):
        assert row["agreement"]["passed"]
        assert row["ms"].keys() == set(scan.KINDS)
        eager = row["ms"]["forward"]["eager"]
        assert eager["p10"] <= eager["median"] <= eager["p90"]
        assert row["share_of_ceiling"]["forward"]["matmul"] > 0
        per_step = eager["median"] * 1e3 / row["shape"]["steps"]
        assert row["us_per_step"]["forward"]["eager"] == pytest.approx(per_step)
    assert result["shapes"]["language"]["plain_loop"]["ratio"]["forward_backward"] > 0
    assert "forward + backward, ms (eager)" in capsys.readouterr().out


def test_a_quick_train_step_writes_all_that_is_promised(tmp_path, capsys):
    options = ["--chunk-size", "5", "--reads", "token", "--layers-with-memory", "1"]
    status, result = run_quick(tmp_path, "train-step", *options)
    assert status == 0
    assert result["models"].keys() == {"language", "video"}
    for row in result["models"].values():
        assert row["agreement"]["passed"]
        without, with_it = row["ms"]["base"]["median"], row["ms"]["memory"]["median"]
        assert row["added_ms"] == pytest.approx(with_it - without)
        assert row["ratio"] == pytest.approx(with_it / without)
        assert row["parameters"]["memory"] > row["parameters"]["base"]
        memory = row["memory"]
        assert (memory["chunk_size"], memory["reads"], memory["backend"]) == (5, "token", "torch")
        assert row["layers_with_memory"] == [1]
        assert row["scan"]["reads"] == 5
        assert all(loss > 0 for loss in row["loss_at_the_end"].values())
    assert "base / with, ms" in capsys.readouterr().out


def test_a_quick_decode_writes_all_that_is_promised(tmp_path, capsys):
    status, result = run_quick(tmp_path, "decode", "--batches", "1", "3")
    assert status == 0
    one, three = result["batches"]["1"], result["batches"]["3"]
    for row in (one, three):
        assert row["agreement"]["passed"]
        assert row["agreement"]["one_token_at_a_time"] < 1e-5
        without, with_it = (row["ms_per_token"][name]["median"] for name in ("base", "memory"))
        assert row["added_ms"] == pytest.approx(with_it - without)
        assert row["ms_by_place_in_chunk"]["memory"].keys() == {"first", "middle", "last"}
    host = hosts.language_host(quick=True)
    assert one["key_value_bytes"]["1000"] == 1000 * 2 * host.layers * host.dim * 4
    assert three["key_value_bytes"]["1000"] == 3 * one["key_value_bytes"]["1000"]
    assert three["state_bytes"] == 3 * one["state_bytes"]
    assert "ms per token" in capsys.readouterr().out


def test_a_quick_run_of_places_writes_all_that_is_promised(tmp_path, capsys):
    status, result = run_quick(tmp_path, "places")
    assert status == 0
    kernels = ["linear kernel, 4x4", "linear kernel, 6x6", "one row, 4x4", "one row, 4x4x4"]
    assert list(result["shapes"]) == ["linear rule", "delta rule", *kernels]
    sizes = [
        [row["shape"][size] for size in ("batch", "tokens")] for row in result["shapes"].values()
    ]
    assert sizes == [[2, 6]] * 4 + [[1, 12]] * 2
    for row in result["shapes"].values():
        assert row["agreement"]["passed"]
        assert row["backend"] == "torch"
        assert row["ms"].keys() == set(scan.KINDS)
    for pair in (kernels[:2], kernels[2:]):
        smallest, larger = (result["shapes"][name] for name in pair)
        assert smallest["over_smallest_grid"]["forward"]["eager"] == 1.0
        ms = [row["ms"]["forward_backward"]["eager"]["median"] for row in (smallest, larger)]
        over = larger["over_smallest_grid"]["forward_backward"]["eager"]
        assert over == pytest.approx(ms[1] / ms[0])
    assert result["memories"].keys() == {"linear", "delta"}
    for rule, row in result["memories"].items():
        assert row["place"]["rule"] == rule
        assert row["threads"] == 2
        assert row["state_values"]["place"] == row["state_values"]["tensor"]
        ours = row["ms"]["place"]["median"]
        for name in ("reference", "tensor"):
            assert row["ratio"][name] == pytest.approx(row["ms"][name]["median"] / ours)
    assert "times faster than tensor" in capsys.readouterr().out


def test_full_size_memories_that_are_compared_hold_as_many_values():
    assert places.PLACE.state_values == places.TENSOR.state_values == 8192


@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
def test_the_addresses_of_places_write_what_the_scan_writes(kernel):
    config = PlaceConfig(grid=(3, 4), channels=2, heads=2, kernel=kernel)
    shape = PlaceShape(2, 5, config, torch.float32)
    inputs = shape.draw(CPU, seed=0)
    given, phi = inputs.arguments, place_shapes.addresses(shape, inputs)
    torch.testing.assert_close(phi.norm(dim=-1), torch.ones(2, 5, 2))
    state = given["state"].flatten(2, -2)
    for t in range(5):
        written = given["rate"][:, t, :, None] * phi[:, t]
        state = given["log_keep"][:, t, :, None, None].exp() * state
        state = state + written[..., None] * given["content"][:, t, :, None]
    after = shape.scan("reference")(**given)[1]
    torch.testing.assert_close(state, after.flatten(2, -2))


def test_a_quick_train_step_with_places_writes_the_same(tmp_path, capsys):
    options = ["--memory", "place", "--rule", "delta", "--layers-with-memory", "1"]
    status, result = run_quick(tmp_path, "train-step", *options)
    assert status == 0
    (row,) = result["models"].values()
    assert row["agreement"]["passed"]
    assert row["agreement"]["rms_ratios"].keys() > {"reads", "state", "grad_write_at", "grad_width"}
    assert (row["memory"]["rule"], row["memory"]["backend"]) == ("delta", "torch")
    assert (row["scan"]["batch"], row["scan"]["tokens"]) == (2, 24)
    assert row["parameters"]["memory"] > row["parameters"]["base"]
    assert row["ratio"] == row["ms"]["memory"]["median"] / row["ms"]["base"]["median"]
    assert "H 2, 1 of 2 layers, delta rule, torch" in capsys.readouterr().out


def test_a_quick_decode_with_places_writes_the_same(tmp_path):
    status, result = run_quick(tmp_path, "decode", "--memory", "place", "--batches", "3")
    assert status == 0
    row = result["batches"]["3"]
    assert row["agreement"]["passed"]
    assert row["agreement"]["one_token_at_a_time"] < 1e-5
    assert row["ms_by_place_in_chunk"]["memory"].keys() == {"every"}
    assert row["state_bytes"] == 3 * 2 * 4 * (2 * 9 * 4 + 2)  # rows, layers: voxels and origin


def test_a_quick_decode_of_an_attached_host_writes_the_same(tmp_path):
    status, result = run_quick(tmp_path, "decode", "--host", "attached", "--batches", "2")
    assert status == 0
    row = result["batches"]["2"]
    assert row["agreement"]["passed"]
    taken = row["ms_per_token"]
    assert row["ratio"] == taken["memory"]["median"] / taken["base"]["median"]
    assert row["ms_by_place_in_chunk"]["memory"].keys() == {"first", "middle", "last"}
    assert row["state_bytes"] > 2 * 2 * 32 * 8**3 * 4  # rows, hidden and cell


@pytest.mark.parametrize("options", [[], ["--memory", "place", "--grid", "3", "3"]])
def test_a_stream_leaves_state_and_resident_memory_flat(tmp_path, options):
    options = [*options, "--tokens", "20000", "--block", "500"]
    status, result = run_quick(tmp_path, "stream", *options)
    assert status == 0
    assert result["state_bytes_first"] == result["state_bytes_last"]
    if "place" in options:
        assert result["state_bytes_first"] == 4 * (4 * 9 * 32 + 2)
    assert result["growth"] <= result["growth_limit"] == 16 * report.MIB
    assert result["tokens_per_second"] > 0


def test_a_quick_quantize_writes_an_error_for_every_way(tmp_path, capsys):
    options = ["--calls", "1", "50", "512", "--keep-biases", "6", "--grid", "3", "3", "--dim", "8"]
    status, result = run_quick(tmp_path, "quantize", *options)
    assert status == 0
    errors = {
        (e["rule"], e["tokens_per_call"], e["way"]): e["state_error"] for e in result["errors"]
    }
    assert len(errors) == 2 * 3 * 6
    for rule in ("linear", "delta"):
        at_each_token = [errors[rule, 1, way] for way in ("float16", "bfloat16", "int8")]
        assert 0 < at_each_token[0] < at_each_token[1] < at_each_token[2] < 0.1
        assert errors[rule, 50, "int8"] < errors[rule, 1, "int8"]
    shown = capsys.readouterr().out
    assert "error of the state" in shown
    assert "–" in shown  # with 512 tokens a call no call begins in the last tenth of 200
    assert "nan" not in shown


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Flash Attention is not installed")  # `fla` does without
@pytest.mark.parametrize("memory", ["tensor", "place"])
@pytest.mark.parametrize("name", ["scan", "train-step", "decode"])
def test_every_benchmark_runs_on_a_gpu(tmp_path, name, memory):
    options = ["--memory", memory]
    if name == "scan":
        name, options = {"tensor": "scan", "place": "places"}[memory], []
    status, result = run_quick(tmp_path, name, *options, device="cuda")
    assert status == 0
    if name == "places":
        row = result["shapes"]["linear rule"]
        assert row["backend"] == "triton"
        assert row["ms"]["forward_backward"].keys() == {"eager", "graph"}
    elif name == "scan":
        assert result["shapes"]["language"]["ms"]["forward_backward"].keys() == {"eager", "graph"}
        assert result["shapes"]["language"]["peak_bytes"]["forward_backward"] > 0
    elif name == "train-step":
        row = result["models"]["language"]
        assert isinstance(row["extra_peak_gib"], float)
        for way in (row, row["one_thread"], row["layer_graphs"], row["graph"]):
            assert way["ms"].keys() == {"base", "memory"}
    else:
        place = "last" if memory == "tensor" else "every"
        assert result["batches"]["1"]["launches"]["by_memory_per_layer"][place] >= 1


def wrong_gradient(reads, *state):
    state[0].register_hook(lambda grad: grad * 1.001)
    return reads, *state


def nan_output(reads, *state):
    return reads * float("nan"), *state


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("scan", ["--shapes", "binding", "--sweeps"], "binding"),
        ("train-step", ["--models", "language"], "language"),
        ("decode", ["--batches", "1"], "batch 1"),
        ("places", [], "delta rule"),
        ("train-step", ["--memory", "place"], "language"),
        ("decode", ["--memory", "place", "--batches", "1"], "batch 1"),
    ],
)
@pytest.mark.parametrize(
    ("spoil", "named"), [(wrong_gradient, "grad_content: error"), (nan_output, "reads: error nan")]
)
def test_a_wrong_scan_gets_no_speed_and_status_1(
    tmp_path, monkeypatch, capsys, name, arguments, part, spoil, named
):
    def planted(*tensors, backend, **options):
        results = memory_scan(*tensors, backend=backend, **options)
        return results if backend == "reference" else spoil(*results)

    def planted_places(*tensors, **options):
        results = place_scan(*tensors, **options)
        return results if results[0].dtype == torch.float64 else spoil(*results)

    monkeypatch.setattr(shapes, "memory_scan", planted)
    monkeypatch.setattr(place_shapes, "place_scan", planted_places)
    status, result = run_quick(tmp_path, name, *arguments)
    assert status == 1
    (rows,) = (result[key] for key in ("shapes", "models", "batches") if key in result)
    for row in rows.values():
        assert not row["agreement"]["passed"]
        assert not {"ms", "ms_per_token"} & row.keys()
    assert f"{part} DISAGREES with the reference: " in (told := capsys.readouterr().err)
    assert named in told


def test_a_memory_that_forgets_between_tokens_gets_no_speed(tmp_path, monkeypatch, capsys):
    honest = TensorMemory.forward
    monkeypatch.setattr(
        TensorMemory, "forward", lambda self, x, *_, **o: honest(self, x, None, **o)
    )
    status, result = run_quick(tmp_path, "decode", "--batches", "1")
    assert status == 1
    assert "ms_per_token" not in result["batches"]["1"]
    assert "batch 1 DISAGREES with the reference: one token at a time" in capsys.readouterr().err


def test_a_part_that_dies_is_recorded_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def dying(self, batch):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(VideoModel, "forward", dying)
    status, result = run_quick(tmp_path, "train-step")
    assert status == 1
    assert result["models"]["video"] == {"errors": {"all": "OutOfMemoryError: no room"}}
    assert "ms" in result["models"]["language"]
    assert "video, all: OutOfMemoryError: no room" in capsys.readouterr().err


def test_a_mistake_in_the_code_is_not_swallowed(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "check", lambda *_: [][0])
    with pytest.raises(IndexError):
        run_quick(tmp_path, "scan", "--sweeps")


def test_a_time_limit_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    asked = []

    def stopped_at_the_second(*arguments):
        asked.append(arguments)
        if len(asked) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return shapes.check(*arguments)

    monkeypatch.setattr(scan, "check", stopped_at_the_second)
    status, result = run_quick(tmp_path, "scan", "--shapes", "video", "binding", "--sweeps")
    assert status == 1
    assert result["interrupted"] is True
    assert result["shapes"].keys() == {"video"}
    assert "interrupted: what is not in the tables was not measured" in capsys.readouterr().err


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_a_compiled_loop_is_timed_where_it_agrees(tmp_path, monkeypatch, capsys, factor):
    def loop(**given):
        return tuple(factor * x for x in memory_scan(**given, backend="reference"))

    monkeypatch.setattr(scan, "compiled_loop", lambda: loop)
    status, result = run_quick(tmp_path, "scan", "--shapes", "language", "--sweeps", "--compiled")
    row = result["shapes"]["language"]
    assert "plain_loop" in row
    if factor == 1.0:
        assert status == 0
        assert row["compiled_plain_loop"]["ratio"].keys() == set(scan.KINDS)
    else:
        assert status == 1
        assert "compiled_plain_loop" not in row
        assert "language, compiled plain loop: RuntimeError: DISAGREES" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at every input's
def test_a_compiled_loop_gives_what_the_reference_gives(monkeypatch):
    torch._dynamo.reset()
    # Everything but the code that is written, which takes a minute.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    shape = ScanShape(2, 3, 2, (3,), torch.bfloat16)
    assert shapes.check(shape, scan.compiled_loop(), CPU, seed=0)["passed"]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("scan", ["--device", "tpu"], "invalid choice: 'tpu'"),
        ("scan", ["--backend", "auto"], "--backend: expected one of reference, torch, triton, got"),
        ("scan", ["--backend", "triton"], "--backend triton: it needs a CUDA device, got cpu"),
        ("scan", ["--output", "."], "--output: .: expected a file for records, got a folder"),
        ("train-step", ["--layers-with-memory", "9"], "expected indices from 0 to 7 for the lang"),
        ("train-step", ["--chunk-size", "0"], "--chunk-size: expected 1 or more, got 0"),
        ("train-step", ["--rule", "delta"], "--rule: not an option of --memory tensor"),
        ("train-step", ["--memory", "place", "--models", "video"], "expected --models language"),
        ("decode", ["--memory", "place", "--reads", "token"], "--reads: not an option of --memory"),
        ("decode", ["--batches", "0"], "--batches: expected 1 or more, got 0"),
        ("stream", ["--memory", "place", "--chunk-size", "4"], "--chunk-size: not an option of"),
        ("stream", ["--tokens", "0"], "--tokens: expected 1 or more, got 0"),
        ("stream", ["--tokens", "9", "--warm-up", "9"], "--warm-up: expected fewer than the 9 --"),
        ("stream", ["--grid", "1", "4"], "grid: expected at least 2 voxels along every axis"),
    ],
)
def test_a_bad_option_is_refused_before_any_work(
    tmp_path, name, arguments, said, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        bench.main([name, "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_in_the_way_of_the_record_is_told_before_any_work(tmp_path, capsys):
    taken = tmp_path / "file"
    taken.write_text("notes")
    for output, told in (
        (taken / "a.jsonl", "file: cannot be made a folder for records"),
        (taken, "file: expected a study to add records to"),
    ):
        with pytest.raises(SystemExit):
            bench.main(["scan", "--device", "cpu", "--output", str(output)])
        assert told in capsys.readouterr().err
    assert taken.read_text() == "notes"


def test_every_output_and_gradient_is_compared_and_blocks_of_rows_change_nothing(monkeypatch):
    inputs = TINY.draw(CPU, seed=0)
    whole = TINY.expected(inputs)
    gradients = {f"grad_{name}" for name in inputs.arguments}
    assert whole.keys() == {"reads", "hidden", "cell"} | gradients
    monkeypatch.setattr(shapes, "REFERENCE_VALUES", 1)
    parts = TINY.expected(inputs)
    for name, value in whole.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(parts[name], value, rtol=1e-12, atol=1e-12)


def test_coordinates_keep_away_from_the_kinks_of_the_interpolation():
    at = PUBLISHED["binding"].draw(CPU, seed=0).arguments["read_at"]
    position = (at + 1) / 2 * (PUBLISHED["binding"].grid[0] - 1)
    assert (at.abs() < 1).all()
    assert ((position - position.round()).abs() > 0.04).all()


def test_the_work_of_a_tiny_scan_is_counted_by_hand():
    # B 1, S 2, C 2, a line of 3 voxels, one read: per step a written volume of 2·2·3, filters of
    # 3 taps · 2 operations · 4 channels · 3 voxels, a mix of 2·8·4·3, an update of 4·2·3 and a
    # read of 2 corners · 2 channels · 2 operations.
    counted = work(ScanShape(1, 2, 2, (3,), torch.float32))
    assert counted["flops_forward"] == 2 * (12 + 72 + 192 + 24 + 8)
    assert counted["flops_forward_backward"] == 3 * counted["flops_forward"]
    # Floats in: per step 1 + 1 coordinates, a spread, 2 of content; 12 taps, 32 of the mix,
    # 8 biases; 6 hidden, 6 cell. Out: 2 read per step, 6 + 6 of state. Kept: 12 per step.
    inputs, outputs, kept = 2 * 5 + 52 + 12, 2 * 2 + 12, 2 * 12
    assert counted["bytes_forward"] == 4 * (inputs + outputs)
    assert counted["bytes_forward_backward"] == 4 * (3 * inputs + 2 * outputs + 2 * kept)


def test_alternated_calls_take_turns():
    order = []
    turns = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    timed = timing.measure_alternately(turns, CPU, timing.QUICK)
    assert order == ["a", "b", "a", "b", "a", "b"]  # one round warms up, two count
    assert timed["a"]["repeats"] == 2


@pytest.mark.parametrize(
    ("name", "without", "with_memory", "steps"),
    [("language", 25_912_704, 28_314_156, 32), ("video", 5_014_373, 5_608_623, 8 * 25)],
)
def test_full_size_models_are_the_published_ones(name, without, with_memory, steps):
    host = hosts.HOSTS[name]()
    with torch.device("meta"):
        models = host.build(None, ()), host.build(host.memory, range(host.layers))
    base, full = (sum(p.numel() for p in model.parameters()) for model in models)
    assert base == pytest.approx(without, rel=1e-4)
    assert full == pytest.approx(with_memory, rel=1e-3)  # the published heads have biases
    assert host.steps(host.memory.chunk_size) == steps


def test_a_step_trains():
    host = hosts.language_host(quick=True)
    model = host.build(host.memory, [0])
    step = train_step.Training(host, model, host.draw(CPU), CPU)
    before = model.word.weight.detach().clone()
    step()
    assert not torch.equal(before, model.word.weight)
    assert model.word.weight.grad is None


@pytest.mark.filterwarnings("ignore:.*Disabling autocast")
@pytest.mark.parametrize("wrong", [False, True])
def test_layers_as_graphs_are_timed_only_if_their_gradients_agree(monkeypatch, wrong):
    def capture(layers, samples):
        for layer in layers:  # PyTorch's graphs train what is registered
            assert set(layer.layer.memory.parameters()) <= set(layer.parameters())
        if wrong:
            monkeypatch.setattr(train_step.Alone, "forward", lambda self, x: 2 * self.layer(x)[0])

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    host = hosts.language_host(quick=True, memory="place")
    step = train_step.Training(host, host.build(host.memory, [0, 1]), host.draw(CPU), CPU)
    agreement = {
        "passed": True, "failures": [], "bounds": {"gradients": 1e-6}, "rms_ratios": {}
    }  # fmt: skip
    train_step._check_layer_graphs(step, agreement)
    found = [m for m in step.model.modules() if isinstance(m, train_step.Stateless)]
    assert len(found) == 2
    assert agreement["passed"] is not wrong
    assert bool(agreement["failures"]) is wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory", ["tensor", "place"])
def test_the_state_does_not_grow_while_decoding(dtype, memory):
    host = hosts.language_host(quick=True, memory=memory)
    decoder = decode.Decoder(decode.build(host, CPU, seed=0, memory=True).to(dtype), batch=2)
    decoder.step()
    first = sum(state.nbytes for state in decoder.states.values())
    for _ in range(2 * decode.WINDOW):
        decoder.step()
    assert sum(state.nbytes for state in decoder.states.values()) == first > 0


class Hoarder(TensorMemory):
    """Keeps new pages at every call: the heap may hold freed memory."""

    def forward(self, x, state=None, **options):
        pages = mmap.mmap(-1, 2 * report.MIB)
        pages.write(bytes([1]) * len(pages))
        self.__dict__.setdefault("hoard", []).append(pages)
        return super().forward(x, state, **options)


class Growing(TensorMemory):
    """Returns a state of twice the rows."""

    def forward(self, x, state=None, **options):
        m, state = super().forward(x, None, **options)
        return m, state.select([0, 0])


@pytest.mark.parametrize(
    ("memory", "said"), [(Hoarder, "MiB after the warm-up, more than"), (Growing, "the state grew")]
)
def test_a_memory_that_grows_is_caught(monkeypatch, capsys, memory, said):
    monkeypatch.setitem(hosts.MEMORIES, "tensor", (MemoryConfig, memory))
    arguments = ["--tokens", "100", "--block", "10", "--growth-limit", "8", "--quick"]
    assert bench.main(["stream", *STREAM, *arguments]) == 1
    assert said in capsys.readouterr().err


def test_memory_taken_during_the_warm_up_does_not_count(tmp_path, monkeypatch):
    held = iter([50, 51, 50, 50, 50, 50, 50])
    monkeypatch.setattr(stream, "resident_bytes", lambda: next(held))
    options = ["--tokens", "100", "--block", "10", "--warm-up", "45"]
    _, result = run_quick(tmp_path, "stream", *STREAM, *options)
    assert (result["resident_after_warm_up"], result["growth"]) == (50, 1)
    assert next(held, None) is None  # asked after block 5, cut short, and every one since


def test_resident_memory_is_known_where_proc_is_missing(monkeypatch, tmp_path):
    now = stream.resident_bytes()
    monkeypatch.setattr(stream, "STATM", tmp_path / "missing")
    assert now // 2 <= stream.resident_bytes() < 100 * now  # a peak, in the same unit
