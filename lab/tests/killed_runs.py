"""A tiny run in processes that die by SIGKILL until one of them finishes.

Each dies at a change of a file, one change later than the one before, or at a random time. A run
that finished before it went on from three different checkpoints is begun anew, so that the speed of
the machine decides nothing.
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import forked
from tensor_memory_lab.train import RunOptions, train
from tiny_runs import tiny_run

CONFIG = tiny_run(
    task={"carries": True},
    model={"method": "tensor", "dropout": 0.3},
    budget={"accumulate": 2, "checkpoint_every": 3, "evaluate_every": 4, "steps": 14},
    seed=3,
)


def die_at_change(number):
    """Kill this process at its change of a file number `number`."""
    left = number

    def count(change):
        def changed(*arguments, **options):
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return changed

    for owner, names in ((Path, ("replace", "write_text", "mkdir", "unlink")), (os, ("fsync",))):
        for name in names:
            setattr(owner, name, count(getattr(owner, name)))


def train_or_die(folder, config=CONFIG, change=None):
    if change is not None:
        die_at_change(change)
    train(config, RunOptions(folder, resume=True, device="cpu", quiet=True))


def attempt(folder, change=None, moment=None):
    """One process, killed at its change of a file, or by us after some seconds; did it finish?"""
    process = forked.start(train_or_die, folder, CONFIG, change, folder=folder.parent)
    process.join(moment)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode in (0, -signal.SIGKILL), (folder.parent / "err").read_text()
    return process.exitcode == 0


def killed_again_and_again(folder, mode):
    """Train in a folder; how many processes died."""
    alive, draw, died, stood = 0.0, random.Random(0), 0, set()
    if mode == "moments":
        assert attempt(folder.with_name("first"))  # starts the server that forks
        started = time.monotonic()
        assert attempt(folder.with_name("timed"))
        alive = time.monotonic() - started
    while len(stood) < 3:
        shutil.rmtree(folder, ignore_errors=True)
        died, stood = 0, set()
        while not attempt(
            folder,
            change=died + 1 if mode == "writes" else None,
            moment=draw.uniform(0.001, alive * (0.5 + 0.05 * died)) if mode == "moments" else None,
        ):
            died += 1
            stood.add(max((p.name for p in folder.glob("checkpoints/step-*")), default=None))
            assert died < 200, stood
    return died
