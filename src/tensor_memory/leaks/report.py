"""What `find_leak` found: numbers per cut, a table, a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensor_memory.wording import counted

NOISE_MARGIN = 2.0  # the largest of a few noisy runs understates the largest of many
ROUNDING = 1e-12  # of what the outputs after the cut changed by, in float64


@dataclass(frozen=True)
class CutReport:
    """What changing every input from position `cut` on did."""

    cut: int
    """The first position whose input was changed."""

    earliest: int | None
    """The first position before the cut whose output moved, None where none did."""

    moved: int
    """How many positions before the cut have an output that moved, in any row."""

    change: float
    """The largest change of an output before the cut."""

    gradient: float | None
    """The largest gradient of the outputs before the cut with respect to the inputs from it on;
    None where no gradient could be taken."""

    later: float
    """The largest change of an output from the cut on; 0 when the model saw no difference."""

    def __bool__(self) -> bool:
        return self.moved > 0 or (self.gradient is not None and self.gradient > 0)


@dataclass(frozen=True)
class LeakReport:
    """The outcome of `find_leak`: true when the model leaks; `str()` is a table and a verdict."""

    cuts: tuple[CutReport, ...]
    """One entry per cut, in ascending order."""

    noise: float
    """The largest difference between runs of the same input. Moves count when they exceed twice
    that; at 0, as for most models, the comparison is bit for bit."""

    precision: str
    """What ran: a float64 copy, or the model as given, and why."""

    gradient: str
    """What gradients were taken with respect to, or why there are none."""

    def __bool__(self) -> bool:
        return any(self.cuts)

    def __str__(self) -> str:
        table = ["cut   moved  earliest    change  gradient  change after the cut"]
        for cut in self.cuts:
            numbers = (_shown(number) for number in (cut.change, cut.gradient, cut.later))
            earliest = "-" if cut.earliest is None else cut.earliest
            table.append(
                "{:3}  {:6}  {:>8}  {:>8}  {:>8}  {:>8}".format(
                    cut.cut, cut.moved, earliest, *numbers
                )
            )
        noise = "compared bit for bit"
        if self.noise:
            noise = (
                f"not deterministic: the same input run again differs by {self.noise:.1e}, "
                f"only moves beyond {NOISE_MARGIN:g} times that count"
            )
        how = f"ran {self.precision}; {noise}; gradient {self.gradient}"
        return "\n".join((*table, how, self._verdict()))

    def _verdict(self) -> str:
        leaking = [cut for cut in self.cuts if cut]
        if not leaking:
            if not any(cut.later for cut in self.cuts):
                return "NOTHING SHOWN: no output moved at all, so the model ignores these inputs"
            return f"no leak at {counted(len(self.cuts), 'cut')}"
        worst = max(leaking, key=lambda cut: (cut.moved, cut.gradient or 0))
        if worst.earliest is None:
            return f"LEAK: outputs before position {worst.cut} have a gradient from inputs after"
        moved = (
            f"LEAK: changing inputs from position {worst.cut} on moved {worst.moved} earlier "
            f"outputs, the first at position {worst.earliest}, by up to {worst.change:.1e}"
        )
        return moved + self._if_rounded(leaking)

    def _if_rounded(self, leaking: Sequence[CutReport]) -> str:
        """What is to be said of moves and gradients that are no larger than roundings."""
        small = all(max(cut.change, cut.gradient or 0) <= ROUNDING * cut.later for cut in leaking)
        if not small or not self.precision.startswith("in float64"):
            return ""
        return (
            "; no more than rounding, as where a step mixes all positions and what is later "
            "cancels (an FFT): no dependence larger than that was seen"
        )


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
