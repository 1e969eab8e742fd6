"""The compared decoders: their sizes, their causality, their losses."""

import math
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensor_memory import MemoryConfig, find_leak
from tensor_memory_lab.models import cross_entropy
from tensor_memory_lab.models.cross_entropy import linear_cross_entropy
from tensor_memory_lab.models.language import (
    LanguageMethod,
    LanguageModel,
    LanguageModelConfig,
)
from tiny_text import loud, text_task
from tolerances import assert_same

METHODS = get_args(LanguageMethod)
CAUSAL = [method for method in METHODS if method != "tensor-depth"]
WORDS, LENGTH = 23, 12
MEMORY = MemoryConfig(channels=4, grid=(3, 3), chunk_size=3)
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAPER_WORDS = 29_999  # of the paper's 30,000 words two share an id
BIASES = 384 + 3 + 32 + 3 * 64 + 384  # of its summary, coordinates, content, taps and output


def config(method, **options):
    small = {
        "dim": 8,
        "layers": 2,
        "heads": 2,
        "dropout": 0.0,
        "window": 4,
        "memory": MEMORY,
        "slots": 2 if method == "recurrent-slots" else None,
        "segment": 4 if method in ("xl", "tensor-xl", "recurrent-slots") else None,
        "non_causal": method == "tensor-depth",
        "positions": "rotary" if method == "window+" else "learned",
    }
    return LanguageModelConfig(method=method, **small | options)


def tiny(method, *, carried=False, std=0.3, **options):
    model = LanguageModel(config(method, **options), WORDS, LENGTH, carried)
    return loud(model, std)


def batch(rows=3, length=LENGTH):
    ids = torch.randint(WORDS, (rows, length))
    return {"ids": ids, "targets": torch.randint(WORDS, (rows, length))}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


