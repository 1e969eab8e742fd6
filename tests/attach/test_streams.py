"""State across calls: fresh by default, continued in a stream, cut by masks and documents."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts import SMALL, VOCABULARY, WIDTH, Custom, encoder, ids, llama, mistral
from torch import Tensor
from transformers import DynamicCache

from tensor_memory import MemoryState, attach, detach, find_leak
from tolerances import assert_same


def window_1() -> torch.nn.Module:
    """A host whose attention sees the token itself alone: all that crosses tokens is memory."""
    return mistral(window=1).double().eval()


def pieces(tokens: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(tokens.split([*sizes, tokens.shape[1] - sum(sizes)], dim=1))


def test_a_stream_continues_where_the_last_call_ended() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    tokens = ids(2, 20)
    whole = model(tokens, use_cache=False).logits
    with attachment.stream():
        parts = [model(part, use_cache=False).logits for part in pieces(tokens, [1, 4, 2, 9])]
    assert_same(torch.cat(parts, dim=1), whole)


def test_outside_a_stream_each_call_starts_empty() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    tokens = ids(1, 9)
    fresh = model(tokens, use_cache=False).logits
    with attachment.stream():
        model(tokens, use_cache=False)
        assert not torch.equal(model(tokens, use_cache=False).logits, fresh)
    assert torch.equal(model(tokens, use_cache=False).logits, fresh)


def test_a_stream_shows_resets_and_detaches_its_state() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    tokens = ids(2, 10)
    with attachment.stream() as s:
        assert s.state == {}
        model(tokens, use_cache=False)
        assert list(s.state) == attachment.paths
        assert all(isinstance(state, MemoryState) for state in s.state.values())
        assert all(state.hidden.requires_grad for state in s.state.values())
        s.detach()
        assert not any(state.hidden.requires_grad for state in s.state.values())
        before = s.nbytes
        s.reset([1])
        assert all(state.hidden[0].any() for state in s.state.values())
        assert not any(state.hidden[1].any() for state in s.state.values())
        continued = model(tokens, use_cache=False).logits
        assert s.nbytes == before
    fresh = model(tokens, use_cache=False).logits
    assert_same(continued[1], fresh[1])
    assert not torch.allclose(continued[0], fresh[0])
    with attachment.stream() as s:
        model(tokens, use_cache=False)
        s.reset()
        assert_same(model(tokens, use_cache=False).logits, fresh)


def test_a_stream_can_start_from_a_state_kept_earlier() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    tokens = ids(1, 12)
    with attachment.stream() as first:
        model(tokens[:, :7], use_cache=False)
    kept = first.state
    for _ in range(2):  # a state that was continued is still there to be continued
        with attachment.stream(kept):
            last = model(tokens[:, 7:], use_cache=False).logits
        assert_same(last, model(tokens, use_cache=False).logits[:, 7:])


def test_a_prompt_is_read_once_and_continued_many_times() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    prompt, questions = ids(1, 8), ids(3, 5)
    whole = model(torch.cat([prompt.expand(3, -1), questions], 1), use_cache=False).logits[:, 8:]
    with attachment.stream() as s:
        model(prompt, use_cache=False)
        kept = s.snapshot()
        for row in range(3):
            last = model(questions[row : row + 1], use_cache=False).logits
            assert_same(last, whole[row : row + 1])
            s.restore(kept)
        s.restore(kept.select([0, 0, 0]))
        assert_same(model(questions, use_cache=False).logits, whole)
        with pytest.raises(ValueError, match=r"expected states for .*, got one for h\.0"):
            s.restore({"h.0": next(iter(kept.values()))})


def test_a_restored_stream_goes_on_with_the_cache_of_its_snapshot_alone() -> None:
    model = llama().double().eval()
    attachment = attach(model, SMALL)
    prompt, questions = ids(2, 6), ids(2, 4)
    cache = DynamicCache(config=model.config)
    whole = model(torch.cat([prompt, questions], 1)).logits[:, 6:]
    with attachment.stream() as s, torch.no_grad():
        model(prompt, past_key_values=cache)
        kept, copied = s.snapshot(), [copy.deepcopy(cache) for _ in range(2)]
        assert_same(model(questions, past_key_values=cache).logits, whole)
        with pytest.raises(ValueError, match="at another moment of this one"):
            model(questions, past_key_values=copied[0])  # the stream has gone on since
        for again in copied:
            s.restore(kept)
            with pytest.raises(ValueError, match=r"restore the snapshot that belongs"):
                model(questions, past_key_values=cache)
            assert_same(model(questions, past_key_values=again).logits, whole)


def test_a_stream_refuses_a_state_of_other_blocks() -> None:
    attachment = attach(window_1(), SMALL)
    state = MemoryState.zeros(SMALL, WIDTH, 1)
    match = r"expected states for model\.layers\.0, .*, got one for h\.0; pass the state of an earl"
    with pytest.raises(ValueError, match=match):
        attachment.stream({"h.0": state})
    bare: Any = state
    with pytest.raises(TypeError, match=r"states by the path .*, got MemoryState; pass those"):
        attachment.stream(bare)


def test_a_memory_taken_off_its_model_opens_no_stream() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    detach(model)
    match = r"taken off its model, .*; open a stream of what attach\(model, \.\.\.\) returned last"
    with pytest.raises(RuntimeError, match=match), attachment.stream():
        pass
    with attach(model, SMALL).stream() as s:
        model(ids(1, 4), use_cache=False)
    assert s.nbytes > 0


def test_gradients_cross_calls_of_a_stream() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    x = torch.randn(1, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    with attachment.stream():
        model(inputs_embeds=x[:, :6], use_cache=False)
        model(inputs_embeds=x[:, 6:], use_cache=False).logits.sum().backward()
    assert x.grad is not None
    assert x.grad[:, :3].any()


def test_one_stream_at_a_time() -> None:
    attachment = attach(window_1(), SMALL)
    with attachment.stream(), pytest.raises(RuntimeError, match=r"another stream .* is open"):
        attachment.stream().__enter__()
    with attachment.stream():
        pass


def test_a_cache_filled_in_a_stream_is_refused_outside_until_it_is_emptied() -> None:
    model = llama().double().eval()
    attachment = attach(model, SMALL)
    cache = DynamicCache(config=model.config)
    tokens = ids(2, 6)
    with attachment.stream():
        model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match="filled inside a stream"):
        model(tokens[:, :1], past_key_values=cache)
    cache.reset()
    parts = [model(part, past_key_values=cache).logits for part in pieces(tokens, [4])]
    assert_same(torch.cat(parts, dim=1), model(tokens).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_attention_mask_becomes_the_memory_s_mask(side: str) -> None:
    model = window_1()
    attach(model, SMALL)
    tokens = ids(2, 9)
    mask = torch.ones_like(tokens)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    mask[1] = 0
    mask[1, real] = 1
    together = model(tokens, attention_mask=mask, use_cache=False).logits
    alone = model(tokens[1:, real], use_cache=False).logits
    assert_same(together[1, real], alone[0])
    assert_same(together[0], model(tokens[:1], use_cache=False).logits[0])


def test_the_padding_mask_of_a_torch_encoder_becomes_the_memory_s_mask() -> None:
    model = encoder().double().eval()
    attach(model, SMALL)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 5:] = True
    alone = model(x[1:, :5])
    assert_same(model(x, src_key_padding_mask=padding)[1, :5], alone[0])
    with torch.no_grad():  # where torch would pack the rows for its fused kernel
        assert_same(model(x, src_key_padding_mask=padding)[1, :5], alone[0])


def test_a_positional_attention_mask_is_seen_too() -> None:
    model = Custom().double().eval()
    attach(model, SMALL)
    tokens = ids(1, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    masked = model(tokens, mask)
    assert_same(masked, model(tokens, attention_mask=mask))
    assert not torch.allclose(masked, model(tokens))


def test_a_mask_too_narrow_for_the_tokens_is_an_error() -> None:
    model = Custom().double().eval()
    attach(model, SMALL)
    with pytest.raises(ValueError, match=r"attention_mask: expected .* columns, .* got \(1, 5\)"):
        model(ids(1, 8), torch.ones(1, 5))


def test_packed_documents_do_not_see_each_other() -> None:
    model = window_1()
    attach(model, SMALL)
    tokens = ids(2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [*range(12)]])
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = model(tokens[:1, 5:], use_cache=False).logits
    assert_same(packed[0, 5:], alone[0])
    assert_same(packed[1], model(tokens[1:], use_cache=False).logits[0])


@pytest.mark.parametrize("padded", [False, True])
def test_a_document_of_one_token_is_not_seen_by_the_next(padded: bool) -> None:
    """Its position and the next document's first are both 0; with padding, they stand apart."""
    model = window_1()
    attach(model, SMALL)
    tokens = ids(1, 8)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5] if padded else [0, 0, 1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]]) if padded else None
    packed = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    second = 2 if padded else 1
    assert_same(packed[0, second:], model(tokens[:, second:], use_cache=False).logits[0])


