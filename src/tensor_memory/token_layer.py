"""A `MemoryResidual` on one token on a CPU, without gradients: decoding, in few operations.

On a small model a token costs what its operations cost to start, whatever they compute. The same
equations as everywhere, with what only many tokens, gradients or marks need left out.

Letters: B batch, d width, K tokens per chunk, C channels, G voxels along an axis, V of the grid,
Q reads and M writes per chunk, H heads, n axes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory.config import PlaceConfig
from tensor_memory.ops.places.addresses import factors
from tensor_memory.ops.places.chunked import SPARSE_FROM
from tensor_memory.ops.products import outer
from tensor_memory.ops.scan.reference import EPSILON
from tensor_memory.place import PlaceMemory
from tensor_memory.place_state import PlaceState
from tensor_memory.state import MemoryState, trusted
from tensor_memory.tensor import SIGMA_FLOOR, TensorMemory


def tensor_token(
    memory: TensorMemory, norm: nn.LayerNorm, gate: Tensor, x: Tensor, state: MemoryState
) -> tuple[Tensor, MemoryState]:
    """x (B, 1, d) and a state whose rows stand together -> x̂ and the state after."""
    config, waiting, weights = memory.config, state.aligned, _weights(memory)
    assert waiting is not None
    h = _normed(norm, x)
    every_token = config.reads == "token"
    if every_token or not waiting:
        head = "coordinate" if config.share_coordinates else "read_coordinate"
        at = F.linear(h, weights[head]).tanh_().view(len(h), -1, config.axes)
        read = _sampled(state.hidden, at)  # (B, Q·C)
    else:
        read = state.readout
    m = F.linear(read, weights["output"])
    out = torch.addcmul(x, gate.sigmoid(), m[:, None])

    tokens = state.tokens.clone()
    tokens[:, waiting] = h
    if waiting + 1 < config.chunk_size:
        readout = state.readout if every_token else read
        fill = torch.full_like(state.fill, waiting + 1)
        after = MemoryState(state.hidden, state.cell, tokens, fill, readout, aligned=waiting + 1)
        return out, trusted(after)
    hidden, cell = _written(memory, tokens, state.hidden, state.cell)
    if config.chunk_size == 1:
        kept = (state.tokens, state.fill, state.readout)
    else:
        kept = tuple(map(torch.zeros_like, (state.tokens, state.fill, state.readout)))
    return out, trusted(MemoryState(hidden, cell, *kept, aligned=0))


def _sampled(hidden: Tensor, at: Tensor) -> Tensor:
    """n-linear samples of hidden (B, C, *grid) at (B, Q, n): (B, Q·C)."""
    shares = []
    for axis, size in enumerate(hidden.shape[2:]):
        place = (at[..., at.shape[-1] - 1 - axis, None] + 1) * (0.5 * (size - 1))  # (B, Q, 1)
        distance = (place - _voxels(size, at.dtype)).abs_()  # (B, Q, G)
        shares.append(distance.neg_().add_(1).clamp_(min=0))
    return torch.bmm(outer(shares), hidden.flatten(2).mT).flatten(1)


def _written(
    memory: TensorMemory, tokens: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """hidden and cell (B, C, *grid) after a chunk of tokens (B, K, d) has been written."""
    config = memory.config
    B, C, grid = len(tokens), config.channels, hidden.shape[2:]
    summary = F.linear(tokens.flatten(1), memory.write_proj.weight)
    at = F.linear(summary, memory.write_head.weight).tanh().view(B, -1, config.axes)
    content = F.linear(summary, memory.content.weight).view(B, -1, C)
    raw = F.softplus(F.linear(summary, memory.spread.weight, memory.spread.bias)) + SIGMA_FLOOR
    scale = -1 / (2 * (config.sigma_scale * raw).square() + EPSILON)  # (B, M)
    parts = []
    for axis, size in enumerate(grid):
        offset = _points(size, at.dtype) - at[..., config.axes - 1 - axis, None]  # (B, M, G)
        parts.append(offset.square_().mul_(scale[..., None]).exp_())
    written = torch.bmm(content.mT, outer(parts))
    volume = torch.cat([written, hidden.flatten(2)], dim=1)  # (B, 2C, V)
    if config.mixing == "factorized":
        volume = _filtered(volume.view(B, 2 * C, *grid), memory.taps).flatten(2)
    mix = memory.mix.weight.expand(B, -1, -1)
    mixed = torch.baddbmm(memory.mix.bias[:, None], mix, volume)  # (B, 4C, V)
    i, f, o = mixed[:, : 3 * C].sigmoid_().view(B, 3, *hidden.shape[1:]).unbind(1)
    g = mixed[:, 3 * C :].tanh_().view_as(cell)
    cell = (f * cell).addcmul_(i, g)
    return cell.tanh().mul_(o), cell


def _filtered(volume: Tensor, taps: Tensor) -> Tensor:
    """The depthwise 3-tap filters along every axis, zero padding: taps (n, 2C, 3)."""
    shape = (-1, *[1] * (volume.ndim - 2))
    for axis, of_axis in enumerate(taps.unbind(0)):
        before, centre, after = (tap.view(shape) for tap in of_axis.unbind(1))
        dim, size = axis + 2, volume.shape[axis + 2]
        filtered = volume * centre
        lower, upper = volume.narrow(dim, 0, size - 1), volume.narrow(dim, 1, size - 1)
        filtered.narrow(dim, 1, size - 1).addcmul_(lower, before)
        filtered.narrow(dim, 0, size - 1).addcmul_(upper, after)
        volume = filtered
    return volume


def place_token(
    memory: PlaceMemory,
    norm: nn.LayerNorm,
    gate: Tensor,
    x: Tensor,
    state: PlaceState,
    where: Tensor | None,
) -> tuple[Tensor, PlaceState]:
    """x (B, 1, d), and where (B, 1, n) or (B, 1, H, n) if places are given -> x̂ and the state."""
    config, values = memory.config, state.values
    B, H, C = x.shape[0], config.heads, config.channels
    weights = _weights(memory)
    h = _normed(norm, x)
    base = state.origin.unsqueeze(1)  # (B, 1 or H, n)
    if where is not None:
        base = base + (where[:, 0] if where.ndim == 4 else where).to(base.dtype)
    write_at = read_at = base.expand(B, H, config.axes)
    if config.places != "given":
        write_at = read_at = F.linear(h, weights["write_place"]).tanh_().view_as(write_at) + base
        if not config.share_places:
            read_at = F.linear(h, weights["read_place"]).tanh_().view_as(write_at) + base
    wrote = _address(memory, write_at)  # (B, H, V)
    read_from = wrote if read_at is write_at else _address(memory, read_at)
    keep = F.linear(h, weights["keep"], memory.keep.bias).sigmoid_()
    rate = F.linear(h, weights["rate"], memory.rate.bias).sigmoid_()
    content = F.linear(h, weights["content"]).view(B * H, 1, C)

    after = (values.view(B, H, -1) * keep.unsqueeze(-1)).view(B * H, -1, C)  # αS, (B·H, V, C)
    if config.rule == "delta":
        content = content - torch.bmm(wrote.view(B * H, 1, -1), after)
    after.addcmul_((wrote * rate.unsqueeze(-1)).view(B * H, -1, 1), content)  # + β φ vᵀ
    read = torch.bmm(read_from.view(B * H, 1, -1), after).view(B, H, C)
    assert memory.norm.eps is not None
    scale = read.square().mean(-1, keepdim=True).add_(memory.norm.eps).rsqrt_()
    read = read.mul_(scale).mul_(weights["norm"]).view(B, -1)  # F.rms_norm takes three times this
    m = F.linear(read.mul_(F.silu(F.linear(h, weights["gate"]))), weights["output"])
    out = torch.addcmul(x, gate.sigmoid(), m.unsqueeze(1))
    return out, state.with_values(after.view(values.shape))


def _address(memory: PlaceMemory, places: Tensor) -> Tensor:
    """φ: places (B, H, n) -> (B, H, V)."""
    config = memory.config
    size, wrap = config.grid[0], config.wrap
    assert isinstance(wrap, tuple)
    width = memory.log_width.exp() if config.kernel == "gaussian" else None
    if width is None or any(wrap) or config.grid.count(size) != len(config.grid):
        return outer(factors(places[:, None], config.grid, width, wrap))[:, 0]
    # All axes at once, coordinate 0 first: (B, H, n, G).
    half = 0.5 * (size - 1)
    at = (places * half).add_(half).clamp_(0, size - 1)
    distance = at.unsqueeze(-1) - _voxels(size, at.dtype)
    # exp(−½d²) over its norm is the root of a softmax of −d².
    parts = distance.div_(width.view(-1, 1, 1)).square_().neg_().softmax(-1).sqrt_()
    return outer(parts.unbind(2)[::-1])


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """x (B, 1, d) -> (B, d)."""
    weights: Any = norm._parameters
    return torch.layer_norm(
        x.squeeze(1), norm.normalized_shape, weights["weight"], weights["bias"], norm.eps
    )


def _weights(memory: nn.Module) -> dict[str, Tensor]:
    """The weights of a memory's parts; asked for as attributes, each would be searched for."""
    return {name: part._parameters["weight"] for name, part in memory._modules.items()}  # type: ignore[union-attr,misc]


@functools.lru_cache(maxsize=32)
def _voxels(size: int, dtype: torch.dtype) -> Tensor:
    """(G,) numbers of the voxels along an axis."""
    return torch.arange(size, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=32)
def _points(size: int, dtype: torch.dtype) -> Tensor:
    """(G,) where the voxels of an axis lie in [-1, 1]."""
    return torch.linspace(-1, 1, size, dtype=dtype, device="cpu")


def touches_whole_grid(config: PlaceConfig) -> bool:
    """Whether a token of a place memory does."""
    return config.kernel == "gaussian" or config.voxels < SPARSE_FROM * 2**config.axes
