"""Launchers, several processes and signals: the same run from outside."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import forked
from tensor_memory_lab.cli import main
from tensor_memory_lab.train import load_run, step
from tensor_memory_lab.train.checkpoint import RunFolder
from tiny_runs import lines, long_run, run, shared_run
from tolerances import assert_same

LAUNCHERS = {
    "torchrun": "torch.distributed.run --standalone --nproc_per_node=2",
    "accelerate": "accelerate.commands.launch --cpu --num_processes=1",
}


def command(recipe, folder, *flags):
    return ["run", f"tiny_runs:{recipe}", "--device", "cpu", "--output", str(folder), *flags]


def joined(command, folder, count=2):
    """The same command in several processes that know of each other as a launcher tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    started = [
        forked.start(main, command, folder=folder / rank, RANK=rank, LOCAL_RANK=rank, **group)
        for rank in map(str, range(count))
    ]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * count
    return "".join((folder / str(rank) / "out").read_text() for rank in range(count))


def test_two_processes_give_the_loss_curve_of_one(tmp_path):
    alone = run(tmp_path / "one", shared_run())
    told = joined(command("shared_run", tmp_path / "two"), tmp_path / "each")
    assert told.count("result.json") == 1  # one process speaks
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
    words = command("long_run", folder, "--results", str(kept))
    process = forked.start(main, words, folder=tmp_path)
    while not (folder / "metrics.jsonl").exists():
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    out, told = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert process.exitcode == 130, told
    step = RunFolder(folder).steps()[-1]
    assert f"SIGINT: saved step {step} of 3000000 in {folder}; continue by adding --resume" in told
    assert out == ""
    assert not (folder / "result.json").exists()
    assert not kept.exists()
    _, _, model = load_run(folder, "last")
    assert not model.training


@pytest.mark.exhaustive  # the two processes above are told what launchers tell theirs
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_runs_a_recipe(tmp_path, launcher):
    words = ["-m", *LAUNCHERS[launcher].split(), "-m", "tensor_memory_lab.cli"]
    subprocess.run(
        [sys.executable, *words, *command("shared_run", tmp_path / "run", "--quiet")],
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["finished"]


def test_an_interrupted_run_is_resumed_to_the_end_of_an_uninterrupted_one(
    tmp_path, monkeypatch, capsys
):
    config = replace(long_run(), budget=shared_run().budget)
    whole = run(tmp_path / "whole", config)
    before, seed_step = signal.getsignal(signal.SIGTERM), step.seed_step

    def interrupt(seed, process, number, device):
        seed_step(seed, process, number, device)
        if number == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(step, "seed_step", interrupt)
        cut = run(tmp_path / "cut", config)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM: saved step 7 of 20" in capsys.readouterr().err
    assert not cut["finished"]
    assert cut["test"] == {}
    resumed = run(tmp_path / "cut", config, resume=True)
    assert resumed["curve"] == whole["curve"]
    assert resumed["test"] == whole["test"]
