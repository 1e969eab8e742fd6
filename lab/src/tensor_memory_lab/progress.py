"""Progress of long work: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TextIO


class Advance(Protocol):
    """Reports finished work."""

    def __call__(self, amount: int = 1, note: str = "") -> None:
        """`amount` more is done; `note` says how it goes and stays until the next one."""
        ...


@contextmanager
def progress(
    label: str, total: int, *, unit: str = "steps", start: int = 0, file: TextIO | None = None
) -> Iterator[Advance]:
    """Show how far work of `total` units has come, on standard error unless `file` is given.

    `start` units were done before, and say nothing about the rate or the time left. The bar needs
    rich (the `experiments` extra); without it the lines are printed instead.

    >>> with progress("reading", 100, unit="pages", file=sys.stdout) as advance:
    ...     advance(60)
    ...     advance(40, note="all found")  # doctest: +ELLIPSIS
    reading: 60 of 100 pages, 60 %, ... left, .../s
    reading: 100 of 100 pages, 100 %, .../s, all found
    """
    out = sys.stderr if file is None else file
    shown = _bar if out.isatty() and importlib.util.find_spec("rich") else _lines
    with shown(label, total, unit, start, out) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, unit: str, start: int, file: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        Remaining(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(file=file)) as bars:
        task = bars.add_task(label, total=total, completed=start, note="", rate="")

        def advance(amount: int = 1, note: str = "") -> None:
            fields = bars.tasks[0].fields
            speed = bars.tasks[0].speed
            rate = fields["rate"] if speed is None else _rate(speed)
            bars.update(task, advance=amount, note=note or fields["note"], rate=rate)

        yield advance


@contextmanager
def _lines(label: str, total: int, unit: str, start: int, file: TextIO) -> Iterator[Advance]:
    done, printed, last_note, started = start, start * 10 // total, "", time.perf_counter()

    def advance(amount: int = 1, note: str = "") -> None:
        nonlocal done, printed, last_note
        done, last_note = done + amount, note or last_note
        tenth = done * 10 // total
        if tenth > printed:  # ten lines at most, however often this is called
            printed = tenth
            rate = (done - start) / max(time.perf_counter() - started, 1e-9)
            left = str(timedelta(seconds=round((total - done) / rate))) if done < total else ""
            parts = [f"{label}: {done:,} of {total:,} {unit}, {done * 100 // total} %"]
            parts += [left and f"{left} left", _rate(rate), last_note]
            print(", ".join(part for part in parts if part), file=file, flush=True)

    yield advance


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.1f}/s"
