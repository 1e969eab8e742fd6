"""Tokens taken back out of a cache: what is generated with a draft is what is generated without."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from hosts import VOCABULARY, gpt2, llama, mistral
from torch import Tensor

from tensor_memory import MemoryConfig, PlaceConfig, attach
from tolerances import assert_same

more = pytest.mark.exhaustive
TENSOR = MemoryConfig(channels=4, grid=(3, 3), chunk_size=3)
PLACE = PlaceConfig(grid=(4, 4), channels=4, heads=2)
CONFIGS = {"tensor": TENSOR, "place": PLACE}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def host(config: Any, build: Any = llama, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    model = build(**options).double().eval()
    if config is not None:
        attach(model, config, gate_init=3.0)
    return model


def repeating(length: int = 24) -> Tensor:
    """One row in which n-grams come again, as prompt lookup needs."""
    return torch.randint(1, VOCABULARY, (1, 5)).repeat(1, length)[:, :length]


def generate(model: Any, tokens: Tensor, **options: Any) -> Any:
    defaults = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(tokens)
    return model.generate(tokens, attention_mask=mask, **defaults | options)


class Crops:
    """Counts the tokens that are taken out of caches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        crop = transformers.DynamicCache.crop

        def counted(cache: Any, tokens: int) -> None:
            self.tokens.append(-tokens)
            crop(cache, tokens)

        monkeypatch.setattr(transformers.DynamicCache, "crop", counted)


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> Crops:
    return Crops(monkeypatch)


def draft_like(config: Any) -> Any:
    """A draft that is right now and then: the same host, its weights disturbed."""
    draft = host(config)
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "tensor_memory" not in name:
                parameter += 0.2 * parameter.std() * torch.randn_like(parameter)
    draft.generation_config.num_assistant_tokens = 5
    return draft


