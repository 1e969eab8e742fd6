"""A long stream through one memory: nothing grows."""

import gc
import os
from pathlib import Path

import torch

from memories import make_tokens
from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory

TOKENS, BLOCK, WIDTH = 20_000, 250, 32
MIB = 2**20


def resident_bytes() -> int:
    gc.collect()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    pages = resident - shared  # pages of files come and go with the memory of the machine
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_twenty_thousand_tokens_leave_memory_flat_and_the_state_as_large_as_it_was():
    """With gradients on: were the state not cut off, every block would be kept, 18 MiB in all."""
    config = MemoryConfig(channels=8, grid=(4, 4, 4), chunk_size=16)
    layer = MemoryResidual(TensorMemory(WIDTH, config))
    blocks = make_tokens(TOKENS // BLOCK, 1, BLOCK, WIDTH, dtype=torch.float32)
    state, sizes, resident = None, set(), 0
    for number, block in enumerate(blocks):
        y, state = layer(block, state)
        state = state.detach()
        sizes.add(state.nbytes)
        assert y.isfinite().all()
        if number == 20:  # allocators and lazily loaded code have settled
            resident = resident_bytes()
    assert len(sizes) == 1
    assert resident_bytes() - resident < 4 * MIB
