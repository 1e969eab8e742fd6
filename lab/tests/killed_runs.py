"""Runs a tiny config in child processes that die by SIGKILL until one of them finishes.

python killed_runs.py FOLDER writes    the n-th child dies at its n-th change of a file
python killed_runs.py FOLDER moments   each child dies at a random time

A run that finished before it went on from three different checkpoints is begun anew, so that the
speed of the machine decides nothing. The neighbour `whole` gets the run that nobody kills, which
also spares the children the imports. Prints how many children died.
"""

import gc
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

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


def attempt(folder, change=None, moment=None):
    """One child, killed at its change of a file, or by us after some seconds; did it finish?"""
    child = os.fork()
    if child == 0:
        if change is not None:
            die_at_change(change)
        train(CONFIG, RunOptions(folder, resume=True, device="cpu", quiet=True))
        os._exit(0)
    if moment is not None:
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)  # one that has finished waits to be asked, and feels nothing
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, status
    return True


def main():
    folder, mode, draw = Path(sys.argv[1]), sys.argv[2], random.Random(0)
    torch.set_num_threads(1)
    train(CONFIG, RunOptions(folder.with_name("whole"), device="cpu", quiet=True))
    gc.freeze()  # a run collects garbage first; its child need not look through the imports
    started = time.monotonic()
    assert attempt(folder.with_name("timed"))
    alive, died, stood = time.monotonic() - started, 0, set()
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
    print(died)


if __name__ == "__main__":
    main()
