"""What the benchmarks must reach on one H200 (and the CPU row on two threads), in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Aim:
    """One line: what is measured, where the published code stands, what is needed and hoped for."""

    work: str
    unit: str
    needed: float
    aim: float
    published: str
    at_least: bool = False
    """Larger is better."""

    def judge(self, value: float | None, how: str = "") -> dict[str, Any]:
        """The measured value beside the numbers it must reach; null verdicts without a value."""
        return {
            "work": self.work,
            "how": how,
            "unit": self.unit,
            "value": value,
            "needed": self.needed,
            "aim": self.aim,
            "at_least": self.at_least,
            "published": self.published,
            "meets_needed": self._meets(value, self.needed),
            "meets_aim": self._meets(value, self.aim),
        }

    def _meets(self, value: float | None, bound: float) -> bool | None:
        if value is None:
            return None
        return value >= bound if self.at_least else value <= bound


SCAN = {
    ("language", "forward"): Aim(
        "language scan, forward", "ms", 0.40, 0.15, "20.6 ms, compiled 10.8 ms"
    ),
    ("language", "forward_backward"): Aim(
        "language scan, forward + backward", "ms", 1.5, 0.6, "62.5 ms, compiled 33.1 ms"
    ),
    ("video", "forward_backward"): Aim("video scan, forward + backward", "ms", 2.0, 1.0, "53.8 ms"),
    ("binding", "forward_backward"): Aim(
        "binding scan, forward + backward", "ms", 6.0, 3.0, "163.8 ms"
    ),
}
"""By name in `shapes.PUBLISHED` and what is timed; for an H200."""

CPU_MEMORY = Aim(
    "CPU, 2 threads, forward + backward over backend 'reference'",
    "x",
    3.0,
    6.0,
    "1x",
    at_least=True,
)

LANGUAGE_STEP = {
    "added_ms": Aim("language step, time added by the memory", "ms", 12.0, 5.0, "643 ms"),
    "ratio": Aim("language step, ratio over base", "x", 1.8, 1.25, "23.6x, compiled 9.7x"),
    "extra_peak_gib": Aim("language step, extra peak memory", "GiB", 1.5, 0.7, "5.0 GiB"),
}
"""By what is measured of the train step with memory; for an H200."""

H200 = "H200"


def applies(device_name: str) -> bool:
    """Whether the GPU rows were set for this device."""
    return H200 in device_name
