"""A run that was stopped anywhere ends where an uninterrupted one ends, bit for bit."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tensor_memory_lab.records import config_dict
from tensor_memory_lab.train import RunOptions, load_run, train
from tensor_memory_lab.train.checkpoints import Checkpoints
from tensor_memory_lab.train.folder import RunFolder
from tiny_runs import tiny_run

HERE = Path(__file__).parent
TIMES = ("seconds", "wall_seconds", "steps_per_second", "step_ms", "peak_memory_bytes")
PLACES = ("date", "commit", "dirty")  # somebody may commit between two runs


def run(folder, config=None, **options):
    return train(config or tiny_run(), RunOptions(folder, device="cpu", quiet=True, **options))


def timeless(record):
    return {name: value for name, value in record.items() if name not in TIMES + PLACES}


def lines(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [timeless(json.loads(line)) for line in text.splitlines()]


def checkpoint(folder, which="last"):
    name = json.loads((folder / which).read_text())["checkpoint"]
    return folder / "checkpoints" / name


def assert_same_runs(one, other):
    assert lines(one) == lines(other)
    results = [json.loads((folder / "result.json").read_text()) for folder in (one, other)]
    assert timeless(results[0]) == timeless(results[1])
    for which in ("last", "best"):
        assert checkpoint(one, which).name == checkpoint(other, which).name
    for which, parts in (("last", ("model", "optimizer")), ("best", ("model",))):
        for part in parts:
            ours, theirs = (
                load_file(checkpoint(folder, which) / f"{part}.safetensors")
                for folder in (one, other)
            )
            assert ours.keys() == theirs.keys()
            assert all(ours[name].equal(theirs[name]) for name in ours), (which, part)


@pytest.mark.parametrize("mode", ["writes", "moments"])
def test_runs_killed_again_and_again_end_as_one_that_nobody_killed(tmp_path, mode):
    folder = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, HERE / "killed_runs.py", folder, mode],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["died"] >= 3
    assert told["stood"] >= 3  # checkpoints that a child went on from, the start among them
    assert_same_runs(tmp_path / "whole", folder)


ENDLESS = """
import sys
from tiny_runs import tiny_run
from tensor_memory_lab.train import RunOptions, train
train(tiny_run(budget={"steps": 10**9}), RunOptions(sys.argv[1], device="cpu", quiet=True))
"""


def test_a_run_is_left_to_the_process_that_trains_it_until_that_is_killed(tmp_path, monkeypatch):
    folder, config = tmp_path / "run", tiny_run(budget={"steps": 10**9})
    other = subprocess.Popen([sys.executable, "-c", ENDLESS, folder], cwd=HERE)
    try:
        while not (folder / "last").exists():
            assert other.poll() is None
            time.sleep(0.05)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "resume", None)  # it may be replaced while it is read
            with pytest.raises(ValueError, match="expected a run that nobody is training"):
                run(folder, config, resume=True)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    step = int(checkpoint(folder).name.removeprefix("step-"))
    crashed(folder, monkeypatch, config, step, resume=True)  # it had gone on


class StopAt:
    """Raises at the beginning of a step, as a crash would."""

    def __init__(self, monkeypatch, step):
        from tensor_memory_lab.train import steps

        seed = steps.seed_step

        def crash(run_seed, process, number, device):
            if number == step:
                raise RuntimeError(f"crashed at step {step}")
            seed(run_seed, process, number, device)

        monkeypatch.setattr(steps, "seed_step", crash)


def crashed(folder, monkeypatch, config, step, **options):
    with monkeypatch.context() as patch:
        StopAt(patch, step)
        with pytest.raises(RuntimeError, match="crashed at step"):
            run(folder, config, **options)


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("steps", [(2,), (4, 13), (9, 10, 19)])
def test_a_crashed_run_is_continued_with_dropout_memory_and_carry(
    tmp_path, monkeypatch, carries, steps
):
    config = tiny_run(task={"carries": carries}, model={"method": "tensor", "dropout": 0.2})
    run(tmp_path / "whole", config)
    for number, step in enumerate(steps):
        crashed(tmp_path / "cut", monkeypatch, config, step, resume=number > 0)
    run(tmp_path / "cut", config, resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_losses_between_two_lines_outlive_a_crash(tmp_path, monkeypatch):
    budget = {"evaluate_every": 40, "checkpoint_every": 3, "steps": 22}  # a line every 4 steps
    config = tiny_run(budget=budget)
    run(tmp_path / "whole", config)
    crashed(tmp_path / "cut", monkeypatch, config, 11)
    run(tmp_path / "cut", config, resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_patience_outlives_a_crash(tmp_path, monkeypatch):
    config = tiny_run(
        optimizer={"lr": 1e-9}, budget={"steps": 60, "patience": 3, "checkpoint_every": 7}
    )
    record = run(tmp_path / "whole", config)
    assert record["stopped_early"]
    assert record["steps"] == record["best_step"] + 15
    crashed(tmp_path / "cut", monkeypatch, config, record["steps"] - 1)
    run(tmp_path / "cut", config, resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_a_run_older_than_a_field_of_its_config_is_continued_and_loaded(tmp_path, monkeypatch):
    config = tiny_run(model={"method": "tensor"})
    run(tmp_path / "whole", config)
    written = config_dict(config)
    del written["model"]["memory"]["input_bias"]  # as a version without it wrote it
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(written))
    crashed(tmp_path / "old", monkeypatch, config, 13, resume=True)
    run(tmp_path / "old", config, resume=True)
    assert_same_runs(tmp_path / "whole", tmp_path / "old")
    assert load_run(tmp_path / "old")[0] == config
    old, whole = (RunFolder(tmp_path / name).fingerprint(config) for name in ("old", "whole"))
    assert old != whole  # it is the written config that its checkpoints belong to


def test_a_finished_run_resumed_returns_its_result(tmp_path):
    record = run(tmp_path / "run")
    before = (tmp_path / "run" / "result.json").stat().st_mtime_ns
    again = run(tmp_path / "run", resume=True)
    assert again == json.loads(json.dumps(record))
    assert (tmp_path / "run" / "result.json").stat().st_mtime_ns == before


def test_a_run_killed_while_it_was_tested_is_tested_again(tmp_path):
    whole = run(tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = run(tmp_path / "run", resume=True)
    assert timeless(again) == timeless(whole)


def test_the_checkpoint_before_the_last_is_kept_and_older_ones_are_not(tmp_path):
    run(tmp_path / "run", tiny_run(budget={"steps": 40}))
    last = json.loads((tmp_path / "run" / "last").read_text())
    assert last["checkpoint"] == "step-000040"
    assert last["previous"]["checkpoint"] == "step-000036"
    kept = {folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-000040", "step-000036", last["best"], last["previous"]["best"]}


def test_what_others_put_beside_the_checkpoints_stays_and_stops_nothing(tmp_path):
    beside = tmp_path / "run" / "checkpoints" / ".DS_Store"
    note = beside.with_name("notes")
    note.mkdir(parents=True)
    beside.write_text("a file browser's")
    assert run(tmp_path / "run", resume=True)["finished"]
    assert beside.exists()
    assert note.exists()


def test_checkpoints_of_a_finished_run_are_dropped_where_nobody_wants_them(tmp_path):
    record = run(tmp_path / "run", keep_checkpoints=False)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "metrics.jsonl", "result.json"}
    assert run(tmp_path / "run", resume=True)["test"] == record["test"]
