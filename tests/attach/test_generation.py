"""Generated tokens are those of full re-computation, however the state was carried there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hosts import SMALL, VOCABULARY, gpt2, ids, llama, mistral, new_host, prompts
from torch import Tensor, nn

from tensor_memory import MemoryConfig, attach, detach, memory_disabled
from tensor_memory.attachment.caches import find_cache
from tolerances import assert_same

Build = Callable[..., nn.Module]
more = pytest.mark.exhaustive
every_build = pytest.mark.parametrize("build", [pytest.param(gpt2, marks=more), llama])
every_chunk = pytest.mark.parametrize(
    "chunk", [pytest.param(1, marks=more), 3, pytest.param(16, marks=more)]
)
NEW = 40


def host(build: Build, chunk: int = 3, **options: Any) -> Any:
    model = build().double().eval()
    attach(model, MemoryConfig(channels=4, grid=(3, 3), chunk_size=chunk), **options)
    return model


def generate(model: Any, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    mask = torch.ones_like(tokens) if mask is None else mask
    defaults = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return model.generate(tokens, attention_mask=mask, **defaults | options)


def choices(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The greedy choice after every position, from one pass over the whole sequence."""
    mask = torch.ones_like(tokens) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions).logits.argmax(-1)


def lengthened(mask: Tensor, tokens: Tensor) -> Tensor:
    new = tokens.shape[1] - mask.shape[1]
    return torch.cat([mask, mask.new_ones(len(mask), new)], dim=1)


@every_build
@every_chunk
def test_greedy_tokens_are_those_of_full_recomputation(build: Build, chunk: int) -> None:
    model, (tokens, _) = host(build, chunk), prompts()
    made = generate(model, tokens)
    assert made.shape == (2, 7 + NEW)
    assert torch.equal(made[:, 7:], choices(model, made)[:, 6:-1])
    with memory_disabled(model):
        assert not torch.equal(made[:, 7:], choices(model, made)[:, 6:-1])


@every_build
@every_chunk
def test_left_padded_rows_generate_as_by_full_recomputation(build: Build, chunk: int) -> None:
    model, (tokens, mask) = host(build, chunk), prompts()
    made = generate(model, tokens, mask)
    assert torch.equal(made[:, 7:], choices(model, made, lengthened(mask, made))[:, 6:-1])


@every_build
def test_a_left_padded_row_generates_what_it_generates_alone(build: Build) -> None:
    model, (tokens, mask) = host(build), prompts()
    together = generate(model, tokens, mask, max_new_tokens=20)
    alone = generate(model, tokens[1:, 3:], max_new_tokens=20)
    assert torch.equal(together[1, 3:], alone[0])


