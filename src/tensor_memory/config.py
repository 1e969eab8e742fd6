"""The choices that define a memory, and the checks that keep them sane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

Reads = Literal["chunk", "token"]
Write = Literal["gaussian", "nearest"]
Mixing = Literal["factorized", "pointwise"]
Rule = Literal["linear", "delta"]
Kernel = Literal["gaussian", "linear"]
Places = Literal["learned", "given", "offset"]

MAX_AXES = 4

MAX_COUNT = 2**31 - 1
"""Of channels, heads, voxels: more do not fit a kernel's integers, nor any memory."""

MAX_NUMBER = 1e6
"""Of initial biases and factors, in size: far beyond what any gate tells apart."""


class GridConfig:
    """What the configs of both memories share: a grid, and plain values for JSON."""

    grid: tuple[int, ...]
    channels: int

    @property
    def axes(self) -> int:
        """n, the number of grid axes."""
        return len(self.grid)

    @property
    def voxels(self) -> int:
        """V, the product of the grid."""
        return math.prod(self.grid)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; an unknown name is an error.

        >>> config = MemoryConfig(channels=16, grid=(4, 4, 4), chunk_size=8)
        >>> MemoryConfig.from_dict(config.to_dict()) == config
        True
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{cls.__name__}.from_dict: expected a dictionary of fields, got "
                f"{type(values).__name__}; pass what to_dict() returned"
            )
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(values) - set(known), key=str)
        if unknown:
            raise ValueError(
                f"{cls.__name__}.from_dict: expected the fields {', '.join(known)}, got an unknown "
                f"field {', '.join(map(str, unknown))}; leave it out"
            )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(GridConfig):
    """Everything that defines a memory but the width of its host. The defaults are the paper's."""

    channels: int = 32
    """C, the features each voxel holds."""

    grid: tuple[int, ...] = (8, 8, 8)
    """Voxels along each of the 1 to 4 axes, each at least 2. Coordinate 0 addresses the last."""

    chunk_size: int = 16
    """K, tokens per chunk: the memory is written once per chunk."""

    reads: Reads = "chunk"
    """"chunk": the first token of a chunk reads for all K. "token": every token reads for itself,
    on the state before its chunk, so the scan gets no longer and nothing leaks."""

    read_heads: int = 1
    """R, points sampled per query; their features are concatenated before W_out."""

    write_heads: int = 1
    """M, volumes deposited per chunk; they are summed."""

    write: Write = "gaussian"
    """"gaussian": a soft volume around the coordinate. "nearest": the closest voxel alone (the
    write coordinate then has no gradient of its own)."""

    share_coordinates: bool = True
    """One coordinate head for reads and writes (needs as many read heads as write heads)."""

    mixing: Mixing = "factorized"
    """"factorized": depthwise 3-tap filters along each axis, then the pointwise mix.
    "pointwise": the mix alone, so voxels never exchange anything."""

    sigma_scale: float = 1.0
    """α, the fixed factor on the predicted spread."""

    spread_bias: float = 1.0
    """Initial b_σ."""

    forget_bias: float = 0.0
    """Initial bias of the forget gate."""

    input_bias: float = 0.0
    """Initial bias of the input gate. A forget gate that starts open adds up what the input gate
    lets in: below 0 the cell does not fill before there is anything to hold."""

    feedback: float = 1.0
    """Factor on the mix's initial weights for the hidden state. At 0 the gates start blind to it,
    so that a cell whose forget gate starts open keeps what was written instead of feeding itself
    until it saturates."""

    gain: float = 1.0
    """Factor on the initial W_content and W_out: how loud a write is in what is read of it, before
    training, goes with its square."""

    backend: str = "auto"
    """Implementation of the scan, see `tensor_memory.memory_scan`."""

    checkpoint_every: int | None = None
    """Keep the state of every so many chunks alone for the backward, which runs the chunks between
    again: less memory for more time. None keeps what the backward needs of all of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", _checked_grid(self.grid))
        counts = ["channels", "chunk_size", "read_heads", "write_heads"]
        if self.checkpoint_every is not None:
            counts.append("checkpoint_every")
        _require_counts(self, counts)
        _require_choices(self, _CHOICES)
        _require_bool(self, "share_coordinates")
        _require_numbers(self, _NUMBERS)
        for name in ("sigma_scale", "gain"):
            if getattr(self, name) <= 0:
                raise ValueError(
                    f"{name}: expected a positive number, got {getattr(self, name)}; "
                    "leave it out for the paper's"
                )
        if self.share_coordinates and self.read_heads != self.write_heads:
            raise ValueError(
                "share_coordinates: expected as many read heads as write heads, which share their "
                f"coordinates, got {self.read_heads} and {self.write_heads}; set "
                "share_coordinates=False"
            )

    @classmethod
    def paper(cls, **changes: Any) -> MemoryConfig:
        """What the paper publishes for language: C 32, a grid of 8 × 8 × 8, chunks of 16 tokens.

        Its forget gate starts half open, so a write halves at every chunk. It was shown to learn
        what is asked for some ten chunks later. Over many chunks nothing arrives to learn from:
        it holds nothing for long, and `long_gap` is the start to take there.

        Args:
            **changes: fields to change.

        >>> MemoryConfig.paper() == MemoryConfig()
        True
        """
        return replace(cls(channels=32, grid=(8, 8, 8), chunk_size=16), **changes)

    @classmethod
    def long_gap(cls, **changes: Any) -> MemoryConfig:
        """A start that keeps what was written: C 16, a grid of 6 × 6 × 6, a chunk per token.

        The forget gate starts open (`forget_bias` 5), the gates start blind to the hidden state
        (`feedback` 0), so that the cell does not saturate, and writes start narrower
        (`spread_bias` -1) and louder (`gain` 4).

        What it was shown to learn: twenty bindings of 32 values, asked for after 124 blank tokens
        beyond the reach of attention: 98.7 ± 0.4 % right at three seeds, where `paper` with the
        same grid and chunks stays at chance, 3.1 %. What it was not: on a map of 8 × 8 cells seen
        10 to 48 tokens back it reached 53 to 69 %, chance being 50 %.

        Args:
            **changes: fields to change; chunks of more tokens cost less and hold less apart.

        >>> MemoryConfig.long_gap(grid=(4, 4, 4)).forget_bias
        5.0
        """
        start = cls(
            channels=16,
            grid=(6, 6, 6),
            chunk_size=1,
            forget_bias=5.0,
            spread_bias=-1.0,
            feedback=0.0,
            gain=4.0,
        )
        return replace(start, **changes)

    @property
    def state_values(self) -> int:
        """Numbers in one row's hidden and cell together.

        >>> config = MemoryConfig(channels=16, grid=(4, 4, 4), chunk_size=8)
        >>> config.axes, config.voxels, config.state_values
        (3, 64, 2048)
        """
        return 2 * self.channels * self.voxels


@dataclass(frozen=True, kw_only=True)
class PlaceConfig(GridConfig):
    """Everything that defines a place memory but the width of its host."""

    grid: tuple[int, ...] = (8, 8)
    """Voxels along each of the 1 to 4 axes, each at least 2. Coordinate 0 addresses the last."""

    channels: int = 32
    """C, the features each voxel holds."""

    heads: int = 4
    """H: each head has places and a grid of its own."""

    rule: Rule = "linear"
    """"linear" adds to what a place holds. "delta" overwrites it."""

    kernel: Kernel = "gaussian"
    """"gaussian": every voxel, weighted by its distance; the width is learned per head. "linear":
    interpolation between the 2ⁿ voxels around a place, whose cost does not grow with the grid."""

    share_places: bool = True
    """Read where the token writes. False learns a second place to read at."""

    places: Places = "learned"
    """"learned": from the token. "given": by the caller, `where=`. "offset": given, plus an offset
    learned from the token that starts at zero."""

    wrap: bool | tuple[bool, ...] = False
    """Axes that are circles, in grid order; one value for all, or one per axis. The G voxels of an
    axis are one turn: places −1 and 1 are neighbours, and 2 G / (G − 1) is the length of a turn."""

    keep_bias: float = 6.0
    """Initial bias of the keep gate: α starts at 0.9975, so that little is forgotten."""

    backend: str = "auto"
    """Implementation of the recurrence, see `tensor_memory.place_scan`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", _checked_grid(self.grid))
        _require_counts(self, ["channels", "heads"])
        _require_choices(self, _PLACE_CHOICES)
        _require_numbers(self, ["keep_bias"])
        _require_bool(self, "share_places")
        wrap = self.wrap
        if isinstance(wrap, bool | _EveryAxis):
            wrap = (bool(wrap[0] if isinstance(wrap, tuple) else wrap),) * self.axes
        if not isinstance(wrap, list | tuple) or not all(isinstance(w, bool) for w in wrap):
            raise TypeError(
                f"wrap: expected True, False or one of them per axis, got {self.wrap!r:.80}; "
                "write it as (True, False)"
            )
        if len(wrap) != self.axes:
            raise ValueError(
                f"wrap: expected one value per axis of the grid {self.grid}, got {self.wrap!r:.80};"
                " True or False stands for all axes"
            )
        object.__setattr__(self, "wrap", _EveryAxis(wrap) if len(set(wrap)) == 1 else tuple(wrap))
        if self.places == "given" and not self.share_places:
            raise ValueError(
                "share_places: expected True where places are given, which are read and written "
                "at, got False; leave share_places out, or choose places='offset'"
            )

    @classmethod
    def recall(cls, **changes: Any) -> PlaceConfig:
        """For key-value recall: reads and writes learn places apart, 4 heads of 4 × 4 × 4 × 32.

        Args:
            **changes: fields to change.
        """
        return replace(cls(grid=(4, 4, 4), channels=32, heads=4, share_places=False), **changes)

    @classmethod
    def map(cls, axes: int | None = None, **changes: Any) -> PlaceConfig:
        """For a world with places of its own (a pose, a patch, a time): `where=` says them.

        Args:
            axes: of the world, 1 to 4; None for those of `grid`, or 2.
            **changes: fields to change.

        >>> PlaceConfig.map(axes=3).grid, PlaceConfig.map(grid=(4, 8, 8)).places
        ((8, 8, 8), 'given')
        """
        if axes is not None and (not is_int(axes) or not 1 <= axes <= MAX_AXES):
            raise ValueError(
                f"axes: expected 1 to {MAX_AXES}, got {axes!r:.80}; grid= gives the voxels of each"
            )
        made = cls(grid=(8,) * (axes or 2), channels=32, heads=4, places="given")
        made = replace(made, **changes)
        if axes not in (None, made.axes):
            raise ValueError(
                f"grid: expected {axes} sizes, one for each of axes={axes}, got {made.grid}; leave "
                "axes out for those of the grid"
            )
        return made

    @property
    def state_values(self) -> int:
        """Numbers in one row's state.

        >>> PlaceConfig(grid=(8, 8), channels=32, heads=4).state_values
        8192
        """
        return self.heads * self.voxels * self.channels


