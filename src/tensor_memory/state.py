"""What a memory remembers between calls: its grid, and the chunk it has not finished."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tensor_memory.config import MAX_COUNT, MemoryConfig, is_int
from tensor_memory.files import load_tensors, save_tensors
from tensor_memory.ops.autograd import can_ask
from tensor_memory.ops.dispatch import BACKENDS
from tensor_memory.ops.inputs import checked_device, checked_float, is_dense
from tensor_memory.wording import counted

_KIND = "tensor-memory state"


@dataclass(frozen=True, eq=False, repr=False)
class MemoryState:
    """The state of one memory layer for B rows. Its size never depends on what has been seen.

    States are values: every method returns a new one and leaves the old as it was.

    >>> config = MemoryConfig(channels=4, grid=(3, 3), chunk_size=2)
    >>> state = MemoryState.zeros(config, dim=8, batch_size=2)
    >>> state.hidden.shape, state.tokens.shape, state.nbytes
    (torch.Size([2, 4, 3, 3]), torch.Size([2, 2, 8]), 752)
    >>> print(state)
    MemoryState(rows=2, grid=3x3, channels=4, chunk 0/2 filled, 752 B, cpu)
    >>> state.select([1, 1, 0]).batch_size
    3
    """

    hidden: Tensor
    """(B, C, *grid), what reads see; float32 or better."""

    cell: Tensor
    """(B, C, *grid), what the gates accumulate; float32 or better."""

    tokens: Tensor
    """(B, K, d) the unfinished chunk in the input's type; unused slots are zero."""

    fill: Tensor
    """(B,) int64, how many of those slots hold a token."""

    readout: Tensor
    """(B, R·C) what the unfinished chunk's first token read; width 0 where every token reads."""

    aligned: int | None = None
    """`fill` where the host knows that all rows share it; spares the device a question."""

    checked: tuple[Tensor, int | None] | None = None
    """The `fill` and `aligned` that are known to be possible: no device is asked again."""

    @classmethod
    def zeros(
        cls,
        config: MemoryConfig,
        dim: int,
        batch_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> MemoryState:
        """An empty memory for `batch_size` rows of tokens of width `dim` and type `dtype`."""
        if not isinstance(config, MemoryConfig):
            raise TypeError(
                f"MemoryState.zeros: expected a MemoryConfig first, got {type(config).__name__}; "
                "pass the memory's own (memory.config)"
            )
        require_size("MemoryState.zeros", "dim", dim, 1, "it is the width of the tokens")
        require_size("MemoryState.zeros", "batch_size", batch_size, 0, "it is the number of rows")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        dtype = checked_float("MemoryState.zeros", dtype)
        if device is not None:
            device = checked_device("MemoryState.zeros", device)
        tensors: dict[str, Any] = {
            name: torch.zeros(shape, dtype=kind, device=device)
            for name, (shape, kind) in _layout(config, dim, batch_size, dtype).items()
        }
        return trusted(cls(**tensors, aligned=0))

    def __repr__(self) -> str:
        channels, *grid = self.hidden.shape[1:]
        return (
            f"MemoryState(rows={self.batch_size}, grid={'x'.join(map(str, grid))}, "
            f"channels={channels}, chunk {self._filled()}/{self.tokens.shape[1]} filled, "
            f"{readable_bytes(self.nbytes)}, {self.hidden.device})"
        )

    def _filled(self) -> str:
        """Tokens in the unfinished chunk; the least and the most where rows differ."""
        if self.aligned is not None:
            return str(self.aligned)
        if self.fill.is_meta:
            return "?"
        fills = self.fill.tolist() or [0]
        least, most = min(fills), max(fills)
        return str(most) if least == most else f"{least}-{most}"

    @property
    def batch_size(self) -> int:
        """B, the number of rows."""
        return self.hidden.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held, the unfinished chunk's buffer included."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def detach(self) -> MemoryState:
        """The same values cut off from the graph, for truncated back-propagation."""
        return self._map(Tensor.detach)

    def to(
        self,
        device: torch.device | str | int | torch.dtype | Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> MemoryState:
        """Move, or change the tokens' type; hidden and cell stay at float32 or better.

        As `Tensor.to`: a device, a float type, both, or a float tensor to follow.
        """
        device, dtype = device_and_type("MemoryState.to", device, dtype)
        dtype = dtype or self.tokens.dtype
        types = {"tokens": dtype, "fill": torch.long}
        held = at_least_float32(dtype)
        return self._changed(
            **{name: t.to(device, types.get(name, held)) for name, t in self._tensors().items()}
        )

    def select(self, rows: Tensor | Sequence[int]) -> MemoryState:
        """The rows named by index, in that order, repeats allowed: beam reordering."""
        index = row_index("MemoryState.select", rows, self.hidden)
        return self._map(lambda tensor: tensor.index_select(0, index))

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> MemoryState:
        """Empty all rows, or those named by index or by a (B,) bool mask."""
        if rows is None:
            return self._map(torch.zeros_like)._changed(aligned=0)
        chosen = chosen_rows("MemoryState.reset", rows, self.hidden)
        emptied = self._map(
            lambda tensor: tensor.masked_fill(chosen.reshape(-1, *[1] * (tensor.ndim - 1)), 0)
        )
        return emptied._changed(aligned=0 if self.aligned == 0 else None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as safetensors, whole or not at all."""
        save_tensors(path, self._tensors(), kind=_KIND)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> MemoryState:
        """Read what `save` wrote; a file that holds no possible state is a `ValueError`."""
        onto = checked_device("MemoryState.load", device)
        tensors: dict[str, Any] = load_tensors(path, kind=_KIND)
        if set(tensors) != set(_TENSORS):
            raise ValueError(
                f"{path}: expected the tensors {', '.join(_TENSORS)}, got "
                f"{', '.join(tensors) or 'none'}; save the state again"
            )
        state = cls(**tensors)
        try:
            state._require_possible()
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        fills = state.fill.unique().tolist()
        return trusted(replace(state, aligned=fills[0] if len(fills) == 1 else None)).to(onto)

    def require(self, config: MemoryConfig, x: Tensor) -> None:
        """Raise unless this state can continue with tokens `x` (B, N, d) under `config`."""
        for name, (shape, dtype) in _layout(config, x.shape[2], x.shape[0], x.dtype).items():
            tensor = getattr(self, name)
            require_tensor(name, tensor, shape, x, "and no state, or a new stream, for new rows")
            if tensor.dtype != dtype:
                raise TypeError(
                    f"state.{name}: expected {dtype} for an input of type {x.dtype}, "
                    f"got {tensor.dtype}; convert it with state.to({x.dtype})"
                )
        if not torch.compiler.is_compiling() and not self._is_trusted():
            self._require_possible()

    def _require_possible(self) -> None:
        """Raise unless `fill` is possible and `aligned` agrees with it; then trust this state.

        It asks a device for values, so states that a memory has returned are trusted at once.
        """
        aligned, fill, slots = self.aligned, self.fill, self.tokens
        if slots.ndim != 3 or fill.shape != slots.shape[:1] or fill.dtype != torch.long:
            raise ValueError(
                "state.fill: expected (B,) of int64 beside tokens (B, K, d), got "
                f"{tuple(fill.shape)} of {fill.dtype} beside {tuple(slots.shape)}; {_REMEDY}"
            )
        K = slots.shape[1]
        if aligned is not None and not is_int(aligned):
            raise TypeError(
                f"state.aligned: expected None or an integer, got {aligned!r:.80}; leave it out"
            )
        if aligned is not None and not 0 <= aligned < K:
            raise ValueError(
                f"state.aligned: expected 0 to {K - 1} for chunks of {K}, got {aligned}; {_REMEDY}"
            )
        if not can_ask(fill):
            return
        other = fill != (fill if aligned is None else aligned)
        outside, differs = torch.stack([(fill < 0) | (fill >= K), other]).any(1).tolist()
        if outside:
            raise ValueError(
                f"state.fill: expected 0 to {K - 1} for chunks of {K}, got {fill.tolist()}; "
                f"{_REMEDY}"
            )
        if differs:
            raise ValueError(
                f"state.aligned: expected None, or what all rows of fill hold, got {aligned} "
                f"beside {fill.tolist()}; leave it out"
            )
        trusted(self)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _TENSORS}

    def _map(self, change: Callable[[Tensor], Tensor]) -> MemoryState:
        return self._changed(**{name: change(t) for name, t in self._tensors().items()})

    def _changed(self, **changes: Any) -> MemoryState:
        """`replace` by values that are possible where these are."""
        changed = replace(self, **changes)
        return trusted(changed) if self._is_trusted() else changed

    def _is_trusted(self) -> bool:
        if self.checked is None or torch.compiler.is_compiling():
            return False
        fill, aligned = self.checked
        return fill is self.fill and aligned is self.aligned


_REMEDY = "pass a state that a call returned, or that `MemoryState.zeros` made"

_TENSORS = ("hidden", "cell", "tokens", "fill", "readout")


def _layout(
    config: MemoryConfig, dim: int, rows: int, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The shape and the type of each tensor of a state, for tokens of a width and a type."""
    held = at_least_float32(dtype)
    volume = (rows, config.channels, *config.grid)
    kept_reads = config.read_heads * config.channels if config.reads == "chunk" else 0
    return {
        "hidden": (volume, held),
        "cell": (volume, held),
        "tokens": ((rows, config.chunk_size, dim), dtype),
        "fill": ((rows,), torch.long),
        "readout": ((rows, kept_reads), held),
    }


def trusted(state: MemoryState) -> MemoryState:
    """The state, which its maker knows to be possible: nobody asks a device about it."""
    if not torch.compiler.is_compiling():
        object.__setattr__(state, "checked", (state.fill, state.aligned))
    return state


def require_tensor(name: str, tensor: Any, shape: tuple[int, ...], x: Tensor, way: str) -> None:
    """Raise unless a state has this tensor of this shape, on the device of the input `x`."""
    if not isinstance(tensor, Tensor) or not is_dense(tensor):
        raise TypeError(
            f"state.{name}: expected a dense tensor of shape {shape}, got "
            f"{type(tensor).__name__}; pass what the previous call returned"
        )
    if tensor.shape != shape:
        raise ValueError(
            f"state.{name}: expected shape {shape} for this memory and input {tuple(x.shape)}, got "
            f"{tuple(tensor.shape)}; a state continues only the memory and the rows it came from "
            f"(use select() to reorder or repeat rows, {way})"
        )
    if tensor.device != x.device:
        raise ValueError(
            f"state.{name}: expected device {x.device} like the input, "
            f"got {tensor.device}; move it with state.to({str(x.device)!r})"
        )


def require_size(method: str, name: str, size: Any, least: int, what: str) -> None:
    """Raise unless this is an integer of at least `least`, and no larger than a tensor can be."""
    if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
        raise TypeError(
            f"{method}: expected {name} as an integer, got {size!r:.80}; convert it with int()"
        )
    if size < least or size > MAX_COUNT:
        raise ValueError(
            f"{method}: expected {name} of at least {least} and at most {MAX_COUNT:,}, got "
            f"{size}; {what}"
        )


def check_memory(name: str, dim: Any, config: Any, kind: type, zero_init: Any) -> None:
    """Raise unless the arguments of a memory's constructor fit."""
    if not isinstance(config, kind):
        raise TypeError(
            f"config: expected a {kind.__name__}, got {type(config).__name__}; "
            f"{kind.__name__}.from_dict() makes one of a dictionary"
        )
    require_size(name, "dim", dim, 1, "it is the width of the tokens")
    if config.backend not in BACKENDS:
        raise ValueError(
            f"config.backend: expected one of {', '.join(BACKENDS)}, got "
            f"{config.backend!r:.80}; leave it out for the fastest that can serve"
        )
    if not isinstance(zero_init, bool):
        raise TypeError(
            f"zero_init: expected True or False, got {zero_init!r:.80}; leave it out for False"
        )


def device_and_type(
    method: str, device: Any, dtype: Any
) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the float type that arguments of `to` mean, as torch reads them."""
    if isinstance(device, Tensor | torch.dtype):
        if dtype is not None:
            raise TypeError(
                f"{method}: expected a device before a type, got {device!r:.80}; "
                "pass one of the two alone"
            )
        followed = isinstance(device, Tensor)
        device, dtype = (device.device, device.dtype) if followed else (None, device)
    return (
        None if device is None else checked_device(method, device),
        None if dtype is None else checked_float(method, dtype),
    )


def row_index(
    method: str, rows: Tensor | Sequence[int], state: Tensor, unit: str = "row"
) -> Tensor:
    """Indices of rows of a state (B, ...) as int64; raise for a row that does not exist.

    On another device than the CPU values are not looked at: that would wait for the device.
    """
    index = _as_tensor(method, rows, state, unit)
    if index.dtype == torch.bool:
        raise TypeError(
            f"{method}: expected {unit} indices, got a bool mask; pass mask.nonzero().flatten()"
        )
    if index.numel() and (index.is_floating_point() or index.is_complex()):
        raise TypeError(
            f"{method}: expected whole numbers as {unit} indices, got {index.dtype}; "
            "convert them with .long()"
        )
    if index.ndim > 1:
        raise ValueError(
            f"{method}: expected {unit} indices of shape ({unit}s,), got "
            f"{tuple(index.shape)}; flatten them"
        )
    index, B = index.long().reshape(-1), state.shape[0]  # an empty list comes as floats
    if index.device.type == "cpu" and index.numel() and can_ask(index):
        least, most = index.min().item(), index.max().item()
        if least < 0 or most >= B:
            raise ValueError(
                f"{method}: expected {unit}s from 0 to {B - 1}, got "
                f"{least if least < 0 else most}; there are {counted(B, unit)}"
            )
    return index


def chosen_rows(method: str, rows: Tensor | Sequence[int], state: Tensor) -> Tensor:
    """(B,) bool from row indices or from such a mask.

    Marks per row that are no bools, 0 and 1, must not be taken for the indices of two rows.
    """
    B, chosen = state.shape[0], _as_tensor(method, rows, state, "row")
    if chosen.dtype != torch.bool:
        if chosen.numel() and (chosen.is_floating_point() or chosen.dtype == torch.uint8):
            raise TypeError(
                f"{method}: expected row indices or a (B,) bool mask, got {chosen.dtype}; "
                "convert marks per row with .bool(), indices with .long()"
            )
        index = row_index(method, chosen, state)
        found = torch.zeros(B, dtype=torch.bool, device=state.device).index_fill(0, index, True)
        if index.device.type == "cpu" and can_ask(index) and index.numel() > int(found.sum()):
            raise ValueError(
                f"{method}: expected every row at most once, got {index.tolist()!r:.80}; "
                "convert marks per row with .bool()"
            )
        return found
    if chosen.shape != (B,):
        raise ValueError(
            f"{method}: expected a mask of shape (B,) = ({B},), "
            f"got {tuple(chosen.shape)}; give one mark per row, or row indices"
        )
    return chosen


def _as_tensor(method: str, values: Any, like: Tensor, unit: str) -> Tensor:
    try:
        found = torch.as_tensor(values, device=like.device)
        if is_dense(found):
            return found
        raise TypeError("sparse or nested")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"{method}: expected {unit} indices, got {values!r:.80}; pass a list such as [0, 2], "
            "or a tensor"
        ) from error


def readable_bytes(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type a state is held in beside tokens of this one."""
    return torch.promote_types(dtype, torch.float32)


def _children(state: MemoryState) -> tuple[list[Tensor], int | None]:
    return list(state._tensors().values()), state.aligned


def _named_children(state: MemoryState) -> tuple[list[tuple[Any, Tensor]], int | None]:
    named = [(pytree.GetAttrKey(name), tensor) for name, tensor in state._tensors().items()]
    return named, state.aligned


# What traces or exports a model sees the tensors inside; `aligned` is part of the structure,
# since it decides the shapes of a call.
pytree.register_pytree_node(
    MemoryState,
    _children,
    lambda tensors, aligned: MemoryState(*tensors, aligned=aligned),
    serialized_type_name="tensor_memory.MemoryState",
    flatten_with_keys_fn=_named_children,
)
