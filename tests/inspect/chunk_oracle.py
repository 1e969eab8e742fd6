"""What a recording must hold, from the NumPy oracle: one row, one token at a time, plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import oracle
from memories import Call
from tensor_memory import TensorMemory


def expected_chunks(memory: TensorMemory, call: Call, row: int, gate: float = 1.0) -> list[dict]:
    """Every chunk of one row: what it read, wrote and left behind."""
    config = memory.config
    weights = {name: oracle.float64(w.detach().numpy()) for name, w in memory.state_dict().items()}
    marks = {
        name: None if value is None or isinstance(value, int) else value[row].numpy()
        for name, value in (*call.marks.items(), ("flush", call.ends))
    }
    state = oracle.empty_state(config.channels, config.grid)
    chunks: list[dict[str, Any]] = []
    open_chunk: dict[str, Any] | None = None

    def close(written: bool) -> None:
        nonlocal state, open_chunk
        if open_chunk is None:
            return
        open_chunk["written"] = written
        if written:
            open_chunk |= _write(state, weights, config)
            state = oracle.write(state, weights, config)
        open_chunk["hidden_norm"] = np.sqrt((state.hidden**2).sum(0))
        open_chunk["use"] = np.mean(open_chunk["use"])
        chunks.append(open_chunk)
        open_chunk = None

    for t, token in enumerate(call.x[row].double().numpy()):
        if marks["reset"] is not None and marks["reset"][t]:
            close(written=False)
            state = oracle.empty_state(config.channels, config.grid)
        if marks["mask"] is None or marks["mask"][t]:
            if open_chunk is None:
                open_chunk = {"span": [t, t], "use": [], "read_at": [], "readout": []}
            if config.reads == "token" or not state.pending:
                name = "coordinate" if config.share_coordinates else "read_coordinate"
                at = oracle.coordinates(weights[f"{name}.weight"], token, len(config.grid))
                state.readout = oracle.read(token, weights, config, state.hidden)
                open_chunk["read_at"] += list(at)
                open_chunk["readout"] += list(state.readout.reshape(len(at), -1))
            state.pending.append(token)
            m = weights["output.weight"] @ state.readout
            open_chunk["use"].append(gate * np.linalg.norm(m) / np.linalg.norm(token))
            open_chunk["span"][1] = t + 1
            if len(state.pending) == config.chunk_size:
                close(written=True)
        if marks["flush"] is not None and marks["flush"][t]:
            close(written=True)
    close(written=call.flush is True)
    return chunks


def _write(state: oracle.OracleState, weights: Any, config: Any) -> dict[str, Any]:
    padding = [np.zeros_like(state.pending[0])] * (config.chunk_size - len(state.pending))
    x = weights["write_proj.weight"] @ np.concatenate(state.pending + padding)
    name = "coordinate" if config.share_coordinates else "write_coordinate"
    at = oracle.coordinates(weights[f"{name}.weight"], x, len(config.grid))
    content = (weights["content.weight"] @ x).reshape(config.write_heads, config.channels)
    sigma = None
    masks = [oracle.nearest_mask(mu, config.grid) for mu in at]
    if config.write == "gaussian":
        raw = weights["spread.weight"] @ x + weights["spread.bias"]
        sigma = config.sigma_scale * (oracle.softplus(raw) + 1e-4)
        masks = [oracle.gaussian_mask(mu, s, config.grid) for mu, s in zip(at, sigma, strict=True)]
    U = oracle.write_volume(at, sigma, content, config.grid)
    taps = weights["taps"] if config.mixing == "factorized" else None
    volume = np.concatenate([U, state.hidden])
    gates = oracle.phys(volume, taps, weights["mix.weight"], weights["mix.bias"])
    i, f, o, _ = np.split(oracle.sigmoid(gates), 4)
    return {
        "write_at": at,
        "content_norm": np.linalg.norm(content, axis=1),
        "gates": np.array([i.mean(), f.mean(), o.mean()]),
        "mask": np.stack(masks),
        **({} if sigma is None else {"spread": sigma}),
    }
