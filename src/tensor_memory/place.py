"""PlaceMemory: tokens write to and read from places of a grid; the update is linear.

Letters: B batch, N tokens, d width, H heads, n axes, C channels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tensor_memory.chunking import check_marks, check_tokens, packed_resets
from tensor_memory.config import PlaceConfig
from tensor_memory.ops.autograd import no_autocast
from tensor_memory.ops.inputs import checked_device, checked_float, is_dense, products_dtype
from tensor_memory.ops.places.inputs import PlaceInputs
from tensor_memory.ops.places.place_scan import place_backend, place_inputs, run_places
from tensor_memory.ops.places.shares import shares
from tensor_memory.place_state import PlaceState
from tensor_memory.state import at_least_float32, check_memory, row_index

START_WIDTH = 0.5  # of the Gaussian, in voxels


class Trace(NamedTuple):
    """Where reads came from: `PlaceMemory.trace`."""

    share: Tensor
    """(B, R, N, H) of every write in every read asked for: shares · content + rest = read."""
    content: Tensor
    """(B, N, H, C) what was written, v."""
    rest: Tensor
    """(B, R, H, C) what the state before the first token gave."""
    read: Tensor
    """(B, R, H, C) what was read, before the norm."""

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(array.shape)}" for name, array in self._asdict().items())
        return f"Trace({', '.join(shapes)})"


class PlaceMemory(nn.Module):
    """A memory of places for tokens of width `dim`; the form that pays where the world is spatial.

    Each head keeps a grid. A token writes content at a place and reads at a place: learned from
    the token, or given by the caller (`where=`). Parallel over time; the state is one tensor.

    Args:
        dim: d, the tokens' width.
        config: everything else.
        zero_init: W_out starts at zero, so that nothing changes before training.

    >>> memory = PlaceMemory(16, PlaceConfig.map(axes=2))
    >>> x, where = torch.randn(2, 50, 16), torch.rand(2, 50, 2) * 2 - 1
    >>> m, state = memory(x, where=where)
    >>> first, half = memory(x[:, :20], where=where[:, :20])  # cut anywhere: nothing changes
    >>> second, _ = memory(x[:, 20:], half, where=where[:, 20:])
    >>> torch.allclose(torch.cat([first, second], 1), m, atol=1e-5)
    True
    """

    def __init__(
        self, dim: int, config: PlaceConfig | None = None, *, zero_init: bool = False
    ) -> None:
        super().__init__()
        config = PlaceConfig() if config is None else config
        check_memory("PlaceMemory", dim, config, PlaceConfig, zero_init)
        self.dim, self.config, self.zero_init = dim, config, zero_init
        H, C, n = config.heads, config.channels, config.axes
        if config.places != "given":
            self.write_place = nn.Linear(dim, H * n, bias=False)
            if not config.share_places:
                self.read_place = nn.Linear(dim, H * n, bias=False)
        self.content = nn.Linear(dim, H * C, bias=False)
        self.rate = nn.Linear(dim, H)
        self.keep = nn.Linear(dim, H)
        if config.kernel == "gaussian":
            self.log_width = nn.Parameter(torch.empty(H))
        self.gate = nn.Linear(dim, H * C, bias=False)
        self.norm = nn.RMSNorm(C, eps=1e-6)
        self.output = nn.Linear(H * C, dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise everything, as the constructor does."""
        for layer in self.children():
            assert isinstance(layer, nn.Linear | nn.RMSNorm)
            layer.reset_parameters()
        self.keep.weight.zero_()
        self.keep.bias.fill_(self.config.keep_bias)
        if self.config.places == "offset":
            self.write_place.weight.zero_()
            if not self.config.share_places:
                self.read_place.weight.zero_()
        if self.config.kernel == "gaussian":
            self.log_width.fill_(torch.tensor(START_WIDTH).log())
        if self.zero_init:
            self.output.weight.zero_()

    def extra_repr(self) -> str:  # noqa: D102
        return f"{self.dim}, {self.config}"

    def backend_on(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
        """The backend that serves this memory on a device, for tokens of a type.

        >>> PlaceMemory(8).backend_on("cpu")
        'torch'
        """
        config, device = self.config, checked_device("backend_on", device)
        dtype = checked_float("backend_on", dtype)
        state = PlaceState.zeros(config, 1, dtype=dtype, device="meta").values
        content = state.new_empty(1, 1, config.heads, config.channels)
        at, rate = content.new_empty(1, 1, config.heads, config.axes), content[..., 0]
        width = rate[0, 0] if config.kernel == "gaussian" else None
        assert isinstance(config.wrap, tuple)
        inputs = place_inputs(
            at, None if config.share_places else at, content, rate, rate, width, state,
            rule=config.rule, wrap=config.wrap, resets=None,
        )  # fmt: skip
        return place_backend(inputs, config.backend, device)

    def forward(
        self,
        x: Tensor,
        state: PlaceState | None = None,
        *,
        where: Tensor | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> tuple[Tensor, PlaceState]:
        """x (B, N, d) -> what the tokens read, m (B, N, d), and the state after.

        Args:
            x: tokens.
            state: what the last call returned; None starts empty.
            where: (B, N, n) or (B, N, H, n) places in [-1, 1], where the config takes them. Their
                values are not checked, as a check would wait for the device. A place outside
                counts as on the border, or comes round again on an axis that wraps.
            mask: (B, N) true where a token is real; others change nothing and m is 0 there.
            reset: (B, N) true where a new document starts, on a masked position too. The grid is
                emptied there; the rest of a voxel that `state.moved` has left in the origin stays.
            cu_seqlens: (documents + 1,) int, where documents packed into one row begin and end:
                0, ..., N, as in variable-length attention; B is 1. Every document but the first
                starts with an empty memory; the first goes on from `state`. A document without
                tokens changes nothing.
            group: processes that hold the parts of one sequence, cut anywhere, in the order of
                their ranks; x, where, mask and reset are this process' part, of the same rows
                everywhere. Each gets the m of its part and the state after the last part. See
                below.

        With a group the call equals one of the whole sequence in one process, its gradients too.
        All processes make the same calls with the state that the last one returned to them, or
        None, and all run the backward. A gradient is that of the sum of all their losses; that of
        a state arrives at the first process. Rule "linear" takes one exchange of a constant size,
        and processes scan at once. Rule "delta" hands the state on from process to process, so
        that they scan one after the other.
        """
        if cu_seqlens is not None:
            check_tokens(x, self.dim, self.output.weight)
            reset = packed_resets(x, reset, cu_seqlens)
        inputs, state = self.steer(x, state, where, mask, reset)
        reads, values = run_places(inputs, self.config.backend, products_dtype(x), group)
        return self.output_of(reads, x, mask), state.with_values(values)

    def output_of(self, reads: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """m = W_out(norm(r) ⊙ silu(W_gate x)): reads (B, N, H, C), x (B, N, d) -> (B, N, d)."""
        source = x if mask is None else x.masked_fill(~mask[..., None], 0)
        gate = F.silu(self.gate(source))
        dtype = self.norm.weight.dtype
        if dtype == torch.float16:  # 65504 is its largest: a norm gives the same of smaller reads
            largest = reads.detach().abs().amax(-1, keepdim=True)
            reads = reads / (largest / 2**15).clamp(min=1)
        read = self.norm(reads.to(dtype)).flatten(2)
        m = self.output(read.to(gate.dtype) * gate)
        return m if mask is None else m.masked_fill(~mask[..., None], 0)

    def resized(self, grid: Sequence[int]) -> PlaceMemory:
        """A copy with the same weights on another grid; `state.resized` takes a state along."""
        config = replace(self.config, grid=grid, wrap=False)  # type: ignore[arg-type]  # checked
        if config.axes != self.config.axes:
            raise ValueError(
                f"resized: expected a grid of {self.config.axes} axes like {self.config.grid}, "
                f"got {config.grid}; the weights know how many coordinates a place has"
            )
        memory = copy.deepcopy(self)
        memory.config = replace(config, wrap=self.config.wrap)
        return memory

    @torch.no_grad()
    def trace(
        self,
        x: Tensor,
        state: PlaceState | None = None,
        *,
        reads: Sequence[int] | Tensor,
        where: Tensor | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Trace:
        """Where the reads of the tokens at these positions came from, exactly.

        The arguments are `forward`'s; `reads` are token positions. Shares times contents, and the
        rest that the state before gave, add up to the read.
        """
        if cu_seqlens is not None:
            check_tokens(x, self.dim, self.output.weight)
            reset = packed_resets(x, reset, cu_seqlens)
        inputs, _ = self.steer(x, state, where, mask, reset)
        inputs = inputs.prepared()
        at = row_index("trace", reads, x.transpose(0, 1), "position")
        with no_autocast(x.device):
            share, rest = shares(inputs, at)
            read = torch.einsum("brnh,bnhc->brhc", share, inputs.content) + rest
        return Trace(share, inputs.content, rest, read)

    def steer(
        self,
        x: Tensor,
        state: PlaceState | None,
        where: Tensor | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> tuple[PlaceInputs, PlaceState]:
        """What the tokens say to the recurrence; in float32 or better even under autocast."""
        self.check(x, state, where, mask, reset)
        state = self.empty_state(x) if state is None else state
        config = self.config
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0)  # garbage there must reach no gradient
            if where is not None:
                where = where.masked_fill(~mask.view(*mask.shape, *[1] * (where.ndim - 2)), 0)
        write_at, read_at = self._places(x, where)
        origin = state.origin[:, None, None]
        rate = _float32(self.rate(x)).sigmoid()
        log_keep = F.logsigmoid(_float32(self.keep(x)))
        if mask is not None:
            rate = rate.masked_fill(~mask[..., None], 0)
            log_keep = log_keep.masked_fill(~mask[..., None], 0)
        width = _float32(self.log_width).exp() if config.kernel == "gaussian" else None
        assert isinstance(config.wrap, tuple)
        content = _float32(self.content(x)).unflatten(-1, (config.heads, config.channels))
        inputs = place_inputs(
            write_at + origin,
            None if read_at is None else read_at + origin,
            content,
            rate,
            log_keep,
            width,
            state.dequantized().values,
            rule=config.rule,
            wrap=config.wrap,
            resets=reset,
        )
        return inputs, state

    def check(
        self,
        x: Tensor,
        state: PlaceState | None,
        where: Tensor | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
    ) -> None:
        """Raise where the arguments of a call do not fit."""
        check_tokens(x, self.dim, self.output.weight)
        if mask is not None or reset is not None:
            check_marks(x, mask, reset)
        if state is not None:  # before the places, which may have been passed in its place
            PlaceState.require(state, self.config, x)
        if where is not None or self.config.places != "learned":
            self._check_where(x, where)

    def empty_state(self, x: Tensor) -> PlaceState:
        """The state before the first of tokens like x (B, N, d)."""
        return PlaceState.zeros(self.config, x.shape[0], dtype=x.dtype, device=x.device)

    def _places(self, x: Tensor, where: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """p, and q where it is another: each (B, N, H, n)."""
        config = self.config
        given = None
        if where is not None:
            # float64, as NumPy has a pose, would make a state of twice the bytes
            given = where.to(at_least_float32(x.dtype))
            if given.ndim == 3:
                given = given[:, :, None].expand(-1, -1, config.heads, -1)
        if config.places == "given":
            assert given is not None
            return given, None
        write_at = self._learned(self.write_place, x, given)
        return write_at, None if config.share_places else self._learned(self.read_place, x, given)

    def _learned(self, head: nn.Linear, x: Tensor, given: Tensor | None) -> Tensor:
        place = _float32(head(x)).tanh().unflatten(-1, (self.config.heads, self.config.axes))
        return place if given is None else given + place

    def _check_where(self, x: Tensor, where: Tensor | None) -> None:
        config = self.config
        if config.places == "learned":
            if where is not None:
                raise ValueError(
                    "where: expected None, since this memory learns its places from the tokens, "
                    f"got {type(where).__name__}; leave where out, or choose "
                    "PlaceConfig(places='given') or 'offset'"
                )
            return
        wanted = (*x.shape[:2], config.axes)
        if where is None:
            raise ValueError(
                f"where: expected places of shape (B, N, n) = {wanted}, since the config has "
                f"places={config.places!r}, got None; pass where=, or choose places='learned'"
            )
        dense = isinstance(where, Tensor) and is_dense(where)
        if not dense or not where.is_floating_point():
            got, remedy = type(where).__name__, "torch.as_tensor(where, dtype=torch.float32)"
            if isinstance(where, Tensor):
                got, remedy = where.dtype, ".float()"
                if not dense:
                    got, remedy = "a sparse or nested one", ".to_dense() or .to_padded_tensor(0.0)"
            raise TypeError(
                f"where: expected a tensor of floats, got {got}; convert it with {remedy}"
            )
        by_head = (*x.shape[:2], config.heads, config.axes)
        if tuple(where.shape) not in (wanted, by_head):
            remedy = "give one place per token of x"
            if where.shape[:2] == x.shape[:2]:
                remedy = f"give each token {config.axes} coordinates, one per axis of the grid "
                remedy += str(config.grid)
            raise ValueError(
                f"where: expected places of shape (B, N, n) = {wanted} or (B, N, H, n) = "
                f"{by_head}, got {tuple(where.shape)}; {remedy}"
            )
        if where.device != x.device:
            raise ValueError(
                f"where: expected device {x.device} like x, got {where.device}; move it with .to()"
            )


def _float32(tensor: Tensor) -> Tensor:
    """In float32 or better."""
    return tensor.to(at_least_float32(tensor.dtype))
