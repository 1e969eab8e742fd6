"""A run that was stopped anywhere ends where an uninterrupted one ends, bit for bit."""

import json
import shutil
import time

import pytest
from safetensors import safe_open

import forked
from killed_runs import CONFIG, killed_again_and_again, train_or_die
from tensor_memory_lab.records import config_dict
from tensor_memory_lab.train import load_run, step
from tensor_memory_lab.train.checkpoint import RunFolder
from tiny_runs import TinyTask, lines, run, tiny_run

TIMES = ("seconds", "wall_seconds", "steps_per_second", "step_ms", "peak_memory_bytes")
PLACES = ("date", "commit", "dirty")  # somebody may commit between two runs


def timeless(record):
    return {name: value for name, value in record.items() if name not in TIMES + PLACES}


def checkpoints(folder):
    """Every tensor of every checkpoint by the names of both."""
    found = {}
    for path in (folder / "checkpoints").iterdir():
        with safe_open(path, framework="pt") as file:
            found |= {(path.name, key): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def assert_same_runs(one, other):
    told = [[timeless(line) for line in lines(folder)] for folder in (one, other)]
    assert told[0] == told[1]
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert timeless(results[0]) == timeless(results[1])
    ours, theirs = checkpoints(one), checkpoints(other)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def crashed(folder, monkeypatch, config, at, **options):
    """Train until the run crashes at the beginning of a step."""
    seed = step.seed_step

    def crash(run_seed, process, number, device):
        if number == at:
            raise RuntimeError(f"crashed at step {at}")
        seed(run_seed, process, number, device)

    with monkeypatch.context() as patch:
        patch.setattr(step, "seed_step", crash)
        with pytest.raises(RuntimeError, match="crashed at step"):
            run(folder, config, **options)


@pytest.mark.parametrize("mode", ["writes", pytest.param("moments", marks=pytest.mark.exhaustive)])
def test_runs_killed_again_and_again_end_as_one_that_nobody_killed(tmp_path, mode):
    run(tmp_path / "whole", CONFIG)
    assert killed_again_and_again(tmp_path / "killed", mode) >= 3
    assert_same_runs(tmp_path / "whole", tmp_path / "killed")


def test_what_a_killed_process_was_about_to_drop_goes_when_the_run_is_continued(tmp_path):
    for name in ("whole", "cut"):
        run(tmp_path / name, tiny_run())
    (tmp_path / "cut" / "result.json").unlink()
    best = next((tmp_path / "cut" / "checkpoints").glob("best-*"))
    shutil.copy(best, best.with_name("best-000000.safetensors"))
    run(tmp_path / "cut", tiny_run(), resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


CRASHES = {
    "before a checkpoint": ([2], {}),
    "memory, dropout and carry": (
        [9, 10, 19],
        {"task": {"carries": True}, "model": {"method": "tensor", "dropout": 0.2}},
    ),
    "between two lines": (
        [11],
        {"budget": {"evaluate_every": 40, "checkpoint_every": 3, "steps": 22}},
    ),
    "losing patience": (
        [19],
        {"optimizer": {"lr": 1e-9}, "budget": {"steps": 60, "patience": 3, "checkpoint_every": 7}},
    ),
}


@pytest.mark.parametrize(("steps", "changes"), CRASHES.values(), ids=CRASHES)
def test_a_crashed_run_is_continued(tmp_path, monkeypatch, steps, changes):
    config = tiny_run(**changes)
    record = run(tmp_path / "whole", config)
    assert record["stopped_early"] == (config.budget.patience is not None)
    for number, at in enumerate(steps):
        crashed(tmp_path / "cut", monkeypatch, config, at, resume=number > 0)
    run(tmp_path / "cut", config, resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_a_run_is_left_to_the_process_that_trains_it_until_that_is_killed(tmp_path, monkeypatch):
    folder, config = tmp_path / "run", tiny_run(budget={"steps": 10**9})
    other = forked.start(train_or_die, folder, config, folder=tmp_path)
    try:
        while not RunFolder(folder).steps():
            assert other.is_alive()
            time.sleep(0.02)
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "resume", None)  # it may be replaced while it is read
            with pytest.raises(ValueError, match="expected a run that nobody is training"):
                run(folder, config, resume=True)
        assert other.is_alive()
    finally:
        other.kill()
        other.join()
    last = RunFolder(folder).steps()[-1]
    crashed(folder, monkeypatch, config, last, resume=True)  # it had gone on


def test_a_run_older_than_a_field_of_its_config_is_continued_and_loaded(tmp_path, monkeypatch):
    config = tiny_run(model={"method": "tensor"})
    whole = run(tmp_path / "whole", config)
    written = config_dict(config)
    del written["model"]["memory"]["input_bias"]  # as a version without it wrote it
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(written))
    crashed(tmp_path / "old", monkeypatch, config, 13, resume=True)
    assert timeless(run(tmp_path / "old", config, resume=True)) == timeless(whole)
    assert load_run(tmp_path / "old")[0] == config


def test_a_finished_run_resumed_returns_its_result_and_measures_a_lost_one_again(
    tmp_path, monkeypatch
):
    record = run(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(TinyTask, "batch", None)
        assert run(tmp_path / "run", resume=True) == json.loads(json.dumps(record))
    (tmp_path / "run" / "result.json").unlink()  # killed while it was tested
    assert timeless(run(tmp_path / "run", resume=True)) == timeless(record)


def test_the_last_two_checkpoints_and_their_best_weights_are_kept(tmp_path):
    folder = RunFolder(tmp_path / "run")
    beside = folder.checkpoints / ".DS_Store"
    folder.checkpoints.mkdir(parents=True)
    beside.write_text("a file browser's")
    record = run(folder.path, tiny_run(budget={"steps": 40}), resume=True)
    assert folder.steps() == [36, 40]
    best = sorted(path.name for path in folder.checkpoints.glob("best-*"))
    assert f"best-{record['best_step']:06d}.safetensors" in best
    assert len(best) <= 2
    assert beside.exists()


def test_checkpoints_of_a_finished_run_are_dropped_where_nobody_wants_them(tmp_path):
    record = run(tmp_path / "run", keep_checkpoints=False)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "result.json"}
    assert run(tmp_path / "run", resume=True)["test"] == record["test"]
