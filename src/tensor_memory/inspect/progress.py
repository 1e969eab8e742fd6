"""How far work has come that takes long, on standard error: recording, or making a page."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

LINE_EVERY = 30.0
"""Seconds between lines where standard error is no terminal."""

MOVE_EVERY = 1.0
"""The same between changes of the one line of a terminal."""


class LongWork:
    """Counts what is done, and says so now and then: `label: COUNT what in TIME`."""

    def __init__(self, label: str, what: str) -> None:
        self.label, self.what, self.done = label, what, 0
        self._began = self._told = self._clock()
        self._is_open = False

    def add(self, count: int) -> None:
        """So much more is done."""
        self.done += count
        now, terminal = self._clock(), sys.stderr.isatty()
        if now - self._told < (MOVE_EVERY if terminal else LINE_EVERY):
            return
        self._told, self._is_open = now, terminal
        passed = timedelta(seconds=round(now - self._began))
        text = f"{self.label}: {self.done:,} {self.what} in {passed}"
        print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        """End the line of a terminal."""
        if self._is_open:
            print(file=sys.stderr)

    def _clock(self) -> float:
        return time.monotonic()