class Logits(nn.Module):
    """The decoder from ids to logits, as `find_leak` takes it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model({"ids": ids}, need_logits=True)[0]["logits"]


ROTARY = (
    "base", "local", "tensor", "tensor-local", "place-local", "linear-local", "conv-local",
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "options"),
    [(method, {}) for method in CAUSAL]
    + [(method, {"positions": "rotary"}) for method in ROTARY]
    + [("tensor-local", {"memory": replace(MEMORY, chunk_size=K)}) for K in (1, 2, 4)],
)
def test_no_causal_model_sees_the_future(method, options):
    model = tiny(method, **options)
    assert (model.position is None) == (model.config.positions == "rotary" or model.config.relative)
    report = find_leak(Logits(model), torch.randint(WORDS, (2, LENGTH)), vocab_size=WORDS)
    assert not report, str(report)


@pytest.mark.parametrize("length", [LENGTH, LENGTH - 1])  # also a last chunk that is not full
def test_the_depth_threaded_model_sees_the_future(length):
    model = Logits(tiny("tensor-depth"))
    report = find_leak(model, torch.randint(WORDS, (2, length)), vocab_size=WORDS)
    assert report
    assert report.cuts[0].earliest == 0


@pytest.mark.parametrize(("method", "kept"), [("xl", "inputs"), ("window+", "keys")])
def test_a_cache_in_bf16_holds_twice_the_tokens_in_the_same_bytes(method, kept):
    memory = replace(MEMORY, channels=16)
    models = [
        tiny(method, carried=True, memory=memory, window=1, cache_type=cache_type)
        for cache_type in ("float32", "bf16")
    ]
    tokens, twice = (m.stack.config.cache or m.stack.config.extra_keys for m in models)
    assert twice == 2 * tokens > 0
    assert [model.state_bytes() for model in models] == [models[0].config.memory_bytes] * 2
    _, carry = models[1](batch(length=LENGTH))
    assert carry[f"0.attention.{kept}"].dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"model.cache_type: .* tensor-local"):
        config("tensor-local", cache_type="bf16")


@pytest.mark.parametrize(
    ("method", "carried", "context"),
    [
        ("base", True, "window 12"),
        ("local", True, "4 per layer within window 12"),
        ("tensor-local", True, "4 per layer within window 12, carried"),
        ("tensor-local", False, "4 per layer within window 12"),
        ("window+", True, "4 and 4 before them per layer, carried"),
        ("xl", True, "segment 4, 2 before it per layer, carried"),
        ("tensor-xl", True, "segment 4, 0 before it per layer, carried"),
        ("recurrent-slots", True, "segment 4, 2 slots before it, carried"),
        ("tensor-depth", False, "all of 12, later tokens too"),
    ],
)
def test_the_context_of_a_prediction_is_told(method, carried, context):
    model = tiny(method, carried=carried, cache=2 if method == "xl" else None)
    assert model.labels()["context"] == context
    assert model.labels().get("non_causal", False) == (method == "tensor-depth")


def test_what_sees_the_future_is_not_built_for_a_task_of_perplexity():
    task = partial(text_task, torch.arange(40), 40, length=8)
    with pytest.raises(ValueError, match=r"so it has no perplexity; expected a task with leak=Tr"):
        config("tensor-depth").build(task())
    assert config("tensor-depth").build(task(leak=True)).labels()["non_causal"]
    assert config("tensor").build(task()).config.method == "tensor"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("base", 25_912_704),
        ("base-sln", 25_918_848),
        ("local", 25_912_704),
        ("tensor", 28_314_156 - BIASES),
    ],
)
def test_the_papers_sizes_give_the_papers_counts(method, expected):
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig(method=method), PAPER_WORDS, 512)
    assert count(model) == expected


@pytest.mark.parametrize(("dim", "std"), [(16, 0.25), (64, 0.125), (384, 0.02)])
def test_the_first_loss_is_near_that_of_a_uniform_guess(dim, std):
    model = LanguageModel(LanguageModelConfig(dim=dim, heads=2, layers=2), 1000, LENGTH).eval()
    assert model.word.weight.std().item() == pytest.approx(std, rel=0.02)
    given = {name: torch.randint(1000, (8, LENGTH)) for name in ("ids", "targets")}
    assert model(given)[0]["nll"].mean().item() == pytest.approx(math.log(1000), abs=1.0)


@pytest.mark.parametrize("dim", [32, 96, 384])
@pytest.mark.parametrize("attention", ["", "-local"])
def test_wide_has_the_weights_of_tensor(dim, attention):
    sizes = {}
    with torch.device("meta"):
        for method in ("tensor", "wide"):
            options = LanguageModelConfig(method=f"{method}{attention}", dim=dim, heads=4, layers=4)
            sizes[method] = count(LanguageModel(options, 10_000, 128))
    assert sizes["wide"] == pytest.approx(sizes["tensor"], rel=0.01)


@pytest.mark.parametrize(
    "method", ["xl", "recurrent-slots", "linear-local", "tensor-local", "tensor-xl", "conv-local"]
)
def test_compared_states_have_the_memorys_bytes(method):
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig(method=method), 100, 512, carried=True)
    memory = 8 * 2 * 32 * 8**3 * 4
    if method == "conv-local":  # three tokens a layer: next to nothing
        memory = 8 * 3 * 384 * 4
    assert 0.99 * memory <= model.state_bytes() <= memory


def test_a_cache_that_every_window_starts_without_is_no_state():
    assert tiny("xl", segment=None).state_bytes() == 0


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_for_training_alone(method):
    dropped, plain = tiny(method, dropout=0.5), tiny(method).eval()
    plain.load_state_dict(dropped.state_dict())
    given = batch()
    assert_same(dropped.eval()(given)[0]["nll"], plain(given)[0]["nll"])
    assert not torch.allclose(dropped.train()(given)[0]["nll"], plain(given)[0]["nll"])


def test_losses_are_those_of_the_logits():
    model, given = tiny("base").double().eval(), batch()
    losses = model(given)[0]["nll"]
    logits = model(given, need_logits=True)[0]["logits"]
    expected = F.cross_entropy(logits.flatten(0, 1), given["targets"].flatten(), reduction="none")
    assert_same(losses, expected.view(3, LENGTH))


@pytest.mark.parametrize("method", METHODS)
def test_one_step_changes_every_parameter(method):
    model = tiny(method, dropout=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    model(batch())[0]["nll"].mean().backward()
    optimizer.step()
    same = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert same == []


@pytest.mark.parametrize(
    ("method", "options", "complaint"),
    [
        ("bse", {}, r"model.method: expected one of base, base-sln, .*'bse'"),
        ("base", {"non_causal": True}, "expected False for base, which is causal"),
        ("tensor-depth", {"non_causal": False}, "its first token sees the last; expected non_caus"),
        ("base", {"positions": "waves"}, "expected one of learned, rotary, got 'waves'"),
        ("window+", {"positions": "learned"}, "expected rotary for window.*got learned"),
        ("xl", {"positions": "rotary"}, "expected learned for xl, got rotary"),
        ("linear", {"positions": "rotary"}, "expected learned for linear, got rotary"),
    ],
)
def test_a_wrong_config_is_refused(method, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        config(method, **options)


def test_too_many_tokens_for_the_positions_are_refused():
    with pytest.raises(ValueError, match=r"ids: expected at most 12 tokens.*got 13"):
        tiny("base")(batch(length=13))
    assert tiny("xl")(batch(length=13))[0]["nll"].shape == (3, 13)


@pytest.mark.parametrize("part", [1, 4, 2048])
def test_the_lean_loss_and_its_gradients_are_the_plain_ones(monkeypatch, part):
    monkeypatch.setattr(cross_entropy, "LOSS_TOKENS", part)
    h = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (2, 5))
    scored = torch.tensor([[1.0, 0, 1, 1, 0], [1, 1, 0.5, 0, 2]], dtype=torch.float64)
    lean = linear_cross_entropy(h, weight, targets)
    plain = F.cross_entropy((h @ weight.t()).flatten(0, 1), targets.flatten(), reduction="none")
    assert_same(lean.flatten(), plain)
    got = torch.autograd.grad((lean * scored).sum(), (h, weight))
    expected = torch.autograd.grad((plain * scored.flatten()).sum(), (h, weight))
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


def test_the_lean_loss_multiplies_in_autocasts_type_and_sums_in_float32():
    h, weight = torch.randn(2, 5, 4), torch.randn(7, 4, requires_grad=True)
    targets = torch.randint(7, (2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        losses = linear_cross_entropy(h, weight, targets)
    low = (h.bfloat16() @ weight.bfloat16().t()).float()
    expected = F.cross_entropy(low.flatten(0, 1), targets.flatten(), reduction="none")
    assert losses.dtype == torch.float32
    assert_same(losses.flatten(), expected)
    losses.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [7, 64, 5000])  # few, no padding, several blocks of a row
def test_the_kernel_of_the_loss_agrees_with_plain_torch(words, dtype, keep):
    columns = math.ceil(words / 64) * 64
    logits = (4 * torch.randn(5, columns, device=HERE)).to(dtype)
    targets = torch.tensor([0, words - 1, 3, 3, 5], device=HERE)
    kept, expected_kept = logits.clone(), logits.clone()
    got = cross_entropy._fused_losses(kept, targets, words, keep=keep)
    expected = cross_entropy._losses(expected_kept, targets, words, keep=keep)
    assert got.dtype == expected.dtype == torch.float32
    assert_same(got, expected)
    assert_same(kept, expected_kept if keep else logits)


@pytest.mark.parametrize("method", METHODS)
def test_every_model_trains_under_bfloat16_autocast(method):
    model = tiny(method, carried=True)
    given = batch() | {"fresh": torch.zeros(3, dtype=torch.bool)}
    with torch.autocast("cpu", torch.bfloat16):
        _, carry = model(given)
        outputs, _ = model(given, carry)
    outputs["nll"].mean().backward()
    assert outputs["nll"].dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
