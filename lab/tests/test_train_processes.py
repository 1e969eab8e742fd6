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

from tensor_memory_lab.train import RunOptions, load_run, step, train
from tensor_memory_lab.train.checkpoint import RunFolder
from tiny_runs import long_run, shared_run
from tolerances import assert_same

HERE = Path(__file__).parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1")


def command(recipe, folder, *flags):
    words = ("run", recipe, "--device", "cpu", "--output", folder, *flags)
    return ["-m", "tensor_memory_lab.cli", *words]


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
    done = launch(*TORCHRUN, *command("tiny_runs:shared_run", tmp_path / "two"))
    assert done.stdout.count("result.json") == 1  # one process speaks
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == len(two) == 20
    for ours, theirs in zip(one, two, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours.get("valid", {}) == pytest.approx(theirs.get("valid", {}), rel=1e-5)
    shared = json.loads((tmp_path / "two" / "result.json").read_text())
    for split, measures in alone["test"].items():
        assert shared["test"][split] == pytest.approx(measures, rel=1e-5)
    last = Path("checkpoints", "step-000020.safetensors")  # its carry holds the rows of both
    ours, theirs = (load_file(tmp_path / name / last) for name in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert_same(theirs[name], ours[name])


def test_ctrl_c_saves_says_how_to_go_on_and_ends_with_130_and_no_result(tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept.jsonl"
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
    step = RunFolder(folder).steps()[-1]
    assert f"SIGINT: saved step {step} of 3000000 in {folder}; continue by adding --resume" in told
    assert out == ""
    assert not (folder / "result.json").exists()
    assert not kept.exists()
    _, _, model = load_run(folder, "last")
    assert not model.training


@pytest.mark.exhaustive  # torchrun above says the same in other variables of the environment
def test_accelerate_launch_runs_a_recipe(tmp_path):
    launch(*ACCELERATE, *command("tiny_runs:shared_run", tmp_path / "run", "--quiet"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"]


def test_an_interrupted_run_is_resumed_to_the_end_of_an_uninterrupted_one(
    tmp_path, monkeypatch, capsys
):
    config = replace(long_run(), budget=shared_run().budget)
    whole = train(config, RunOptions(tmp_path / "whole", device="cpu", quiet=True))
    before, seed_step = signal.getsignal(signal.SIGTERM), step.seed_step

    def interrupt(seed, process, number, device):
        seed_step(seed, process, number, device)
        if number == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(step, "seed_step", interrupt)
        cut = train(config, RunOptions(tmp_path / "cut", device="cpu", quiet=True))
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: saved step 7 of 20" in capsys.readouterr().err
    assert not cut["finished"]
    assert cut["test"] == {}
    resumed = train(config, RunOptions(tmp_path / "cut", device="cpu", quiet=True, resume=True))
    assert resumed["curve"] == whole["curve"]
    assert resumed["test"] == whole["test"]
