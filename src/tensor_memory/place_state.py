"""What a place memory remembers between calls: one grid per head, and where the agent stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tensor_memory.config import MAX_AXES, PlaceConfig
from tensor_memory.files import load_tensors, save_tensors
from tensor_memory.ops.autograd import can_ask
from tensor_memory.ops.inputs import checked_device, checked_float, is_dense
from tensor_memory.state import (
    at_least_float32,
    chosen_rows,
    device_and_type,
    readable_bytes,
    require_size,
    require_tensor,
    row_index,
)

_KIND = "tensor-memory place state"

_LEVELS = {torch.bfloat16: 1, torch.float16: 1, torch.int8: 127}
"""What stands for a voxel's largest value in each type that a state can be quantized to."""

watching_moves: list[Callable[[PlaceState, PlaceState, Tensor, bool], None]] = []
"""Told of every move while a recording is made: the state before and after, the voxels rolled
(B, n), coordinate 0 first, and whether what came in is empty."""


@dataclass(frozen=True, eq=False, repr=False)
class PlaceState:
    """The state of one place memory for B rows. Its size never depends on what has been seen.

    States are values: every method returns a new one and leaves the old as it was.

    >>> state = PlaceState.zeros(PlaceConfig(grid=(8, 8), channels=32, heads=4), batch_size=2)
    >>> print(state)
    PlaceState(rows=2, heads=4, grid=8x8, channels=32, 64.0 KiB, cpu)
    >>> state.resized((16, 16)).values.shape
    torch.Size([2, 4, 16, 16, 32])
    """

    values: Tensor
    """(B, H, *grid, C), what the voxels hold; float32 or better, unless the state is quantized."""

    origin: Tensor
    """(B, n) what `moved` has left over: less than a voxel, added to every place."""

    wrap: tuple[bool, ...]
    """Which axes are circles, in grid order."""

    scale: Tensor | None = None
    """(B, H, *grid, 1) the largest magnitude in each voxel of a quantized state, else None."""

    @classmethod
    def zeros(
        cls,
        config: PlaceConfig,
        batch_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> PlaceState:
        """An empty memory for `batch_size` rows."""
        if not isinstance(config, PlaceConfig):
            raise TypeError(
                f"PlaceState.zeros: expected a PlaceConfig first, got {type(config).__name__}; "
                "pass the memory's own (memory.config)"
            )
        require_size("PlaceState.zeros", "batch_size", batch_size, 0, "it is the number of rows")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        dtype = at_least_float32(checked_float("PlaceState.zeros", dtype))
        if device is not None:
            device = checked_device("PlaceState.zeros", device)
        shape = (batch_size, config.heads, *config.grid, config.channels)
        values = torch.zeros(shape, dtype=dtype, device=device)
        assert isinstance(config.wrap, tuple)
        return cls(values, values.new_zeros(batch_size, config.axes), tuple(config.wrap))

    def __repr__(self) -> str:
        heads, *grid, channels = self.values.shape[1:]
        kind = "" if self.scale is None else f", {str(self.values.dtype).removeprefix('torch.')}"
        return (
            f"PlaceState(rows={self.batch_size}, heads={heads}, grid={'x'.join(map(str, grid))}, "
            f"channels={channels}{kind}, {readable_bytes(self.nbytes)}, {self.values.device})"
        )

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.values.shape[0]

    @property
    def grid(self) -> tuple[int, ...]:
        """Voxels along each axis."""
        return tuple(self.values.shape[2:-1])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in _tensors(self).values())

    def detach(self) -> PlaceState:
        """The same values cut off from the graph, for truncated back-propagation."""
        return self._map(Tensor.detach)

    def to(
        self,
        device: torch.device | str | int | torch.dtype | Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> PlaceState:
        """Move, or change the type; it stays at float32 or better.

        As `Tensor.to`: a device, a float type, both, or a float tensor to follow. Values of a
        quantized state keep their type: `quantized` and `dequantized` change it.
        """
        device, dtype = device_and_type("PlaceState.to", device, dtype)
        held = self.values if self.scale is None else self.scale
        dtype = at_least_float32(dtype or held.dtype)
        values = self.values.to(device, dtype if self.scale is None else self.values.dtype)
        return replace(self._map(lambda tensor: tensor.to(device, dtype)), values=values)

    def quantized(self, dtype: torch.dtype) -> PlaceState:
        """The same state in fewer bytes: values in bfloat16, float16 or int8, a scale per voxel.

        A memory that is given such a state returns one of the same type: it computes in float32
        and rounds to the nearest value when the call ends. So the error depends on where a
        sequence is cut into calls, and grows with their number. A voxel that a call leaves alone,
        or that only fades, is not rounded again. No gradient goes through a quantized state.

        >>> state = PlaceState.zeros(PlaceConfig.map(axes=2), batch_size=1)
        >>> state.nbytes, state.quantized(torch.int8).nbytes
        (32776, 9224)
        """
        if not isinstance(dtype, torch.dtype) or dtype not in _LEVELS:
            raise TypeError(
                "PlaceState.quantized: expected torch.bfloat16, torch.float16 or torch.int8, got "
                f"{dtype!r:.80}; dequantized() goes back to float32"
            )
        values = self.dequantized().values.detach()
        # The largest value of a voxel stands in the scale, exactly. So a voxel that has only been
        # multiplied by a factor gets the same values again, and one that is unchanged the same
        # scale too.
        scale = values.abs().amax(-1, keepdim=True)
        values = values / scale.clamp(min=torch.finfo(scale.dtype).tiny) * _LEVELS[dtype]
        values = values.round() if dtype == torch.int8 else values
        origin = self.origin.detach()
        return replace(self, values=values.to(dtype), origin=origin, scale=scale)

    def dequantized(self) -> PlaceState:
        """A quantized state in float32 or better; any other as it is."""
        if self.scale is None:
            return self
        values = self.values.to(self.scale.dtype) / _LEVELS[self.values.dtype] * self.scale
        return replace(self, values=values, scale=None)

    def with_values(self, values: Tensor) -> PlaceState:
        """This state with other values (B, H, *grid, C), quantized where this one is."""
        state = PlaceState(values, self.origin, self.wrap)
        return state if self.scale is None else state.quantized(self.values.dtype)

    def select(self, rows: Tensor | Sequence[int]) -> PlaceState:
        """The rows named by index, in that order, repeats allowed: beam reordering."""
        index = row_index("PlaceState.select", rows, self.values)
        return self._map(lambda tensor: tensor.index_select(0, index))

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> PlaceState:
        """Empty all rows, or those named by index or by a (B,) bool mask."""
        if rows is None:
            return self._map(torch.zeros_like)
        chosen = chosen_rows("PlaceState.reset", rows, self.values)
        return self._map(
            lambda tensor: tensor.masked_fill(chosen.reshape(-1, *[1] * (tensor.ndim - 1)), 0)
        )

    def resized(self, grid: Sequence[int]) -> PlaceState:
        """The same world on another grid, resampled by interpolation between voxels.

        What is at a place stays there. On an axis that wraps, the whole turn stays whole instead:
        what was at the share t of a turn is there again, and in places a turn is 2 G / (G - 1).
        """
        size = PlaceConfig(grid=grid).grid  # type: ignore[arg-type]  # which checks it
        if len(size) != len(self.grid):
            raise ValueError(
                f"PlaceState.resized: expected a grid of {len(self.grid)} axes like {self.grid}, "
                f"got {size}; a world has as many axes as its places have coordinates"
            )
        values = self.dequantized().values
        turns = [1.0] * len(size)  # by coordinate: the last axis of the grid first
        for axis, (old, new, wraps) in enumerate(zip(self.grid, size, self.wrap, strict=True)):
            values = _resampled(values, axis + 2, new, wraps)
            if wraps:
                turns[-1 - axis] = new / (new - 1) * (old - 1) / old
        origin = self.origin * self.origin.new_tensor(turns)
        return replace(self.with_values(values), origin=origin)

    def moved(self, shift: Tensor | Sequence[float], *, empty: bool = True) -> PlaceState:
        """The agent's frame moves by `shift` (n) or (B, n), in the units of places.

        What lay at place p lies at p − shift afterwards. Whole voxels roll; the rest stays in
        `origin`, so that a walk of any length blurs nothing; shifts add up in the type of `origin`.
        What leaves the grid is gone, and what comes in is empty; on an axis that wraps
        `empty=False` keeps it: the world is then a circle itself.
        """
        axes = len(self.grid)
        try:
            if isinstance(shift, Tensor) and (shift.is_complex() or not is_dense(shift)):
                raise TypeError("complex, sparse or nested")
            moved = torch.as_tensor(shift, dtype=self.origin.dtype, device=self.origin.device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(
                f"PlaceState.moved: expected a shift of {axes} numbers, got {shift!r:.80}; "
                "pass a list or a tensor"
            ) from error
        if not isinstance(empty, bool):
            raise TypeError(
                f"PlaceState.moved: expected empty as True or False, got {empty!r:.80}; leave it "
                "out for True"
            )
        if moved.shape not in ((axes,), tuple(self.origin.shape)):
            raise ValueError(
                f"PlaceState.moved: expected a shift of shape ({axes},) or "
                f"({self.batch_size}, {axes}), got {tuple(moved.shape)}; coordinate 0 goes along "
                "the last axis of the grid"
            )
        can_look = not moved.is_cuda and can_ask(moved)  # asking would wait for a GPU
        if can_look and not moved.isfinite().all():
            raise ValueError(
                f"PlaceState.moved: expected finite numbers, got {moved.tolist()!r:.80}; a shift "
                "of 2 is the whole grid"
            )
        total = self.origin + moved
        voxel = total.new_tensor([2 / (size - 1) for size in reversed(self.grid)])
        steps = (total / voxel).detach().round()
        values = {name: t for name, t in _tensors(self).items() if name != "origin"}
        for axis, wraps in enumerate(self.wrap):
            step = steps[:, axes - 1 - axis].long()
            if can_look and not step.any():  # most moves are shorter than a voxel
                continue
            for name, tensor in values.items():
                values[name] = rolled(tensor, axis + 2, step, empty=empty or not wraps)
        after = replace(self, **values, origin=total - steps * voxel)
        for watch in watching_moves:
            watch(self, after, steps, empty)
        return after

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as safetensors, whole or not at all."""
        save_tensors(path, {**_tensors(self), "wrap": torch.tensor(self.wrap)}, kind=_KIND)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> PlaceState:
        """Read what `save` wrote; a file that holds no possible state is a `ValueError`."""
        onto = checked_device("PlaceState.load", device)
        tensors = load_tensors(path, kind=_KIND)
        if set(tensors) - {"scale"} != {"values", "origin", "wrap"}:
            raise ValueError(
                f"{path}: expected the tensors values, origin, wrap, and scale of a quantized "
                f"state, got {', '.join(tensors) or 'none'}; save the state again"
            )
        wrap = tuple(bool(w) for w in tensors.pop("wrap").flatten().tolist())
        state = cls(**tensors, wrap=wrap)
        try:
            state._require_possible()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        return state.to(onto)

    def require(self, config: PlaceConfig, x: Tensor) -> None:
        """Raise unless this state can continue with tokens `x` (B, N, d) under `config`."""
        if not isinstance(self, PlaceState):
            raise TypeError(
                f"state: expected a PlaceState, got {type(self).__name__}; "
                "pass what the memory's last call returned, and where, mask and reset by name"
            )
        voxels = (x.shape[0], config.heads, *config.grid)
        shapes = {
            "values": (*voxels, config.channels),
            "origin": (x.shape[0], config.axes),
            "scale": (*voxels, 1),
        }
        for name, tensor in _tensors(self).items():
            require_tensor(name, tensor, shapes[name], x, "resized() for another grid")
        if not isinstance(self.wrap, tuple) or self.wrap != config.wrap:
            raise ValueError(
                f"state.wrap: expected {config.wrap} like the memory's config, got "
                f"{self.wrap!r:.80}; {_REMEDY}"
            )
        self._require_possible()

    def _require_possible(self) -> None:
        """Raise unless shapes and types agree; values are not looked at."""
        shape, held = self.values.shape, self.values.dtype
        if not 4 <= len(shape) <= 3 + MAX_AXES or min(self.grid) < 2:
            raise ValueError(
                f"state.values: expected (B, H, *grid, C) with 1 to {MAX_AXES} grid axes of at "
                f"least 2 voxels, got {tuple(shape)}; {_REMEDY}"
            )
        if self.scale is not None and self.scale.shape != (*shape[:-1], 1):
            raise ValueError(
                f"state.scale: expected shape {(*shape[:-1], 1)} beside values {tuple(shape)}, got "
                f"{tuple(self.scale.shape)}; {_REMEDY}"
            )
        B, axes = self.batch_size, len(self.grid)
        if len(self.wrap) != axes or self.origin.shape != (B, axes):
            raise ValueError(
                f"state: expected wrap ({axes}) and origin ({B}, {axes}) beside a grid of {axes} "
                f"axes, got {len(self.wrap)} and {tuple(self.origin.shape)}; {_REMEDY}"
            )
        floats = (torch.float32, torch.float64)
        allowed = floats if self.scale is None else tuple(_LEVELS)
        for name, kind, types in (
            ("values", held, allowed),
            ("origin", self.origin.dtype, floats),
            ("scale", torch.float32 if self.scale is None else self.scale.dtype, floats),
        ):
            if kind not in types:
                remedy = _REMEDY
                if name == "values" and self.scale is None and kind in _LEVELS:
                    remedy += "; of a quantized state take state.dequantized().values"
                raise TypeError(
                    f"state.{name}: expected one of {', '.join(map(str, types))}, got {kind}; "
                    f"{remedy}"
                )

    def _map(self, change: Callable[[Tensor], Tensor]) -> PlaceState:
        return replace(self, **{name: change(tensor) for name, tensor in _tensors(self).items()})


_REMEDY = "pass a state that a call returned, or that `PlaceState.zeros` made"


def _resampled(values: Tensor, axis: int, size: int, wraps: bool) -> Tensor:
    """One axis on `size` voxels: both ends stay where they are, on a circle the whole turn does."""
    old = values.shape[axis]
    if old == size:
        return values
    rows = values.movedim(axis, -1).flatten(0, -2)[:, None]  # (rows, 1, old)
    if wraps:
        at = torch.arange(size, dtype=values.dtype, device=values.device) * (old / size)
        low = at.floor().long()
        upper = at - low
        found = rows[..., low] * (1 - upper) + rows[..., (low + 1) % old] * upper
    else:
        found = F.interpolate(rows, size=size, mode="linear", align_corners=True)
    shape = values.movedim(axis, -1).shape[:-1]
    return found[:, 0].reshape(*shape, size).movedim(-1, axis)


def rolled(values: Tensor, axis: int, step: Tensor, *, empty: bool) -> Tensor:
    """new[i] = old[i + step] along an axis, another step (B) for every row."""
    size = values.shape[axis]
    source = torch.arange(size, device=values.device) + step[:, None]  # (B, size)
    shape = [1] * values.ndim
    shape[0], shape[axis] = values.shape[0], size
    found = values.gather(axis, (source % size).view(shape).expand_as(values))
    if empty:
        inside = (source >= 0) & (source < size)
        found = found.masked_fill(~inside.view(shape), 0)
    return found


def _tensors(state: PlaceState) -> dict[str, Tensor]:
    """The tensors of a state by name."""
    found = {"values": state.values, "origin": state.origin}
    return found if state.scale is None else {**found, "scale": state.scale}


def _children(state: PlaceState) -> tuple[list[Tensor], tuple[bool, ...]]:
    return list(_tensors(state).values()), state.wrap


def _named_children(state: PlaceState) -> tuple[list[tuple[Any, Tensor]], tuple[bool, ...]]:
    named = [(pytree.GetAttrKey(name), tensor) for name, tensor in _tensors(state).items()]
    return named, state.wrap


def _from_children(tensors: Iterable[Tensor], wrap: tuple[bool, ...]) -> PlaceState:
    values, origin, *scale = tensors
    return PlaceState(values, origin, wrap, *scale)


pytree.register_pytree_node(
    PlaceState,
    _children,
    _from_children,
    serialized_type_name="tensor_memory.PlaceState",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_named_children,
)
