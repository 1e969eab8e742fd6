"""How far a long recording has come, on standard error: recorded calls take longer."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

LINE_EVERY = 30.0
"""Seconds between lines where standard error is no terminal."""

MOVE_EVERY = 1.0
"""The same between changes of the one line of a terminal."""


class RecordingProgress:
    """Counts steps, the chunks and tokens that were recorded; says so where it takes long."""

    def __init__(self, layers: int) -> None:
        self.layers, self.steps = layers, 0
        self._began = self._told = self._clock()
        self._is_open = False

    def add(self, steps: int) -> None:
        """So many steps more, of all rows of a layer."""
        self.steps += steps
        now, terminal = self._clock(), sys.stderr.isatty()
        if now - self._told < (MOVE_EVERY if terminal else LINE_EVERY):
            return
        self._told, self._is_open = now, terminal
        passed = timedelta(seconds=round(now - self._began))
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        text = f"recording: {self.steps:,} steps of {layers} in {passed}"
        print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def _clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """End the line of a terminal."""
        if self._is_open:
            print(file=sys.stderr)
