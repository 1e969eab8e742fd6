"""Hosts that use a block twice, or hold an encoder and a decoder."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import accelerate.hooks
import pytest
import torch
import transformers
from families import EAGER, MIXED
from hosts import SMALL, VOCABULARY, WIDTH, encoder, ids, llama, new_host
from torch import Tensor, nn

from tensor_memory import attach, memory_disabled
from tolerances import assert_same


def test_a_block_used_twice_in_depth_keeps_a_state_for_each_use() -> None:
    model = new_host("AlbertModel", num_hidden_layers=3, pad_token_id=0)
    attachment = attach(model, SMALL)
    (path,) = attachment.paths
    first, second = ids(), ids()
    with attachment.stream() as s:
        model(first)
        kept = s.state
        straight = model(second).last_hidden_state
    assert list(kept) == [path, f"{path}#1", f"{path}#2"]
    with attachment.stream(kept):
        assert torch.equal(model(second).last_hidden_state, straight)


def t5() -> Any:
    ends = dict(decoder_start_token_id=0, pad_token_id=0)
    return new_host(
        "T5ForConditionalGeneration", num_layers=2, num_heads=2, d_kv=8, d_ff=24, **ends
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_with_a_memory_serves_a_decoder_that_has_none(beams: int) -> None:
    model = t5()
    attach(model, SMALL, layers="encoder.block.*")
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    options: dict[str, Any] = dict(max_new_tokens=25, num_beams=beams, do_sample=False)
    cached = model.generate(tokens, attention_mask=mask, **options)
    recomputed = model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached, recomputed)


def test_a_static_cache_of_a_decoder_generates_what_a_dynamic_one_does() -> None:
    model, tokens = t5(), ids()
    attach(model, SMALL, layers="decoder.block.*", gate_init=3.0)
    options: dict[str, Any] = dict(max_new_tokens=8, do_sample=False)
    fixed = model.generate(tokens, cache_implementation="static", **options)
    assert torch.equal(fixed, model.generate(tokens, **options))


class Holder(nn.Module):
    """A module of the user's own around a host."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside another module"])
def test_the_encoder_s_mask_is_not_taken_for_the_decoder_s(inside: bool) -> None:
    model = Holder(t5()) if inside else t5()
    layers = "model.decoder.block.*" if inside else "decoder.block.*"
    attach(model, SMALL, layers=layers, gate_init=3.0)
    tokens, target = ids(), ids()
    mask = torch.ones_like(tokens)
    mask[:, 4:] = 0
    padded = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=target).logits
    cut = model(input_ids=tokens[:, :4], decoder_input_ids=target).logits
    assert_same(padded, cut)


def test_a_decoder_as_long_as_its_encoder_has_a_mask_of_its_own() -> None:
    model = t5()
    attach(model, SMALL, layers=["encoder.block.*", "decoder.block.*"], gate_init=3.0)
    tokens, target = ids(), ids()
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    together = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=target).logits
    encoded = model.encoder(tokens, attention_mask=mask)
    apart = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=target).logits
    assert_same(together, apart)


