"""The compared decoders: their sizes, their causality, their losses."""

import math
from dataclasses import replace
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
from tensor_memory_lab.recipes.language import language_paper
from tensor_memory_lab.tasks.language import LanguageTask, LanguageTaskConfig
from tensor_memory_lab.tasks.text import WIKITEXT_2, Corpus, Vocabulary
from tolerances import assert_same

METHODS = get_args(LanguageMethod)
CAUSAL = [method for method in METHODS if method != "tensor-depth"]
WORDS, LENGTH = 23, 12
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAPER_WORDS = 29_999  # of the paper's 30,000 words two share an id


def config(method, **options):
    small = {
        "dim": 8,
        "layers": 2,
        "heads": 2,
        "dropout": 0.0,
        "window": 4,
        "memory": MemoryConfig(channels=4, grid=(3, 3), chunk_size=3),
        "slots": 2 if method == "recurrent-slots" else None,
        "segment": 4 if method in ("xl", "tensor-xl", "recurrent-slots") else None,
        "non_causal": method == "tensor-depth",
    }
    return LanguageModelConfig(method=method, **small | options)


def tiny(method, *, carried=False, std=0.3, **options):
    model = LanguageModel(config(method, **options), WORDS, LENGTH, carried)
    for name, parameter in model.named_parameters():  # large enough for a dependence to be seen
        if parameter.ndim > 1 and "memory" not in name:
            nn.init.normal_(parameter, std=std)
    return model


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


@pytest.mark.parametrize("method", CAUSAL)
def test_no_causal_model_sees_the_future(method):
    report = find_leak(Logits(tiny(method)), torch.randint(WORDS, (2, LENGTH)), vocab_size=WORDS)
    assert not report, str(report)


@pytest.mark.parametrize(
    "method", ["base", "local", "tensor", "tensor-local", "linear-local", "conv-local"]
)
def test_no_model_with_rotary_positions_sees_the_future(method):
    model = tiny(method, positions="rotary")
    assert model.position is None
    report = find_leak(Logits(model), torch.randint(WORDS, (2, LENGTH)), vocab_size=WORDS)
    assert not report, str(report)


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_no_model_with_short_chunks_sees_the_future(chunk_size):
    memory = MemoryConfig(channels=4, grid=(3, 3), chunk_size=chunk_size)
    model = Logits(tiny("tensor-local", memory=memory))
    report = find_leak(model, torch.randint(WORDS, (2, LENGTH)), vocab_size=WORDS)
    assert not report, str(report)


def test_rotary_positions_tell_order_where_there_is_no_table():
    model = Logits(tiny("base", positions="rotary")).double()
    ids = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    first, second = model(ids)[:, -1]
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("method", ["xl", "tensor-xl", "linear", "recurrent-slots"])
def test_rotary_positions_are_refused_where_nothing_can_be_turned(method):
    with pytest.raises(ValueError, match=f"expected learned for {method}, got rotary"):
        config(method, positions="rotary")
    with pytest.raises(ValueError, match="expected one of learned, rotary, got 'sinusoidal'"):
        config("base", positions="sinusoidal")


def test_the_depth_threaded_model_sees_the_future():
    model = Logits(tiny("tensor-depth"))
    report = find_leak(model, torch.randint(WORDS, (2, LENGTH)), vocab_size=WORDS)
    assert report
    assert report.cuts[0].earliest == 0


def test_the_depth_threaded_model_is_built_only_by_name_and_labelled():
    with pytest.raises(ValueError, match="its first token sees the last; expected non_causal=True"):
        LanguageModelConfig(method="tensor-depth")
    assert tiny("tensor-depth").labels()["non_causal"] is True
    assert all(not tiny(method).labels().get("non_causal") for method in CAUSAL)


