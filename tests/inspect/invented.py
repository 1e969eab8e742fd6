"""Recordings made up without a model: writes that wander, a state that keeps and forgets them."""

import torch

from tensor_memory import MemoryConfig, Recording
from tensor_memory.inspect import LayerRecording
from tensor_memory.ops.scan.reference import gaussian_mask, nearest_mask


def invented_layer(
    name: str,
    *,
    chunks: int = 24,
    rows: int = 2,
    grid: tuple[int, ...] = (6, 6, 6),
    seed: int = 0,
    gate: float | None = 0.4,
    every: int = 1,
    write: str = "gaussian",
    reads: str = "chunk",
    heads: int = 1,
    chunk_size: int = 4,
) -> LayerRecording:
    config = MemoryConfig(
        channels=8,
        grid=grid,
        chunk_size=chunk_size,
        write=write,  # pyright: ignore[reportArgumentType]
        reads=reads,  # pyright: ignore[reportArgumentType]
        read_heads=heads,
        write_heads=heads,
    )
    T, B, n, K = chunks, rows, config.axes, chunk_size
    Q = heads * (K if reads == "token" else 1)
    draw = torch.Generator().manual_seed(seed)

    def wander(count: int) -> torch.Tensor:  # (T, B, count, n), smooth in time
        pace, phase = torch.rand(2, 1, B, count, n, generator=draw)
        time = torch.arange(T).reshape(T, 1, 1, 1)
        return 0.95 * torch.sin(time * (0.05 + 0.35 * pace) + 6.3 * phase)

    write_at = wander(heads)
    spread = 0.15 + 0.35 * torch.rand(T, B, heads, generator=draw)
    hidden = torch.zeros(B, *grid)
    norms = []
    for t in range(T):
        masks = (
            nearest_mask(write_at[t], grid)
            if write == "nearest"
            else gaussian_mask(write_at[t], spread[t], grid)
        )
        hidden = 0.92 * hidden + (1 - hidden) * 0.8 * masks.amax(1)
        norms.append(hidden)
    time = torch.arange(T).float()[:, None, None]
    phase = torch.arange(B * 3).reshape(1, B, 3).float() + seed
    first = torch.arange(T)[:, None].expand(T, B) * K * every
    return LayerRecording(
        name=name,
        config=config,
        gate=gate,
        read_at=wander(Q),
        write_at=write_at,
        spread=None if write == "nearest" else spread,
        content_norm=1 + torch.rand(T, B, heads, generator=draw),
        gates=torch.sigmoid(torch.sin(time / 9 + phase) + torch.tensor([-0.5, 1.5, 0.2])),
        hidden_norm=torch.stack(norms) if T else torch.zeros(0, B, *grid),
        readout=torch.randn(T, B, Q, 8, generator=draw),
        use=0.03 + 0.02 * torch.sin(time[:, :, 0] / 7 + phase[..., 0]),
        span=torch.stack([first, first + K], dim=-1),
        written=torch.ones(T, B, dtype=torch.bool),
        present=torch.ones(T, B, dtype=torch.bool),
        chunk=torch.arange(T) * every,
        seen=torch.full((B,), T * every),
    )


WORDS = ["memory", "writes", "where", "words", "point", "and", "reads", "when", "they", "return\n"]


def invented(layers: int = 2, *, texts: bool = True, **options) -> Recording:
    made = [invented_layer(f"blocks.{i}", seed=i, **options) for i in range(layers)]
    recording = Recording(layers=made, every=options.get("every", 1))
    if texts and made:
        length = int(made[0].span.max()) if len(made[0]) else 0
        row = [("" if i == 0 else " ") + WORDS[i % len(WORDS)] for i in range(length)]
        recording.annotate(texts=[row[b:] + row[:b] for b in range(recording.rows)])
    return recording
