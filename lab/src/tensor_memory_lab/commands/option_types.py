"""Types of argparse options."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """How many of something: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return int(text)


def seconds(text: str) -> float:
    """A time: more than 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:  # NaN is not
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text}")
    return found