class Watcher(transformers.LogitsProcessor):
    """Keeps what beam search decides on: the running beams and their log-probabilities."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.steps.append((input_ids.clone(), scores.clone()))
        return scores


@more
@every_build
@every_chunk
def test_beam_search_decides_on_what_full_recomputation_gives(build: Build, chunk: int) -> None:
    model, (tokens, mask) = host(build, chunk), prompts()
    watcher, beams = Watcher(), 3
    made = generate(model, tokens, mask, num_beams=beams, logits_processor=[watcher])
    assert made.shape == (2, 7 + NEW)
    assert len(watcher.steps) == NEW

    mask = mask.repeat_interleave(beams, 0)
    lineages: dict[tuple[int, ...], int] = {}  # every beam that ever ran -> its row
    places: dict[tuple[int, ...], int] = {}  # and all it grew from -> its number
    for running, _ in reversed(watcher.steps):
        for row, beam in enumerate(map(tuple, running.tolist())):
            if beam not in places:
                for length in range(7, len(beam) + 1):
                    places.setdefault(beam[:length], len(lineages))
                lineages[beam] = row
    whole = [torch.tensor(beam + (1,) * (7 + NEW - len(beam))) for beam in lineages]
    rows = torch.stack(whole), mask[list(lineages.values())]
    positions = (lengthened(rows[1], rows[0]).cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(
            rows[0], attention_mask=lengthened(rows[1], rows[0]), position_ids=positions
        ).logits
    for running, scores in watcher.steps:
        found = [places[tuple(beam)] for beam in running.tolist()]
        assert_same(scores, logits[found, running.shape[1] - 1].float().log_softmax(-1))


@every_build
def test_beams_are_those_of_full_recomputation(build: Build) -> None:
    model, (tokens, mask) = host(build), prompts()
    beams = dict(num_beams=3, num_return_sequences=2, max_new_tokens=16)
    cached = generate(model, tokens, mask, **beams)
    recomputed = generate(model, tokens, mask, **beams, use_cache=False)
    assert cached.shape == (4, 23)
    assert torch.equal(cached, recomputed)


@every_build
def test_samples_are_those_of_full_recomputation(build: Build) -> None:
    model, (tokens, mask) = host(build), prompts()
    made = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        options = dict(do_sample=True, num_return_sequences=2, max_new_tokens=30)
        made.append(generate(model, tokens, mask, use_cache=use_cache, **options))
    assert torch.equal(*made)


@every_build
def test_a_second_call_continues_from_a_returned_cache(build: Build) -> None:
    model, (tokens, mask) = host(build), prompts()
    whole = generate(model, tokens, mask, max_new_tokens=30)
    first = generate(model, tokens, mask, max_new_tokens=13, return_dict_in_generate=True)
    made, cache = first.sequences, first.past_key_values
    again = generate(model, made, lengthened(mask, made), max_new_tokens=17, past_key_values=cache)
    assert torch.equal(again, whole)


@every_build
def test_a_copied_cache_carries_its_own_state(build: Build) -> None:
    model, (tokens, mask) = host(build), prompts()
    first = generate(model, tokens, mask, max_new_tokens=10, return_dict_in_generate=True)
    made, cache = first.sequences, first.past_key_values
    copied = copy.deepcopy(cache)
    assert type(copied).__name__ == "DynamicCache"
    more = dict(mask=lengthened(mask, made), max_new_tokens=20)
    one = generate(model, made, past_key_values=cache, **more)
    other = generate(model, made, past_key_values=copied, **more)
    assert torch.equal(one, other)


def test_every_operation_on_the_rows_of_a_cache_moves_the_memory_along() -> None:
    model = host(llama)
    attachment = model.tensor_memory
    tokens = torch.randint(1, VOCABULARY, (3, 8))

    def rows(cache: Any) -> Tensor:
        return torch.stack([state.hidden for state in attachment.state_on(cache).values()])

    def filled() -> Any:
        return model(tokens, use_cache=True).past_key_values

    before = rows(filled())
    assert before.any()
    cache = filled()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(rows(cache), before[:, [2, 0, 0]])
    cache = filled()
    cache.batch_repeat_interleave(2)
    assert torch.equal(rows(cache), before[:, [0, 0, 1, 1, 2, 2]])
    cache = filled()
    cache.batch_select_indices(torch.tensor([2, 1]))
    assert torch.equal(rows(cache), before[:, [2, 1]])
    next_token = tokens[:, :1]
    held = attachment.state_on(cache)
    kept = dict(held)
    chosen = model(next_token[[2, 1]], past_key_values=cache).logits
    # what was asked for earlier does not move on with the cache
    assert all(held[slot] is state for slot, state in kept.items())
    assert_same(chosen, model(next_token, past_key_values=filled()).logits[[2, 1]])
    cache = filled()
    cache.reset()
    assert attachment.state_on(cache) == {}
    assert_same(model(tokens, past_key_values=cache).logits, model(tokens).logits)


@every_build
def test_the_bytes_of_the_memory_do_not_grow_with_the_tokens_generated(build: Build) -> None:
    one_layer = {gpt2: "n_layer", llama: "num_hidden_layers"}[build]
    model = host(lambda: build(**{one_layer: 1}))
    tokens = torch.randint(1, VOCABULARY, (1, 3))
    held = []
    for new in (10, 100):
        made = generate(model, tokens, max_new_tokens=new, return_dict_in_generate=True)
        states = model.tensor_memory.state_on(made.past_key_values)
        assert made.sequences.shape == (1, 3 + new)
        held.append(sum(state.nbytes for state in states.values()))
    assert held[0] == held[1] > 0


def test_every_layer_of_a_sliding_window_host_generates_exactly() -> None:
    model, (tokens, mask) = host(mistral), prompts()
    made = generate(model, tokens, mask, max_new_tokens=30)
    assert torch.equal(made[:, 7:], choices(model, made, lengthened(mask, made))[:, 6:-1])


def test_a_memory_on_some_layers_only_generates_exactly() -> None:
    model, (tokens, _) = host(llama, layers="model.layers.1", share_weights=False), prompts()
    made = generate(model, tokens, max_new_tokens=40)
    assert torch.equal(made[:, 7:], choices(model, made)[:, 6:-1])


def test_a_cache_that_was_filled_or_went_on_without_the_memory_is_refused() -> None:
    model, (tokens, _) = host(llama), prompts()
    with memory_disabled(model):
        filled = model(tokens, use_cache=True).past_key_values
    went_on = model(tokens, use_cache=True).past_key_values
    with memory_disabled(model):
        model(tokens[:, :2], past_key_values=went_on)
    with pytest.raises(ValueError, match="holds 7 tokens, of which the memory has seen 0: it was"):
        model(tokens[:, :1], past_key_values=filled)
    with pytest.raises(ValueError, match="holds 9 tokens, of which the memory has seen 7"):
        model(tokens[:, :1], past_key_values=went_on)


def test_continuous_batching_is_refused_where_it_starts() -> None:
    """Its thread would put the error into results that come back empty."""
    model = host(llama)
    refused = pytest.raises(ValueError, match=r"continuous batching .* use generate\(\) with padd")
    with refused:
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    with refused:
        model.init_continuous_batching()
    with memory_disabled(model):
        assert "init_continuous_batching" not in vars(model)
    with refused:
        copy.deepcopy(model).init_continuous_batching()
    detach(model)
    assert "init_continuous_batching" not in vars(model)


def test_a_paged_cache_that_comes_another_way_is_refused() -> None:
    paged = pytest.importorskip("transformers.generation.continuous_batching.cache")
    cache = object.__new__(paged.PagedAttentionCache)
    with pytest.raises(ValueError, match=r"continuous batching packs .* use generate\(\)"):
        find_cache((torch.zeros(1),), {"cache": cache})


def test_a_past_that_cannot_carry_the_memory_is_refused_outside_a_stream() -> None:
    """Reformer hands its past on in a class of its own."""
    model = new_host(
        "ReformerModelWithLMHead",
        attn_layers=["local", "local"],
        is_decoder=True,
        axial_pos_embds=False,
        attention_head_size=8,
        feed_forward_size=24,
        local_attn_chunk_length=4,
        pad_token_id=0,
    )
    attachment = attach(model, SMALL, gate_init=3.0)
    tokens = ids()[:, :9]

    def last() -> Tensor:
        past = model(tokens[:, :8], use_cache=True).past_buckets_states
        return model(tokens[:, 8:], past_buckets_states=past, use_cache=True).logits

    with pytest.raises(ValueError, match=r"past_buckets_states: expected a cache .* got Reformer"):
        last()
    whole = model(tokens, use_cache=False).logits
    with attachment.stream():
        assert_same(last(), whole[:, 8:])
