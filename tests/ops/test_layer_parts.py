"""The parts of a fused layer by themselves: whom they stand in for, and sums of many tokens."""

from __future__ import annotations

import pytest
import torch
from scans import HERE
from torch import Tensor, nn

from tensor_memory.ops import why_not
from tolerances import assert_same_rms

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

from tensor_memory.ops import layer, layer_parts
from tensor_memory.ops.layer_heads import steer
from tensor_memory.ops.packing import Heads

DIM = 10

WAYS_TO_WATCH = {
    "forward": lambda module: setattr(module, "forward", module.forward),
    "before": lambda module: module.register_forward_pre_hook(print),
    "after": lambda module: module.register_forward_hook(print),
    "before the backward": lambda module: module.register_full_backward_pre_hook(print),
    "after the backward": lambda module: module.register_full_backward_hook(print),
}


@pytest.mark.parametrize("way", WAYS_TO_WATCH)
def test_a_module_that_is_watched_in_any_way_is_not_plain(way):
    head, norm = nn.Linear(DIM, 2, bias=False), nn.LayerNorm(DIM)
    assert layer_parts.plain_heads([head])
    assert layer_parts.plain_norm(norm, DIM)
    for module in (head, norm):
        WAYS_TO_WATCH[way](module)
    assert not layer_parts.plain_heads([head])
    assert not layer_parts.plain_norm(norm, DIM)


def test_modules_of_another_kind_are_not_plain():
    class OwnLinear(nn.Linear):
        pass

    class OwnNorm(nn.LayerNorm):
        pass

    assert not layer_parts.plain_heads([OwnLinear(DIM, 2, bias=False)])
    assert not layer_parts.plain_norm(OwnNorm(DIM), DIM)
    assert not layer_parts.plain_norm(nn.LayerNorm((2, DIM)), DIM)


def test_a_whole_layer_takes_plain_tensors_on_grids_that_kernels_serve():
    class OwnTensor(Tensor):
        pass

    volume = torch.ones(1, 16, 2, device=HERE)
    own, weights = volume.as_subclass(OwnTensor), layer.Weights(*[volume] * 13)
    assert layer.serves_whole(volume, volume, weights)
    assert not layer.serves_whole(volume, own, weights)
    assert not layer.serves_whole(volume, volume, weights._replace(mix=own))
    large = torch.ones(1, 16, 4097, device=HERE)
    assert not layer.serves_whole(large, large, weights)


@pytest.mark.parametrize("used", ["both", "norm", "through"])
def test_norms_of_many_tokens_share_the_sums_for_their_weights(used, monkeypatch):
    monkeypatch.setattr(layer_parts, "NORM_PROGRAMS", 2)  # for five blocks of 128 tokens
    x, norm = torch.randn(1, 600, DIM).to(HERE), nn.LayerNorm(DIM).to(HERE)
    weight = torch.randn(2, 1, 600, DIM).to(HERE)
    weight[{"both": [], "norm": [1], "through": [0]}[used]] = 0

    def gradients(fused: bool) -> list[Tensor | None]:
        norm.zero_grad()
        given = x.clone().requires_grad_()
        normed, through = (
            layer_parts.norm_and_through(given, norm) if fused else (norm(given), given)
        )
        results = [r for r, w in zip((normed, through), weight, strict=True) if w.any()]
        torch.autograd.backward(results, [w for w in weight if w.any()])
        return [given.grad, norm.weight.grad, norm.bias.grad]

    for got, expected in zip(gradients(fused=True), gradients(fused=False), strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            assert_same_rms("gradient", got, expected.double(), torch.float32)


def test_a_narrow_spread_keeps_its_digits():
    bias, weight = torch.tensor([-12.0, -3.0, 30.0]).to(HERE), torch.zeros(3, DIM).to(HERE)
    project = torch.zeros(DIM, DIM).to(HERE)
    heads = Heads(project, weight, weight, weight, weight, bias)
    spread = steer(torch.ones(1, 1, 1, DIM).to(HERE), heads, 1, False, 1.0)[2]
    expected = nn.functional.softplus(bias.double()) + 1e-4
    for got, right in zip(spread.flatten(), expected, strict=True):
        assert_same_rms("spread", got, right, torch.float32)
