"""Runs as jobs of submitit: processes of this machine, or jobs of a SLURM cluster.

A job is the command `run` with its arguments, in a process of its own, with a log of its own. Its
outcome is what it leaves in the run's folder. A job of this machine goes on when the process that
started it is killed; its run is then found finished, or continued from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_memory_lab.commands.run import run_command
from tensor_memory_lab.interruption import handled

if TYPE_CHECKING:
    import submitit

LOOK_EVERY = 0.2
"""Seconds between two looks at the jobs that are running."""

TO_SAVE = 30
"""Seconds from the end of a run's time, when it is asked to save itself, until it is killed."""

TO_END = 120.0
"""Seconds that interrupted jobs get to save their runs."""

NO_TIMEOUT = 366 * 24 * 3600.0
"""Seconds; submitit gives a job of this machine two minutes unless it is told otherwise."""


@dataclass(frozen=True)
class Job:
    """A run to be done."""

    name: str
    arguments: tuple[str, ...]
    """Of the command `run`, but for the device."""
    folder: Path
    """Where its log goes."""
    timeout: float | None = None
    """Seconds that it may take."""


@dataclass(frozen=True)
class Ended:
    """A job that is over, whatever became of it."""

    job: Job
    seconds: float
    """Since it began: time in a cluster's queue does not count."""
    log: Path
    killed: bool
    """Whether its process ended without a word of its own."""

    @property
    def timed_out(self) -> bool:
        """Whether it took all the time it was given."""
        return self.job.timeout is not None and self.seconds >= self.job.timeout

    def last_line(self) -> str:
        """The last line of its log that is not empty, which is the message of an error."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]


def do_jobs(jobs: Sequence[Job], *, devices: Sequence[str], slurm: str | None) -> Iterator[Ended]:
    """Do all jobs in their order, one per entry of `devices` at a time; each as it ends.

    With the name of a partition in `slurm` they go to that cluster. Whoever stops listening before
    the end, by an interrupt or an error, ends the jobs that are running; they save their runs.
    """
    waiting, free = deque(jobs), list(devices)
    threads = max(1, (os.cpu_count() or 1) // len(devices))
    running: dict[submitit.Job[None], tuple[Job, str]] = {}
    begun: dict[submitit.Job[None], float] = {}
    try:
        while waiting or running:
            while waiting and free:
                job, device = waiting.popleft(), free.pop(0)
                submitted = _submit(job, device, threads, slurm)
                running[submitted] = job, device
                if slurm is None:
                    begun[submitted] = time.monotonic()
            for submitted in list(running):
                done, paths = submitted.done(), submitted.paths
                if submitted not in begun and paths.stdout.exists():  # it has left the queue
                    begun[submitted] = time.monotonic()
                if not done:
                    continue
                job, device = running.pop(submitted)
                free.append(device)
                killed = not paths.result_pickle.exists()
                paths.result_pickle.unlink(missing_ok=True)
                paths.submitted_pickle.unlink(missing_ok=True)
                now = time.monotonic()
                yield Ended(job, now - begun.pop(submitted, now), paths.stdout, killed)
            time.sleep(LOOK_EVERY)
    finally:
        _end(list(running), slurm)


def _submit(job: Job, device: str, threads: int, slurm: str | None) -> submitit.Job[None]:
    import submitit
    from submitit.helpers import environment_variables

    arguments = [*job.arguments, "--device", device]
    if slurm is not None:
        cluster = submitit.SlurmExecutor(job.folder)
        cluster.update_parameters(
            partition=slurm,
            job_name=job.name,
            gpus_per_node=0 if device == "cpu" else 1,
            stderr_to_stdout=True,
            additional_parameters={"signal": f"TERM@{TO_SAVE}"},  # which a run takes to save itself
            **({} if job.timeout is None else {"time": math.ceil((job.timeout + TO_SAVE) / 60)}),
        )
        return cluster.submit(run_job, arguments, {})
    local = submitit.LocalExecutor(job.folder)
    local.update_parameters(
        timeout_min=((job.timeout or NO_TIMEOUT) + TO_SAVE + 0.5) / 60,
        signal_delay_s=TO_SAVE,
        stderr_to_stdout=True,
    )
    # submitit hides all GPUs from a job of this machine unless it counts them itself.
    seen = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
    seen["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
    # Ctrl-C at a terminal reaches every process there. One started here ignores it until its run
    # trains and can save itself; the sweep ends the others with SIGTERM.
    ignored = handled(signal.SIGINT, signal.SIG_IGN)
    with ignored, environment_variables(SUBMITIT_PREEMPT_SIGNAL="TERM"):
        return local.submit(run_job, arguments, seen)


def run_job(arguments: Sequence[str], environment: dict[str, str | None]) -> None:
    """Be the command `run`, in the process of a job."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until training takes it to save itself
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if status := run_command(arguments):
        raise SystemExit(status)


def _end(running: Sequence[submitit.Job[Any]], slurm: str | None) -> None:
    """Ask jobs to save their runs and to end; wait until they have."""
    for job in running:
        if slurm is not None:
            job.cancel(check=False)
        else:  # its number is that of the process that passes a SIGTERM on to the run
            with suppress(ProcessLookupError):
                os.kill(int(job.job_id), signal.SIGTERM)
    until = time.monotonic() + TO_END
    while time.monotonic() < until and not all(job.done() for job in running):
        time.sleep(LOOK_EVERY)
