"""Processes that take runs: what they may use, and what the death of one costs."""

import math
import os
import signal

import pytest

from invented_runs import count_threads
from tensor_memory_lab.commands.workers import Job, _Worker, run_jobs


def make_jobs(folder, *names, **options):
    return [Job(name, count_threads, folder / f"{name}.log", **options) for name in names]


def test_a_worker_takes_no_more_threads_than_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs = make_jobs(tmp_path, "threads", timeout=math.inf)  # as long as it likes
    (outcome,) = run_jobs(jobs, workers=1, devices=["cpu"])
    assert outcome.record == {"threads": 1}


@pytest.mark.parametrize("moment", ["before it is given a run", "before it takes it"])
def test_a_worker_killed_while_it_starts_costs_one_run_alone(tmp_path, monkeypatch, moment):
    """The one run that it was given; the pipe breaks, or is reset with the run still in it."""
    give = _Worker.give

    def given(worker, job):
        if job.name != "first":
            give(worker, job)
        elif moment == "before it takes it":
            give(worker, job)
            os.kill(worker.process.pid, signal.SIGKILL)
        else:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
            with monkeypatch.context() as unseen:
                unseen.setattr(worker.process, "is_alive", lambda: True)
                give(worker, job)

    monkeypatch.setattr(_Worker, "give", given)
    jobs = make_jobs(tmp_path, "first", "second")
    first, second = run_jobs(jobs, workers=1, devices=["cpu"])
    assert first.record is None
    assert first.error == f"its process was killed by signal 9 ({tmp_path / 'first.log'})"
    assert second.record is not None