def test_a_decoder_made_of_a_text_model_sees_its_mask() -> None:
    sizes: dict[str, Any] = dict(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    text = transformers.BertConfig(vocab_size=VOCABULARY, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(text, text)
    model: Any = transformers.EncoderDecoderModel(config).double().eval()
    attach(model, SMALL, layers="decoder.bert.encoder.layer.*", gate_init=3.0)
    tokens, target = ids(), ids()
    mask = torch.ones_like(target)
    mask[:, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(
        input_ids=tokens,
        decoder_input_ids=target,
        decoder_attention_mask=mask,
        decoder_position_ids=places,
    ).logits
    alone = model(input_ids=tokens, decoder_input_ids=target[:, 4:]).logits
    assert_same(padded[:, 4:], alone)


def test_source_and_target_of_a_torch_transformer_have_their_own_masks() -> None:
    host = nn.Transformer(WIDTH, 2, 1, 2, 24, dropout=0.0, batch_first=True).double().eval()
    attach(host, SMALL, layers="decoder.layers.*", gate_init=3.0)
    source, target = torch.randn(2, 2, 9, WIDTH, dtype=torch.float64)
    absent = torch.zeros(2, 9, dtype=torch.bool)
    absent[:, :4] = True

    hidden_source = host(
        source, target, src_key_padding_mask=absent, memory_key_padding_mask=absent
    )
    assert_same(hidden_source, host(source[:, 4:], target))
    padded = host(source, target, tgt_key_padding_mask=absent)
    assert_same(padded[:, 4:], host(source, target[:, 4:]))


def test_a_host_that_puts_tokens_first_is_refused_before_it_mixes_rows() -> None:
    """A call of as many rows as tokens would not show it."""
    model = new_host("XLNetModel", d_inner=24)
    with pytest.raises(
        ValueError, match=r"layer.0' is one of a host \(xlnet\) .* attach with batch_first=False"
    ):
        attach(Holder(model), SMALL)
    fsmt = new_host("FSMTModel", langs=["en", "de"], pad_token_id=1)
    with pytest.raises(ValueError, match=r"a host \(fsmt\) that puts tokens first"):
        attach(fsmt, SMALL, layers="encoder.layers.*")
    attach(model, SMALL, gate_init=3.0, batch_first=False)
    tokens = torch.randint(1, VOCABULARY, (9, 9))
    together = model(input_ids=tokens).last_hidden_state
    assert_same(model(input_ids=tokens[:1]).last_hidden_state, together[:1])
    absent = torch.zeros(1, 9)
    absent[:, :4] = 1
    padded = model(input_ids=tokens[:1], input_mask=absent).last_hidden_state
    assert_same(padded[:, 4:], model(input_ids=tokens[:1, 4:]).last_hidden_state)


def test_a_host_of_one_s_own_that_puts_tokens_first_is_refused_when_called() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), encoder().layers

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embedding(input_ids).transpose(0, 1)
            for layer in self.layers:
                x = layer(x)
            return x

    model = Turning().double().eval()
    attach(model, SMALL)
    with pytest.raises(
        ValueError,
        match=r"block 'layers.0' .*\(B, N, d\) for ids of shape .*\(2, 11\), got \(11, 2,"
        r" 16\): tokens come first in this host.*attach with batch_first=False",
    ):
        model(input_ids=ids())


class Turned(nn.Module):
    """A block that turns its tokens around an attention that wants them first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.norm(x).transpose(0, 1)
        x = x + self.attention(turned, turned, turned)[0].transpose(0, 1)
        return x + self.mlp(x)


def test_a_block_that_may_turn_its_tokens_asks_in_which_order_it_returns_them() -> None:
    model = nn.Sequential(Turned(), Turned()).double().eval()
    with pytest.raises(ValueError, match=r"block '0' \(Turned\) holds .*pass batch_first=True if"):
        attach(model, SMALL)
    with pytest.raises(TypeError, match="batch_first: expected True or False, got 'no'"):
        attach(model, SMALL, batch_first="no")  # type: ignore[arg-type]
    attach(model, SMALL, gate_init=3.0, batch_first=True)
    x = torch.randn(12, 17, WIDTH, dtype=torch.float64)
    assert_same(model(x)[-1:], model(x[-1:]))
    with memory_disabled(model):
        bare = model(x[-1:])
    assert not torch.allclose(model(x[-1:]), bare)


def test_a_block_that_returns_another_type_than_its_first_weight_says_what_to_convert() -> None:
    model: Any = encoder().bfloat16().eval()
    attachment = attach(model, SMALL)
    model.layers[0].float()
    x = torch.randn(2, 9, WIDTH)
    message = r"block 'layers.0' returned torch.float32, and its memory is in torch.bfloat16, .*"
    with pytest.raises(TypeError, match=message + r"attachment.to\(torch.float32\)"):
        model(x)
    attachment.to(torch.float32)
    model.layers[1].float()
    assert model(x).isfinite().all()


def test_the_memory_of_a_host_stored_in_eight_bits_computes_as_its_norms_do() -> None:
    host: Any = llama().bfloat16().eval()
    for part in host.model.layers.modules():
        if isinstance(part, nn.Linear):
            stored = part.weight.to(torch.float8_e4m3fn)
            part.weight = nn.Parameter(stored, requires_grad=False)
            part.forward = lambda input, w=stored: nn.functional.linear(input, w.to(input.dtype))
    attachment = attach(host, SMALL)
    assert {p.dtype for p in attachment.parameters()} == {torch.bfloat16}
    assert host(ids()).logits.isfinite().all()


@pytest.mark.parametrize("hooked", ["once", "twice"])
def test_the_memory_of_an_offloaded_host_stays_where_the_host_computes(hooked: str) -> None:
    host: Any = llama().double().eval()
    tokens = ids()
    bare = host(tokens).logits
    accelerate.cpu_offload(host, execution_device=torch.device("cpu"))
    if hooked == "twice":
        for part in host.model.layers.modules():
            accelerate.hooks.add_hook_to_module(part, accelerate.hooks.ModelHook(), append=True)
    attachment = attach(host, SMALL, zero_init=True)
    assert {p.device.type for p in attachment.parameters()} == {"cpu"}
    assert torch.equal(host(tokens).logits, bare)


def test_a_memory_is_shared_with_blocks_that_are_offloaded() -> None:
    host: Any = llama().double().eval()
    accelerate.cpu_offload(host.model.layers[1], execution_device=torch.device("cpu"))
    attach(host, SMALL)
    assert host(ids()).logits.isfinite().all()


def test_a_memory_may_be_attached_before_there_are_weights() -> None:
    with torch.device("meta"):
        empty: Any = llama()
    host: Any = llama()
    attach(host, SMALL)
    attachment = attach(empty, SMALL)
    assert all(p.is_meta for p in attachment.parameters())
    empty.load_state_dict(host.state_dict(), assign=True)
    assert {p.device.type for p in attachment.parameters()} == {"cpu"}


@pytest.mark.parametrize("padded", [True, False])
def test_a_mask_that_the_host_turned_into_scores_is_not_taken_the_wrong_way_round(
    padded: bool,
) -> None:
    """Longformer hands its blocks' module 0 for a real token, and fills its rows to 12 tokens."""
    model = new_host("LongformerModel", attention_window=4, pad_token_id=1)
    attachment = attach(model, SMALL, gate_init=3.0)
    tokens = ids()[:, :12]
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, 5:] = 0
    with attachment.stream() as s:
        model(tokens, attention_mask=mask)
    lengths = torch.tensor([5 if padded else tokens.shape[1], tokens.shape[1]])
    assert torch.equal(s.state["encoder.layer.0"].fill, lengths % SMALL.chunk_size)
    assert all(s.state["encoder.layer.0"].cell.flatten(1).any(1))


@pytest.mark.parametrize("real", [True, False])
def test_a_caller_s_own_mask_of_floats_marks_tokens(real: bool) -> None:
    model: Any = llama().eval()
    attachment = attach(model, SMALL)
    with attachment.stream() as s:
        model(ids()[:, :2], attention_mask=torch.full((2, 2), float(real)), use_cache=False)
    assert s.state["model.layers.0"].fill.tolist() == [2 * real] * 2


@pytest.mark.parametrize("words", [5, 8, 20])
def test_a_text_s_mask_is_not_taken_for_an_image_s(words: int) -> None:
    """An image makes 5 tokens: the text is as long, longer, or shorter than a mask may be."""
    sizes: dict[str, Any] = dict(
        hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    text = sizes | dict(vocab_size=VOCABULARY, max_position_embeddings=40, eos_token_id=1)
    image = sizes | dict(image_size=8, patch_size=4)
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    model: Any = transformers.CLIPModel(config).double().eval()
    both = ["vision_model.encoder.layers.*", "text_model.encoder.layers.*"]
    attach(model, SMALL, layers=both, gate_init=3.0)
    tokens, pixels = torch.randint(2, VOCABULARY, (2, words)), torch.randn(2, 3, 8, 8).double()
    tokens[:, -1] = 1
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    masked = model(input_ids=tokens, pixel_values=pixels, attention_mask=mask)
    plain = model(input_ids=tokens, pixel_values=pixels)
    assert_same(masked.image_embeds, plain.image_embeds)
    assert not torch.allclose(masked.text_embeds[0], plain.text_embeds[0])


def hybrid(kinds: tuple[str, ...]) -> Any:
    return new_host("Lfm2ForCausalLM", num_hidden_layers=len(kinds), layer_types=list(kinds))


@pytest.mark.parametrize("own_cache", [False, True])
def test_a_host_whose_first_layer_does_not_attend_generates_exactly(own_cache: bool) -> None:
    model = hybrid(("conv", "full_attention", "conv"))
    attach(model, SMALL, layers="model.layers.*", gate_init=3.0)
    tokens = ids()
    if own_cache:  # the host makes the cache itself, and the first block does not lengthen it
        cache = model(tokens[:, :6], use_cache=True).past_key_values
        last = model(tokens[:, 6:7], past_key_values=cache).logits
        assert_same(last, model(tokens[:, :7], use_cache=False).logits[:, 6:])
        return
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    cached = model.generate(tokens, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))


def test_a_host_whose_first_layer_leaves_its_place_in_the_cache_empty_generates_exactly() -> None:
    """MiniMax keeps the state of linear layers beside the cache's layers, which all count."""
    model = new_host("MiniMaxForCausalLM", **EAGER, block_size=4, layer_types=MIXED)
    attach(model, SMALL, gate_init=3.0)
    options: dict[str, Any] = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    tokens = ids()
    cached = model.generate(tokens, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))


