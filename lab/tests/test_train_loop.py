"""The loop trains, evaluates and writes down what came out."""

import functools
import gc
import itertools
import json
import math
import re
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

from tensor_memory_lab.commands.report import report_table
from tensor_memory_lab.commands.run import print_outcome
from tensor_memory_lab.commands.sweep_runs import _measures
from tensor_memory_lab.records import read_result
from tensor_memory_lab.records.figure import figure
from tensor_memory_lab.records.store import frame
from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig
from tensor_memory_lab.train import load_run
from tensor_memory_lab.train.batches import AHEAD, training_batches
from tensor_memory_lab.train.checkpoint import RunFolder
from tensor_memory_lab.train.compiling import one_compiles
from tensor_memory_lab.train.loop import _Run
from tensor_memory_lab.train.record import Journal, Stopwatch
from tensor_memory_lab.train.step import (
    learning_rate,
    make_optimizer,
    seed_step,
    set_learning_rate,
)
from tiny_runs import TinyModelConfig, TinyTask, TinyTaskConfig, lines, run, tiny_run
from tolerances import TOLERANCE, assert_same


def test_a_run_learns_and_its_record_says_everything_a_table_needs(tmp_path):
    config = tiny_run(budget={"steps": 150, "evaluate_every": 50}, seed=5)
    record = run(tmp_path / "run", config, shared_device=True)
    assert [entry["step"] for entry in record["curve"]] == [50, 100, 150]
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"]
    assert record["test"]["test"]["accuracy"] > 0.8
    assert record["valid"]["accuracy"] == max(e["valid"]["accuracy"] for e in record["curve"])
    expected = {
        "kind": "run", "recipe": "tiny", "task": "tiny", "method": "base", "seed": 5, "steps": 150,
        "facts": {"chance": 0.5}, "parameters": 8 * 3 + 8 + 8 * 8 + 8 + 2 * 8 + 2, "memory": None,
        "state_bytes": 0, "ceiling": {"test": 1.0, "test@half": 1.0}, "backend": None,
        "shared_device": True, "finished": True, "stopped_early": False,
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert record["config"]["budget"]["steps"] == 150
    for name in ("steps_per_second", "step_ms", "wall_seconds"):
        assert record[name] > 0
    assert {"commit", "dirty", "versions", "hardware", "date"} <= set(record)
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written == json.loads(json.dumps(record))


def test_what_an_earlier_run_held_is_gone_when_the_next_begins(tmp_path):
    """Captured graphs and their models hold each other; left lying they count in the next peak."""

    class Held:
        def __init__(self):
            self.itself = self

    gc.disable()
    try:
        left = weakref.ref(Held())
        run(tmp_path / "run", tiny_run(budget={"steps": 1}))
        assert left() is None
    finally:
        gc.enable()


def test_the_record_of_a_run_on_the_cpu_is_not_one_of_the_gpu_beside_it(tmp_path, monkeypatch):
    """A run before it in the same process has woken the GPU, on which this one holds nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    record = run(tmp_path / "run", tiny_run(budget={"steps": 1}))
    assert record["peak_memory_bytes"] > 2**20
    assert record["hardware"]["gpu"] is None


def by_hand(config):
    """The same run in plain PyTorch: per step its loss, and the weights at the end."""
    task, losses = config.task.build(config.seed), []
    torch.manual_seed(config.seed)
    model = config.model.build(task)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(config.budget.steps):
        warm = min((step + 1) / 3, 1)
        cosine = 0.5 * (1 + math.cos(math.pi * max(step - 3, 0) / (config.budget.steps - 3)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (warm if step < 3 else cosine)
        batch = task.batch("train", step, config.budget.batch_size)
        logits = model(batch)[0]["logits"]
        loss = F.cross_entropy(logits, batch["target"])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.8)  # half of the steps are longer
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_computes_what_plain_pytorch_computes(tmp_path, accumulate):
    config = tiny_run(
        optimizer={"weight_decay": 0.1, "clip": 0.8}, budget={"accumulate": accumulate}, seed=2
    )
    losses, expected = by_hand(config)
    run(tmp_path / "run", config)
    logged = [entry["loss"] for entry in lines(tmp_path / "run")]
    assert logged == pytest.approx(losses, rel=TOLERANCE[torch.float32])
    _, _, model = load_run(tmp_path / "run", "last")
    for name, tensor in model.state_dict().items():
        assert_same(tensor, expected.state_dict()[name])


def test_a_measure_is_a_mean_over_the_whole_split(tmp_path):
    record = run(tmp_path / "run", tiny_run(budget={"evaluation_batch_size": 16}))  # 16 × 4 + 6
    _, task, model = load_run(tmp_path / "run", "best")
    parts = [task.batch("test", index, 16) for index in range(5)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    with torch.no_grad():
        logits = model(batch)[0]["logits"]
    right = (logits.argmax(-1) == batch["target"]).sum().item()
    assert record["test"]["test"]["accuracy"] == pytest.approx(right / 70)
    loss = F.cross_entropy(logits, batch["target"]).item()
    assert record["test"]["test"]["loss"] == pytest.approx(loss, rel=TOLERANCE[torch.float32])
    assert record["test"]["test"]["error"] == pytest.approx(1 - right / 70)


def test_as_much_is_evaluated_as_the_budget_says(tmp_path, monkeypatch):
    asked = []
    draw = TinyTaskConfig().build(0).batch

    def batch(self, split, index, size):
        asked.append((split, index, size))
        return draw(split, index, size)

    monkeypatch.setattr("tiny_runs.TinyTask.batch", batch)
    run(tmp_path / "run", tiny_run(budget={"evaluation_batches": 2, "steps": 5}))
    assert [a for a in asked if a[0] == "valid"] == [("valid", 0, 12), ("valid", 1, 12)]
    assert [a[1] for a in asked if a[0] == "test"] == [0, 1, 2, 3, 4, 5]
    trained = [("train", index, 12) for index in (0, *range(5))]  # first, to see that it can be
    assert [a for a in asked if a[0] == "train"] == trained


def test_a_measure_of_which_a_split_has_no_case_is_left_out(tmp_path, monkeypatch):
    measure, none = TinyTask.measure, torch.zeros(())
    monkeypatch.setattr(TinyTask, "measure", lambda *a: measure(*a) | {"rare": (none, none)})
    record = run(tmp_path / "run", tiny_run(budget={"steps": 2}))
    assert record["test"]["test"].keys() == {"accuracy", "error", "loss"}


def test_a_metric_of_which_no_split_has_a_case_is_not_measured_and_chooses_no_weights(
    tmp_path, monkeypatch, capsys
):
    measure, none = TinyTask.measure, torch.zeros(())
    monkeypatch.setattr(TinyTask, "measure", lambda *a: measure(*a) | {"accuracy": (none, none)})
    record = run(tmp_path / "run", tiny_run(budget={"steps": 2}))
    print_outcome(record)
    assert capsys.readouterr().out.splitlines()[-2].split()[:3] == ["test", "not", "measured"]
    kept = read_result(tmp_path / "run" / "result.json")
    assert _measures(kept).startswith("test accuracy not measured")
    assert _measures({**kept, "test": {}}) == "valid accuracy not measured"
    (line,) = report_table(frame([kept]))
    assert line["test.accuracy"] == "–"
    drawn = figure(frame([kept]), tmp_path / "curves.png", y="valid.accuracy")
    assert drawn.stat().st_size
    with pytest.raises(FileNotFoundError, match=r"the metric had no value on valid; choose 'last'"):
        RunFolder(tmp_path / "run").weights("best")


def test_the_best_weights_are_measured_and_the_last_ones_kept(tmp_path):
    config = tiny_run(optimizer={"lr": 0.3, "schedule": "constant"}, budget={"steps": 40})
    record = run(tmp_path / "run", config)
    values = [(e["valid"]["accuracy"], -e["valid"]["loss"]) for e in record["curve"]]
    assert record["best_step"] == record["curve"][values.index(max(values))]["step"]
    assert record["best_step"] < 40  # otherwise this shows nothing; change the rate
    best, last = (load_run(tmp_path / "run", which)[2] for which in ("best", "last"))
    assert not best.head.weight.equal(last.head.weight)


@pytest.mark.parametrize(
    ("metric", "higher", "found", "best_step"),
    [
        ("loss", False, [(0, 3.0), (0, 2.0), (0, math.nan), (0, 2.5)], 2),
        ("accuracy", True, [(0.9, 0.1), (1.0, 0.3), (1.0, 0.2), (1.0, 0.25)], 3),  # of less loss
    ],
)
def test_the_best_evaluation_is_found_by_metric_and_loss(metric, higher, found, best_step):
    journal = Journal()
    for step, (accuracy, loss) in enumerate(found, 1):
        journal.step = step
        journal.log_loss(1.0)
        journal.enter({"accuracy": accuracy, "loss": loss}, metric, higher_is_better=higher)
    assert (journal.best_step, journal.waited) == (best_step, len(found) - best_step)


def test_weight_decay_is_for_matrices():
    model = TinyModelConfig(method="tensor").build(SimpleNamespace(carries=False))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3), torch.device("cpu"))
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert kept["weight_decay"] == 0.0
    assert any(p is model.side.gate for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_weights_that_make_places_learn_at_their_part_of_the_rate():
    model = TinyModelConfig(method="tensor").build(SimpleNamespace(carries=False))
    config = OptimizerConfig(lr=0.5, weight_decay=0.3, place_rate=0.25)
    optimizer = make_optimizer(model, config, torch.device("cpu"))
    set_learning_rate(optimizer, 0.2)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        part = 0.25 if name == "side.memory.coordinate.weight" else 1
        assert rates[id(p)] == 0.2 * part
    assert all(
        group["weight_decay"] == (0.3 if group["params"][0].ndim >= 2 else 0)
        for group in optimizer.param_groups
    )


def test_a_rate_of_places_needs_weights_that_make_them():
    model = TinyModelConfig(method="base").build(SimpleNamespace(carries=False))
    with pytest.raises(ValueError, match=r"place_rate: expected 1, got 0\.25: this model has no"):
        make_optimizer(model, OptimizerConfig(place_rate=0.25), torch.device("cpu"))


def test_the_cosine_ends_at_zero_and_the_warm_up_at_the_peak():
    config = OptimizerConfig(lr=2.0, warmup=10, schedule="cosine")
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[100] == 0.0
    assert 0 < rates[99] < 0.01
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_a_rate_that_lies_on_a_device_is_changed_in_place():
    group = {"params": nn.Linear(1, 1).parameters(), "lr": torch.tensor(0.5), "part": 0.5}
    optimizer = torch.optim.AdamW([group])
    held = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is held  # a captured graph reads this one
    assert held.item() == 0.125


class Widths:
    """Batch number i is i + 1 wide, so that one which lost its values still shows its number."""

    def __init__(self):
        self.made = []

    def batch(self, split, index, size):
        self.made.append(index)
        return {"x": torch.zeros(size, index + 1)}


def test_batches_made_ahead_come_in_order_and_none_past_the_end():
    task, first, steps = Widths(), 3, 3 + 2 * AHEAD
    budget, meta = BudgetConfig(steps=steps, batch_size=4), torch.device("meta")
    taken = [b["x"] for b in training_batches(task, budget, meta, first=first, processes=2)]
    assert [tuple(x.shape) for x in taken] == [(2, step + 1) for step in range(first, steps)]
    assert {x.device.type for x in taken} == {"meta"}
    assert task.made == list(range(first, steps))


def test_what_a_step_draws_depends_on_run_process_and_step_alone(tmp_path):
    def drawn(*where):
        seed_step(*where, torch.device("cpu"))
        return tuple(torch.rand(3).tolist())

    draws = {where: drawn(*where) for where in itertools.product(range(3), repeat=3)}
    assert len(set(draws.values())) == len(draws)
    assert all(drawn(*where) == draws[where] for where in reversed(draws))
    config = tiny_run(model={"dropout": 0.5}, optimizer={"lr": 1e-12})
    first, again = (run(tmp_path / name, config)["curve"] for name in ("a", "b"))
    assert first == again


def test_bf16_multiplies_in_bf16_and_keeps_weights_in_float32(tmp_path, monkeypatch):
    seen = []
    linear = F.linear

    def watched(x, weight, bias=None):
        y = linear(x, weight, bias)
        seen.append((weight.dtype, y.dtype))
        return y

    monkeypatch.setattr(F, "linear", watched)
    exact = run(tmp_path / "float32")
    assert {y for _, y in seen} == {torch.float32}
    seen.clear()
    rough = run(tmp_path / "bf16", tiny_run(precision="bf16"))
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    losses = [[e["loss"] for e in r["curve"]] for r in (exact, rough)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE[torch.bfloat16])


def test_the_backward_runs_on_the_thread_that_calls_it(tmp_path, monkeypatch):
    threaded = []
    backward = torch.Tensor.backward

    def watched(self):
        threaded.append(torch._C._is_multithreading_enabled())
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    run(tmp_path / "run")
    assert set(threaded) == {False}
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_a_compiled_run_drops_and_gives_the_same(tmp_path, monkeypatch, backend):
    # By default what the loop could get wrong, tracing; what a compiler makes of it takes longer.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    plain, compiled = (
        run(tmp_path / speed, tiny_run(model={"dropout": 0.3}, speed=speed))
        for speed in ("eager", "compile")
    )
    assert plain["speed"] == "eager"
    assert compiled["speed"] == "compiled, eager (a CUDA graph needs a CUDA device, got cpu)"
    losses, others = ([entry["loss"] for entry in r["curve"]] for r in (plain, compiled))
    assert losses == pytest.approx(others, rel=1e-5)


@pytest.mark.exhaustive
def test_a_second_run_under_autocast_finds_everything_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found = []
    for rate in (0.1, 0.2):
        torch._dynamo.reset()
        counters.clear()
        config = tiny_run(precision="bf16", speed="compile", optimizer={"lr": rate})
        run(tmp_path / str(rate), config)
        found.append(counters["aot_autograd"])
    assert found[0]["autograd_cache_saved"] == found[1]["autograd_cache_hit"] == 1
    assert not any(counts["autograd_cache_bypass"] for counts in found)


def test_a_run_that_compiles_holds_up_those_with_the_same_code_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config, same, shape = tiny_run(), threading.Event(), (torch.Size([12, 4]),)
    model, length = threading.Event(), threading.Event()
    together = threading.Barrier(3, timeout=30)  # those that waited do not wait for each other

    def follow(config, shape, inside, then=lambda: None):
        with one_compiles(config, shape):
            inside.set()
            then()

    seeds = [replace(config, seed=seed, optimizer=OptimizerConfig(lr=0.1)) for seed in (1, 2)]
    arguments = [
        *((like, shape, same, together.wait) for like in seeds),
        (tiny_run(model={"method": "tensor"}), shape, model),
        (config, (torch.Size([12, 8]),), length),
    ]
    with one_compiles(config, shape):
        for some in arguments:
            threading.Thread(target=follow, args=some, daemon=True).start()
        assert model.wait(30)
        assert length.wait(30)
        assert not same.wait(0.5)
    together.wait()


def test_tensorboard_gets_what_the_lines_say(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path / "run", trackers=("tensorboard",))
    folder = next((tmp_path / "run" / "trackers").rglob("events.*")).parent
    events = EventAccumulator(str(folder)).Reload()
    logged = {event.step: event.value for event in events.Scalars("loss")}
    told = {entry["step"]: entry["loss"] for entry in lines(tmp_path / "run")}
    assert logged == pytest.approx(told)
    valid = {event.step: event.value for event in events.Scalars("valid/accuracy")}
    assert sorted(valid) == [5, 10, 15, 20]


def test_progress_shows_loss_metric_and_time_left(tmp_path, capsys):
    run(tmp_path / "run", tiny_run(optimizer={"warmup": 30}), quiet=False)
    warning, *told, first, second = capsys.readouterr().err.splitlines()
    assert warning.startswith("the warm-up of 30 steps is longer than the budget of 20:")
    assert first == "measuring test with the best weights"
    assert second == "measuring test@half with the best weights"
    assert any(
        re.match(r"tiny base: \d+ of 20 steps, .* loss 0\.\d+, accuracy 0\.\d+$", line)
        for line in told
    )
    run(tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_the_first_stretch_and_pauses_are_not_timed(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch()
    assert watch.lap(4) == []  # the first steps, with everything that happens once
    now = 10.0
    assert watch.lap(6) == []  # ten of them
    with watch.pause():
        now = 17.0
    now = 18.0
    assert watch.lap(4) == [(4, 1.0)]
    now = 20.0
    assert watch.lap(1) == [(1, 2.0)]
    journal = Journal(laps=[(4, 2.0), (4, 4.0), (2, 6.0)])
    assert journal.speed() == {"steps_per_second": 10 / 12, "step_ms": 1000.0}
    assert Journal().speed() == {"steps_per_second": None, "step_ms": None}


def test_steps_before_a_checkpoint_are_timed_to_their_end(tmp_path, monkeypatch):
    happened = []
    read, pause = _Run._read_loss, Stopwatch.pause
    monkeypatch.setattr(_Run, "_read_loss", lambda run: happened.append("read") or read(run))
    monkeypatch.setattr(Stopwatch, "pause", lambda w: happened.append("pause") or pause(w))
    # Lines at 5, 10, …, a checkpoint at 3: a pause that began before the loss was read, which
    # waits for the device, would take the time of three steps away.
    budget = {"steps": 4, "evaluate_every": 50, "checkpoint_every": 3}
    run(tmp_path / "run", tiny_run(budget=budget))
    assert happened[:2] == ["read", "pause"]


def test_metrics_are_lines_of_json_with_the_step_first(tmp_path):
    run(tmp_path / "run", tiny_run(budget={"evaluate_every": 20, "steps": 30}))
    entries = lines(tmp_path / "run")
    assert [entry["step"] for entry in entries] == [*range(2, 31, 2)]
    assert [entry["step"] for entry in entries if "valid" in entry] == [20, 30]
    assert all(next(iter(entry)) == "step" for entry in entries)


class TaskWithFiles(TinyTask):  # a class of its own: what a class once had, a protocol remembers
    def assets(self):
        return {"words.txt": "a\nb"}


def test_files_of_the_task_lie_beside_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr("tiny_runs.TinyTask", TaskWithFiles)
    run(tmp_path / "run")
    assert (tmp_path / "run" / "words.txt").read_text() == "a\nb"
