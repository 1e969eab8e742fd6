"""A step captured as one CUDA graph gives the numbers of an eager one; what it cannot do, it says.

The tests marked gpu run on a CUDA device alone.
"""

import gc
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.train import RunOptions, load_run, train
from tensor_memory_lab.train.graph import WARM_UP, no_waiting
from tensor_memory_lab.train.steps import seed_step
from tiny_runs import TinyModel, tiny_run
from tolerances import TOLERANCE, assert_same

gpu = pytest.mark.gpu


def run(folder, config, **options):
    return train(config, RunOptions(folder, quiet=True, **options))


def both(tmp_path, config):
    """Records and last weights of the config run eagerly and as a graph."""
    found = {}
    for speed in ("eager", "graph"):
        record = run(tmp_path / speed, replace(config, speed=speed))
        assert record["speed"] == speed
        found[speed] = record, load_run(tmp_path / speed, "last")[2].state_dict()
    return found["eager"], found["graph"]


def assert_same_numbers(one, other, dtype=torch.float32):
    (record, weights), (other_record, other_weights) = one, other
    for entry, other_entry in zip(record["curve"], other_record["curve"], strict=True):
        assert entry["step"] == other_entry["step"]
        assert entry["loss"] == pytest.approx(other_entry["loss"], rel=TOLERANCE[dtype])
        loss, other_loss = entry["valid"]["loss"], other_entry["valid"]["loss"]
        assert loss == pytest.approx(other_loss, rel=TOLERANCE[dtype])
    for name, tensor in weights.items():
        assert_same(tensor, other_weights[name], dtype)


VARIANTS = {
    "plain": {},
    "dropout": {"model": {"dropout": 0.3}},
    "memory": {"model": {"method": "tensor", "dropout": 0.1}},
    "carried": {"task": {"carries": True}, "model": {"dropout": 0.2}},
    "parts": {"task": {"carries": True}, "budget": {"accumulate": 3}},
    "host batches": {"task": {"resident": False}, "model": {"dropout": 0.2}},
    "no clipping": {"optimizer": {"clip": 0.0}},
}


@gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_a_graph_gives_the_numbers_of_eager_steps(tmp_path, name):
    assert_same_numbers(*both(tmp_path, tiny_run(**VARIANTS[name])))


@gpu
def test_a_graph_gives_the_numbers_of_eager_steps_in_bf16(tmp_path):
    config = tiny_run(model={"method": "tensor", "dropout": 0.1}, precision="bf16")
    assert_same_numbers(*both(tmp_path, config), dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("name", ["dropout", "carried"])
def test_a_resumed_graph_goes_on_as_if_never_stopped(tmp_path, monkeypatch, name):
    config = tiny_run(**VARIANTS[name])
    whole = run(tmp_path / "whole", config)
    with monkeypatch.context() as patch:

        def crash(seed, process, step, device):
            if step == 13:
                raise RuntimeError("crashed")
            seed_step(seed, process, step, device)

        patch.setattr("tensor_memory_lab.train.steps.seed_step", crash)
        with pytest.raises(RuntimeError, match="crashed"):
            run(tmp_path / "cut", config)
    record = run(tmp_path / "cut", config, resume=True)
    weights = [load_run(tmp_path / f, "last")[2].state_dict() for f in ("whole", "cut")]
    assert_same_numbers((whole, weights[0]), (record, weights[1]))


@gpu
def test_auto_takes_a_graph_and_the_record_says_how_fast_it_was(tmp_path):
    config = tiny_run(budget={"steps": 300, "evaluate_every": 50, "checkpoint_every": 300})
    record = run(tmp_path / "run", config)
    assert record["speed"] == "graph"
    assert record["steps_per_second"] > 0
    assert record["step_ms"] > 0
    assert record["peak_memory_bytes"] > 0


class WaitingModel(TinyModel):
    def forward(self, batch, carry=None):
        outputs, carry = super().forward(batch, carry)
        assert outputs["logits"].sum().item() == outputs["logits"].sum().item()
        return outputs, carry


@gpu
def test_a_model_that_waits_for_the_device_runs_eagerly_and_says_where(tmp_path, monkeypatch):
    config = tiny_run(model={"dropout": 0.2})
    eager = run(tmp_path / "eager", replace(config, speed="eager"))
    monkeypatch.setattr("tiny_runs.TinyModel", WaitingModel)
    record = run(tmp_path / "run", config)
    assert record["speed"].startswith("eager (no CUDA graph: the step waits for the device at ")
    assert "test_train_graph.py:" in record["speed"]
    assert [e["loss"] for e in record["curve"]] == pytest.approx(
        [e["loss"] for e in eager["curve"]], rel=TOLERANCE[torch.float32]
    )
    with pytest.raises(ValueError, match="speed 'graph' cannot serve this run: the step waits"):
        run(tmp_path / "graph", replace(config, speed="graph"))


@gpu
def test_a_batch_of_another_shape_is_taken_eagerly_or_refused(tmp_path):
    config = tiny_run(task={"uneven": True})
    eager = run(tmp_path / "eager", replace(config, speed="eager"))
    record = run(tmp_path / "run", config)
    assert record["speed"] == "graph (1 steps eager, of other shapes)"
    assert [e["loss"] for e in record["curve"]] == pytest.approx(
        [e["loss"] for e in eager["curve"]], rel=TOLERANCE[torch.float32]
    )
    with pytest.raises(ValueError, match="a batch has other shapes than the first: x"):
        run(tmp_path / "graph", replace(config, speed="graph"))


@gpu
def test_a_finished_graph_leaves_no_memory_behind(tmp_path):
    run(tmp_path / "first", tiny_run(speed="graph"))
    gc.collect()
    before = torch.cuda.memory_allocated()
    run(tmp_path / "second", tiny_run(speed="graph"))
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


METHODS = ("base", "wide", "slots", "tensor", "xl", "recurrent-slots", "linear")


@gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("recipe", ["windowed-binding", "windowed-map"])
def test_every_method_can_be_captured_and_learns_the_same(tmp_path, recipe, method):
    config = find_recipe(recipe)()
    budget = replace(config.budget, steps=12, evaluate_every=4, evaluation_batches=6)
    config = replace(config, budget=budget, model=replace(config.model, method=method))
    eager, graph = both(tmp_path, config)
    for entry, other in zip(eager[0]["curve"], graph[0]["curve"], strict=True):
        # Kernels that add atomically differ from run to run, and twelve steps let that grow.
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-3)