def test_a_host_that_drops_whole_layers_trains() -> None:
    config = dict(decoder_layerdrop=0.5, pad_token_id=0)
    model = new_host("M2M100ForConditionalGeneration", **config).train()
    attachment = attach(model, SMALL, layers="model.decoder.layers.*")
    ran = set()
    for seed in range(20):  # among these the first layer is dropped, the second, both and none
        torch.manual_seed(seed)
        model(input_ids=ids(), labels=ids()).loss.backward()
        ran.add(tuple(layer.gate.grad is not None for layer in attachment.layers))
        model.zero_grad()
    assert ran == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("layers", ["model.layers.*.mlp", "model.layers.1.mlp"])
def test_a_memory_on_a_part_of_a_block_generates_exactly(layers: str) -> None:
    """The part is given no cache, and the blocks before it have lengthened theirs."""
    model: Any = llama().double().eval()
    attach(model, SMALL, layers=layers, gate_init=3.0)
    options: dict[str, Any] = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    tokens = ids()
    made = model.generate(tokens, **options)
    assert torch.equal(made, model.generate(tokens, use_cache=False, **options))
    with memory_disabled(model):
        filled = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="holds 11 tokens, of which the memory has seen 0"):
        model(tokens[:, :1], past_key_values=filled)


def test_a_cache_none_of_whose_layers_counts_its_tokens_carries_the_memory() -> None:
    model = new_host("MambaForCausalLM").requires_grad_(False)  # so that its cache can be copied
    attach(model, SMALL, gate_init=3.0).requires_grad_(False)
    tokens = ids()
    whole = model(tokens, use_cache=False).logits
    cache = model(tokens[:, :6], use_cache=True).cache_params  # the host makes it
    copied = copy.deepcopy(cache)
    for one in (cache, copied):
        for at in (6, 7, 8):  # Mamba itself continues by one token only
            last = model(tokens[:, at : at + 1], cache_params=one).logits
            assert_same(last, whole[:, at : at + 1])
    with pytest.raises(ValueError, match=r"crop\(-1\) takes tokens out of a cache none of whose"):
        cache.crop(-1)
    cache.reset()
    assert_same(model(tokens[:, :3], cache_params=cache).logits, whole[:, :3])