def test_a_call_never_starts_a_document_by_itself() -> None:
    model = window_1()
    attachment = attach(model, SMALL)
    tokens = ids(1, 12)
    whole = model(tokens, use_cache=False).logits
    with attachment.stream():
        model(tokens[:, :6], position_ids=torch.arange(6)[None], use_cache=False)
        # positions start again at column 0, and fall to zero nowhere inside the call
        last = model(tokens[:, 6:], position_ids=torch.arange(6)[None], use_cache=False).logits
    assert_same(last, whole[:, 6:])


def test_positions_of_padding_start_no_document() -> None:
    model = window_1()
    attach(model, SMALL)
    tokens = ids(1, 10)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3, 1, 1, 4, 5, 6, 7]])  # as generate() fills them
    padded = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    kept = mask[0].bool()
    assert_same(padded[0, kept], model(tokens[:, kept], use_cache=False).logits[0])


@pytest.mark.parametrize("owner", ["stream", "cache"])
def test_a_sliding_window_host_streams_as_in_one_pass(owner: str) -> None:
    model = mistral(window=8).double().eval()
    attachment = attach(model, SMALL)
    tokens = ids(1, 400)
    cache = DynamicCache(config=model.config)
    sizes = [1, 7, 64, 3, 30, 1, 1, 100, 17]
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        parts = []
        if owner == "stream":
            with attachment.stream():
                for part in pieces(tokens, sizes):
                    parts.append(model(part, past_key_values=cache, use_cache=True).logits)
        else:
            for part in pieces(tokens, sizes):
                parts.append(model(part, past_key_values=cache, use_cache=True).logits)
    assert_same(torch.cat(parts, dim=1), whole)