@pytest.mark.parametrize(
    ("method", "carried", "context"),
    [
        ("base", True, "window 12"),
        ("local", True, "4 per layer within window 12"),
        ("tensor-local", True, "4 per layer within window 12, carried"),
        ("tensor-local", False, "4 per layer within window 12"),
        ("xl", True, "segment 4, 2 before it per layer, carried"),
        ("tensor-xl", True, "segment 4, 0 before it per layer, carried"),
        ("recurrent-slots", True, "segment 4, 2 slots before it, carried"),
        ("tensor-depth", False, "all of 12, later tokens too"),
    ],
)
def test_the_context_of_a_prediction_is_told(method, carried, context):
    model = tiny(method, carried=carried, cache=2 if method == "xl" else None)
    assert model.labels()["context"] == context


def test_a_cache_that_is_never_filled_is_not_called_context():
    alone = LanguageModelConfig(method="xl", dim=16, layers=1, heads=2, cache=2)
    assert LanguageModel(alone, words=9, length=12).labels()["context"] == "window 12"


def test_what_sees_the_future_is_not_built_for_a_task_of_perplexity():
    splits = {s: torch.arange(40) for s in ("train", "valid", "test")}
    words = ("<eos>", "<unk>", *map(str, range(38)))

    def task(**options):
        given = LanguageTaskConfig(corpus="any", length=8, **options)
        return LanguageTask(given, Corpus(Vocabulary(words), splits), 0)

    with pytest.raises(ValueError, match=r"so it has no perplexity; expected a task with leak=Tr"):
        config("tensor-depth").build(task())
    assert config("tensor-depth").build(task(leak=True)).labels()["non_causal"]
    assert config("tensor").build(task()).config.method == "tensor"


@pytest.mark.parametrize("method", CAUSAL)
def test_a_causal_model_does_not_take_the_label(method):
    with pytest.raises(ValueError, match=f"expected False for {method}, which is causal"):
        config(method, non_causal=True)


@pytest.mark.parametrize(
    ("method", "expected"),
    [("base", 25_912_704), ("base-sln", 25_918_848), ("local", 25_912_704)],
)
def test_the_papers_sizes_give_the_papers_counts(method, expected):
    with torch.device("meta"):
        assert (
            count(LanguageModel(LanguageModelConfig(method=method), PAPER_WORDS, 512)) == expected
        )


def test_the_memorys_count_is_the_papers_without_the_biases_we_leave_out():
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig(method="tensor"), PAPER_WORDS, 512)
    biases = 384 + 3 + 32 + 3 * 64 + 384  # summary, coordinates, content, taps, output
    assert count(model) + biases == 28_314_156


@pytest.mark.parametrize(
    ("method", "millions"), [("base", 25.9), ("base-sln", 25.9), ("local", 25.9), ("tensor", 28.3)]
)
def test_the_papers_protocol_rounds_to_the_papers_column(method, millions):
    recipe = language_paper()
    assert recipe.task.protocol == "paper"
    model = replace(recipe.model, method=method)
    with torch.device("meta"):
        found = count(LanguageModel(model, WIKITEXT_2["paper"]["words"], recipe.task.length))
    assert round(found / 1e6, 1) == millions


@pytest.mark.parametrize(("dim", "std"), [(16, 0.25), (64, 0.125), (384, 0.02)])
def test_the_first_loss_is_near_that_of_a_uniform_guess(dim, std):
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(dim=dim, heads=2, layers=2), 1000, LENGTH).eval()
    assert model.word.weight.std().item() == pytest.approx(std, rel=0.02)
    given = {name: torch.randint(1000, (8, LENGTH)) for name in ("ids", "targets")}
    assert model(given)[0]["nll"].mean().item() == pytest.approx(math.log(1000), abs=1.0)


def test_all_methods_start_from_the_same_words():
    found = []
    for method in METHODS:
        torch.manual_seed(5)
        found.append(LanguageModel(config(method), WORDS, LENGTH).word.weight)
    assert all(torch.equal(words, found[0]) for words in found)


def test_wide_local_is_wide_seen_through_the_window_of_local():
    wide, local, both = (
        LanguageModelConfig(method=method).stack(512, carried=True)
        for method in ("wide", "local", "wide-local")
    )
    assert (wide.window, local.window) == (None, 64)
    assert both == replace(wide, window=64)


