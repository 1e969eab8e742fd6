"""One call does not reach into another: interrupts, threads, copies, failures."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from hosts import SMALL, WIDTH, ids, llama
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from tensor_memory import attach, memory_disabled
from tolerances import assert_same


def host() -> Any:
    model: Any = llama().double().eval()
    attach(model, SMALL, gate_init=3.0)
    return model


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def fail(*_: object) -> None:
    raise RuntimeError("planted")


def test_a_call_cut_short_by_ctrl_c_leaves_the_next_one_clean() -> None:
    model, tokens = host(), ids(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    before = model(tokens).logits
    handle = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(tokens, attention_mask=mask)
    with pytest.raises(KeyboardInterrupt):  # a part of the host entered by itself
        model.model(tokens, attention_mask=mask)
    handle.remove()
    assert torch.equal(model.model(tokens).last_hidden_state, host_states(model, tokens))
    assert torch.equal(model(tokens).logits, before)
    cache = DynamicCache(config=model.config)
    parts = [model(part, past_key_values=cache).logits for part in tokens.split([4, 3], dim=1)]
    assert_same(torch.cat(parts, dim=1), before)


def host_states(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens, output_hidden_states=True).hidden_states[-1]


def test_calls_in_two_threads_do_not_mix() -> None:
    """Both threads stop inside their call until the other is inside its own."""
    model = host()
    tokens = [ids(2, 12), ids(2, 12)]
    masks = [torch.ones_like(tokens[0]), torch.ones_like(tokens[1])]
    masks[0][:, :6] = 0
    alone = [model(t, attention_mask=m).logits for t, m in zip(tokens, masks, strict=True)]
    meet = threading.Barrier(2, timeout=120)
    for part in (model.model.embed_tokens, model.model.layers[0], model.model.layers[1]):
        part.register_forward_hook(lambda *_: (meet.wait(), None)[1])
    together: dict[int, Tensor] = {}

    def run(index: int) -> None:
        together[index] = model(tokens[index], attention_mask=masks[index]).logits

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


def test_a_model_copied_inside_a_stream_is_in_no_stream() -> None:
    model, tokens = host(), ids(2, 7)
    with torch.no_grad():
        fresh = model(tokens, use_cache=False).logits
        with model.tensor_memory.stream() as s:
            model(tokens, use_cache=False)
            copied = copy.deepcopy(model)
            assert torch.equal(copied(tokens, use_cache=False).logits, fresh)
            held = s.state
            assert all(state is held[slot] for slot, state in s.state.items())
        with copied.tensor_memory.stream() as other:
            assert torch.equal(copied(tokens, use_cache=False).logits, fresh)
        assert list(other.state) == list(s.state)


@pytest.mark.parametrize("where", ["model.layers.1.mlp", "lm_head"])
def test_a_call_that_fails_inside_a_stream_can_be_made_again(where: str) -> None:
    """In a block, or after the part of the host that holds the blocks has returned."""
    model, tokens = host(), ids(2, 10)
    with torch.no_grad():
        with model.tensor_memory.stream():
            model(tokens[:, :5], use_cache=False)
            straight = model(tokens[:, 5:], use_cache=False).logits
        with model.tensor_memory.stream() as s:
            model(tokens[:, :5], use_cache=False)
            before = s.state
            handle = model.get_submodule(where).register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="planted"):
                model(tokens[:, 5:], use_cache=False)
            handle.remove()
            assert all(state is before[slot] for slot, state in s.state.items())
            assert torch.equal(model(tokens[:, 5:], use_cache=False).logits, straight)


def test_a_cache_half_filled_by_a_call_that_failed_is_refused() -> None:
    model, tokens = host(), ids(2, 10)
    cache = model(tokens[:, :5]).past_key_values
    handle = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(tokens[:, 5:], past_key_values=cache)
    handle.remove()
    with pytest.raises(ValueError, match="holds 10 tokens, of which the memory has seen 5"):
        model(tokens[:, 5:], past_key_values=cache)


def test_a_stream_refuses_a_cache_whose_tokens_it_has_not_seen() -> None:
    model, tokens = host(), ids(2, 12)
    stream = model.tensor_memory.stream
    off, of_another = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with memory_disabled(model):
        model(tokens[:, :7], past_key_values=off)
    with stream() as first:
        model(tokens[:, :7], past_key_values=of_another)
    with stream(), pytest.raises(ValueError, match="holds 7 tokens, of which the memory has seen"):
        model(tokens[:, 7:], past_key_values=off)
    with stream(), pytest.raises(ValueError, match="was filled in another stream"):
        model(tokens[:, 7:], past_key_values=of_another)
    kept = pickle.loads(pickle.dumps(first.state))
    with stream(kept):  # goes on where the first one ended
        last = model(tokens[:, 7:], past_key_values=of_another).logits
    assert_same(last, model(tokens, use_cache=False).logits[:, 7:])


@pytest.mark.parametrize(
    ("operation", "argument"),
    [
        ("reorder_cache", torch.tensor([1, 0])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([1])),
        ("crop", -1),
    ],
)
def test_a_cache_in_a_stream_keeps_its_rows_and_tokens(operation: str, argument: Any) -> None:
    model = host()
    cache = DynamicCache(config=model.config)
    with model.tensor_memory.stream():
        model(ids(2, 6), past_key_values=cache)
        before = cache.layers[0].keys
        with pytest.raises(ValueError, match=rf"attach: {operation}.* changes a cache whose"):
            getattr(cache, operation)(argument)
    assert cache.layers[0].keys is before


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    model, tokens = host(), ids(2, 9)
    cache = model(tokens[:, :6]).past_key_values
    with model.tensor_memory.stream(), pytest.raises(ValueError, match="cache carries a state"):
        model(tokens[:, 6:], past_key_values=cache)
    assert cache.get_seq_length() == 6
    last = model(tokens[:, 6:], past_key_values=cache).logits
    assert_same(last, model(tokens).logits[:, 6:])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_a_whole_host_checkpointed_inside_a_stream_is_refused(
    reentrant: bool, closed: bool
) -> None:
    model = host()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return model(inputs_embeds=x, use_cache=False).logits

    match = "checkpointed inside a stream .* checkpoint its blocks instead"
    with model.tensor_memory.stream():
        first = checkpoint(run, x[:, :5], use_reentrant=reentrant)
        loss = (first.sum() + checkpoint(run, x[:, 5:], use_reentrant=reentrant).sum()).square()
        if not closed:
            with pytest.raises(RuntimeError, match=match):
                loss.backward()
    if closed:
        with pytest.raises(RuntimeError, match=match):
            loss.backward()
    plain = torch.autograd.grad(run(x).square().sum(), x)
    y = x.detach().clone().requires_grad_()
    again = torch.autograd.grad(checkpoint(run, y, use_reentrant=False).square().sum(), y)
    assert_same(again[0], plain[0])


def test_a_mask_of_pairs_does_not_drop_the_padding_silently() -> None:
    model, tokens = host(), ids(2, 6)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")
    for given, got in (
        (blocks, "BlockMask"),
        (mask, r"\(2, 1, 6, 6\)"),
        (mask[:, 0], r"\(2, 6, 6\)"),
        ({"full_attention": mask}, "dict"),
    ):
        with pytest.raises(ValueError, match=f"attention_mask: expected shape .* got {got}, from"):
            model(tokens, attention_mask=given)
