"""A process of its own that generates and is recorded while it does."""

import sys
import time
from pathlib import Path

import torch

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory, record
from tensor_memory.cli import main


def generate(folder: Path, tokens: int) -> int:
    """Token by token: as many as there are lines in the file `tokens`, until it says `end`."""
    torch.manual_seed(0)
    model = MemoryResidual(TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3), chunk_size=1)))
    texts, state, wanted = [[]], None, folder / "tokens"
    with torch.no_grad(), record(model, live=folder / "run.safetensors", texts=texts):
        while True:
            asked = int(wanted.read_text() or 0) if wanted.exists() else tokens
            if asked < 0:
                return 0
            if len(texts[0]) < asked:
                texts[0].append(f" word{len(texts[0])}")
                _, state = model(torch.randn(1, 1, 8), state)
            else:
                time.sleep(0.02)


def watch(path: Path) -> int:
    """The command itself."""
    sys.argv = ["tensor-memory", "watch", str(path)]
    return main()
