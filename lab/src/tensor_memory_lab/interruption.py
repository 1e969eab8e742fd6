"""Signals that are taken in another way for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def terminated_as_interrupted() -> AbstractContextManager[None]:
    """Take SIGTERM, which time limits send, as Ctrl-C, so that what is done can be saved."""
    return handled(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """Inside, a signal has this handler; in another thread than the main one nothing changes."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
