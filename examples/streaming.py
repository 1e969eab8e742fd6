"""Stream 50,000 tokens through a memory of constant size, in blocks of any length.

    python examples/streaming.py            # about a minute on a CPU core

The stream is made of short episodes: eight values are written at random points of space, then the
values at four of those points are asked for. The model takes every token by itself; its memory is
all that is carried from one token to the next, and from one block to the next.

Needs: pip install tensor-memory

Letters: B batch, N tokens.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import MemoryConfig, MemoryResidual, MemoryState, TensorMemory

VALUES, WRITES, QUERIES = 8, 8, 4
EPISODE = WRITES + QUERIES
ASK = VALUES  # the symbol that asks, after the symbols 0 to VALUES - 1 that are written
DIM = 64
MEMORY = MemoryConfig(channels=16, grid=(6, 6, 6), chunk_size=1, forget_bias=4.0)


class Tokens(NamedTuple):
    """What is written or asked, and where."""

    symbol: Tensor  # (B, N) a value, or ASK
    point: Tensor  # (B, N, 3) in [-1, 1]
    answer: Tensor  # (B, N) the value asked for; -100, which the loss skips, at writes
    reset: Tensor  # (B, N) true where an episode starts


def episodes(batch: int, generator: torch.Generator) -> Tokens:
    """One episode per row: (batch, EPISODE) tokens."""
    value = torch.randint(VALUES, (batch, WRITES), generator=generator)
    point = torch.rand(batch, WRITES, 3, generator=generator) * 2 - 1
    asked = torch.rand(batch, WRITES, generator=generator).argsort(1)[:, :QUERIES]
    return Tokens(
        symbol=F.pad(value, (0, QUERIES), value=ASK),
        point=torch.cat([point, point.gather(1, asked[..., None].expand(-1, -1, 3))], dim=1),
        answer=torch.cat([torch.full_like(value, -100), value.gather(1, asked)], dim=1),
        reset=(torch.arange(EPISODE) == 0).repeat(batch, 1),
    )


class Model(nn.Module):
    """Symbols and points -> logits over the values."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol, self.point = nn.Embedding(VALUES + 1, DIM), nn.Linear(3, DIM)
        self.memory = MemoryResidual(TensorMemory(DIM, MEMORY))
        self.head = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, VALUES)
        )

    def forward(
        self, tokens: Tokens, state: MemoryState | None = None
    ) -> tuple[Tensor, MemoryState]:
        """N tokens that continue `state` -> logits (B, N, VALUES), the state after them."""
        x = self.symbol(tokens.symbol) + self.point(tokens.point)
        x, state = self.memory(x, state, reset=tokens.reset)
        return self.head(x), state


def train(model: Model, steps: int, seed: int) -> None:
    """Minimise the cross-entropy of the answers, one episode per row and an empty memory each."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(1, steps + 1):
        tokens = episodes(32, generator)
        logits, _ = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)


@torch.inference_mode()
def stream(model: Model, length: int, seed: int) -> float:
    """Feed one long row block by block; the part of the questions that was answered right."""
    generator = torch.Generator().manual_seed(seed)
    row = Tokens(*(t.flatten(0, 1)[None] for t in episodes(-(-length // EPISODE), generator)))
    state, done, right, asked = None, 0, 0, 0
    while done < length:
        size = min(int(torch.randint(1, 701, (), generator=generator)), length - done)
        block = Tokens(*(tensor[:, done : done + size] for tensor in row))
        logits, state = model(block, state)
        right += int((logits.argmax(-1) == block.answer).sum())
        asked += int((block.answer >= 0).sum())
        if done == 0 or done + size == length:
            print(f"after {done + size:,} tokens: state {state.nbytes:,} B")
        done += size
    return right / max(asked, 1)


def main(argv: list[str] | None = None) -> int:
    """Train, stream, say how many answers were right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of training (default 300)")
    parser.add_argument("--tokens", type=int, default=50_000, help="of the stream (default 50,000)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.tokens < 1:
        parser.error(
            f"--steps and --tokens: expected at least 1, got {options.steps} and {options.tokens}"
        )
    torch.set_num_threads(1)  # on tensors this small more threads cost more than they give
    torch.manual_seed(options.seed)
    model = Model()
    train(model, options.steps, options.seed + 1)
    right = stream(model, options.tokens, options.seed + 2)
    print(f"answers right: {right:.1%} (chance {1 / VALUES:.1%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
