"""Ctrl-C and SIGTERM: the step in hand is finished and saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interruption:
    """Notes the first SIGINT or SIGTERM; a second SIGINT interrupts at once.

    Signals reach the main thread alone, so in another one nothing is noted.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        """The signal's name once one came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
