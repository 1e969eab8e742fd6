"""Every kind of attention against the plain formula that defines it."""

import math

import pytest
import torch

from tensor_memory_lab.models import attention as attention_module
from tensor_memory_lab.models import relative_attention
from tensor_memory_lab.models.attention import SelfAttention, split_heads, visible
from tensor_memory_lab.models.block import initialise
from tensor_memory_lab.models.linear_attention import (
    EPSILON,
    LinearAttention,
    linear_attention,
    sizes_for,
)
from tensor_memory_lab.models.relative_attention import PositionBias, RelativeAttention
from tensor_memory_lab.models.side import ShortConvolution
from tensor_memory_lab.models.window_attention import WindowAttention
from tolerances import assert_same, assert_same_rms

DOUBLE = torch.float64


def drawn(module):
    """The module in float64 with weights large enough to matter."""
    initialise(module, std=0.3)
    return module.double().eval()


def softmax_attention(scores, v, mask):
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def by_mask(module, x, mask):
    """What softmax attention with the module's weights gives under an explicit mask."""
    q, k, v = split_heads(module.qkv(x), 3, module.heads)
    mixed = softmax_attention(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), v, mask)
    return module.project(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [1, 5, 7, 65, 130, 200])
@pytest.mark.parametrize("window", [1, 3, 64, 70])
def test_a_window_is_attention_under_its_mask(monkeypatch, length, window):
    monkeypatch.setattr(attention_module, "SMALL", 0)  # so that short sequences run in blocks too
    prepared = drawn(SelfAttention(8, 2, window=window, length=length))
    x = torch.randn(2, length, 8, dtype=DOUBLE)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    expected = by_mask(prepared, x, (j <= i) & (i - j < window))
    assert_same(prepared(x)[0], expected)
    elsewhere = SelfAttention(8, 2, window=window, length=3).double().eval()
    elsewhere.load_state_dict(prepared.state_dict())
    assert_same(elsewhere(x)[0], expected)  # a mask made on the spot


