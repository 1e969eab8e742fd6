"""What one place memory did, token by token: plain tensors on the CPU.

Letters: T tokens kept, B rows, H heads, n axes, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensor_memory.config import PlaceConfig
from tensor_memory.inspect.history import LayerArrays
from tensor_memory.inspect.layer_recording import GridRecording, require_index
from tensor_memory.inspect.place_history import PlaceHistory
from tensor_memory.inspect.place_lives import WriteLives, follow_writes
from tensor_memory.inspect.place_trace import RecordedTrace, trace_history
from tensor_memory.ops.places.addresses import factors
from tensor_memory.ops.products import outer


def place_shapes(config: PlaceConfig) -> dict[str, tuple[int, ...]]:
    """Every array of measured values by name, and its shape after (T, B).

    >>> place_shapes(PlaceConfig(channels=4, grid=(3, 5), heads=2))["state_norm"]
    (2, 3, 5)
    """
    H, n, C = config.heads, config.axes, config.channels
    shapes = {
        "write_at": (H, n),
        "read_at": (H, n),
        "width": (H,),
        "content_norm": (H,),
        "rate": (H,),
        "keep": (H,),
        "state_norm": (H, *config.grid),
        "readout": (H, C),
        "use": (),
    }
    if config.kernel == "linear":
        del shapes["width"]
    return shapes


@dataclass(frozen=True, eq=False, repr=False)
class PlaceLayerRecording(LayerArrays):
    """One layer of a `PlaceMemory`: everything its equations made of each token that was kept.

    The first two dimensions of an array are T tokens and B rows. Where `present` is false the row
    has no such token, or a masked one, and every float there is NaN. A long stream is thinned; the
    `history` is not.
    """

    norm_name = "‖S‖"
    unit = "token"

    name: str
    """The path of the block the layer follows, else of the layer itself, in the model."""

    config: PlaceConfig
    """What the memory is."""

    gate: float | None
    """σ(γ) at the last call; None where the memory was used without `MemoryResidual`."""

    write_at: Tensor
    """(T, B, H, n) where the token wrote; coordinate 0 addresses the last grid axis."""

    read_at: Tensor
    """(T, B, H, n) where it read."""

    width: Tensor | None
    """(T, B, H) of the Gaussian in voxels; None with the linear kernel."""

    content_norm: Tensor
    """(T, B, H) ‖v‖, how strong what it wrote was."""

    rate: Tensor
    """(T, B, H) β, the share of it that was written."""

    keep: Tensor
    """(T, B, H) α, the share of the state that stayed."""

    state_norm: Tensor
    """(T, B, H, *grid) ‖S‖ of every voxel after the token wrote."""

    readout: Tensor
    """(T, B, H, C) r, what it read, before the norm."""

    use: Tensor
    """(T, B) ‖σ(γ)·m‖ / ‖x‖ (σ(γ) = 1 without a residual)."""

    present: Tensor
    """(T, B) bool."""

    token: Tensor
    """(T,) int64: the token's position in its row's stream, counted from the first recorded one;
    masked positions count, so that they index the row's texts: 0, every, 2·every, ..."""

    seen: Tensor
    """(B,) int64: tokens the row went through, kept or not, masked ones not counted."""

    history: PlaceHistory | None
    """The inputs of the recurrence, exactly as they were; None where `record` kept none."""

    def __len__(self) -> int:
        """T, tokens kept."""
        return self.token.shape[0]

    @property
    def span(self) -> Tensor:
        """(T, B, 2) int64: [start, stop) in the row's stream, one token each."""
        start = self.token[:, None].expand(-1, self.rows)
        return torch.stack([start, start + 1], dim=-1)

    @property
    def norms(self) -> Tensor:
        """(T, B, ...) the norms of everything that is held."""
        return self.state_norm

    def head(self, head: int) -> HeadRecording:
        """One head's grid over time."""
        require_index(head, self.config.heads, "head")
        one = slice(head % self.config.heads, head % self.config.heads + 1)
        spread = None
        if self.width is not None:
            spread = self.width[:, :, one].float() * _voxel(self.config)
        return HeadRecording(
            name=f"{self.name} head {one.start}" if self.config.heads > 1 else self.name,
            config=self.config,
            gate=self.gate,
            read_at=self.read_at[:, :, one],
            write_at=self.write_at[:, :, one],
            spread=spread,
            content_norm=self.content_norm[:, :, one],
            gates=torch.stack([self.rate[:, :, one.start], self.keep[:, :, one.start]], dim=-1),
            hidden_norm=self.state_norm[:, :, one.start],
            readout=self.readout[:, :, one],
            use=self.use,
            span=self.span,
            written=self.present,
            present=self.present,
            chunk=self.token,
            seen=self.seen,
        )

    def trace(
        self, reads: Sequence[int] | Tensor, *, row: int = 0, top: int | None = None
    ) -> RecordedTrace:
        """Where reads came from, exactly: the share of every earlier write, in all recorded calls.

        What happened to the state between calls is followed back: `moved`, `reset`, `select` and
        `quantized`, in any order. Shares are computed in float64 from what was recorded. A state
        that was quantized counts as if it had not been rounded. Beside what is returned, memory is
        bounded.

        Args:
            reads: positions in the row's stream.
            row: the row that read.
            top: tell of each head only so many writes, those of the largest shares.

        >>> import torch
        >>> from tensor_memory import PlaceMemory, record
        >>> memory = PlaceMemory(8, PlaceConfig(grid=(4, 4), channels=3, heads=2)).double()
        >>> with record(memory) as recording:
        ...     m, state = memory(torch.randn(1, 6, 8).double())
        ...     m, state = memory(torch.randn(1, 4, 8).double(), state)
        >>> trace = recording[0].trace([9])
        >>> trace.share.shape, trace.call[0, :, 0].tolist()
        (torch.Size([1, 10, 2]), [0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
        >>> read = (trace.share[0, ..., None] * trace.content(0)).sum(0) + trace.rest[0]
        >>> torch.allclose(read, trace.read[0])
        True
        """
        require_index(row, self.rows, "row")
        return trace_history(self.traced_history(), self.config, reads, row % self.rows, top)

    def follow(self, row: int, top: int) -> WriteLives | None:
        """Every write of a row followed forward; None where the history cannot tell.

        `top` writes are told of each read. Where beam search moved rows, `trace` alone can tell.
        """
        if self.history is None or len(self.history.joins) or not self.history.count[row]:
            return None
        return follow_writes(self.history, self.config, row, top)

    def follow_work(self, row: int) -> int:
        """Multiplications that `follow` takes, about."""
        tokens = 0 if self.history is None else int(self.history.count[row])
        return tokens * tokens * self.config.heads * self.config.voxels

    def views(self) -> list[GridRecording]:
        """What is drawn of this layer: the grid of each head."""
        return [self.head(head) for head in range(self.config.heads)]

    def __getitem__(self, at: Any) -> Any:
        """`layer[t, b]` is one `PlaceToken`; `layer[3:9]` a layer of the same history.

        `layer.head(h)` takes slices of rows too.
        """
        arrays = {name: array for name, array in self.arrays().items() if array.ndim > 1}
        if isinstance(at, slice):
            cut = {name: array[at] for name, array in arrays.items()}
            return replace(self, **cut, token=self.token[at])
        if not isinstance(at, tuple) or len(at) != 2:
            raise TypeError(f"expected [token, row] or a slice of tokens, got {at!r}")
        token, row = at
        require_index(token, len(self), "token")
        require_index(row, self.rows, "row")
        values = {name: array[token, row] for name, array in arrays.items()}
        return PlaceToken(
            layer=self.name,
            row=row % self.rows,
            token=int(self.token[token]),
            present=bool(values.pop("present")),
            use=float(values.pop("use")),
            width=values.pop("width", None),
            **values,
        )