@pytest.mark.parametrize("dim", [32, 64, 96, 192, 384, 512])
@pytest.mark.parametrize("attention", ["", "-local"])
def test_wide_has_the_weights_of_tensor(dim, attention):
    sizes = {}
    with torch.device("meta"):
        for method in ("tensor", "wide"):
            options = LanguageModelConfig(method=f"{method}{attention}", dim=dim, heads=4, layers=4)
            sizes[method] = count(LanguageModel(options, 10_000, 128))
    assert sizes["wide"] == pytest.approx(sizes["tensor"], rel=0.01)


@pytest.mark.parametrize(
    "method", ["xl", "recurrent-slots", "linear-local", "tensor-local", "tensor-xl"]
)
def test_compared_states_have_the_memorys_bytes(method):
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig(method=method), 100, 512)
    memory = 8 * 2 * 32 * 8**3 * 4
    assert 0.99 * memory <= model.state_bytes() <= memory


def test_a_convolution_over_four_tokens_holds_next_to_nothing():
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig(method="conv-local"), 100, 512)
    assert model.state_bytes() == 8 * 3 * 384 * 4


@pytest.mark.parametrize("method", METHODS)
def test_dropout_is_for_training_alone(method):
    dropped, plain = tiny(method, dropout=0.5), tiny(method).eval()
    plain.load_state_dict(dropped.state_dict())
    given = batch()
    assert_same(dropped.eval()(given)[0]["nll"], plain(given)[0]["nll"])
    assert not torch.allclose(dropped.train()(given)[0]["nll"], plain(given)[0]["nll"])


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_of_the_logits(method):
    model, given = tiny(method).double().eval(), batch()
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


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_independent(method):
    model, given = tiny(method).double().eval(), batch()
    losses = model(given)[0]["nll"]
    alone = model({name: tensor[1:2] for name, tensor in given.items()})[0]["nll"]
    assert_same(alone, losses[1:2])


@pytest.mark.parametrize("method", CAUSAL)
def test_streams_are_carried_and_fresh_rows_start_anew(method):
    model = tiny(method, carried=True).double().eval()
    one, two = batch(), batch()
    _, carry = model(one | {"fresh": torch.ones(3, dtype=torch.bool)})
    fresh = torch.tensor([True, False, True])
    losses, after = model(two | {"fresh": fresh}, carry)
    anew, _ = model(two)
    assert_same(losses["nll"][fresh], anew["nll"][fresh])
    remembers = model.state_bytes() > 0
    assert remembers == (not torch.equal(losses["nll"][1], anew["nll"][1]))
    assert {name: t.shape for name, t in after.items()} == {n: t.shape for n, t in carry.items()}
    started, _ = model(two | {"fresh": torch.ones_like(fresh)}, model.empty_carry(3))
    assert_same(started["nll"], anew["nll"])


def test_too_many_tokens_for_the_positions_are_refused():
    with pytest.raises(ValueError, match=r"ids: expected at most 12 tokens.*got 13"):
        tiny("base")(batch(length=13))
    assert tiny("xl")(batch(length=13))[0]["nll"].shape == (3, 13)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"model.method: expected one of base, base-sln, .*'bse'"):
        LanguageModelConfig(method="bse")  # type: ignore[arg-type]


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


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_where_the_kernel_serves_it_makes_the_loss_and_its_gradients(monkeypatch):
    given = [torch.randn(shape, device=HERE, requires_grad=True) for shape in ((2, 3, 4), (7, 4))]
    targets = torch.randint(7, (2, 3), device=HERE)
    found = []
    for fused in ((), (HERE.type,)):
        monkeypatch.setattr(cross_entropy, "FUSED", fused)
        losses = linear_cross_entropy(*given, targets)
        found.append((losses, *torch.autograd.grad((losses * losses).sum(), given)))
    for plain, kernel in zip(*found, strict=True):
        assert_same(kernel, plain)
    monkeypatch.setattr(cross_entropy, "_fused_losses", None)
    with pytest.raises(TypeError):
        linear_cross_entropy(*given, targets)


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
