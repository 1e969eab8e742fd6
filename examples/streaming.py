"""A Transformer that sees two tokens at a time, with and without a Tensor Memory, on one stream.

    python examples/streaming.py            # about two minutes on two CPU cores

The stream is made of short episodes: eight values are written at random points of space, then the
values at four of those points are asked for. Attention reaches one token back per layer, so only
something that is carried along can answer. Both models are built, trained and streamed the same
way; the difference is one argument.

Needs: pip install 'tensor-memory[experiments]'.

Letters: B batch, N tokens, d width, W attention window, H heads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    MemoryState,
    Recording,
    TensorMemory,
    record,
)
from tensor_memory_lab.progress import progress
from tensor_memory_lab.provenance import write_record

VALUES, WRITES, QUERIES = 8, 8, 4
EPISODE = WRITES + QUERIES
ASK = VALUES  # the symbol that asks, after the symbols 0 to VALUES - 1 that are written
WINDOW = 2
MEMORY = MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1)
MEMORY_LAYERS = (0,)  # one is enough here; several would share one set of weights


class Tokens(NamedTuple):
    """What is written or asked, and where."""

    symbol: Tensor  # (B, N) a value, or ASK
    point: Tensor  # (B, N, 3) in [-1, 1]
    answer: Tensor  # (B, N) the value asked for; -100, which the loss skips, at writes
    reset: Tensor  # (B, N) true where an episode starts

    def __getitem__(self, at: slice) -> Tokens:  # type: ignore[override]
        """Positions `at` of every row."""
        return Tokens(*(tensor[:, at] for tensor in self))


def episodes(batch: int, generator: torch.Generator) -> Tokens:
    """One episode per row: (batch, EPISODE) tokens."""
    value = torch.randint(VALUES, (batch, WRITES), generator=generator)
    point = torch.rand(batch, WRITES, 3, generator=generator) * 2 - 1
    asked = torch.rand(batch, WRITES, generator=generator).argsort(1)[:, :QUERIES]
    return Tokens(
        symbol=F.pad(value, (0, QUERIES), value=ASK),
        point=torch.cat([point, point.gather(1, asked[..., None].expand(-1, -1, 3))], dim=1),
        answer=torch.cat([torch.full_like(value, -100), value.gather(1, asked)], dim=1),
        reset=torch.zeros(batch, EPISODE, dtype=torch.bool).index_fill(1, torch.tensor([0]), True),
    )


def one_stream(tokens: int, generator: torch.Generator) -> Tokens:
    """Episode after episode in a single row: (1, tokens)."""
    rows = episodes(-(-tokens // EPISODE), generator)
    return Tokens(*(tensor.flatten(0, 1)[None, :tokens] for tensor in rows))


@dataclass(frozen=True)
class Window:
    """The keys and values attention can still reach, and the episode each belongs to."""

    keys: Tensor  # (B, W - 1, d)
    values: Tensor  # (B, W - 1, d)
    episode: Tensor  # (B, W - 1), -1 in slots that no token has filled

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.keys.nbytes + self.values.nbytes + self.episode.nbytes


class WindowAttention(nn.Module):
    """Each token attends to itself and the W - 1 before it, within its episode."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, episode: Tensor, before: Window) -> tuple[Tensor, Window]:
        """x (B, N, d) and the window before it -> (B, N, d), the window after it."""
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        keys = torch.cat([before.keys, key], dim=1)  # (B, W - 1 + N, d)
        values = torch.cat([before.values, value], dim=1)
        owners = torch.cat([before.episode, episode], dim=1)  # (B, W - 1 + N)

        split = (self.heads, -1)
        near_keys = keys.unfold(1, WINDOW, 1).unflatten(2, split)  # (B, N, H, d / H, W)
        near_values = values.unfold(1, WINDOW, 1).unflatten(2, split)
        scores = torch.einsum("bnhe,bnhew->bnhw", query.unflatten(-1, split), near_keys)
        own = owners.unfold(1, WINDOW, 1) == episode[..., None]  # (B, N, W)
        scores = scores * near_keys.shape[3] ** -0.5
        weights = scores.masked_fill(~own[:, :, None], float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("bnhw,bnhew->bnhe", weights, near_values).flatten(2)

        kept = slice(keys.shape[1] - (WINDOW - 1), None)
        after = Window(keys[:, kept].clone(), values[:, kept].clone(), owners[:, kept].clone())
        return self.out(mixed), after  # cloned, or the window would keep the whole block alive


class Block(nn.Module):
    """Attention, MLP and, where there is one, the memory: each added to the residual stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = WindowAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.memory: MemoryResidual | None = None

    def forward(
        self,
        x: Tensor,
        episode: Tensor,
        reset: Tensor,
        window: Window,
        remembered: MemoryState | None,
    ) -> tuple[Tensor, Window, MemoryState | None]:
        """x (B, N, d) and what this layer carried so far -> x, what it carries on."""
        attended, window = self.attention(self.attention_norm(x), episode, window)
        x = x + attended
        x = x + self.mlp(self.mlp_norm(x))
        if self.memory is not None:
            x, remembered = self.memory(x, remembered, reset=reset)
        return x, window, remembered


@dataclass(frozen=True)
class StreamState:
    """All that is carried from one block of tokens to the next."""

    episode: Tensor  # (B, 1) number of the current episode
    windows: tuple[Window, ...]  # one per layer
    memories: tuple[MemoryState | None, ...]  # one per layer that has a memory

    @property
    def nbytes(self) -> int:
        """Bytes held: the same after one token and after a million."""
        parts = (self.episode, *self.windows, *self.memories)
        return sum(part.nbytes for part in parts if part is not None)


class Model(nn.Module):
    """Symbols and points -> logits over the values, token by token."""

    def __init__(self, memory: MemoryConfig | None, dim: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.dim, self.config = dim, memory
        self.symbol = nn.Embedding(VALUES + 1, dim)
        self.point = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VALUES)
        if memory is not None:  # built last: the same seed gives both models the same host
            shared = TensorMemory(dim, memory)  # the weights; gate and state belong to a layer
            for layer in MEMORY_LAYERS:
                self.blocks[layer].memory = MemoryResidual(shared)

    def start(self, batch: int) -> StreamState:
        """The state before any token."""
        weight = self.head.weight
        nothing = weight.new_zeros(batch, WINDOW - 1, self.dim)
        nobody = torch.full((batch, WINDOW - 1), -1, device=weight.device)
        empty = None
        if self.config is not None:
            empty = MemoryState.zeros(
                self.config, self.dim, batch, dtype=weight.dtype, device=weight.device
            )
        return StreamState(
            episode=torch.zeros(batch, 1, dtype=torch.long, device=weight.device),
            windows=tuple(Window(nothing, nothing, nobody) for _ in self.blocks),
            memories=tuple(None if block.memory is None else empty for block in self.blocks),
        )

    def forward(
        self, tokens: Tokens, state: StreamState | None = None
    ) -> tuple[Tensor, StreamState]:
        """B rows of N tokens, continuing `state` -> logits (B, N, VALUES), the state after them."""
        state = state or self.start(tokens.symbol.shape[0])
        episode = state.episode + tokens.reset.cumsum(1)  # (B, N)
        x = self.symbol(tokens.symbol) + self.point(tokens.point)
        windows, memories = [], []
        for block, *carried in zip(self.blocks, state.windows, state.memories, strict=True):
            x, window, remembered = block(x, episode, tokens.reset, *carried)
            windows.append(window)
            memories.append(remembered)
        after = StreamState(episode[:, -1:].clone(), tuple(windows), tuple(memories))
        return self.head(self.norm(x)), after


def train(model: Model, steps: int, seed: int, label: str, batch: int = 32) -> None:
    """Minimise the cross-entropy of the answers; the seed alone decides the order of the data."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    with progress(f"train {label}", steps) as advance:
        for _ in range(steps):
            tokens = episodes(batch, generator)
            logits, _ = model(tokens)
            asked = tokens.answer >= 0
            loss = F.cross_entropy(logits[asked], tokens.answer[asked])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            right = (logits[asked].argmax(-1) == tokens.answer[asked]).double().mean().item()
            advance(note=f"loss {loss.item():.2f}, accuracy {right:.0%}")


def record_stream(model: Model, episodes: int, seed: int) -> Recording:
    """What the memory does in two rows of so many episodes each, token by token."""
    generator = torch.Generator().manual_seed(seed)
    rows = [one_stream(episodes * EPISODE, generator) for _ in range(2)]
    tokens = Tokens(*(torch.cat(parts) for parts in zip(*rows, strict=True)))
    with torch.no_grad(), record(model.eval(), texts=texts_of(tokens)) as recording:
        state = model.start(2)
        for at in range(tokens.symbol.shape[1]):
            _, state = model(tokens[slice(at, at + 1)], state)
    return recording


def texts_of(tokens: Tokens) -> list[list[str]]:
    """What each token says, per row."""
    places = [
        [", ".join(f"{value:+.1f}" for value in point) for point in row]
        for row in tokens.point.tolist()
    ]
    return [
        [
            f"what is at ({at})? " if s == ASK else f"{s} at ({at}); "
            for s, at in zip(*row, strict=True)
        ]
        for row in zip(tokens.symbol.tolist(), places, strict=True)
    ]


def uneven_blocks(tokens: int, generator: torch.Generator, largest: int = 700) -> Iterator[slice]:
    """Cut `tokens` positions at random places, episodes or not."""
    start = 0
    while start < tokens:
        stop = start + int(torch.randint(1, largest + 1, (), generator=generator))
        yield slice(start, stop)
        start = stop


class Streamed(NamedTuple):
    """What a stream has shown."""

    accuracy: float
    bytes_first: int
    bytes_last: int
    tokens_per_second: float


@torch.inference_mode()
def stream(model: Model, tokens: int, seed: int, label: str) -> Streamed:
    """Feed one long row block by block, carrying nothing but the state."""
    generator = torch.Generator().manual_seed(seed)
    row = one_stream(tokens, generator)
    state, right, asked, started = model.start(1), 0, 0, time.perf_counter()
    first = state.nbytes
    with progress(f"stream {label}", tokens, unit="tokens") as advance:
        for block in uneven_blocks(tokens, generator):
            part = row[block]
            logits, state = model(part, state)
            right += int((logits.argmax(-1) == part.answer).sum())
            asked += int((part.answer >= 0).sum())
            advance(part.symbol.shape[1], f"accuracy {right / max(asked, 1):.1%}")
    seconds = time.perf_counter() - started
    return Streamed(right / max(asked, 1), first, state.nbytes, tokens / seconds)


def report(results: dict[str, tuple[Model, Streamed]], tokens: int) -> None:
    """Print the table and what it says."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{tokens:,} tokens in one stream, attention window {WINDOW}")
    table.add_column("")
    for label in results:
        table.add_column(label, justify="right")
    every = list(results.values())
    # What attention over the whole stream would keep: two float32 vectors per token and layer.
    cache = [2 * tokens * model.dim * len(model.blocks) * 4 for model, _ in every]
    rows = {
        "parameters": [f"{sum(p.numel() for p in model.parameters()):,}" for model, _ in every],
        "answers right": [f"{shown.accuracy:.1%}" for _, shown in every],
        f"chance, 1 of {VALUES}": [f"{1 / VALUES:.1%}" for _ in every],
        "state before the first token": [f"{shown.bytes_first:,} B" for _, shown in every],
        "state after the last token": [f"{shown.bytes_last:,} B" for _, shown in every],
        "key-value cache of every token (computed)": [f"{size:,} B" for size in cache],
        "tokens per second": [f"{shown.tokens_per_second:,.0f}" for _, shown in every],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console = Console()
    console.print(table)
    console.print(
        "Two layers of attention reach two tokens back, and a value is asked for up to eleven "
        "tokens after it was written: without memory the model can hardly do better than guess. "
        "The memory carries the values in a state that does not grow. The task is made to show "
        "this one thing; it says nothing about tasks that attention can solve.",
        highlight=False,
    )


def main(argv: list[str] | None = None) -> int:
    """Train, stream, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="training steps of each model (default 600)"
    )
    parser.add_argument(
        "--tokens", type=int, default=50_000, help="length of the stream (default 50,000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, data and block sizes (default 0)"
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        help="run only the model with, or only the one without memory (default: both)",
    )
    parser.add_argument("--output", help="also write what came out, and where, to this JSON file")
    parser.add_argument("--page", type=Path, help="write a page that shows the memory at work")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.tokens < 1:
        parser.error(
            f"--steps and --tokens: expected at least 1, got {options.steps} and {options.tokens}"
        )

    torch.set_num_threads(1)  # on tensors this small more threads cost more than they give
    chosen = {"without memory": None, "with memory": MEMORY}
    if options.memory is not None:
        chosen = {k: v for k, v in chosen.items() if (v is not None) == options.memory}
    results = {}
    try:
        for label, memory in chosen.items():
            torch.manual_seed(options.seed)
            model = Model(memory)
            train(model, options.steps, options.seed + 1, label)
            results[label] = model, stream(model, options.tokens, options.seed + 2, label)
    except KeyboardInterrupt:
        print("\nstopped before the end; nothing to report", file=sys.stderr)
        return 130
    report(results, options.tokens)
    if options.page and "with memory" in results:
        recording = record_stream(results["with memory"][0], episodes=10, seed=options.seed + 3)
        options.page.parent.mkdir(parents=True, exist_ok=True)
        recording.save_page(options.page)
        print(f"See inside the memory: open {options.page} in a browser.")
    if options.output:
        write_record(
            options.output,
            benchmark="demo",
            config={"steps": options.steps, "tokens": options.tokens, "memory": MEMORY.to_dict()},
            seed=options.seed,
            result={label: shown._asdict() for label, (_, shown) in results.items()},
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
