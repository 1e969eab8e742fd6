"""Associative recall: rows hold what they ask for, the protocol is zoology's, models fit it."""

import re
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch

from tensor_memory import find_leak
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.peers import Peer
from tensor_memory_lab.models.recall import RecallMethod, RecallModelConfig
from tensor_memory_lab.recipes import find_recipe
from tensor_memory_lab.tasks.mqar import TESTED, TRAINED, MqarConfig, distinct
from tensor_memory_lab.tasks.synthetic import generator
from tensor_memory_lab.train import RunOptions, train
from tolerances import TOLERANCE

SMALL = MqarConfig(train_rows=12, valid_rows=3, test_rows=3)


def looked_up(batch):
    """The last value that each asked key was written with, by reading the pairs in order."""
    found = torch.zeros_like(batch["target"])
    for row, tokens in enumerate(batch["tokens"].tolist()):
        length, asked = batch["tokens"].shape[1], batch["ask"][row].tolist()
        pairs = next(p for n, p in TESTED if n == length and len(asked) in (p, p - p // 4))
        held = dict(zip(tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        found[row] = torch.tensor([held[tokens[at]] for at in asked])
        assert min(asked) >= 2 * pairs
    return found


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_lookup_answers_everything(overwrite):
    task = replace(SMALL, overwrite=overwrite).build(0)
    for index in range(task.batches("test", 3)):
        batch = task.batch("test", index, 3)
        found = looked_up(batch)
        assert torch.equal(found, batch["target"])
        logits = torch.nn.functional.one_hot(found, task.vocabulary).float()
        total, rows = task.measure({"logits": logits}, batch)["accuracy"]
        assert total / rows == task.ceiling("test") == 1
    if overwrite:  # the first value that a key was written with is not enough
        tokens, pairs = batch["tokens"][0].tolist(), 256
        assert len(set(tokens[: 2 * pairs : 2])) == len(batch["ask"][0]) == 192
        assert sorted(tokens[: 2 * pairs : 2]) != sorted(set(tokens[: 2 * pairs : 2]))


def test_answers_for_keys_that_were_written_twice_are_told_apart():
    task = replace(SMALL, overwrite=True).build(0)
    for index in range(task.batches("test", 3)):
        batch = task.batch("test", index, 3)
        stale = torch.empty_like(batch["target"])
        for row, tokens in enumerate(batch["tokens"].tolist()):
            for column, ask in enumerate(batch["ask"][row].tolist()):
                stale[row, column] = tokens[tokens.index(tokens[ask]) + 1]  # its first value
        logits = torch.nn.functional.one_hot(stale, task.vocabulary).float()
        sums = task.measure({"logits": logits}, batch)
        means = {name: (total / rows).item() for name, (total, rows) in sums.items() if rows}
        assert means["accuracy_rewritten"] == 0
        assert means["accuracy"] == pytest.approx(2 / 3)
        assert means["accuracy_once"] == 1
    assert "accuracy_once" not in SMALL.build(0).measure(*shown(SMALL.build(0)))


def shown(task):
    """Some answers, and the batch they are to."""
    batch = task.batch("test", 0, 3)
    return {"logits": torch.zeros(*batch["target"].shape, task.vocabulary)}, batch


def test_rows_are_written_and_asked_as_zoology_has_it():
    task = MqarConfig(train_rows=400).build(0)
    batch = task.batch("train", task.batches("train", 400) - 1, 400)  # 64 pairs in 256 tokens
    tokens, ask, target = batch["tokens"].long(), batch["ask"], batch["target"]
    assert tokens.shape == (400, 256)
    assert ask.shape == target.shape == (400, 64)
    keys, values = tokens[:, 0:128:2], tokens[:, 1:128:2]
    for row in (keys, values, ask):
        assert all(len(set(numbers)) == 64 for numbers in row.tolist())
    assert keys.min() >= 1
    assert keys.max() < 4096 <= values.min()
    assert (ask % 2 == 0).all()
    assert torch.equal(tokens.gather(1, ask).sort(1).values, keys.sort(1).values)
    rest = torch.ones_like(tokens, dtype=torch.bool).scatter(1, ask, False)[:, 128:]
    assert tokens[:, 128:][rest].float().mean().item() == pytest.approx(4096, rel=0.02)  # noise
    short = task.batch("train", 0, 400)["ask"]  # 4 pairs in 64 tokens: most are asked for early
    places = torch.bincount((short.flatten() - 8) // 2, minlength=28).float()
    assert places[:3].sum() > 3 * places[-3:].sum() > 0


def test_the_mixture_is_zoologys():
    task, config = MqarConfig().build(0), find_recipe("mqar")()
    assert task.batches("train", 256) == 707
    assert config.budget.steps == 32 * 707
    assert task.facts()["trained"] == [
        [64, 4, 100_000], [128, 8, 20_000], [256, 16, 20_000], [256, 32, 20_000], [256, 64, 20_000]
    ]  # fmt: skip
    assert [part[2] for part in task.facts()["tested"]] == [1000] * 7
    assert task.batches("test", config.budget.evaluation_batch_size) == 28


def test_an_epoch_goes_from_short_rows_to_long_ones_and_begins_again():
    task = SMALL.build(0)
    whole = task.batches("train", 8)
    shapes = [task.batch("train", index, 8)["ask"].shape for index in range(whole)]
    assert shapes == [(8, 4)] * 8 + [(8, 8)] * 2 + [(8, 16)] * 2 + [(8, 32)] * 2 + [(8, 64)] * 2
    again = task.batch("train", whole, 8)
    assert torch.equal(again["tokens"], task.batch("train", 0, 8)["tokens"])
    first, last = (task.batch("train", index, 8)["tokens"] for index in (8, 9))
    assert torch.equal(last[4:], first[:4])  # a part's last batch is filled up with its first rows


def test_rows_depend_on_the_seed_in_training_alone():
    one, other = SMALL.build(0), SMALL.build(1)
    for split, same in (("train", False), ("valid", True), ("test", True)):
        pair = [task.batch(split, 3, 3)["tokens"] for task in (one, other)]
        assert torch.equal(*pair) == same
        assert torch.equal(one.batch(split, 3, 3)["tokens"], pair[0])
    splits = [one.batch(split, 0, 3)["tokens"] for split in ("train", "valid", "test")]
    assert not torch.equal(splits[0], splits[1])
    assert not torch.equal(splits[1], splits[2])
    with pytest.raises(IndexError, match="batch 7 of 3 rows: test has 7 batches"):
        one.batch("test", 7, 3)


def test_accuracy_is_the_mean_over_rows_and_told_for_each_number_of_pairs():
    task = SMALL.build(0)
    batch = task.batch("test", 1, 3)  # 8 pairs
    right = torch.nn.functional.one_hot(batch["target"], task.vocabulary).float()
    right[0, :4] = 0  # half of one row is wrong
    sums = task.measure({"logits": right}, batch)
    assert [x.item() for x in sums["accuracy"]] == [2.5, 3]
    assert [x.item() for x in sums["accuracy@8"]] == [2.5, 3]
    assert [x.item() for x in sums["accuracy@16"]] == [0, 0]
    assert set(sums) == {"loss", "accuracy", *(f"accuracy@{pairs}" for _, pairs in TESTED)}


def test_the_smallest_vocabulary_has_a_key_for_every_pair():
    task = replace(SMALL, vocabulary=514).build(0)
    batch = task.batch("test", task.batches("test", 3) - 1, 3)
    assert torch.equal(looked_up(batch), batch["target"])
    assert batch["target"].shape[1] == 256


def test_drawing_without_replacement_takes_every_number_equally_often():
    drawn = distinct(3000, 3, 5, 9, generator(0))
    assert all(len(set(row)) == 3 for row in drawn.tolist())
    for column in drawn.T:
        counts = torch.bincount(column, minlength=9)
        assert counts[:5].sum() == 0
        assert counts[5:].float().div(3000).tolist() == pytest.approx([0.25] * 4, abs=0.03)


METHODS = {
    "place": {},
    "place, delta, one axis": {"method": "place", "rule": "delta", "axes": 1},
    "place, three axes": {"method": "place", "axes": 3},
    "mamba2, two mixers": {"method": "mamba2", "first": "mixer"},
    **{name: {"method": name} for name in get_args(RecallMethod)[1:]},
}


def built(name, **options):
    torch.manual_seed(0)
    return RecallModelConfig(**METHODS[name] | options).build(SMALL.build(0))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::tensor_memory.ForgettingWarning")  # the published start
def test_a_model_answers_causally(name):
    size = {} if name == "attention" else {"state_bytes": 2048}
    model = built(name, dim=16, **size).eval()
    batch = SMALL.build(0).batch("valid", 0, 2)
    outputs, carry = model(batch)
    assert outputs["logits"].shape == (2, 4, 8192)
    assert carry is None
    every = torch.arange(24).expand(2, -1)
    report = find_leak(
        lambda tokens: model({"tokens": tokens, "ask": every})[0]["logits"],
        batch["tokens"][:, :24].long(),
        vocab_size=8192,
    )
    assert not report, report
    assert "no leak at" in str(report)


@pytest.mark.parametrize("kilobytes", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "attention"])
def test_a_mixer_fills_its_budget(name, kilobytes):
    """To 5 %; the tokens of convolutions and the origin of a grid come on top."""
    budget = 1024 * kilobytes
    mixer = RecallModelConfig(**METHODS[name] | {"state_bytes": budget}).mixer(budget)
    if isinstance(mixer, SelfAttention):
        size = (mixer.window - 1) * 2 * 128 * 4
    elif isinstance(mixer, Peer):
        size = mixer.zeros(1, torch.empty(0))["state"].nbytes
    else:
        size = mixer.config.state_values * 4
    assert 0.95 * budget <= size <= budget


def test_a_model_states_all_that_it_keeps():
    convolution = 2 * 128 * 4
    assert built("gla").state_bytes() == 32_768 + convolution
    assert built("deltanet").state_bytes() == 32_768 + convolution + 3 * 3 * 128 * 4
    assert built("window+").state_bytes() == 32_768 + convolution
    assert built("attention").state_bytes() == 1024 * 2 * 128 * 4 + convolution
    assert built("tensor").state_bytes() == 32_768 + convolution
    place = built("place").state_bytes() - convolution
    assert 32_768 <= place < 32_768 + 64  # and the origin of the grid
    two, one = built("mamba2, two mixers"), built("mamba2")
    assert len(two.layers) == 2
    assert one.state_bytes() == 32_768 + convolution + 3 * (256 + 2 * 32) * 4
    assert two.state_bytes() == 32_768 + 2 * 3 * (256 + 2 * 16) * 4


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: RecallModelConfig(axes=4), "model.axes: expected 1 to 3, got 4"),
        (lambda: RecallModelConfig(state_bytes=512), "expected 1024 or more, got 512"),
        (lambda: RecallModelConfig(method="magic"), "expected one of place, .*, got 'magic'"),
        (lambda: MqarConfig(vocabulary=513), "vocabulary: expected 514 or more, .*256.*, got 513"),
    ],
)
def test_what_cannot_be_built_is_refused(make, complaint):
    with pytest.raises(ValueError, match=complaint):
        make()


UNREAD = {
    "place": ("heads",),
    "tensor": ("heads", "place_heads", "axes", "rule"),
    "tensor-long": ("heads", "place_heads", "axes", "rule"),
    "mamba2": ("heads", "place_heads", "axes", "rule"),
    "attention": ("state_bytes", "place_heads", "axes", "rule"),
}


@pytest.mark.filterwarnings("ignore::tensor_memory.ForgettingWarning")  # the published start
@pytest.mark.parametrize("method", get_args(RecallMethod)[1:])
def test_around_the_mixer_all_methods_start_from_the_same_weights(method):
    ours, theirs = (built(name).state_dict() for name in ("place", method))
    around = [name for name in ours if not name.startswith("layers.1.")]
    assert len(around) == 5 + 2 * 4 + 2
    for name in around:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.filterwarnings("ignore::tensor_memory.ForgettingWarning")  # the published start
@pytest.mark.parametrize("method", get_args(RecallMethod))
def test_a_field_changes_the_mixer_or_is_refused(method):
    plain = RecallModelConfig(method=method)
    changes = {"heads": 4, "place_heads": 2, "axes": 1, "rule": "delta", "state_bytes": 16_384}
    for field, value in changes.items():
        if field in UNREAD.get(method, ("place_heads", "axes", "rule")):
            complaint = rf"model\.{field}: expected the default, .* for {re.escape(method)}, .*got"
            with pytest.raises(ValueError, match=complaint):
                replace(plain, **{field: value})
        else:
            changed = replace(plain, **{field: value})
            assert described(changed) != described(plain), field


def described(config):
    """A mixer as text, its config, heads and the shapes of its weights."""
    mixer = config.mixer(config.state_bytes)
    named = {name: value for name, value in vars(mixer).items() if not name.startswith("_")}
    return f"{mixer} {named} {[tuple(w.shape) for w in mixer.parameters()]}"


@pytest.mark.exhaustive
def test_rows_of_one_length_share_compiled_code(tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs, options):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    config = find_recipe("mqar")()
    model = replace(config.model, method="attention", dim=16)
    budget = replace(
        config.budget, steps=9, batch_size=4, evaluate_every=9, evaluation_batches=1, test=False
    )
    config = replace(config, task=replace(SMALL, train_rows=4), model=model, budget=budget)
    records = [
        train(replace(config, speed=speed), RunOptions(tmp_path / speed, device="cpu", quiet=True))
        for speed in ("eager", "compile")
    ]
    assert len(graphs) == len({length for length, _, _ in TRAINED}) == 3
    losses = [record["curve"][0]["loss"] for record in records]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE[torch.float32])