def turned(x):
    """Rotary positions by definition: pairs (a, b) at place p turned by p · 10,000^(-i / e)."""
    places, width = torch.arange(x.shape[-2]), x.shape[-1]
    rates = [10_000.0 ** (-i / width) for i in range(0, width, 2)]
    angle = places[:, None] * torch.tensor(rates, dtype=DOUBLE)
    a, b = x[..., 0::2], x[..., 1::2]
    made = torch.empty_like(x)
    made[..., 0::2] = a * angle.cos() - b * angle.sin()
    made[..., 1::2] = a * angle.sin() + b * angle.cos()
    return made


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 3, 64])
def test_rotary_positions_turn_queries_and_keys_before_the_product(monkeypatch, window, compiled):
    monkeypatch.setattr(attention_module, "SMALL", 0)
    module = drawn(SelfAttention(12, 2, window=window, length=150, rotary=True))
    x = torch.randn(2, 150, 12, dtype=DOUBLE)
    q, k, v = split_heads(module.qkv(x), 3, module.heads)
    scores = turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(q.shape[-1])
    mixed = softmax_attention(scores, v, visible(150, window=window))
    attend = torch.compile(module, backend="eager") if compiled else module
    assert_same(attend(x)[0], module.project(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("cuts", [(7,), (1, 6), (2, 2, 3)])
def test_a_short_convolution_is_the_sum_over_four_tokens(cuts):
    module = ShortConvolution(3).double()
    x, state, made = torch.randn(2, 7, 3, dtype=DOUBLE), None, []
    for part in x.split(cuts, dim=1):
        m, state = module(part, state)
        made.append(m)
    padded = torch.cat([torch.zeros(2, 3, 3, dtype=DOUBLE), x], dim=1)
    summed = torch.stack(
        [sum(module.taps[k] * padded[:, n + k] for k in range(4)) for n in range(7)], dim=1
    )
    assert_same(torch.cat(made, dim=1), summed @ module.output.weight.T)


def test_gradients_through_blocks_are_those_under_the_mask(monkeypatch):
    monkeypatch.setattr(attention_module, "SMALL", 0)
    module = drawn(SelfAttention(4, 2, window=5, length=150))
    x = torch.randn(1, 150, 4, dtype=DOUBLE, requires_grad=True)
    weights = torch.randn(1, 150, 4, dtype=DOUBLE)
    (got,) = torch.autograd.grad((module(x)[0] * weights).sum(), x)
    masked = by_mask(module, x, visible(150, window=5))
    (expected,) = torch.autograd.grad((masked * weights).sum(), x)
    assert_same(got, expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [1, 9, 150])
def test_a_kernel_for_a_window_is_attention_under_its_mask(window):
    q, k, v = torch.randn(3, 2, 2, 200, 16, dtype=DOUBLE)
    scores = q @ k.transpose(-1, -2) / 4
    expected = softmax_attention(scores, v, visible(200, window=window))
    assert_same(attention_module._attend_near(q, k, v, window), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [200, 512])
def test_a_compiled_window_is_an_eager_one_with_every_gradient(length):
    module = SelfAttention(64, 4, window=16, length=length, rotary=True).cuda()
    initialise(module, std=0.3)
    x = torch.randn(2, length, 64, device="cuda", requires_grad=True)
    weights = torch.randn(2, length, 64, device="cuda")
    found = []
    for attend in (module, torch.compile(module, dynamic=False)):
        y = attend(x)[0]
        found.append([y, *torch.autograd.grad((y * weights).sum(), (x, *module.parameters()))])
    names = ("y", "x", *dict(module.named_parameters()))
    for name, eager, compiled in zip(names, *found, strict=True):
        assert_same_rms(name, compiled, eager, torch.float32)


@pytest.mark.parametrize("causal", [True, False])
def test_full_attention_sees_the_past_or_everything(causal):
    module = drawn(SelfAttention(8, 2, causal=causal))
    x = torch.randn(2, 6, 8, dtype=DOUBLE)
    assert_same(module(x)[0], by_mask(module, x, visible(6, causal)))


def test_slots_see_and_are_seen_by_the_one_rule():
    module = drawn(SelfAttention(8, 2, read_slots=2, write_slots=3, window=2, length=4))
    x = torch.randn(2, 9, 8, dtype=DOUBLE)
    mask = torch.zeros(9, 9, dtype=torch.bool)
    mask[:, :2] = True  # everybody sees the read slots
    for token in range(2, 6):
        mask[token, max(2, token - 1) : token + 1] = True
    mask[6:] = True  # write slots see everything
    assert torch.equal(mask, visible(4, True, 2, 2, 3))
    assert_same(module(x)[0], by_mask(module, x, mask))


@pytest.mark.parametrize("length", [1, 4, 5, 11])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_linear_attention_equals_its_quadratic_form(length, chunk):
    q, k = torch.randn(2, 2, 3, length, 5, dtype=DOUBLE)
    v = torch.randn(2, 3, length, 4, dtype=DOUBLE)
    feature = torch.nn.functional.elu
    scores = ((feature(q) + 1) @ (feature(k) + 1).transpose(-1, -2)).tril()
    expected = scores @ v / (scores.sum(-1, keepdim=True) + EPSILON)
    got, state = linear_attention(q, k, v, chunk=chunk)
    assert_same(got, expected)
    assert_same(state[..., -1], (feature(k) + 1).sum(2))


def test_linear_attention_continues_from_its_state():
    module = drawn(LinearAttention(8, 2))
    x = torch.randn(2, 9, 8, dtype=DOUBLE)
    whole, _ = module(x)
    first, state = module(x[:, :4], module.zeros(2, x))
    second, _ = module(x[:, 4:], state)
    assert_same(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize(("values", "heads"), [(32_768, 8), (6_912, 4), (1_000, 4), (777, 3)])
def test_a_linear_state_fills_the_bytes_it_is_given(values, heads):
    key, value = sizes_for(values, heads)
    assert 0.98 * values <= heads * key * (value + 1) <= values


def relative_by_definition(module, source, first, mask):
    """The paper's formula, a score at a time: source (1, M, d) whose queries start at `first`."""
    d, h = source.shape[2], module.heads
    q, k, v = split_heads(module.qkv(source), 3, h)
    u, place = (bias.view(h, -1) for bias in (module.bias.content, module.bias.place))
    M, e = source.shape[1], d // h
    scores = torch.zeros(h, M, M, dtype=source.dtype)
    for i in range(M):
        for j in range(i + 1):
            angle = (i - j) * module.rates
            r = module.relative(torch.cat([angle.sin(), angle.cos()])).view(h, e)
            content = ((q[0, :, i] + u) * k[0, :, j]).sum(-1)
            scores[:, i, j] = (content + ((q[0, :, i] + place) * r).sum(-1)) / math.sqrt(e)
    mixed = softmax_attention(scores, v[0], mask)
    return module.project(mixed.transpose(0, 1).flatten(1))[None, first:]


def relative(**options):
    bias = PositionBias(8)
    module = RelativeAttention(8, 2, bias, **options)
    module.held = bias  # so that it is initialised and converted too
    return drawn(module)


def test_relative_attention_is_the_papers_formula():
    module = relative()
    expected = torch.tensor([10_000 ** (-2 * i / 8) for i in range(4)])
    assert_same(module.rates, expected, torch.float32)
    x = torch.randn(1, 6, 8, dtype=DOUBLE)
    assert_same(module(x)[0], relative_by_definition(module, x, 0, visible(6)))


def test_xl_with_its_cache_equals_full_attention_over_the_same_span():
    module = relative(cache=4, carried=True)
    x = torch.randn(1, 11, 8, dtype=DOUBLE)
    _, cache = module(x[:, :6])
    got, cache = module(x[:, 6:], cache)
    assert cache["seen"].tolist() == [4]
    assert_same(got, relative_by_definition(module, x[:, 2:], 4, visible(9)))


@pytest.mark.parametrize("smallest", [1, 64])
@pytest.mark.parametrize(("segment", "cache"), [(2, 3), (3, 3), (4, 1), (5, 0), (3, 20)])
def test_segments_side_by_side_equal_segments_one_by_one(monkeypatch, smallest, segment, cache):
    monkeypatch.setattr(relative_attention, "SMALLEST_BLOCK", smallest)
    together = relative(segment=segment, cache=cache)
    alone = RelativeAttention(8, 2, together.held, cache=cache, carried=True).double().eval()
    alone.load_state_dict(together.state_dict(), strict=False)
    x = torch.randn(2, 13, 8, dtype=DOUBLE)
    carried, parts = alone.zeros(2, x), []
    for part in x.split(segment, dim=1):
        made, carried = alone(part, carried)
        parts.append(made)
    assert_same(together(x)[0], torch.cat(parts, 1))


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("cuts", [(200,), (1, 99, 100), (3, 2, 170, 25)])
@pytest.mark.parametrize("window", [1, 5, 70])
def test_a_window_that_crosses_calls_is_a_window_over_all_of_them(window, cuts, rotary):
    carried = drawn(WindowAttention(8, 2, window, rotary=rotary))
    at_once = SelfAttention(8, 2, window=window, rotary=rotary).double().eval()
    at_once.load_state_dict(carried.state_dict())
    x, cache, parts = torch.randn(2, 200, 8, dtype=DOUBLE), None, []
    for part in x.split(cuts, dim=1):
        made, cache = carried(part, cache)
        parts.append(made)
    assert_same(torch.cat(parts, 1), at_once(x)[0])
    assert cache["seen"].tolist() == [window - 1] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda kept_in: relative(segment=4, cache=8, carried=True, kept_in=kept_in),
        lambda kept_in: drawn(WindowAttention(8, 2, 6, kept_in=kept_in)),
    ],
)
def test_a_cache_in_bf16_takes_half_the_bytes_and_loses_nothing_under_autocast(make):
    x, found = torch.randn(2, 12, 8), []
    for kept_in in ("float32", "bf16"):
        module = make(kept_in).float()
        with torch.autocast("cpu", torch.bfloat16):
            _, cache = module(x[:, :8])
            found.append(module(x[:, 8:], cache)[0])
        sizes = {t.itemsize for name, t in module.zeros(2, x).items() if name != "seen"}
        assert sizes == {module.state_bytes() // (8 * 8 if "inputs" in cache else 2 * 5 * 8)}
    assert cache["seen"].dtype == torch.long
    assert torch.equal(*found)


def test_an_empty_cache_equals_none():
    module = relative(cache=5, carried=True)
    x = torch.randn(2, 4, 8, dtype=DOUBLE)
    got, kept = module(x, module.zeros(2, x))
    expected, started = module(x)
    assert_same(got, expected)
    assert_same(kept["inputs"], started["inputs"])
    assert torch.equal(kept["seen"], started["seen"])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: SelfAttention(10, 4), "heads: expected a divisor of the width 10, got 4"),
        (lambda: SelfAttention(6, 2, rotary=True), "expected an even width of a head .*, got 3"),
        (lambda: SelfAttention(8, 2, causal=False, window=3), "window: expected 1 or more tokens"),
        (lambda: RelativeAttention(9, 3, PositionBias(9)), "expected an even width for sinusoids"),
        (lambda: relative(segment=0), "segment of 1 or more, got 0 and 0"),
        (lambda: relative(cache=-1), "expected cache of 0 or more .* got -1 and None"),
        (lambda: sizes_for(7, 2), "state: expected at least 8 values for 2 heads, got 7"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()
