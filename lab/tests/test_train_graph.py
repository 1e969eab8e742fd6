"""A step captured as one CUDA graph gives the numbers of an eager one; what it cannot do, it says.

The tests marked gpu run on a CUDA device alone. A CPU goes through everything but the capture.
"""

import functools
import gc
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.train import RunOptions, evaluation, graph, load_run, step, train
from tensor_memory_lab.train.compiling import compiled
from tensor_memory_lab.train.graph import WARM_UP, Graphed, no_waiting
from tiny_runs import TinyModel, tiny_run
from tolerances import TOLERANCE, assert_same

gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


class Replayed:
    """Stands in for a captured graph where there is no GPU: a replay does the work again."""

    def __init__(self, work, pool=None):
        self.replay, self.given = work, pool

    def pool(self):
        return self if self.given is None else self.given

    def reset(self):
        self.replay = None


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """A GPU, or a CPU with a stand-in for the capture."""
    if request.param == "cpu":
        for module in (evaluation, step):
            monkeypatch.setattr(module, "why_not_graph", lambda device, processes: None)
        monkeypatch.setattr(graph, "aside", nullcontext)
        monkeypatch.setattr(graph, "no_waiting", nullcontext)
        monkeypatch.setattr(graph, "capture", Replayed)
    return request.param


def run(folder, config, device, **options):
    return train(config, RunOptions(folder, device=device, quiet=True, **options))


def assert_same_numbers(one, other, dtype=torch.float32):
    losses, others = (
        [(e["step"], e["loss"], e["valid"]["loss"]) for e in record["curve"]]
        for record in (one, other)
    )
    for ours, theirs in zip(losses, others, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE[dtype])


