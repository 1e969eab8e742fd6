"""The place memory in a residual, on a host, in generation and in files."""

import hosts
import pytest
import torch

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    attach,
    detach,
    find_leak,
    load_memory,
    memory_disabled,
    save_memory,
)

SMALL = PlaceConfig(grid=(4, 4), channels=4, heads=2)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return hosts.llama().eval()


def test_a_residual_takes_a_place_memory_and_its_places():
    layer = MemoryResidual(PlaceMemory(6, PlaceConfig.map(2)))
    x, where = torch.randn(2, 10, 6), torch.rand(2, 10, 2)
    whole, _ = layer(x, where=where)
    first, state = layer(x[:, :3], where=where[:, :3])
    second, _ = layer(x[:, 3:], state, where=where[:, 3:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert not torch.equal(whole, x)


def test_attaching_and_detaching_leaves_no_trace(llama):
    ids = torch.randint(30, (2, 9))
    before, keys = llama(ids).logits, list(llama.state_dict())
    attachment = attach(llama, SMALL, zero_init=True)
    assert isinstance(attachment.memory, PlaceMemory)
    assert torch.equal(llama(ids).logits, before)
    detach(llama)
    assert torch.equal(llama(ids).logits, before)
    assert list(llama.state_dict()) == keys


def test_generation_equals_recomputation_token_by_token(llama):
    attach(llama, SMALL, gate_init=2.0)
    ids = torch.randint(1, 30, (2, 7))
    made = llama.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for t in range(7, 13):
        logits = llama(made[:, :t], use_cache=False).logits[:, -1]
        assert torch.equal(logits.argmax(-1), made[:, t])


def test_a_host_with_a_place_memory_stays_causal(llama):
    attach(llama, SMALL, gate_init=2.0)
    assert not find_leak(llama, torch.randint(30, (2, 12)))


def test_the_memory_is_saved_loaded_and_switched_off(llama, tmp_path):
    ids = torch.randint(30, (2, 9))
    bare = llama(ids).logits
    attach(llama, SMALL)
    with_memory = llama(ids).logits
    assert not torch.equal(with_memory, bare)
    with memory_disabled(llama):
        assert torch.equal(llama(ids).logits, bare)
    save_memory(llama, tmp_path)
    detach(llama)
    attach(llama, SMALL)
    assert not torch.equal(llama(ids).logits, with_memory)
    load_memory(llama, tmp_path)
    assert torch.equal(llama(ids).logits, with_memory)
    detach(llama)
    attach(llama, MemoryConfig(channels=4, grid=(3, 3), chunk_size=2))
    with pytest.raises(ValueError, match="expected the fields of a MemoryConfig"):
        load_memory(llama, tmp_path)
