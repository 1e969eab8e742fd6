"""Runs a tiny config in child processes that die by SIGKILL until one of them finishes.

python killed_runs.py FOLDER writes       the n-th child dies at its n-th change of a file
python killed_runs.py FOLDER moments SEED each child dies after a random time

Its neighbour `whole` gets the run that nobody kills, which also spares the children the imports.
Prints how many children died, and at how many different checkpoints the next one went on.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tiny_runs import tiny_run

from tensor_memory.experiments.train import RunOptions, train

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

    for owner, names in ((Path, ("rename", "replace", "write_text", "mkdir", "unlink")),
                         (os, ("fsync",)), (shutil, ("rmtree",))):  # fmt: skip
        for name in names:
            setattr(owner, name, count(getattr(owner, name)))


def attempt(folder, prepare):
    """One child; whether it finished. `prepare` says when it dies: in itself, or by its parent."""
    child = os.fork()
    if child == 0:
        wait = prepare()
        if wait is not None:
            signal.setitimer(signal.ITIMER_REAL, wait)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        train(CONFIG, RunOptions(folder, resume=True, device="cpu", quiet=True))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, status
    return True


def main():
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    train(CONFIG, RunOptions(folder.with_name("whole"), device="cpu", quiet=True))
    draw = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    died, stood, started = 0, set(), time.monotonic()
    while True:
        if mode == "writes":
            finished = attempt(folder, partial(die_at_change, died + 1))
        else:
            longest = 0.2 + 0.1 * died
            finished = attempt(folder, partial(draw.uniform, 0.001, longest))
        if finished:
            break
        died += 1
        last = folder / "last"
        stood.add(json.loads(last.read_text())["checkpoint"] if last.exists() else None)
        assert time.monotonic() - started < 60, died
    print(json.dumps({"died": died, "stood": len(stood)}))


if __name__ == "__main__":
    main()
