"""The place memory once more, in NumPy, token by token, from its equations alone."""

from __future__ import annotations

import itertools

import numpy as np


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def address(place, grid, width, wrap):
    """φ(p) as an array of the grid's shape; coordinate 0 addresses the last axis."""
    axes = []
    for axis, size in enumerate(grid):
        points = np.linspace(-1, 1, size)
        p = place[len(grid) - 1 - axis]
        step = 2 / (size - 1)
        if wrap[axis]:
            turn = size * step
            distance = (p - points + turn / 2) % turn - turn / 2
        else:
            distance = np.clip(p, -1, 1) - points
        if width is None:
            weight = np.maximum(0, 1 - np.abs(distance) / step)
        else:
            weight = np.exp(-0.5 * (distance / (width * step)) ** 2)
        axes.append(weight / np.sqrt((weight**2).sum()))
    phi = np.zeros(grid)
    for at in itertools.product(*(range(size) for size in grid)):
        phi[at] = np.prod([axes[axis][i] for axis, i in enumerate(at)])
    return phi


def run(weights, config, x, where=None, state=None, mask=None, reset=None):
    """x (N, d) of one row -> m (N, d), state (H, *grid, C)."""
    w = {name: np.asarray(value) for name, value in weights.items()}
    H, C, n, grid = config.heads, config.channels, config.axes, config.grid
    S = np.zeros((H, *grid, C)) if state is None else state.copy()
    out = np.zeros((len(x), w["output.weight"].shape[0]))
    for t in range(len(x)):
        if reset is not None and reset[t]:
            S[:] = 0
        if mask is not None and not mask[t]:
            continue
        reads = []
        for h in range(H):

            def place(name, h=h, t=t):
                learned = np.tanh(w[f"{name}.weight"] @ x[t]).reshape(H, n)[h]
                return learned if config.places == "learned" else where[t] + learned

            if config.places == "given":
                p = q = where[t]
            else:
                p = place("write_place")
                q = p if config.share_places else place("read_place")
            width = np.exp(w["log_width"][h]) if config.kernel == "gaussian" else None
            v = (w["content.weight"] @ x[t]).reshape(H, C)[h]
            beta = sigmoid(w["rate.weight"][h] @ x[t] + w["rate.bias"][h])
            alpha = sigmoid(w["keep.weight"][h] @ x[t] + w["keep.bias"][h])
            phi = address(p, grid, width, config.wrap)
            S[h] = alpha * S[h]
            if config.rule == "delta":
                v = v - np.tensordot(phi, S[h], n)
            S[h] = S[h] + beta * phi[..., None] * v
            r = np.tensordot(address(q, grid, width, config.wrap), S[h], n)
            reads.append(r / np.sqrt((r**2).mean() + 1e-6) * w["norm.weight"])
        z = w["gate.weight"] @ x[t]
        out[t] = w["output.weight"] @ (np.concatenate(reads) * z * sigmoid(z))
    return out, S
