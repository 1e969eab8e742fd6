"""The loop trains, evaluates and writes down what came out."""

import functools
import gc
import itertools
import json
import math
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensor_memory_lab.run_config import BudgetConfig, OptimizerConfig
from tensor_memory_lab.train import RunOptions, load_run, train
from tensor_memory_lab.train.journal import Journal, Stopwatch
from tensor_memory_lab.train.loop import _Run
from tensor_memory_lab.train.schedule import learning_rate, make_optimizer
from tensor_memory_lab.train.steps import seed_step
from tiny_runs import TinyModelConfig, TinyTask, TinyTaskConfig, tiny_run
from tolerances import TOLERANCE, assert_same


def run(folder, config=None, **options):
    return train(
        config or tiny_run(), RunOptions(folder, device="cpu", **{"quiet": True, **options})
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_leaves_its_record(tmp_path):
    record = run(tmp_path / "run", tiny_run(budget={"steps": 150, "evaluate_every": 50}))
    assert record["finished"]
    assert [entry["step"] for entry in record["curve"]] == [50, 100, 150]
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"]
    assert record["test"]["test"]["accuracy"] > 0.8
    assert record["valid"]["accuracy"] == max(e["valid"]["accuracy"] for e in record["curve"])
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


def test_the_record_says_everything_a_table_needs(tmp_path):
    record = run(tmp_path / "run", tiny_run(seed=5), shared_device=True)
    assert record["kind"] == "run"
    assert (record["recipe"], record["task"], record["method"]) == ("tiny", "tiny", "base")
    assert (record["seed"], record["steps"]) == (5, 20)
    assert record["config"]["budget"]["steps"] == 20
    assert record["facts"] == {"chance": 0.5}
    assert record["parameters"] == 8 * 3 + 8 + 8 * 8 + 8 + 2 * 8 + 2
    assert record["state_bytes"] == 0
    assert record["ceiling"] == {"test": 1.0, "test@half": 1.0}
    assert record["memory"] is None
    assert record["backend"] is None
    assert record["shared_device"]
    assert record["steps_per_second"] > 0
    assert record["step_ms"] > 0
    assert record["wall_seconds"] > 0
    assert record["peak_memory_bytes"] > 2**20
    assert {"commit", "dirty", "versions", "hardware", "date"} <= set(record)


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
    batch = task.batch("test", 0, 70)  # other rows than in batches of 16, so measure those
    parts = [task.batch("test", index, 16) for index in range(5)]
    batch = {name: torch.cat([part[name] for part in parts]) for name in batch}
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


def test_the_best_weights_are_measured_and_the_last_ones_kept(tmp_path):
    config = tiny_run(optimizer={"lr": 0.3, "schedule": "constant"}, budget={"steps": 40})
    record = run(tmp_path / "run", config)
    values = [(e["valid"]["accuracy"], -e["valid"]["loss"]) for e in record["curve"]]
    assert record["best_step"] == record["curve"][values.index(max(values))]["step"]
    assert record["best_step"] < 40  # otherwise this shows nothing; change the rate
    best, last = (load_run(tmp_path / "run", which)[2] for which in ("best", "last"))
    assert not best.head.weight.equal(last.head.weight)


def test_a_lower_measure_is_better_where_the_task_says_so():
    journal = Journal()
    for step, value in ((1, 3.0), (2, 2.0), (3, math.nan), (4, 2.5)):
        journal.step = step
        journal.log_loss(1.0)
        journal.enter({"loss": value}, "loss", higher_is_better=False)
    assert (journal.best, journal.best_step, journal.waited) == (2.0, 2, 2)


@pytest.mark.parametrize("resumed", [False, True])
def test_of_equals_the_one_of_less_loss_is_the_best(resumed):
    journal = Journal()
    for step, accuracy, loss in ((1, 0.9, 0.1), (2, 1.0, 0.3), (3, 1.0, 0.2), (4, 1.0, 0.25)):
        journal.step = step
        journal.log_loss(1.0)
        journal.enter({"accuracy": accuracy, "loss": loss}, "accuracy", higher_is_better=True)
        if resumed:
            journal = Journal.from_dict(json.loads(json.dumps(journal.to_dict())))
    assert (journal.best, journal.best_step, journal.waited) == (1.0, 3, 1)


def test_weight_decay_is_for_matrices():
    model = TinyModelConfig(method="tensor").build(SimpleNamespace(carries=False))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.3), torch.device("cpu"))
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert kept["weight_decay"] == 0.0
    assert any(p is model.side.gate for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_the_cosine_ends_at_zero_and_the_warm_up_at_the_peak():
    config = OptimizerConfig(lr=2.0, warmup=10, schedule="cosine")
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert rates[100] == 0.0
    assert 0 < rates[99] < 0.01
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_what_a_step_draws_depends_on_run_process_and_step_alone():
    def drawn(*where):
        seed_step(*where, torch.device("cpu"))
        return tuple(torch.rand(3).tolist())

    draws = {where: drawn(*where) for where in itertools.product(range(3), repeat=3)}
    assert len(set(draws.values())) == len(draws)
    assert all(drawn(*where) == draws[where] for where in reversed(draws))


def test_dropout_repeats_from_run_to_run(tmp_path):
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


def test_a_compiled_run_gives_the_same_numbers(tmp_path, monkeypatch):
    plain = run(tmp_path / "eager", tiny_run(speed="eager"))
    # Tracing is what the loop could get wrong; what a compiler makes of it is torch's affair.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = run(tmp_path / "compiled", tiny_run(speed="compile"))
    assert (plain["speed"], compiled["speed"]) == ("eager", "compile")
    assert compiled["curve"] == plain["curve"]


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
    run(tmp_path / "run", quiet=False)
    *told, last = capsys.readouterr().err.splitlines()
    assert len(told) == 10
    assert last == "measuring test and test@half with the best weights"
    assert re.match(
        r"tiny base: 6 of 20 steps, 30 %, \d+:\d\d:\d\d left, [\d.,]+/s, loss 0\.", told[2]
    )
    assert re.search(r", accuracy \d+\.\d %$", told[2])
    run(tmp_path / "quiet")
    assert capsys.readouterr().err == ""


def test_a_warm_up_longer_than_the_budget_is_told(tmp_path, capsys):
    run(tmp_path / "run", tiny_run(optimizer={"warmup": 30}), quiet=False)
    first, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith("the warm-up of 30 steps is longer than the budget of 20:")


@pytest.mark.parametrize(
    ("facts", "error", "message"),
    [
        (lambda task: {"weights": torch.ones(2)}, ValueError, r"TinyTask.facts: expected plain "),
        (lambda task: task.nowhere, AttributeError, "nowhere"),
    ],
)
def test_what_a_record_needs_is_asked_for_before_anything_is_trained(
    tmp_path, monkeypatch, facts, error, message
):
    monkeypatch.setattr(TinyTask, "facts", facts)
    with pytest.raises(error, match=message):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_stops_after_evaluations_that_bring_nothing(tmp_path):
    config = tiny_run(optimizer={"lr": 1e-12}, budget={"steps": 100, "patience": 2})
    record = run(tmp_path / "run", config)
    assert record["stopped_early"]
    assert record["finished"]
    assert record["steps"] == record["curve"][-1]["step"] == record["best_step"] + 10


def test_the_first_stretch_and_pauses_are_not_timed(monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch()
    assert watch.lap(4) is None  # the first steps, with everything that happens once
    now = 10.0
    assert watch.lap(6) is None  # ten of them
    with watch.pause():
        now = 17.0
    now = 18.0
    assert watch.lap(4) == (4, 1.0)
    now = 20.0
    assert watch.lap(1) == (1, 2.0)
    journal = Journal(laps=[(4, 2.0), (4, 4.0), (2, 6.0)])
    assert journal.speed() == (10 / 12, 1000.0)
    assert Journal().speed() == (None, None)


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


@pytest.mark.parametrize("name", ["evaluation_batches", "evaluation_batch_size", "patience"])
def test_an_evaluation_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=rf"budget\.{name}: expected 1 or more, or None, got 0"):
        BudgetConfig(**{name: 0})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": math.nan}, "optimizer.lr: expected a positive number, got nan"),
        ({"lr": math.inf}, "optimizer.lr: expected a positive number, got inf"),
        ({"clip": math.nan}, "clip and warmup of 0 or more, got 0.01, nan and 0"),
        ({"betas": (1.5, 0.9)}, r"optimizer.betas: expected two numbers in \[0, 1\), got \(1.5"),
    ],
)
def test_an_optimizer_is_made_of_numbers(values, said):
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**values)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OptimizerConfig(schedule="linear"), "optimizer.schedule: .* got 'linear'"),
        (
            lambda: tiny_run(precision="fp16"),
            "precision: .* float32, bf16, got 'fp16'",
        ),
        (lambda: tiny_run(speed="graphs"), "speed: expected one of auto, .* got 'graphs'"),
    ],
)
def test_a_word_that_would_be_taken_for_another_is_refused(make, said):
    """Python checks no Literal: a cosine, bf16 and eager steps ran under these names."""
    with pytest.raises(ValueError, match=said):
        make()


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