_CHOICES = {
    "reads": ("chunk", "token"),
    "write": ("gaussian", "nearest"),
    "mixing": ("factorized", "pointwise"),
}

_PLACE_CHOICES = {
    "rule": ("linear", "delta"),
    "kernel": ("gaussian", "linear"),
    "places": ("learned", "given", "offset"),
}


class _EveryAxis(tuple[bool, ...]):
    """The same for every axis, whatever their number: `replace(config, grid=...)` may change it."""


_NUMBERS = ("sigma_scale", "spread_bias", "forget_bias", "input_bias", "feedback", "gain")


def is_int(value: object) -> bool:
    """Whether a value is an integer; True and False are none here."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is an integer or a float; True and False are none here."""
    return is_int(value) or isinstance(value, float)


def _checked_grid(grid: Any) -> tuple[int, ...]:
    listed = isinstance(grid, Sequence) and not isinstance(grid, bytes | bytearray)
    if not listed or not all(is_int(size) for size in grid):
        raise TypeError(
            f"grid: expected a tuple of integers, got {grid!r:.80}; "
            "write it as (8, 8, 8), or (8,) for one axis"
        )
    if not 1 <= len(grid) <= MAX_AXES:
        raise ValueError(
            f"grid: expected 1 to {MAX_AXES} axes, got {len(grid)}; "
            "give the voxels of each axis, such as (8, 8, 8)"
        )
    if min(grid) < 2:
        raise ValueError(
            f"grid: expected at least 2 voxels along every axis, got {tuple(grid)}; "
            "drop the axis instead of giving it one voxel"
        )
    if math.prod(grid) > MAX_COUNT:
        raise ValueError(
            f"grid: expected at most {MAX_COUNT:,} voxels, got {tuple(grid)}; "
            "(8, 8, 8) to (16, 16, 16) are usual"
        )
    return tuple(grid)  # lists come back from JSON


def _require_counts(config: GridConfig, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(config, name)
        if not is_int(value):
            raise TypeError(
                f"{name}: expected an integer, got {value!r:.80}; convert it with int()"
            )
        if not 1 <= value <= MAX_COUNT:
            raise ValueError(
                f"{name}: expected at least 1 and at most {MAX_COUNT:,}, got {value}; "
                "leave it out for the default"
            )


def _require_choices(config: GridConfig, choices: Mapping[str, Sequence[str]]) -> None:
    for name, allowed in choices.items():
        value = getattr(config, name)
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(
                f"{name}: expected one of {', '.join(allowed)}, got {value!r:.80}; "
                "leave it out for the default"
            )
    backend = getattr(config, "backend", None)
    if not isinstance(backend, str):
        raise TypeError(
            f"backend: expected a backend's name, got {backend!r:.80}; "
            "leave it out for the fastest that can serve"
        )


def _require_bool(config: GridConfig, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r:.80}; leave it out for True")


def _require_numbers(config: GridConfig, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or not abs(value) <= MAX_NUMBER:  # which a NaN is not either
            raise ValueError(
                f"{name}: expected a number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}, got "
                f"{value!r:.80}; leave it out for the default"
            )