def test_a_long_stream_holds_no_more_than_a_short_one() -> None:
    model = mistral(window=8, max_position_embeddings=65536).eval()
    attachment = attach(model, SMALL)
    cache = DynamicCache(config=model.config)
    generator = torch.Generator().manual_seed(3)
    largest, memory, kept, keys, resident = 200, set(), set(), set(), []
    gc.freeze()  # of what there is by now, nothing is looked at again; all of it takes 0.3 s
    with torch.no_grad(), attachment.stream() as s:
        done = 0
        while done < 8_000:
            size = int(torch.randint(1, largest, (1,), generator=generator))
            model(ids(1, size), past_key_values=cache, use_cache=True, logits_to_keep=1)
            done += size
            memory.add(s.nbytes)
            kept |= {layer.keys.shape[-2] for layer in cache.layers}
            # torch keeps a window as a view of the block it was cut from
            keys |= {layer.keys.untyped_storage().nbytes() for layer in cache.layers}
            if done > 4_000:  # allocators and lazily loaded code have settled
                resident.append(resident_bytes())
    assert cache.get_seq_length() == done
    assert len(memory) == 1
    assert max(kept) == 7
    one_token = cache.layers[0].keys[..., :1, :].nbytes
    assert max(keys) <= (largest + 7) * one_token
    assert max(resident) - resident[0] < 4 * 2**20


def resident_bytes() -> int:
    gc.collect()
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    pages = resident - shared  # pages of files come and go with the memory of the machine
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_the_window_of_one_leaves_the_memory_as_the_only_path() -> None:
    model = window_1()
    assert not find_leak(model, ids(1, 8))
    tokens = ids(1, 8)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCABULARY
    assert torch.equal(model(tokens).logits[:, 1:], model(changed).logits[:, 1:])