class Replayed:
    """Stands in for a captured graph where there is no GPU: a replay does the work again."""

    def __init__(self, work):
        self.replay = work

    def reset(self):
        self.replay = None


@pytest.fixture
def stand_in(monkeypatch):
    """Let a CPU go through everything a graph needs but the capture."""
    from tensor_memory_lab.train import evaluation, graph, speed

    for module in (evaluation, speed):
        monkeypatch.setattr(module, "why_not_graph", lambda device, processes: None)
    monkeypatch.setattr(graph, "capture_stream", lambda: None)
    monkeypatch.setattr(graph.GraphStep, "_aside", graph.GraphStep._run)
    monkeypatch.setattr(graph, "no_waiting", nullcontext)

    def capture(work, stream):
        return Replayed(work), None

    monkeypatch.setattr(graph, "capture", capture)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_buffers_of_a_graph_hold_what_eager_steps_take(tmp_path, stand_in, name):
    config = tiny_run(**VARIANTS[name])
    records, weights = [], []
    for speed in ("eager", "graph"):
        records.append(run(tmp_path / speed, replace(config, speed=speed), device="cpu"))
        weights.append(load_run(tmp_path / speed, "last")[2].state_dict())
        assert records[-1]["speed"] == speed
    assert records[0]["curve"] == records[1]["curve"]
    assert records[0]["test"] == records[1]["test"]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


class FailingModel(TinyModel):
    """Fails in the last eager step as one that waits for a device does there."""

    held, found = None, None

    def forward(self, batch, carry=None):
        outputs, carry = super().forward(batch, carry)
        if not self.training:
            return outputs, carry
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == WARM_UP:
            FailingModel.held = weakref.ref(outputs["logits"])
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.calls == WARM_UP + 1:
            FailingModel.found = FailingModel.held()
        return outputs, carry


def test_a_step_done_again_finds_nothing_left_of_the_one_that_failed(
    tmp_path, stand_in, monkeypatch
):
    eager = run(tmp_path / "eager", tiny_run(speed="eager"), device="cpu")
    monkeypatch.setattr("tiny_runs.TinyModel", FailingModel)
    record = run(tmp_path / "run", tiny_run(), device="cpu")
    assert record["speed"].startswith("eager (no CUDA graph: the step waits for the device at ")
    assert record["curve"] == eager["curve"]
    assert FailingModel.held is not None
    assert FailingModel.found is None


class Mode:
    """Stands in for what torch keeps of its watch for waits; setting it warns, as torch does."""

    def __init__(self):
        self.set = 0

    def get(self):
        return self.set

    def put(self, mode):
        self.set = mode
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)


def test_the_watch_for_waits_ends_with_its_block_and_hides_no_other_warning(monkeypatch):
    mode = Mode()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", mode.get)
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


def test_batches_of_another_shape_go_past_the_buffers(tmp_path, stand_in):
    config = tiny_run(task={"uneven": True})
    eager = run(tmp_path / "eager", replace(config, speed="eager"), device="cpu")
    record = run(tmp_path / "run", config, device="cpu")
    assert record["speed"] == "graph (1 steps eager, of other shapes)"
    assert record["curve"] == eager["curve"]
    with pytest.raises(ValueError, match=r"a batch has other shapes than the first: x \(6, 4, 3\)"):
        run(tmp_path / "graph", replace(config, speed="graph"), device="cpu")


def test_on_a_cpu_auto_is_eager_and_says_why(tmp_path):
    record = run(tmp_path / "run", tiny_run(), device="cpu")
    assert record["speed"] == "eager (a CUDA graph needs a CUDA device, got cpu)"


def test_a_graph_on_a_cpu_is_refused(tmp_path):
    message = (
        "speed 'graph' cannot serve this run: a CUDA graph needs a CUDA device, got cpu; "
        "choose --speed auto or eager"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", tiny_run(speed="graph"), device="cpu")
