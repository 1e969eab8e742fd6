"""What a memory remembers between calls: its grid, and the chunk it has not finished."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tensor_memory.config import MemoryConfig
from tensor_memory.files import load_tensors, save_tensors
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
        dtype = _require_float("zeros", dtype or torch.get_default_dtype())
        if not isinstance(config, MemoryConfig):
            raise TypeError(
                f"MemoryState.zeros: expected a MemoryConfig first, got {type(config).__name__}; "
                "pass the memory's own (memory.config)"
            )
        for name, size in (("dim", dim), ("batch_size", batch_size)):
            if not isinstance(size, int | torch.SymInt) or isinstance(size, bool):
                raise TypeError(
                    f"MemoryState.zeros: expected {name} as an integer, got {size!r}; "
                    "convert it with int()"
                )
        if batch_size < 0:
            raise ValueError(
                f"MemoryState.zeros: expected batch_size of at least 0, got {batch_size}; "
                "it is the number of rows"
            )
        volume = torch.zeros(
            batch_size, config.channels, *config.grid, dtype=at_least_float32(dtype), device=device
        )
        kept_reads = config.read_heads * config.channels if config.reads == "chunk" else 0
        return cls(
            hidden=volume,
            cell=torch.zeros_like(volume),
            tokens=torch.zeros(batch_size, config.chunk_size, dim, dtype=dtype, device=device),
            fill=torch.zeros(batch_size, dtype=torch.long, device=device),
            readout=volume.new_zeros(batch_size, kept_reads),
            aligned=0,
        )

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
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> MemoryState:
        """Move, or change the token type (hidden and cell stay at float32 or better)."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        dtype = _require_float("to", dtype or self.tokens.dtype)
        moved = self._map(lambda tensor: tensor.to(device))
        return replace(
            moved,
            hidden=moved.hidden.to(at_least_float32(dtype)),
            cell=moved.cell.to(at_least_float32(dtype)),
            readout=moved.readout.to(at_least_float32(dtype)),
            tokens=moved.tokens.to(dtype),
        )

    def select(self, rows: Tensor | Sequence[int]) -> MemoryState:
        """The rows named by index, in that order, repeats allowed: beam reordering."""
        index = row_index("MemoryState.select", rows, self.hidden)
        return self._map(lambda tensor: tensor.index_select(0, index))

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> MemoryState:
        """Empty all rows, or those named by index or by a (B,) bool mask."""
        if rows is None:
            emptied = self._map(torch.zeros_like)
            return replace(emptied, aligned=0)
        chosen = chosen_rows("MemoryState.reset", rows, self.hidden)
        emptied = self._map(
            lambda tensor: tensor.masked_fill(chosen.reshape(-1, *[1] * (tensor.ndim - 1)), 0)
        )
        return replace(emptied, aligned=0 if self.aligned == 0 else None)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as safetensors, whole or not at all."""
        save_tensors(path, self._tensors(), kind=_KIND)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
    ) -> MemoryState:
        """Read what `save` wrote."""
        tensors = load_tensors(path, kind=_KIND)
        if set(tensors) != set(_TENSORS):
            raise ValueError(
                f"{path}: expected the tensors {', '.join(_TENSORS)}, got {', '.join(tensors)}"
            )
        fills = tensors["fill"].unique().tolist()
        return cls(**tensors, aligned=fills[0] if len(fills) == 1 else None).to(device)

    def require(self, config: MemoryConfig, x: Tensor) -> None:
        """Raise unless this state can continue with tokens `x` (B, N, d) under `config`."""
        kept_reads = config.read_heads * config.channels if config.reads == "chunk" else 0
        volume = (x.shape[0], config.channels, *config.grid)
        expected = {
            "hidden": (volume, at_least_float32(x.dtype)),
            "cell": (volume, at_least_float32(x.dtype)),
            "tokens": ((x.shape[0], config.chunk_size, x.shape[2]), x.dtype),
            "fill": ((x.shape[0],), torch.long),
            "readout": ((x.shape[0], kept_reads), at_least_float32(x.dtype)),
        }
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tensor.shape != shape:
                raise ValueError(
                    f"state.{name}: expected shape {shape} for this memory and input "
                    f"{tuple(x.shape)}, got {tuple(tensor.shape)}; a state continues only the "
                    "memory and the rows it came from (use select() to reorder or repeat rows, "
                    "and no state, or a new stream, for new rows)"
                )
            if tensor.dtype != dtype:
                raise TypeError(
                    f"state.{name}: expected {dtype} for an input of type {x.dtype}, "
                    f"got {tensor.dtype}; convert it with state.to({x.dtype})"
                )
            if tensor.device != x.device:
                raise ValueError(
                    f"state.{name}: expected device {x.device} like the input, "
                    f"got {tensor.device}; move it with state.to({str(x.device)!r})"
                )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _TENSORS}

    def _map(self, change: Callable[[Tensor], Tensor]) -> MemoryState:
        return replace(self, **{name: change(t) for name, t in self._tensors().items()})


_TENSORS = tuple(f.name for f in fields(MemoryState) if f.name != "aligned")


def row_index(method: str, rows: Tensor | Sequence[int], state: Tensor) -> Tensor:
    """Indices of rows of a state (B, ...) as int64; raise for a row that does not exist.

    On another device than the CPU values are not looked at: that would wait for the device.
    """
    index = torch.as_tensor(rows, device=state.device)
    if index.dtype == torch.bool:
        raise TypeError(
            f"{method}: expected row indices, got a bool mask; pass mask.nonzero().flatten()"
        )
    if index.numel() and (index.is_floating_point() or index.is_complex()):
        raise TypeError(
            f"{method}: expected whole numbers as row indices, got {index.dtype}; "
            "convert them with .long()"
        )
    if index.ndim > 1:
        raise ValueError(
            f"{method}: expected row indices of shape (rows,), got "
            f"{tuple(index.shape)}; flatten them"
        )
    index, B = index.long(), state.shape[0]  # an empty list comes as floats
    if index.device.type == "cpu" and index.numel():
        least, most = index.min().item(), index.max().item()
        if least < 0 or most >= B:
            raise ValueError(
                f"{method}: expected rows from 0 to {B - 1}, got {least if least < 0 else most}; "
                f"this state holds {counted(B, 'row')}"
            )
    return index


def chosen_rows(method: str, rows: Tensor | Sequence[int], state: Tensor) -> Tensor:
    """(B,) bool from row indices or from such a mask."""
    B, chosen = state.shape[0], torch.as_tensor(rows, device=state.device)
    if chosen.dtype != torch.bool:
        index = row_index(method, chosen, state)
        return torch.zeros(B, dtype=torch.bool, device=state.device).index_fill(0, index, True)
    if chosen.shape != (B,):
        raise ValueError(
            f"{method}: expected a mask of shape (B,) = ({B},), "
            f"got {tuple(chosen.shape)}; give one mark per row, or row indices"
        )
    return chosen


def readable_bytes(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The type a state is held in beside tokens of this one."""
    return torch.promote_types(dtype, torch.float32)


def _require_float(method: str, dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point:
        raise TypeError(
            f"MemoryState.{method}: expected the tokens' float type, got {dtype}; "
            "pass the type of the embedded tokens"
        )
    return dtype


def _children(state: MemoryState) -> tuple[list[Tensor], int | None]:
    return [getattr(state, name) for name in _TENSORS], state.aligned


def _named_children(state: MemoryState) -> tuple[list[tuple[Any, Tensor]], int | None]:
    tensors, aligned = _children(state)
    keys = [pytree.GetAttrKey(name) for name in _TENSORS]
    return list(zip(keys, tensors, strict=True)), aligned


# What traces or exports a model sees the tensors inside; `aligned` is part of the structure,
# since it decides the shapes of a call.
pytree.register_pytree_node(
    MemoryState,
    _children,
    lambda tensors, aligned: MemoryState(*tensors, aligned=aligned),
    serialized_type_name="tensor_memory.MemoryState",
    flatten_with_keys_fn=_named_children,
)
