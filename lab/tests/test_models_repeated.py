"""Layers called for many segments: the same numbers from fewer, larger operations."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensor_memory_lab.models import repeated as repeated_module
from tensor_memory_lab.models.block import initialise
from tensor_memory_lab.models.repeated import LayerNorm, Linear, repeated
from tensor_memory_lab.models.stack import Stack, StackConfig
from tolerances import assert_same

SLOTS = StackConfig(dim=8, layers=2, heads=2, length=11, recurrent_slots=3, segment=2)


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(repeated_module, "PLAIN", ())


def made(config=SLOTS, dtype=torch.float64):
    torch.manual_seed(3)
    stack = Stack(config)
    initialise(stack, std=0.3)
    return stack.to(dtype)


def results(stack, x):
    """What a stack makes of x, and the gradients of x and of every weight."""
    weights = dict(stack.named_parameters())
    y, _ = stack(x)
    weigh = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device)
    loss = (y * weigh.view(y.shape)).sum()
    gradients = torch.autograd.grad(loss, [x, *weights.values()], allow_unused=True)
    return {"y": y} | dict(zip(["x", *weights], gradients, strict=True))


@pytest.mark.parametrize("length", [11, 2, 1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_segments_have_the_gradients_of_ordinary_layers(monkeypatch, device, length):
    stack = made().to(device)
    x = torch.randn(2, length, 8, dtype=torch.float64, device=device, requires_grad=True)
    got = results(stack, x)
    monkeypatch.setattr(repeated_module, "PLAIN", (device,))
    expected = results(stack, x)
    for name in expected:
        if expected[name] is None:  # the norm of what nobody reads
            assert got[name] is None
        else:
            assert_same(got[name], expected[name])


def test_slots_are_those_of_a_loop_written_out():
    """Segment after segment by the definition, with the prepared masks made anew."""
    stack, m = made(), SLOTS.recurrent_slots
    x = torch.randn(2, 11, 8, dtype=torch.float64)
    slots, expected = stack.slots.empty.expand(2, -1, -1), []
    for start in range(0, 11, 2):
        part = x[:, start : start + 2]
        after = torch.cat([slots, part, slots + stack.slots.write], dim=1)
        seen = torch.ones(after.shape[1], after.shape[1]).tril().bool()
        seen[:m, :m] = seen[-m:] = True
        for block in stack.blocks:
            q, k, v = block.attention.qkv(block.attention_norm(after)).chunk(3, dim=-1)
            q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in (q, k, v))
            scores = (q @ k.mT / 2).masked_fill(~seen, -torch.inf)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            after = block.transform(after + block.attention.project(mixed))
        expected.append(after[:, m:-m])
        slots = stack.slots.norm(after[:, -m:])
    assert_same(stack(x)[0], torch.cat(expected, dim=1))


def test_a_second_step_starts_from_nothing_kept():
    stack = made()
    x = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)
    first, second = results(stack, x), results(stack, x)
    for name, gradient in first.items():
        if gradient is not None:
            assert torch.equal(second[name], gradient), name


def test_a_second_backward_through_one_pass_gives_the_same():
    stack = made()
    weight = stack.blocks[1].mlp_norm.weight
    loss = stack(torch.randn(2, 11, 8, dtype=torch.float64))[0].sum()
    (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, second)


def test_two_passes_before_one_backward_both_count():
    stack = made()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    weight = stack.blocks[0].widen.weight
    (once,) = torch.autograd.grad(stack(x)[0].sum(), weight)
    (twice,) = torch.autograd.grad(stack(x)[0].sum() + stack(x)[0].sum(), weight)
    assert_same(twice, 2 * once)


def test_a_frozen_layer_gets_no_gradient_and_passes_one_on():
    stack = made()
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    expected = results(stack, x)["x"]
    stack.requires_grad_(False)
    stack(x)[0].mul(torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 4, 8)).sum().backward()
    assert x.grad is not None
    assert_same(x.grad, expected)
    assert all(weight.grad is None for weight in stack.parameters())


def test_layers_are_ordinary_again_after_an_error():
    layer = torch.nn.Sequential(Linear(2, 2), LayerNorm(2))
    with pytest.raises(RuntimeError, match="shapes"), repeated(layer, torch.zeros(1)):
        layer(torch.zeros(1, 3))
    assert all(part.shared is None for part in layer)


@pytest.mark.parametrize("where", ["no_grad", "autocast", "cpu"])
def test_layers_stay_ordinary_where_there_is_nothing_to_gain(monkeypatch, where):
    layer = Linear(2, 2)
    outside = torch.autocast("cpu", torch.bfloat16) if where == "autocast" else nullcontext()
    outside = torch.no_grad() if where == "no_grad" else outside
    if where == "cpu":
        monkeypatch.undo()
    with outside, repeated(layer, torch.zeros(1)):
        assert layer.shared is None


@pytest.mark.parametrize("length", [12, 11])
def test_slots_train_under_autocast(length):
    stack = made(replace(SLOTS, length=length), torch.float32)
    x = torch.randn(2, length, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = stack(x)
    y.sum().backward()
    assert_same(y, stack(x)[0], torch.bfloat16)


VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unbind", "slice", "split"}
VIEWS |= {"split_with_sizes", "detach", "unsqueeze", "squeeze", "alias", "select", "empty"}


class Operations(TorchDispatchMode):
    """Counts what would be a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.found[name] += name not in VIEWS
        return function(*args, **(kwargs or {}))


def operations(length):
    stack = made(replace(SLOTS, length=length))
    x = torch.randn(2, length, 8, dtype=torch.float64)
    with Operations() as counted:
        stack(x)[0].sum().backward()
    return counted.found


def test_a_segment_more_adds_no_gradient_of_a_weight():
    few, many = operations(8), operations(16)  # 4 and 8 segments of 2 layers
    assert many["sum"] == few["sum"]
    assert many["mm"] - few["mm"] == 4 * 2 * 4  # of the inputs of four linear layers
    assert many["add"] - few["add"] <= 4 * (2 * 4 + 2)  # two residuals, and slots that are read
    assert not many["where"]  # masks were made when it was built
    assert not many["masked_fill"]
