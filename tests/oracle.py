"""The memory, straight from the paper, as slowly and plainly as possible: NumPy, float64, loops.

Written from the paper and DESIGN.md alone and sharing no code with the package, so that a
misreading would have to happen twice to go unnoticed. It handles one row, one token at a time.

B batch (the caller loops over rows) · N tokens · K tokens per chunk · S chunks · d model width ·
C memory channels · n grid axes · V voxels (product of the grid) · R reads per chunk (heads) ·
M writes per chunk (heads) · Q reads per scan step (R, or K·R when every token reads)
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray
Voxel = tuple[int, ...]
Weights = Mapping[str, Array]


@dataclass(eq=False)  # == on arrays has no single truth value
class OracleState:
    hidden: Array  # (C, *grid)
    cell: Array  # (C, *grid)
    pending: list[Array] = field(default_factory=list)  # tokens (d,) of the unfinished chunk
    readout: Array | None = None  # (R*C,) of the unfinished chunk, only when reads == "chunk"

    def copy(self) -> "OracleState":
        readout = None if self.readout is None else float64(self.readout)
        pending = [float64(token) for token in self.pending]
        return OracleState(float64(self.hidden), float64(self.cell), pending, readout)


def empty_state(channels: int, grid: Sequence[int]) -> OracleState:
    return OracleState(np.zeros((channels, *grid)), np.zeros((channels, *grid)))


def float64(values: Any) -> Array:
    """Always a copy: nothing that comes in is ever changed."""
    return np.array(values, dtype=np.float64)


def sigmoid(z: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -z))  # 1 / (1 + exp(-z)) without overflow


def softplus(z: Array) -> Array:
    return np.logaddexp(0.0, z)  # log(1 + exp(z)) without overflow


def coordinates(weight: Array, x: Array, axes: int) -> Array:
    """mu = tanh(W_coord x), one row per head: (d,) -> (heads, n)."""
    return np.tanh(weight @ x).reshape(-1, axes)


def grid_position(mu: Array, grid: Sequence[int]) -> list[float]:
    """mu in [-1, 1]^n as fractional voxel indices in grid order, clamped to the border."""
    position = []
    for axis, size in enumerate(grid):
        coordinate = mu[len(grid) - 1 - axis]  # (x, y, z) addresses (W, H, D): reversed
        index = (coordinate + 1) / 2 * (size - 1)  # -1 and 1 are the first and last voxel
        position.append(float(min(max(index, 0.0), size - 1)))
    return position


def grid_point(voxel: Voxel, grid: Sequence[int]) -> Array:
    """G at one voxel, in coordinate order (x, y, z)."""
    axis_points = [np.linspace(-1, 1, size)[i] for i, size in zip(voxel, grid, strict=True)]
    return np.array(axis_points[::-1])


def sample(hidden: Array, mu: Array) -> Array:
    """r = GridSample(h, mu): the 2^n surrounding voxels, n-linearly weighted. -> (C,)"""
    grid = hidden.shape[1:]
    position = grid_position(mu, grid)
    r = np.zeros(hidden.shape[0])
    for corner in itertools.product((0, 1), repeat=len(grid)):
        weight, voxel = 1.0, []
        for p, side, size in zip(position, corner, grid, strict=True):
            low = math.floor(p)
            weight *= p - low if side else 1 - (p - low)
            voxel.append(min(low + side, size - 1))  # past the border the weight is 0 anyway
        r += weight * hidden[:, *voxel]
    return r


def gaussian_mask(mu: Array, sigma: float, grid: Sequence[int]) -> Array:
    """M = exp(-|G - mu|^2 / (2 sigma^2 + eps))."""
    mask = np.zeros(grid)
    for voxel in np.ndindex(*grid):
        distance2 = sum((grid_point(voxel, grid) - mu) ** 2)
        mask[voxel] = math.exp(-distance2 / (2 * sigma**2 + 1e-6))
    return mask


def nearest_mask(mu: Array, grid: Sequence[int]) -> Array:
    """1 at the voxel nearest to mu (halfway: the upper one), 0 elsewhere."""
    mask = np.zeros(grid)
    mask[tuple(math.floor(p + 0.5) for p in grid_position(mu, grid))] = 1.0
    return mask


def write_volume(
    write_at: Array, spread: Array | None, content: Array, grid: Sequence[int]
) -> Array:
    """U = sum over the M write heads of content (x) M. -> (C, *grid)"""
    U = np.zeros((content.shape[1], *grid))
    for head, mu in enumerate(write_at):
        if spread is None:
            mask = nearest_mask(mu, grid)
        else:
            mask = gaussian_mask(mu, float(spread[head]), grid)
        for voxel in np.ndindex(*grid):
            U[:, *voxel] += content[head] * mask[voxel]
    return U


def depthwise(z: Array, taps: Array, axis: int) -> Array:
    """DW along one grid axis: y[i] = taps[0] z[i-1] + taps[1] z[i] + taps[2] z[i+1], zeros outside.

    z (2C, *grid), taps (2C, 3).
    """
    grid = z.shape[1:]
    y = np.zeros_like(z)
    for voxel in np.ndindex(*grid):
        for tap, offset in enumerate((-1, 0, 1)):
            neighbour = list(voxel)
            neighbour[axis] += offset
            if 0 <= neighbour[axis] < grid[axis]:
                y[:, *voxel] += taps[:, tap] * z[:, *neighbour]
    return y


def phys(z: Array, taps: Array | None, mix: Array, bias: Array) -> Array:
    """G = Phys(Z): the axis filters in grid order, then the pointwise 2C -> 4C mix."""
    if taps is not None:
        for axis in range(z.ndim - 1):
            z = depthwise(z, taps[axis], axis)
    gates = np.zeros((mix.shape[0], *z.shape[1:]))
    for voxel in np.ndindex(*z.shape[1:]):
        gates[:, *voxel] = mix @ z[:, *voxel] + bias
    return gates


def update(
    U: Array, taps: Array | None, mix: Array, bias: Array, hidden: Array, cell: Array
) -> tuple[Array, Array]:
    """c' = f c + i g and h' = o tanh(c'), with [i, f, o, g] = chunk(Phys([U; h]), 4)."""
    i, f, o, g = np.split(phys(np.concatenate([U, hidden]), taps, mix, bias), 4)
    cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(cell), cell


def scan(
    read_at: Array | None,
    write_at: Array,
    spread: Array | None,
    content: Array,
    taps: Array | None,
    mix: Array,
    bias: Array,
    hidden: Array,
    cell: Array,
    writes: Array | None = None,
    resets: Array | None = None,
) -> tuple[Array | None, Array, Array]:
    """One row of memory_scan: reads (S, Q, C) or None, hidden, cell.

    read_at (S, Q, n), write_at (S, M, n), spread (S, M), content (S, M, C), taps (n, 2C, 3),
    mix (4C, 2C), bias (4C,), hidden and cell (C, *grid), writes and resets (S,).
    """
    hidden, cell = float64(hidden), float64(cell)
    channels, *grid = hidden.shape
    queries = 0 if read_at is None else read_at.shape[1]
    reads = np.zeros((len(write_at), queries, channels))
    for t in range(len(write_at)):
        if resets is not None and resets[t]:
            hidden, cell = np.zeros_like(hidden), np.zeros_like(cell)
        if read_at is not None:
            for q, mu in enumerate(float64(read_at[t])):
                reads[t, q] = sample(hidden, mu)
        if writes is None or writes[t]:
            sigma = None if spread is None else float64(spread[t])
            U = write_volume(float64(write_at[t]), sigma, float64(content[t]), grid)
            hidden, cell = update(U, taps, mix, bias, hidden, cell)
    return None if read_at is None else reads, hidden, cell


def read(x: Array, weights: Weights, config: Any, hidden: Array) -> Array:
    """The query x reads with every head; reads concatenated head after head. -> (R*C,)"""
    name = "coordinate.weight" if config.share_coordinates else "read_coordinate.weight"
    heads = coordinates(weights[name], x, len(config.grid))
    return np.concatenate([sample(hidden, mu) for mu in heads])


def write(state: OracleState, weights: Weights, config: Any) -> OracleState:
    """The pending chunk, zero-padded to K tokens, goes into the memory."""
    padding = [np.zeros_like(state.pending[0])] * (config.chunk_size - len(state.pending))
    x = weights["write_proj.weight"] @ np.concatenate(state.pending + padding)  # W_wp vec(x_1..x_K)
    name = "coordinate.weight" if config.share_coordinates else "write_coordinate.weight"
    write_at = coordinates(weights[name], x, len(config.grid))
    content = (weights["content.weight"] @ x).reshape(config.write_heads, config.channels)
    sigma = None
    if config.write == "gaussian":
        raw = weights["spread.weight"] @ x + weights["spread.bias"]
        sigma = config.sigma_scale * (softplus(raw) + 1e-4)
    taps = weights["taps"] if config.mixing == "factorized" else None
    U = write_volume(write_at, sigma, content, config.grid)
    mix, bias = weights["mix.weight"], weights["mix.bias"]
    return OracleState(*update(U, taps, mix, bias, state.hidden, state.cell))


def forward(
    x: Array,
    weights: Weights,
    config: Any,
    state: OracleState,
    mask: Array | None = None,
    reset: Array | None = None,
    flush: Array | bool | None = None,
) -> tuple[Array, OracleState]:
    """One row of TensorMemory.forward: x (N, d), mask, reset and flush (N,) -> m (N, d), state.

    flush may also be True: after the last token, or on the state as it came when N = 0.
    """
    weights = {name: float64(value) for name, value in weights.items()}
    x, state = float64(x), state.copy()
    m = np.zeros_like(x)
    flush = np.asarray(False if flush is None else flush)
    flush_after = np.zeros(len(x), dtype=bool) if flush.ndim == 0 else flush
    flush_at_end = flush.ndim == 0 and bool(flush)
    for t, token in enumerate(x):
        if reset is not None and reset[t]:
            state = empty_state(config.channels, config.grid)
        if mask is None or mask[t]:
            readout = state.readout
            if config.reads == "token" or not state.pending:  # x_read is the chunk's first token
                readout = read(token, weights, config, state.hidden)
            m[t] = weights["output.weight"] @ readout
            state.readout = readout if config.reads == "chunk" else None
            state.pending.append(token)
            if len(state.pending) == config.chunk_size:
                state = write(state, weights, config)
        if flush_after[t] and state.pending:
            state = write(state, weights, config)
    if flush_at_end and state.pending:
        state = write(state, weights, config)
    return m, state
