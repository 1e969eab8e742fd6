"""Worker processes that each take runs one after another.

A worker is started once, so imports, the CUDA context and compiled kernels are paid for once. What
a run prints goes to a log file of its own. A run that raises, or takes the process down with it,
costs its worker, and a new one takes the next run: after a CUDA error the old one is of no use.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

STARTING = 300.0
"""Seconds that a worker gets to import what it needs, before a run's own time begins."""

LOOK = 3600.0
"""Seconds after which workers are looked at, whatever time they have: waits of weeks overflow."""

GRACE = 120.0
"""Seconds that an interrupted worker gets to save where it is."""


@dataclass(frozen=True)
class Job:
    """A run for a worker."""

    name: str
    run: Callable[[str], dict[str, Any]]
    """Takes the device its worker is on; picklable."""
    log: Path
    timeout: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a record or with an error."""

    job: Job
    record: dict[str, Any] | None
    error: str | None
    seconds: float


def run_jobs(jobs: Sequence[Job], *, workers: int, devices: Sequence[str]) -> Iterator[Outcome]:
    """Do all jobs, `workers` at a time, in their order; what became of each as it ends.

    Worker number i is on device number i, counted around. Whoever stops listening before the end,
    by an interrupt or an error, interrupts the runs that go on; they are waited for.
    """
    waiting, threads = deque(jobs), max(1, (os.cpu_count() or 1) // workers)
    started = [_Worker(devices[i % len(devices)], threads) for i in range(min(workers, len(jobs)))]
    try:
        for worker in started:
            worker.give(waiting.popleft())
        while busy := [worker for worker in started if worker.job is not None]:
            wait([w.pipe for w in busy], timeout=min(worker.left() for worker in busy))
            for worker in busy:
                outcome = worker.outcome()
                if outcome is None:
                    continue
                if waiting:
                    worker.give(waiting.popleft())
                yield outcome
    finally:
        for worker in started:
            worker.interrupt()
        for worker in started:
            worker.end()


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, device: str, threads: int) -> None:
        self.device, self.threads = device, threads
        self.job: Job | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked CUDA context is of no use
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, self.device, self.threads), daemon=True
        )
        resource_tracker.ensure_running()  # its start would end what is held back
        with _held_back(signal.SIGINT):  # until the worker can take one without a traceback
            self.process.start()
        theirs.close()  # so that its death is seen as the end of the pipe

    def give(self, job: Job) -> None:
        """Start a run, in a new process where the last run took its own with it."""
        if not self.process.is_alive():
            self.pipe.close()
            self._start()
        self.job, self.since, self.taken = job, time.monotonic(), False
        job.log.parent.mkdir(parents=True, exist_ok=True)
        job.log.write_text("")
        with suppress(BrokenPipeError):  # it died just now, which `outcome` tells
            self.pipe.send(job)

    def left(self) -> float:
        """Seconds until its run has taken too long."""
        if self.job is None or self.job.timeout is None:
            return LOOK
        given = self.job.timeout if self.taken else STARTING
        return min(LOOK, max(0.0, self.since + given - time.monotonic()))

    def outcome(self) -> Outcome | None:
        """How its run ended, None while it has not."""
        job = self.job
        if job is None:
            return None
        record, error = None, None
        if self.pipe.poll():
            try:
                record = self.pipe.recv()
            except (EOFError, ConnectionResetError):  # it died with its run, or before it took it
                self.process.join()
                error = _last_words(job.log, self.process.exitcode)
            if record is None and error is None:  # its first word: the run begins
                self.since, self.taken = time.monotonic(), True
                return None
        elif self.left() == 0.0:
            self.pipe.close()
            self._stop()
            error = f"ended after the {job.timeout:g} s it was given"
        else:
            return None
        self.job = None
        return Outcome(job, record, error, time.monotonic() - self.since)

    def interrupt(self) -> None:
        """Ask a run that goes on to save itself and stop."""
        if self.process.is_alive() and self.process.pid is not None and self.job is not None:
            os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """Let an interrupted run save itself, an idle worker go; then close."""
        self.pipe.close()
        self.process.join(GRACE)
        self._stop()

    def _stop(self) -> None:
        self.process.terminate()  # a run notes it, saves where it is and ends
        self.process.join(10.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Let a signal wait, in this process and, for as long as they like, in those it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _last_words(log: Path, status: int | None) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if status is not None and status < 0:
        return f"its process was killed by signal {-status} ({log})"
    return f"{lines[-1].strip()} ({log})" if lines else f"its process ended with status {status}"


def _serve(pipe: Connection, device: str, threads: int) -> None:
    """The worker's side: take a run, say so, do it, send its record, until the pipe closes."""
    import faulthandler

    import torch

    signal.signal(signal.SIGINT, _leave)  # a run takes it over and saves itself
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a Ctrl-C at the terminal reaches the parent alone, which passes it on once
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(min(threads, torch.get_num_threads()))  # OMP_NUM_THREADS may say fewer
    while True:
        try:
            job: Job = pipe.recv()
            pipe.send(None)
        except (EOFError, OSError):  # nobody gives out runs any more
            return
        _redirect(job.log)
        faulthandler.enable()
        record = job.run(device)
        sys.stdout.flush()
        try:
            pipe.send(record)
        except OSError:  # it has been interrupted, and saved itself
            return


def _leave_with_parent() -> None:
    """Interrupt this worker's run once the sweep is dead, or it would go on for nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGINT)


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGINT)


def _redirect(log: Path) -> None:
    """Let what this process prints, and what libraries print below Python, go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