VARIANTS = {
    "dropout": {"model": {"dropout": 0.3}},
    "memory in bf16": {"model": {"method": "tensor", "dropout": 0.1}, "precision": "bf16"},
    "carried": {"task": {"carries": True}, "model": {"dropout": 0.2}},
    "parts": {"task": {"carries": True}, "budget": {"accumulate": 3}},
    "host batches": {"task": {"resident": False}, "model": {"dropout": 0.2}},
    "no clipping": {"optimizer": {"clip": 0.0}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_graph_gives_the_numbers_of_eager_steps(tmp_path, device, name):
    config = tiny_run(**VARIANTS[name])
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    records, weights = [], []
    for speed in ("eager", "graph"):
        records.append(run(tmp_path / speed, replace(config, speed=speed), device))
        weights.append(load_run(tmp_path / speed, "last")[2].state_dict())
        assert records[-1]["speed"] == speed
    assert_same_numbers(*records, dtype)
    for name, tensor in weights[0].items():
        assert_same(weights[1][name], tensor, dtype)


@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning")  # the compiler's
def test_a_graph_of_a_compiled_step_drops_and_gives_the_same(tmp_path, device, monkeypatch):
    if device == "cpu":  # the stand-in needs no compiler's code
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = tiny_run(**VARIANTS["dropout"])
    eager = run(tmp_path / "eager", replace(config, speed="eager"), device)
    compiled = run(tmp_path / "compiled", replace(config, speed="compile"), device)
    assert compiled["speed"] == "compiled, graph"
    assert_same_numbers(eager, compiled)


def test_rows_of_a_larger_tensor_and_other_open_sizes_need_no_new_code(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    whole = torch.arange(12).view(4, 3)
    loss = compiled(lambda batch: batch["ask"].sum(), SimpleNamespace(any_size=("ask",)))
    assert loss({"ask": whole[2:]}) == 51  # compiled here, where a run is resumed say
    with torch.compiler.set_stance("fail_on_recompile"):
        assert loss({"ask": whole[2:].clone()}) == 51  # as a CUDA graph is captured with
        assert loss({"ask": torch.ones(2, 7, dtype=torch.int64)}) == 14


@pytest.mark.parametrize("name", ["dropout", "carried"])
def test_a_resumed_graph_goes_on_as_if_never_stopped(tmp_path, monkeypatch, device, name):
    config = tiny_run(**VARIANTS[name])
    whole, seed_step = run(tmp_path / "whole", config, device), step.seed_step

    def crash(seed, process, number, device):
        if number == 13:
            raise RuntimeError("crashed")
        seed_step(seed, process, number, device)

    with monkeypatch.context() as patch:
        patch.setattr(step, "seed_step", crash)
        with pytest.raises(RuntimeError, match="crashed"):
            run(tmp_path / "cut", config, device)
    assert_same_numbers(whole, run(tmp_path / "cut", config, device, resume=True))


class WaitingModel(TinyModel):
    """Waits for the device, or on a CPU fails as such a model does in the last eager step."""

    held, found = None, None

    def forward(self, batch, carry=None):
        outputs, carry = super().forward(batch, carry)
        if outputs["logits"].is_cuda:
            outputs["logits"].sum().item()
        elif self.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == WARM_UP:
                WaitingModel.held = weakref.ref(outputs["logits"])
                raise RuntimeError("called a synchronizing CUDA operation")
            if self.calls == WARM_UP + 1:  # what is left of the step that failed
                WaitingModel.found = WaitingModel.held()
        return outputs, carry


def test_a_model_that_waits_for_the_device_runs_eagerly_and_says_where(
    tmp_path, monkeypatch, device
):
    config = tiny_run(model={"dropout": 0.2})
    eager = run(tmp_path / "eager", replace(config, speed="eager"), device)
    monkeypatch.setattr("tiny_runs.TinyModel", WaitingModel)
    record = run(tmp_path / "run", config, device)
    assert record["speed"].startswith("eager (no CUDA graph: the step waits for the device at ")
    assert "test_train_graph.py:" in record["speed"]
    assert WaitingModel.found is None
    assert_same_numbers(record, eager)
    with pytest.raises(ValueError, match="speed 'graph' cannot serve this run: the step waits"):
        run(tmp_path / "graph", replace(config, speed="graph"), device)


def test_a_batch_of_another_shape_is_taken_eagerly_or_refused(tmp_path, device):
    config = tiny_run(task={"uneven": True})
    eager = run(tmp_path / "eager", replace(config, speed="eager"), device)
    record = run(tmp_path / "run", config, device)
    assert record["speed"] == "graph (1 steps eager, of other shapes)"
    assert_same_numbers(record, eager)
    with pytest.raises(ValueError, match=r"a batch has other shapes than the first: x \(6, 4, 3\)"):
        run(tmp_path / "graph", replace(config, speed="graph"), device)


def test_a_task_that_says_so_has_a_graph_for_each_of_its_shapes(device, monkeypatch):
    captures, capture = [], graph.capture

    def captured(work, pool):
        captures.append(capture(work, pool))
        return captures[-1]

    monkeypatch.setattr(graph, "capture", captured)
    graphed = Graphed(lambda batch: batch["x"].sum() + len(batch["x"]), shapes=2, required=True)
    for _ in range(WARM_UP + 2):
        for rows in (2, 3):
            x = torch.full((rows, 4), 0.5, device=device)
            assert graphed({"x": x}).item() == 3 * rows
    assert len(captures) == 2
    assert captures[0].pool() == captures[1].pool()  # no two of them run at once
    assert graphed.described == "graph"
    with pytest.raises(ValueError, match=r"other shapes than the first 2: x \(5, 4\)"):
        graphed({"x": torch.zeros(5, 4, device=device)})


@pytest.mark.parametrize("device", ["cpu"], indirect=True)  # a GPU's generator may be lost
def test_a_capture_that_fails_is_told_and_steps_go_on_eagerly(tmp_path, device, monkeypatch):
    def capture(work, pool):
        raise RuntimeError("not permitted when stream is capturing\nmore of it")

    config = tiny_run(model={"dropout": 0.2})
    eager = run(tmp_path / "eager", replace(config, speed="eager"), device)
    monkeypatch.setattr(graph, "capture", capture)
    record = run(tmp_path / "run", config, device)
    told = "capturing failed: not permitted when stream is capturing"
    assert record["speed"] == f"eager (no CUDA graph: {told})"
    assert_same_numbers(record, eager)

    def work(batch):
        if calls.append(batch) or len(calls) > WARM_UP:
            raise RuntimeError("Offset increment outside graph capture")

    calls: list[object] = []
    graphed = Graphed(work)
    for _ in range(WARM_UP):
        graphed({"x": torch.zeros(2)})
    with pytest.raises(RuntimeError, match=rf"{told}\), and no step .*Offset increment") as failed:
        graphed({"x": torch.zeros(2)})
    assert "stream is capturing" in str(failed.value.__cause__)


@gpu
def test_a_finished_graph_leaves_no_memory_behind(tmp_path):
    run(tmp_path / "first", tiny_run(speed="graph"), "cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    record = run(tmp_path / "second", tiny_run(), "cuda")
    gc.collect()
    assert record["speed"] == "graph"
    assert record["peak_memory_bytes"] > 0
    assert torch.cuda.memory_allocated() <= before


@gpu
@pytest.mark.parametrize(
    "method", ["base", "wide", "slots", "tensor", "xl", "recurrent-slots", "linear"]
)
@pytest.mark.parametrize("recipe", ["windowed-binding", "windowed-map"])
def test_every_method_can_be_captured_and_learns_the_same(tmp_path, recipe, method):
    config = find_recipe(recipe)()
    budget = replace(config.budget, steps=12, evaluate_every=4, evaluation_batches=6)
    config = replace(config, budget=budget, model=replace(config.model, method=method))
    eager, captured = (
        run(tmp_path / speed, replace(config, speed=speed), "cuda") for speed in ("eager", "graph")
    )
    for entry, other in zip(eager["curve"], captured["curve"], strict=True):
        # Kernels that add atomically differ from run to run, and twelve steps let that grow.
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-3)


class Mode:
    """Stands in for what torch keeps of its watch for waits; setting it warns, as torch does."""

    def __init__(self):
        self.set = 0

    def put(self, mode):
        self.set = mode
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


def test_the_watch_for_waits_ends_with_its_block_and_hides_no_other_warning(monkeypatch):
    mode = Mode()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode.set)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode.put)

    def failing():
        with no_waiting():
            assert mode.set == "error"
            raise RuntimeError("from within")

    with pytest.raises(RuntimeError, match="from within"):
        failing()
    assert mode.set == 0
    with no_waiting(), pytest.warns(UserWarning, match="of the step itself"):
        warnings.warn("of the step itself", stacklevel=1)


def test_on_a_cpu_auto_is_eager_and_a_graph_is_refused(tmp_path):
    record = run(tmp_path / "run", tiny_run(), "cpu")
    assert record["speed"] == "eager (a CUDA graph needs a CUDA device, got cpu)"
    message = (
        "speed 'graph' cannot serve this run: a CUDA graph needs a CUDA device, got cpu; "
        "choose --speed auto or eager"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "graph", tiny_run(speed="graph"), "cpu")
