"""Stream a long input through a sliding-window host with a memory, in constant space.

    python examples/stream_attached.py                  # 100,000 tokens, seconds on one CPU core

The host's cache keeps its window, the memory its grid; neither grows with the input, which comes in
blocks of arbitrary sizes.

Needs: pip install 'tensor-memory[hf]'
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from tensor_memory import MemoryConfig, attach

CONFIG = MemoryConfig(channels=8, grid=(4, 4, 4), chunk_size=16)
MARKS = 5
VOCABULARY, LARGEST_BLOCK = 256, 1000


def build() -> MistralForCausalLM:
    """A small random host whose attention sees 64 tokens."""
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=64)
    return MistralForCausalLM(MistralConfig(vocab_size=VOCABULARY, **sizes, **heads)).eval()


def stream(tokens: int, seed: int) -> list[dict[str, float]]:
    """Run the stream; print and return what was held at every fifth of it."""
    torch.manual_seed(seed)
    model = build()
    attachment = attach(model, CONFIG)
    cache, done, start = DynamicCache(config=model.config), 0, time.perf_counter()
    marks: list[dict[str, float]] = []
    with torch.no_grad(), attachment.stream() as s:
        while done < tokens:
            size = int(torch.randint(1, LARGEST_BLOCK, ()))
            ids = torch.randint(VOCABULARY, (1, size))
            model(ids, past_key_values=cache, logits_to_keep=1)
            done += size
            if done * MARKS >= tokens * (len(marks) + 1):
                mark = {
                    "tokens": done,
                    "memory_bytes": s.nbytes,
                    "cached_tokens": sum(layer.keys.shape[-2] for layer in cache.layers),
                    "resident_mib": round(resident_mib(), 1),
                    "seconds": round(time.perf_counter() - start, 1),
                }
                marks.append(mark)
                print(", ".join(f"{name} {value}" for name, value in mark.items()))
    return marks


def resident_mib() -> float:
    """Memory this process holds now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(argv: list[str] | None = None) -> None:
    """Stream and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=100_000, help="at least so many (default 100,000)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, tokens and block sizes (default 0)"
    )
    options = parser.parse_args(argv)
    if options.tokens < 1:
        parser.error(f"--tokens: expected 1 or more, got {options.tokens}")
    stream(options.tokens, options.seed)


if __name__ == "__main__":
    main()