@pytest.mark.parametrize(
    ("config", "carriers"),
    [
        (TENSOR, "draft"),
        (PLACE, "both"),
        *(pytest.param(TENSOR, carriers, marks=more) for carriers in ("host", "both")),
        *(pytest.param(PLACE, carriers, marks=more) for carriers in ("host", "draft")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_assisted_tokens_are_those_without_a_draft(
    config: Any, carriers: str, crops: Crops
) -> None:
    model = host(config if carriers != "draft" else None)
    draft = draft_like(config if carriers != "host" else None)
    tokens = torch.randint(1, VOCABULARY, (1, 9))
    alone = generate(model, tokens)
    crops.tokens.clear()
    assert torch.equal(generate(model, tokens, assistant_model=draft), alone)
    assert max(crops.tokens) > 1
    assert min(crops.tokens) == 0


@every_config
def test_tokens_looked_up_in_the_prompt_change_nothing(config: Any, crops: Crops) -> None:
    model, tokens = host(config), repeating()
    alone = generate(model, tokens)
    assert torch.equal(generate(model, tokens, prompt_lookup_num_tokens=5), alone)
    assert max(crops.tokens) > 1


@pytest.mark.parametrize("build", [mistral, pytest.param(gpt2, marks=more)])
def test_assisted_tokens_of_other_hosts(build: Any, crops: Crops) -> None:
    """A sliding window among them, whose cache records its past."""
    model, tokens = host(TENSOR, build), repeating()
    alone = generate(model, tokens)
    assert torch.equal(generate(model, tokens, prompt_lookup_num_tokens=4), alone)
    draft = host(PLACE, build, seed=1)
    draft.generation_config.num_assistant_tokens = 3
    assert torch.equal(generate(model, tokens, assistant_model=draft), alone)
    assert max(crops.tokens) > 1


@torch.no_grad()
def test_a_draft_that_grows_beyond_what_is_kept_at_first_is_taken_back_whole() -> None:
    """A draft that is always right grows by two tokens a time; then it is wrong."""
    model, tokens = host(TENSOR, num_hidden_layers=1), torch.randint(1, VOCABULARY, (1, 160))
    model.tensor_memory.rollback = 6
    cache = transformers.DynamicCache(config=model.config)
    model(tokens[:, :4], past_key_values=cache)
    read = 4
    for size in range(4, 22, 2):
        cache.crop(0)
        for _ in range(size):  # as a draft reads, one token at a time
            model(tokens[:, read : read + 1], past_key_values=cache)
            read += 1
    cache.crop(-19)
    last = slice(read - 19, read)
    assert_same(model(tokens[:, last], past_key_values=cache).logits, model(tokens).logits[:, last])


@every_config
@pytest.mark.parametrize("calls", [[20], [7, 13], [9] + [1] * 11])
@pytest.mark.parametrize("taken", [1, 2, 11])
@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been_read(
    config: Any, calls: list[int], taken: int
) -> None:
    model, tokens = host(config), torch.randint(1, VOCABULARY, (2, 24))
    cache = transformers.DynamicCache(config=model.config)
    for part in tokens[:, :20].split(calls, dim=1):
        model(part, past_key_values=cache)
    cache.crop(-taken)
    kept = tokens[:, : 20 - taken]
    expected = model(kept, use_cache=True).past_key_values
    held, wanted = (model.tensor_memory.state_on(c) for c in (cache, expected))
    for slot, state in wanted.items():
        for name, tensor in vars(state).items():
            if isinstance(tensor, Tensor):
                assert_same(getattr(held[slot], name).double(), tensor.double())
    rest = tokens[:, 20:]
    logits = model(rest, past_key_values=cache).logits
    assert_same(logits, model(torch.cat([kept, rest], dim=1)).logits[:, -4:])


@torch.no_grad()
def test_padding_and_given_places_are_taken_back_with_their_tokens() -> None:
    model = host(None)
    attach(
        model,
        PlaceConfig(grid=(8,), channels=4, heads=1, places="given"),
        where=lambda position_ids: position_ids[..., None] / 32 - 1,
    )
    tokens, mask = torch.randint(1, VOCABULARY, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    mask[1, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    marks = dict(attention_mask=mask, position_ids=positions)
    whole = model(tokens, **marks).logits
    cache = transformers.DynamicCache(config=model.config)
    model(tokens[:, :7], attention_mask=mask[:, :7], position_ids=positions[:, :7],
          past_key_values=cache)  # fmt: skip
    for at in range(7, 12):
        now = slice(at, at + 1)
        model(tokens[:, now] * 0 + 3, attention_mask=mask[:, : at + 1],
              position_ids=positions[:, now], past_key_values=cache)  # fmt: skip
    cache.crop(-6)  # one of them was read in the first call
    logits = model(tokens[:, 6:], attention_mask=mask, position_ids=positions[:, 6:],
                   past_key_values=cache).logits  # fmt: skip
    assert_same(logits, whole[:, 6:])


@torch.no_grad()
def test_rows_moved_after_a_crop_move_what_is_read_again() -> None:
    model, tokens = host(TENSOR), torch.randint(1, VOCABULARY, (3, 12))
    cache = model(tokens, use_cache=True).past_key_values
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    logits = model(tokens[[2, 0, 0], 7:], past_key_values=cache).logits
    assert_same(logits, model(tokens).logits[[2, 0, 0], 7:])
    with pytest.raises(ValueError, match=r"crop\(-8\) takes 8 tokens out .* can go back by 5"):
        cache.crop(-8)


@torch.no_grad()
def test_a_crop_goes_back_as_far_as_is_kept_and_no_further() -> None:
    model, tokens = host(TENSOR), torch.randint(1, VOCABULARY, (1, 12))
    attachment = model.tensor_memory
    attachment.rollback = 4
    cache = transformers.DynamicCache(config=model.config)
    whole = model(tokens[:, :10]).logits
    model(tokens, past_key_values=cache)
    match = r"crop\(-10\) takes 10 tokens .* go back by 6; set attachment.rollback = 10 before"
    with pytest.raises(ValueError, match=match):
        cache.crop(-10)
    assert cache.get_seq_length() == 12
    cache.crop(-4)
    assert_same(model(tokens[:, 8:10], past_key_values=cache).logits, whole[:, 8:])
    attachment.rollback = 0
    model(tokens[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"can go back by 0; set attachment.rollback = 1"):
        cache.crop(-1)
    cache.crop(0)
    with pytest.raises(ValueError, match=r"rollback: expected a number of tokens, .* got -1"):
        attachment.rollback = -1


@torch.no_grad()
def test_what_is_kept_to_go_back_does_not_grow() -> None:
    model, tokens = host(PLACE, num_hidden_layers=1), torch.randint(1, VOCABULARY, (1, 3000))
    model.tensor_memory.rollback = 8
    cache = transformers.DynamicCache(config=model.config)
    model(tokens, past_key_values=cache)
    (history,) = cache._tensor_memory.histories.values()
    held = []
    for _ in range(40):
        held.append((history.tokens, sum(call.has_state for call in history.calls)))
        model(tokens[:, :1], past_key_values=cache)
    assert min(tokens for tokens, _ in held) >= 8
    assert max(tokens for tokens, _ in held) <= 17
    assert max(states for _, states in held) <= 3
    assert all(call.x.untyped_storage().nbytes() <= 17 * 16 * 8 for call in history.calls)


def test_calls_with_gradients_are_not_kept() -> None:
    model, tokens = host(TENSOR), torch.randint(1, VOCABULARY, (1, 8))
    cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"go back by 0; set .* \(without gradients, and not"):
        cache.crop(-1)


@torch.no_grad()
def test_a_cropped_cache_can_be_copied() -> None:
    model, tokens = host(TENSOR), torch.randint(1, VOCABULARY, (1, 12))
    cache = model(tokens, use_cache=True).past_key_values
    cache.crop(-5)
    copied = copy.deepcopy(cache)
    whole = model(tokens).logits
    for one in (cache, copied):
        assert_same(model(tokens[:, 7:], past_key_values=one).logits, whole[:, 7:])
