"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, one: str, several: str | None = None) -> str:
    """So many of something, in the singular where it is one.

    >>> counted(1, "run"), counted(1200, "unfinished run"), counted(1, "run is", "runs are")
    ('1 run', '1,200 unfinished runs', '1 run is')
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"
