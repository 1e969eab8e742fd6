"""Progress of long work: a bar on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, TextIO

LINE_EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


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

    `start` units were done before; they do not count for the rate or the time left.

    >>> with progress("reading", 100, unit="pages", file=sys.stdout) as advance:
    ...     advance(60)
    ...     advance(40, note="all found")  # doctest: +ELLIPSIS
    reading: 60 of 100 pages, 60 %, ... left, .../s
    reading: 100 of 100 pages, 100 %, .../s, all found
    """
    out = sys.stderr if file is None else file
    with (_bar if out.isatty() else _lines)(label, total, unit, start, out) as advance:
        yield advance


@contextmanager
def _bar(label: str, total: int, unit: str, start: int, file: TextIO) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining
    from rich.table import Column

    console = Console(file=file)
    columns: list[ProgressColumn] = [
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        Remaining(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
    ]
    if console.width >= 64:  # what a narrower terminal has no room for
        columns.append(TextColumn("{task.fields[note]}"))
    if console.width >= 100:
        columns = [TextColumn("{task.description}"), BarColumn(20), *columns]
    with Progress(*columns, console=console) as bars:
        task = bars.add_task(label, total=total, completed=start, note="", rate="")

        def advance(amount: int = 1, note: str = "") -> None:
            fields = bars.tasks[0].fields
            speed = bars.tasks[0].speed
            rate = fields["rate"] if speed is None else _rate(speed)
            bars.update(task, advance=amount, note=note or fields["note"], rate=rate)

        yield advance


@contextmanager
def _lines(label: str, total: int, unit: str, start: int, file: TextIO) -> Iterator[Advance]:
    """A line at every tenth of the work, and every LINE_EVERY seconds between."""
    done, printed, last_note, began = start, start * 10 // total, "", time.perf_counter()
    last_line, over, one_at_a_time = began, threading.Event(), threading.Lock()

    def show() -> None:
        nonlocal last_line
        last_line = time.perf_counter()
        parts = [f"{label}: {done:,} of {total:,} {unit}, {done * 100 // total} %"]
        if done > start:
            rate = (done - start) / max(last_line - began, 1e-9)
            left = timedelta(seconds=round((total - done) / rate))
            parts += [f"{left} left"] * (done < total) + [_rate(rate)]
        print(", ".join([*parts, *filter(None, [last_note])]), file=file, flush=True)

    def advance(amount: int = 1, note: str = "") -> None:
        nonlocal done, printed, last_note
        with one_at_a_time:
            done, last_note = done + amount, note or last_note
            if done * 10 // total > printed:
                printed = done * 10 // total
                show()

    def keep_showing() -> None:  # also while one step or an evaluation takes minutes
        while not over.wait(max(0.0, last_line + LINE_EVERY - time.perf_counter())):
            with one_at_a_time:
                if time.perf_counter() - last_line >= LINE_EVERY:
                    show()

    thread = threading.Thread(target=keep_showing, daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        over.set()
        thread.join()


def _rate(per_second: float) -> str:
    if per_second < 1:
        return f"{1 / max(per_second, 1e-9):,.1f} s each"
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{per_second:.1f}/s"
