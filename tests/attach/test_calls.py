"""One call does not reach into another: interrupts, threads, copies, failures."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from hosts import SMALL, VOCABULARY, llama
from torch import Tensor
from transformers import DynamicCache

from tensor_memory import attach
from tolerances import assert_same


def text(rows: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length))


def host() -> Any:
    model: Any = llama().double().eval()
    attach(model, SMALL, gate_init=3.0)
    return model


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def fail(*_: object) -> None:
    raise RuntimeError("planted")


def test_a_call_cut_short_by_ctrl_c_leaves_the_next_one_clean() -> None:
    model, tokens = host(), text(2, 7)
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
    tokens = [text(2, 12), text(2, 12)]
    masks = [torch.ones_like(tokens[0]), torch.ones_like(tokens[1])]
    masks[0][:, :6] = 0
    alone = [model(t, attention_mask=m).logits for t, m in zip(tokens, masks, strict=True)]
    meet = threading.Barrier(2, timeout=30)
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
    model, tokens = host(), text(2, 7)
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
