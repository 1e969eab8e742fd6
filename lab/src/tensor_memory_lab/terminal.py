"""Tables for a terminal of any width, and for a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNLIMITED = 10_000
"""Columns of something that is no terminal: no line is broken there, so that `grep` finds it."""


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows on stdout under the names of their columns; numbers are aligned to the right.

    Where the terminal is too narrow for the columns, each row is a list of names and values.
    """
    console = Console(width=None if sys.stdout.isatty() else UNLIMITED, highlight=False)
    names = dict.fromkeys(name for row in rows for name in row)
    table = _empty_table()
    for number, name in enumerate(names):
        numbers = all(re.match(r"[-+−–]?\d|[–-]?$", row.get(name, "")) for row in rows)
        table.add_column(name, justify="right" if numbers and number else "left")
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in names))
    shown = [table]
    unlimited = console.options.update_width(UNLIMITED)
    if console.measure(table, options=unlimited).minimum > console.width:
        shown = [_empty_table(show_header=False) for _ in rows]
        for table, row in zip(shown, rows, strict=True):
            for name, value in row.items():
                table.add_row(Text(name, style="bold"), Text(value))
    with console.capture() as captured:
        console.print(*shown, sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip())


def _empty_table(show_header: bool = True) -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, show_header=show_header, show_edge=False)
