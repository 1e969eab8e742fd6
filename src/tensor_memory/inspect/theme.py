"""Colours that everybody can tell apart, on light paper and on dark, and a figure to draw on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WIDTH = 5.5
"""Inches: the text width of a paper, at which 8 point type is read."""

# Okabe and Ito's colours, of which the light ones leave white paper and the dark ones leave black.
LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DARK = ("#56B4E9", "#E69F00", "#F0E442", "#CC79A7", "#2FC29B", "#FF8A4C")
VOLUME = "cividis"
"""The colour map of everything that a grid holds: even in lightness, the same to all eyes."""

_INK = {False: "#1a1a1a", True: "#e8e8e8"}
_PAPER = {False: "#ffffff", True: "#14161a"}


@contextmanager
def theme(*, dark: bool = False) -> Iterator[None]:
    """Figures made inside have type for a paper's width, on white or on nearly black."""
    import matplotlib
    from cycler import cycler

    ink, paper = _INK[dark], _PAPER[dark]
    coloured = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    options: dict[str, Any] = dict.fromkeys(coloured, ink)
    options |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)
    options |= {
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "legend.fontsize": 7,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "lines.linewidth": 1.2,
        "legend.frameon": False,
        "legend.labelcolor": ink,
        "axes.prop_cycle": cycler(color=DARK if dark else LIGHT),
    }
    with matplotlib.rc_context(options):  # pyright: ignore[reportArgumentType]
        yield


def palette(axis: Any) -> tuple[str, ...]:
    """Colours that show on this axis, whichever theme it was made in."""
    return DARK if is_dark(axis) else LIGHT


def ink(axis: Any) -> str:
    """The colour of type on this axis."""
    return _INK[is_dark(axis)]


def is_dark(axis: Any) -> bool:
    """Whether the axis is darker than middle grey; a transparent one shows its figure."""
    from matplotlib.colors import to_rgba

    for artist in (axis, axis.figure):
        red, green, blue, alpha = to_rgba(artist.get_facecolor())
        if alpha:
            return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5
    return False
