"""Static caches: the same tokens as with a dynamic one, in tensors that stay where they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from hosts import llama, mistral, prompts
from torch import Tensor
from transformers.generation.configuration_utils import CompileConfig

from tensor_memory import MemoryConfig, PlaceConfig, attach, memory_disabled
from tolerances import assert_same

more = pytest.mark.exhaustive
TENSOR = MemoryConfig(channels=4, grid=(3, 3), chunk_size=3)
TOKEN = MemoryConfig(channels=4, grid=(3, 3), chunk_size=3, reads="token")
PLACE = PlaceConfig(grid=(4, 4), channels=4, heads=2)
every_config = pytest.mark.parametrize(
    "config", [TENSOR, pytest.param(PLACE, marks=more)], ids=["tensor", "place"]
)


def host(config: Any, build: Any = llama, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build(**options).double().eval()
    attach(model, config, gate_init=3.0)
    return model


def generate(model: Any, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    defaults = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(tokens) if mask is None else mask
    return model.generate(tokens, attention_mask=mask, **defaults | options)


CROSS = list(itertools.product((llama, mistral), (TENSOR, TOKEN, PLACE), ("sdpa", "eager")))
SAMPLE = [(llama, TENSOR, "sdpa"), (mistral, PLACE, "eager")]


@pytest.mark.parametrize(
    ("build", "config", "attention"),
    SAMPLE + [pytest.param(*case, marks=more) for case in CROSS if case not in SAMPLE],
)
def test_a_static_cache_generates_what_a_dynamic_one_does(
    build: Any, config: Any, attention: str
) -> None:
    model, (tokens, mask) = host(config, build), prompts()
    model.set_attn_implementation(attention)
    for padding in (None, mask):
        dynamic = generate(model, tokens, padding)
        assert torch.equal(generate(model, tokens, padding, cache_implementation="static"), dynamic)


def test_beams_and_samples_move_the_rows_of_a_static_cache() -> None:
    model, (tokens, mask) = host(TENSOR), prompts()
    beams = dict(num_beams=3, num_return_sequences=2)
    dynamic = generate(model, tokens, mask, **beams)
    assert torch.equal(
        generate(model, tokens, mask, cache_implementation="static", **beams), dynamic
    )


@torch.no_grad()
def test_a_static_cache_keeps_its_state_in_place_and_is_emptied_by_a_reset() -> None:
    model, (tokens, _) = host(TENSOR), prompts()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    whole = model(tokens).logits

    def addresses() -> list[int]:
        states = model.tensor_memory.state_on(cache).values()
        return [state.hidden.data_ptr() for state in states]

    for _ in range(2):
        parts = [model(part, past_key_values=cache).logits for part in tokens.split([3, 1, 3], 1)]
        assert_same(torch.cat(parts, dim=1), whole)
        before = addresses()
        model(tokens[:, :1], past_key_values=cache)
        cache.reset()
        assert addresses() == before
        assert not any(s.hidden.any() for s in model.tensor_memory.state_on(cache).values())


@torch.no_grad()
def test_a_static_cache_that_went_on_without_the_memory_is_refused() -> None:
    model, (tokens, _) = host(TENSOR), prompts()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    model(tokens, past_key_values=cache)
    with memory_disabled(model):
        model(tokens[:, :2], past_key_values=cache)
    with pytest.raises(ValueError, match="holds 9 tokens, of which the memory has seen 7"):
        model(tokens[:, :1], past_key_values=cache)


@torch.no_grad()
def test_a_mask_of_documents_is_refused_with_a_static_cache_too() -> None:
    model, (tokens, _) = host(TENSOR), prompts()
    cache = transformers.StaticCache(config=model.config, max_cache_len=7)
    pairs = torch.ones(7, 7, dtype=torch.bool).tril()
    pairs[4:, :4] = False
    with pytest.raises(ValueError, match="attention_mask: expected each token to attend to all"):
        model(tokens, attention_mask=pairs.expand(2, 1, 7, 7), past_key_values=cache)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_options(**options: Any) -> dict[str, Any]:
    config = CompileConfig(backend="eager", mode=None, **options)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return dict(cache_implementation="static", compile_config=config)


@every_config
@pytest.mark.usefixtures("fresh_dynamo")
def test_decoding_is_compiled_once_without_a_break(config: Any) -> None:
    model, (tokens, mask) = host(config, num_hidden_layers=1), prompts()
    dynamic = generate(model, tokens, mask)
    torch._dynamo.utils.counters.clear()
    made = generate(model, tokens, mask, **compiled_options(fullgraph=True))
    assert torch.equal(made, dynamic)
    # the host, and the hooks around it, which compile on their own; never one for each token
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3
    made = generate(model, tokens, mask, **compiled_options(fullgraph=True))
    assert torch.equal(made, dynamic)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@more
@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_a_compiled_step_refuses_a_static_cache_that_went_on_without_the_memory() -> None:
    model, (tokens, _) = host(PLACE, num_hidden_layers=1), prompts()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    compiled = torch.compile(model, backend="eager")
    model(tokens, past_key_values=cache)
    compiled(tokens[:, :1], past_key_values=cache)
    with memory_disabled(model):
        model(tokens[:, :1], past_key_values=cache)
    with pytest.raises(RuntimeError, match="cache holds tokens that the memory has not seen"):
        compiled(tokens[:, :1], past_key_values=cache)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one to begin with
def test_decoding_that_generate_compiles_by_itself_gives_the_same_tokens() -> None:
    """On a GPU: inductor, and CUDA graphs that read and write the state in place."""
    for config in (TENSOR, PLACE):
        model, (tokens, mask) = host(config).cuda(), (p.cuda() for p in prompts())
        dynamic = generate(model, tokens, mask)
        for _ in range(2):
            static = generate(model, tokens, mask, cache_implementation="static")
            assert torch.equal(static, dynamic)