def test_a_static_cache_serves_a_mixed_row_and_not_one_without_attention() -> None:
    tokens, options = ids(), dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    model = hybrid(("conv", "full_attention"))
    attach(model, SMALL, gate_init=3.0)
    fixed = model.generate(tokens, cache_implementation="static", **options)
    assert torch.equal(fixed, model.generate(tokens, use_cache=False, **options))
    model = new_host("MambaForCausalLM")
    attach(model, SMALL)
    with pytest.raises(ValueError, match=r"got one of a host without attention.* use the default"):
        model.generate(tokens, cache_implementation="static", **options)


@pytest.mark.parametrize("first", ["with the memory", "without it"])
def test_a_cache_that_does_not_count_and_went_on_without_the_memory_is_refused(first: str) -> None:
    model, tokens = new_host("MambaForCausalLM"), ids()
    attach(model, SMALL)
    if first == "without it":
        with memory_disabled(model):
            cache = model(tokens, use_cache=True).cache_params
    else:
        cache = model(tokens, use_cache=True).cache_params
        with memory_disabled(model):
            model(tokens[:, :1], cache_params=cache)
    seen = "none" if first == "without it" else "11"
    with pytest.raises(
        ValueError, match=rf"cache holds tokens, of which the memory has seen {seen}"
    ):
        model(tokens[:, :1], cache_params=cache)
