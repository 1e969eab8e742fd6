"""Hosts that use a block twice, or hold an encoder and a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hosts import SMALL, VOCABULARY, WIDTH, ids

from tensor_memory import attach
from tolerances import assert_same


def test_a_block_used_twice_in_depth_keeps_a_state_for_each_use() -> None:
    config = transformers.AlbertConfig(
        embedding_size=8,
        hidden_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=VOCABULARY,
    )
    model: Any = transformers.AlbertModel(config, add_pooling_layer=False).double().eval()
    attachment = attach(model, SMALL)
    (path,) = attachment.paths
    with attachment.stream() as s:
        model(ids())
    assert list(s.state) == [path, f"{path}#1", f"{path}#2"]


def t5() -> Any:
    config = transformers.T5Config(
        d_model=WIDTH,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    return transformers.T5ForConditionalGeneration(config).double().eval()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("layers", ["decoder.block.*", "encoder.block.*"])
def test_an_encoder_decoder_generates_as_by_full_recomputation(layers: str, beams: int) -> None:
    model = t5()
    attach(model, SMALL, layers=layers)
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    options: dict[str, Any] = dict(max_new_tokens=25, num_beams=beams, do_sample=False)
    cached = model.generate(tokens, attention_mask=mask, **options)
    recomputed = model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(cached, recomputed)


def test_the_encoder_s_mask_is_not_taken_for_the_decoder_s() -> None:
    model = t5()
    attach(model, SMALL, layers="decoder.block.*")
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