@dataclass(frozen=True, eq=False)
class PlaceToken:
    """One token of one row in one layer: a recording without its first two dimensions."""

    layer: str
    row: int
    token: int
    present: bool
    use: float
    write_at: Tensor
    read_at: Tensor
    width: Tensor | None
    content_norm: Tensor
    rate: Tensor
    keep: Tensor
    state_norm: Tensor
    readout: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class HeadRecording(GridRecording):
    """One head of a `PlaceMemory`, whose grid is its own."""

    gate_names = ("rate", "keep")
    norm_name = "‖S‖"
    unit = "token"

    config: PlaceConfig

    def mask(self, chunk: int, row: int = 0) -> Tensor:  # noqa: D102
        require_index(chunk, len(self), "token")
        require_index(row, self.rows, "row")
        config = self.config
        width = None if self.spread is None else self.spread[chunk, row].float() / _voxel(config)
        assert isinstance(config.wrap, tuple)
        at = self.write_at[chunk, row][None, None].float()  # (1, 1, 1, n)
        return outer(factors(at, config.grid, width, config.wrap))[0, 0].unflatten(1, config.grid)


def _voxel(config: PlaceConfig) -> float:
    """From voxel to voxel in the units of places, averaged over axes of several lengths."""
    return sum(2 / (size - 1) for size in config.grid) / config.axes
