"""Rows of the drawn tasks are numbered: the same whoever asks, in batches of whatever size."""

import math
import threading

import pytest
import torch

from tensor_memory_lab.tasks import Task
from tensor_memory_lab.tasks.binding import BindingConfig
from tensor_memory_lab.tasks.map_building import MapConfig
from tensor_memory_lab.tasks.no_harm import NoHarmConfig
from tensor_memory_lab.tasks.occlusion import OcclusionConfig

CONFIGS = {
    "binding": BindingConfig(),
    "binding with a gap": BindingConfig(writes=8, values=8, gap=3),
    "map": MapConfig(),
    "map with a gap": MapConfig(observations=8, queries=2, gap=3),
    "occlusion": OcclusionConfig(),
    "no-harm": NoHarmConfig(),
}
every_task = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@every_task
def test_a_batch_depends_on_seed_split_and_index_alone(config):
    task = config.build(3)
    first = task.batch("train", 5, 16)
    task.batch("train", 90, 16)  # what was asked before leaves no trace
    assert same(task.batch("train", 5, 16), first)
    assert same(config.build(3).batch("train", 5, 16), first)
    assert not torch.equal(task.batch("train", 6, 16)["target"], first["target"])
    assert not torch.equal(config.build(4).batch("train", 5, 16)["target"], first["target"])


@every_task
def test_two_batches_are_the_batch_of_twice_the_size(config):
    task = config.build(0)
    size = 768  # does not divide a block, so that batches cross its end
    halves = [task.batch("train", index, size) for index in (2, 3)]
    joined = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    assert same(joined, task.batch("train", 1, 2 * size))


def test_a_block_is_drawn_while_the_one_before_it_is_used():
    plain, ahead = BindingConfig().build(0), BindingConfig().build(0)
    ahead.draws_ahead = True  # as on a GPU
    drawers, draw = [], ahead.draw

    def watched(rows, random):
        drawers.append(threading.current_thread().name)
        return draw(rows, random)

    ahead.draw = watched
    for index in (0, 1, 2, 3, 4, 0, 1, 9, 10):  # in order, back, and forth
        assert same(ahead.batch("train", index, 768), plain.batch("train", index, 768))
        assert same(ahead.batch("valid", 0, 768), plain.batch("valid", 0, 768))
    main = threading.current_thread().name
    assert drawers[0] == main  # somebody has to draw the first
    assert drawers.count(main) == 4  # and after each of two jumps, and for "valid"
    assert len(drawers) > 10


@every_task
def test_evaluation_rows_do_not_depend_on_the_seed_and_are_not_training_rows(config):
    one, other = config.build(0), config.build(1)
    for split, rows in (("valid", 2048), ("test", 8192)):
        assert one.batches(split, 1000) == math.ceil(rows / 1000)
        last = one.batches(split, 1000) - 1
        assert len(one.batch(split, last, 1000)["target"]) == rows - last * 1000
        assert same(one.batch(split, last, 1000), other.batch(split, last, 1000))
    starts = [one.batch(split, 0, 64)["target"] for split in ("train", "valid", "test")]
    assert not torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[1], starts[2])


@every_task
def test_classes_are_drawn_evenly_and_asked_within_the_row(config):
    task = config.build(0)
    assert isinstance(task, Task)
    batch = task.batch("test", 0, 8192)
    share = torch.bincount(batch["target"].flatten(), minlength=task.classes)
    share = share / batch["target"].numel()
    noise = 5 * math.sqrt(task.facts()["chance"] / batch["target"].numel())
    torch.testing.assert_close(share, torch.full_like(share, 1 / task.classes), rtol=0, atol=noise)
    assert batch["ask"].shape == batch["target"].shape
    assert 0 <= int(batch["ask"].min()) <= int(batch["ask"].max()) == task.length - 1


@every_task
def test_loss_is_the_mean_and_parts_of_a_split_add_up(config):
    task = config.build(0)
    batch = task.batch("valid", 0, 64)
    logits = torch.randn(*batch["target"].shape, task.classes)
    logits.scatter_add_(2, batch["target"][..., None], torch.full_like(logits[..., :1], 1.0))
    whole = task.measure({"logits": logits}, batch)
    log_p = logits.log_softmax(-1).gather(2, batch["target"][..., None])
    torch.testing.assert_close(task.loss({"logits": logits}, batch), -log_p.mean())
    torch.testing.assert_close(whole["loss"][0] / whole["loss"][1], -log_p.mean())
    right = (logits.argmax(-1) == batch["target"]).sum()
    assert (whole["accuracy"][0], whole["accuracy"][1]) == (right, batch["target"].numel())
    parts = [
        task.measure(
            {"logits": logits[rows]}, {name: tensor[rows] for name, tensor in batch.items()}
        )
        for rows in (slice(0, 24), slice(24, 64))
    ]
    for measure, (total, count) in whole.items():
        torch.testing.assert_close(sum(part[measure][0] for part in parts), total)
        assert sum(part[measure][1] for part in parts) == count


def test_what_cannot_be_asked_is_named():
    task = BindingConfig().build(0)
    with pytest.raises(ValueError, match="split: expected train, valid or test, got 'dev'"):
        task.batch("dev", 0, 4)
    with pytest.raises(ValueError, match="expected an evaluation split, got 'train'"):
        task.batches("train", 4)
    with pytest.raises(IndexError, match="test has 8192 rows"):
        task.batch("test", 2, 4096)
    with pytest.raises(ValueError, match="expected index >= 0 and size >= 1, got 0 and 0"):
        task.batch("train", 0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BindingConfig(writes=0), "task.writes: expected 1 or more, got 0"),
        (lambda: BindingConfig(noise=-0.1), "task.noise: expected 0 or more, got -0.1"),
        (lambda: BindingConfig(target="first"), "expected one of nearest, source, got 'first'"),
        (lambda: BindingConfig(test_rows=0), "task.test_rows: expected 1 or more, got 0"),
        (lambda: MapConfig(side=1), "task.side: expected 2 or more, got 1"),
        (lambda: OcclusionConfig(hidden=9), "task.hidden: expected 0 to frames = 8, got 9"),
        (lambda: OcclusionConfig("late"), "expected one of published, valid, got 'late'"),
        (lambda: NoHarmConfig(lag=32), "task.lag: expected 0 to tokens - 1 = 31, got 32"),
        (lambda: NoHarmConfig(symbols=1), "task.symbols: expected 2 or more, got 1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_task_that_draws_another_number_of_rows_is_refused(monkeypatch):
    task = CONFIGS["no-harm"].build(0)
    draw = task.draw
    monkeypatch.setattr(task, "draw", lambda rows, random: draw(rows - 24, random))
    with pytest.raises(ValueError, match=r"NoHarm.draw: expected 1024 rows of '\w+', .* \(1000, "):
        task.batch("train", 0, 8)
