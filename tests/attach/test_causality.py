"""No causal host sees the future because of its memory, whatever is asked for."""

from __future__ import annotations

import pytest
import torch
from hosts import HOSTS, SMALL, WIDTH, Host, bert, encoder, for_hosts, ids, llama, new_host, read
from torch import nn

from tensor_memory import attach, detach, find_leak
from tensor_memory.attachment.causal_hosts import refuse_causal_call
from tolerances import assert_same

CAUSAL = {name: host for name, host in HOSTS.items() if host.causal}
KNOWN = {n: h for n, h in HOSTS.items() if not h.causal and h.bidirectional_is_known}
UNKNOWN = {n: h for n, h in HOSTS.items() if not h.causal and not h.bidirectional_is_known}
LEAK = "a token would read what later tokens wrote"


@pytest.mark.whole_cross
@for_hosts(CAUSAL, sample=("llama", "mistral", "custom"))
@pytest.mark.parametrize("share", [True, False], ids=["shared", "each"])
def test_a_causal_host_stays_causal(host: Host, share: bool) -> None:
    model = host()
    attach(model, SMALL, share_weights=share)
    report = find_leak(model, host.example())
    assert not report, str(report)


@for_hosts(CAUSAL)
def test_depth_is_refused_on_causal_hosts(host: Host) -> None:
    model = host()
    with pytest.raises(ValueError, match=f"counts as causal, and .*{LEAK}.*scope='layer'"):
        attach(model, SMALL, scope="depth")
    assert not hasattr(model, "tensor_memory")


@for_hosts(KNOWN)
def test_depth_is_allowed_where_the_host_says_it_is_bidirectional(host: Host) -> None:
    model, example = host(), host.example()
    attach(model, SMALL)
    by_layer = read(model(example))
    model = host()
    attach(model, SMALL, scope="depth")
    assert read(model(example)).shape == by_layer.shape


@for_hosts(UNKNOWN)
def test_what_cannot_be_known_counts_as_causal_until_the_user_says_otherwise(host: Host) -> None:
    model = host()
    with pytest.raises(ValueError, match="pass causal=False"):
        attach(model, SMALL, scope="depth")
    attach(model, SMALL, scope="depth", causal=False)
    read(model(host.example()))


def test_a_user_who_says_causal_is_believed() -> None:
    with pytest.raises(ValueError, match=f"BertModel is causal, and .*{LEAK}"):
        attach(bert(), SMALL, scope="depth", causal=True)


def test_a_decoder_that_also_looks_at_all_of_an_encoder_is_causal() -> None:
    with pytest.raises(ValueError, match=LEAK):
        attach(new_host("BartModel"), SMALL, scope="depth", layers="decoder.layers.*")


def test_a_bert_built_as_a_decoder_is_causal() -> None:
    with pytest.raises(ValueError, match=LEAK):
        attach(bert(is_decoder=True), SMALL, scope="depth")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_causal_mask_seen_only_in_the_call_is_refused_there(attention: str) -> None:
    # CLIP's text model says is_causal=False on its attention and hands it a causal mask
    model = new_host("CLIPTextModel", eos_token_id=29, attn_implementation=attention)
    attach(model, SMALL, scope="depth")
    with pytest.raises(ValueError, match=f"called with a causal mask, and .*{LEAK}"):
        model(ids())
    detach(model)
    attach(model, SMALL, scope="depth", causal=False)  # a user who says so is believed
    model(ids())


def mask_of(kind: str, added: bool) -> torch.Tensor:
    """(B, 1, N, N) true where a token attends to another, or what is added to its scores."""
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    if "causal" in kind:
        seen = seen.tril()
    if "window" in kind:
        seen = seen & seen.new_ones(6, 6).tril(1).triu(-1)
    if "padded" in kind:
        seen[1, :, :, :2] = False
    if "continued" in kind:
        seen = seen[:, :, 3:]
    if "first" in kind:
        seen[..., 1:] = False
    if "documents" in kind:
        seen[:, :, 3:, :3] = False
    return torch.zeros(seen.shape).masked_fill(~seen, -1e4) if added else seen


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    "kind", ["causal", "causal, padded", "causal, window", "causal, documents", "causal, continued"]
)
def test_a_mask_that_hides_what_comes_later_is_refused(kind: str, added: bool) -> None:
    mask = mask_of(kind, added)
    for args, kwargs in (((mask,), {}), ((), {"attention_mask": mask})):
        with pytest.raises(ValueError, match=f"block 'h.0' is called with a causal mask, .*{LEAK}"):
            refuse_causal_call("h.0", args, kwargs)


def test_a_block_told_to_attend_causally_is_refused() -> None:
    with pytest.raises(ValueError, match=f"block 'h.0' is called with a causal mask, .*{LEAK}"):
        refuse_causal_call("h.0", (), {"is_causal": True})
    refuse_causal_call("h.0", (), {"is_causal": False})


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("kind", ["all", "padded", "window", "the first token alone"])
def test_a_mask_that_shows_what_comes_later_is_not_refused(kind: str, added: bool) -> None:
    refuse_causal_call("h.0", (mask_of(kind, added),), {})


def test_depth_threads_one_state_and_flushes_after_each_layer() -> None:
    model = bert().double().eval()
    attachment = attach(model, SMALL, scope="depth")
    seen = []
    for layer in attachment.layers:
        layer.register_forward_hook(
            lambda _, args, kwargs, output: seen.append((args[1], kwargs["flush"], output[1])),
            with_kwargs=True,
        )
    model(ids())
    (first, flush, after_first), (second, _, after_second) = seen
    assert first is None
    assert flush is True
    assert second is after_first
    assert after_first.fill.tolist() == after_second.fill.tolist() == [0, 0]


def test_depth_continues_its_one_state_in_a_stream() -> None:
    model = bert().double().eval()
    attachment = attach(model, SMALL, scope="depth")
    first, second = ids(), ids()
    fresh = read(model(second))
    with attachment.stream() as s:
        model(first)
        kept = s.state
        straight = read(model(second))
    assert list(kept) == ["depth"]
    assert not torch.allclose(straight, fresh)
    with attachment.stream(kept):
        assert torch.equal(read(model(second)), straight)


def test_depth_refuses_a_cache_where_no_stream_keeps_the_state() -> None:
    model = llama().eval()
    attachment = attach(model, SMALL, scope="depth", causal=False)
    with pytest.raises(ValueError, match="scope='depth' has no state to keep on a cache"):
        model(ids(), use_cache=True)
    with attachment.stream() as s:
        model(ids(), use_cache=True)
    assert list(s.state) == ["depth"]


def test_a_torch_encoder_under_a_causal_mask_stays_causal_in_either_layout() -> None:
    models = [encoder(batch_first=batch_first).double().eval() for batch_first in (True, False)]
    for model in models:
        attach(model, SMALL)
        model.load_state_dict(models[0].state_dict())
    x = torch.randn(3, 9, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    batch_first, sequence_first = models
    assert not find_leak(lambda x: batch_first(x, mask=mask), x)
    transposed = sequence_first(x.transpose(0, 1), mask=mask).transpose(0, 1)
    assert_same(transposed, batch_first(x, mask=mask))
