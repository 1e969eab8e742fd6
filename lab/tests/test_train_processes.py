"""Launchers, several processes and signals: the same run from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tensor_memory_lab.train import RunOptions, load_run, train
from tensor_memory_lab.train.steps import seed_step
from tiny_runs import long_run, shared_run
from tolerances import assert_same

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(recipe, folder, *flags):
    return ["-m", "tensor_memory", "run", recipe, "--device", "cpu", "--output", folder, *flags]


def launch(*words):
    done = subprocess.run(
        words, cwd=HERE, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_give_the_loss_curve_of_one(tmp_path):
    alone = train(shared_run(), RunOptions(tmp_path / "one", device="cpu", quiet=True))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = launch(*torchrun, *command("tiny_runs:shared_run", tmp_path / "two"))
    assert done.stdout.count("result.json") == 1  # one process speaks
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == len(two) == 20
    for ours, theirs in zip(one, two, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours.get("valid", {}) == pytest.approx(theirs.get("valid", {}), rel=1e-5)
    shared = json.loads((tmp_path / "two" / "result.json").read_text())
    assert shared["speed"] == "eager (a CUDA graph needs a CUDA device, got cpu)"
    for split, measures in alone["test"].items():
        assert shared["test"][split] == pytest.approx(measures, rel=1e-5)
    last = [tmp_path / name / "checkpoints" / "step-000020" for name in ("one", "two")]
    for part in ("model", "optimizer", "carry"):  # the carry holds the rows of both
        ours, theirs = (load_file(folder / f"{part}.safetensors") for folder in last)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same(theirs[name], ours[name])


def test_processes_look_for_unused_weights_only_where_there_are_any(tmp_path):
    # The memory of `shared_run` above, a row of 4 tokens and chunks of 16, never writes.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ("--budget.steps", "4", "--quiet")
    done = launch(*torchrun, *command("tiny_runs:long_run", tmp_path / "run", *flags))
    assert "find_unused_parameters" not in done.stderr
    assert len(lines(tmp_path / "run")) == 4


def test_ctrl_c_saves_says_how_to_go_on_and_ends_with_130_and_no_result(tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    words = [sys.executable, *command("tiny_runs:long_run", folder, "--results", kept)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=HERE, env=ENVIRONMENT, **pipes)
    with process, ExitStack() as leaving:
        leaving.callback(process.kill)  # by then it has ended, unless the test has failed
        while not (folder / "metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, told = (text.decode() for text in process.communicate())
        assert process.returncode == 130, told
    step = lines(folder)[-1]["step"]
    assert step < 3_000_000
    assert "SIGINT: saved step " in told
    assert f" of 3000000 in {folder}; continue by adding --resume to the same command" in told
    saved = json.loads((folder / "last").read_text())["checkpoint"]
    assert f"saved step {int(saved.removeprefix('step-'))} of" in told
    assert out == ""
    assert not (folder / "result.json").exists()
    assert not list(kept.iterdir())
    _, _, model = load_run(folder, "last")
    assert not model.training


def test_accelerate_launch_runs_a_recipe(tmp_path):
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1"]
    launch(*accelerate, *command("tiny_runs:shared_run", tmp_path / "run", "--quiet"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_resumed_to_the_end_of_an_uninterrupted_one(
    tmp_path, monkeypatch, capsys, number
):
    config = replace(long_run(), budget=shared_run().budget)
    whole = train(config, RunOptions(tmp_path / "whole", device="cpu", quiet=True))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:

        def interrupt(seed, process, step, device):
            seed_step(seed, process, step, device)
            if step == 6:
                os.kill(os.getpid(), number)

        patch.setattr("tensor_memory_lab.train.steps.seed_step", interrupt)
        cut = train(config, RunOptions(tmp_path / "cut", device="cpu", quiet=True))
    assert signal.getsignal(number) is before
    assert f"{number.name}: saved step 7 of 20" in capsys.readouterr().err
    assert not cut["finished"]
    assert cut["test"] == {}
    resumed = train(config, RunOptions(tmp_path / "cut", device="cpu", quiet=True, resume=True))
    assert resumed["curve"] == whole["curve"]
    assert resumed["test"] == whole["test"]
