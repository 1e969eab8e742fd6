"""How numbers are written: measures, bytes, counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tensor_memory_lab.records.intervals import Estimate

PERCENT = ("accuracy", "top1", "top5")
"""Measures that are parts of a whole and shown in percent."""


def measure_text(value: float | None, name: str = "") -> str:
    """A measure with as many digits as it can bear; "diverged" where it is not a number.

    >>> measure_text(0.94812, "accuracy"), measure_text(0.94812), measure_text(100.071)
    ('94.8 %', '0.9481', '100.07')
    >>> measure_text(None)
    'diverged'
    """
    if value is None or not math.isfinite(value):
        return "diverged"
    if name in PERCENT:
        return f"{100 * value:.1f} %"
    return f"{value:.{_digits(value)}f}"


def bound_name(record: Mapping[str, Any]) -> str:
    """What the best that can be scored is called.

    >>> bound_name({"higher_is_better": True}), bound_name({"higher_is_better": False})
    ('ceiling', 'floor')
    """
    return "ceiling" if record.get("higher_is_better", True) else "floor"


def estimate_text(estimate: Estimate, name: str = "") -> str:
    """A mean with its interval, without one where there is one run.

    >>> estimate_text(Estimate(0.948, 0.0123, 5), "accuracy")
    '94.8 ± 1.2 %'
    >>> estimate_text(Estimate(99.5, None, 1))
    '99.50'
    """
    if not math.isfinite(estimate.mean) or estimate.half_width is None:
        return measure_text(estimate.mean, name)
    if name in PERCENT:
        return f"{100 * estimate.mean:.1f} ± {100 * estimate.half_width:.1f} %"
    digits = _digits(estimate.mean)
    return f"{estimate.mean:.{digits}f} ± {estimate.half_width:.{digits}f}"


def bytes_text(count: int) -> str:
    """Bytes in the largest unit that leaves at least one of it.

    >>> bytes_text(0), bytes_text(768), bytes_text(27648), bytes_text(3 * 2**20)
    ('0 B', '768 B', '27.0 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    if count < 1024**2:
        return f"{count / 1024:.1f} KiB"
    if count < 1024**3:
        return f"{count / 1024**2:.1f} MiB"
    return f"{count / 1024**3:.1f} GiB"


def listing(items: Sequence[object]) -> str:
    """Items as words: "a", "a and b", "a, b and c".

    >>> listing([0, 1, 2])
    '0, 1 and 2'
    """
    words = [str(item) for item in items]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _digits(value: float) -> int:
    return 4 if abs(value) < 2 else 3 if abs(value) < 10 else 2
