"""A whole layer, or one token of it, in a few launches: against the plain code it stands in for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scans import HERE
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from memories import OPTIONS, assert_same_state
from sampled import exhaustive_but
from tensor_memory import MemoryConfig, MemoryResidual, MemoryState, TensorMemory, residual
from tensor_memory.ops import why_not
from tolerances import RMS_RATIO, assert_same, assert_same_rms

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

from tensor_memory import fused_layer as fused
from tensor_memory.ops.scan import layer as ops

DIM = 10
SERVED = {  # what differs outside the scan; interpreted, every voxel counts
    name: replace(OPTIONS[name], backend="triton", channels=16, grid=(2,))
    for name in ("paper", "token reads, heads", "separate coordinates", "nearest", "sigma, biases")
}
SMALL = SERVED["paper"]  # chunks of three
SERVED["few channels"] = replace(SMALL, channels=3)  # which the scan widens to 16
SERVED["long chunks"] = replace(SMALL, chunk_size=6)  # more tokens than one draw drops from
SAMPLE = ("paper", "token reads, heads", "few channels")
EACH_OPTION = exhaustive_but(SAMPLE, SERVED)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def fused_calls(monkeypatch) -> list[str]:
    """The fused functions that ran."""
    ran = []
    for name in ("fused_layer_forward", "token_forward"):
        function = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda *a, name=name, function=function: (ran.append(name), function(*a))[1]
        )
    return ran


def build(config: MemoryConfig, seed: int = 0, **options: float) -> MemoryResidual:
    torch.manual_seed(seed)
    layer = MemoryResidual(TensorMemory(DIM, config), gate_init=0.3, **options).to(HERE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape).to(HERE)
    return layer


def tokens(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, DIM).to(HERE)


def everything(layer: MemoryResidual, x: Tensor, state: MemoryState | None = None, **call) -> dict:
    """Output, state and every gradient."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out, after = layer(x, state, **call)
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)
    ((out * weight).sum() + after.cell.square().sum()).backward()
    found = {"out": out.detach(), "state": after.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}


def plainly(monkeypatch) -> None:
    """From here on nothing is fused but the scan."""
    monkeypatch.setattr(residual, "fused_layer", lambda *_, **__: None)


def twin(layer: MemoryResidual, backend: str) -> MemoryResidual:
    """The same layer by another backend, around which nothing is fused."""
    memory = TensorMemory(DIM, replace(layer.memory.config, backend=backend))
    other = MemoryResidual(memory).to(HERE)
    other.load_state_dict(layer.state_dict())
    for mine, theirs in zip(other.parameters(), layer.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    return other


def assert_fused_is_plain(layer, x, state=None, **call) -> None:
    """Equal states, and nothing further from float64 than the plain layer, which sums that nearly
    cancel may take beyond the bound."""
    got = everything(layer, x, state, **call)
    plain = everything(twin(layer, "torch"), x, state, **call)
    before = None if state is None else state.to(torch.float64)
    exact = everything(twin(layer, "reference").double(), x.double(), before, **call)
    assert_same_state(got.pop("state"), plain.pop("state"))
    del exact["state"]
    for name, value in exact.items():
        if plain[name] is None:  # frozen
            assert got[name] is None, name
            continue
        assert got[name].shape == value.shape, name
        size = value.square().mean().sqrt().item() or 1.0
        error, plain_error = (
            (d[name].double() - value).square().mean().sqrt().item() / size for d in (got, plain)
        )
        assert error <= max(2 * plain_error, RMS_RATIO[torch.float32]), f"{name}: {error:.2e}"


@pytest.mark.parametrize("option", EACH_OPTION)
def test_a_fused_layer_is_the_plain_one(option, fused_calls, monkeypatch):
    layer = build(SERVED[option])
    x = tokens(2, 2 * SERVED[option].chunk_size)  # a first chunk reads nothing
    assert_fused_is_plain(layer, x)
    with torch.no_grad():
        got, state = layer(x)
        assert fused_calls == ["fused_layer_forward"] * 2
        plainly(monkeypatch)
        expected, expected_state = layer(x)
    assert_same(got, expected)
    assert_same_state(state, expected_state)


@pytest.mark.parametrize(
    ("reads", "flush"),
    [
        pytest.param("chunk", 4, marks=pytest.mark.exhaustive),
        pytest.param("chunk", 2, marks=pytest.mark.exhaustive),
        pytest.param("token", 4, marks=pytest.mark.exhaustive),
        ("token", True),
    ],
)
def test_a_fused_layer_flushes_frames(reads, flush, fused_calls):
    assert_fused_is_plain(build(replace(SMALL, reads=reads)), tokens(2, 8), flush=flush)
    assert fused_calls


def test_calls_that_leave_a_chunk_unfinished_run_plain_code(fused_calls):
    layer, x = build(SMALL), tokens(2, 8)
    _, state = layer(x)  # eight tokens leave two of three waiting
    layer(x[:, :4], state.detach())  # and two that wait come first here
    layer(x[:, :5], flush=4)  # a frame and a token
    layer(x[:, :6], mask=torch.ones(2, 6, dtype=torch.bool, device=HERE))
    assert fused_calls == []


def test_under_autocast_a_fused_layer_is_as_exact_as_the_plain_one(monkeypatch):
    layer, x = build(SMALL), tokens(1, 6)
    with torch.autocast(HERE.type, torch.bfloat16):
        got = everything(layer, x)
        plainly(monkeypatch)
        plain = everything(layer, x)
    exact = everything(layer, x)
    del exact["state"]
    for name, value in exact.items():
        size = value.square().mean().sqrt()
        error, plain_error = (
            ((d[name] - value).square().mean().sqrt() / size).item() for d in (got, plain)
        )
        assert got[name].dtype == plain[name].dtype == torch.float32
        assert error <= max(3 * plain_error, RMS_RATIO[torch.bfloat16]), name


def test_a_backward_multiplies_as_its_forward_did_whatever_autocast_says_by_then():
    def gradient(autocast: bool) -> Tensor:
        layer, x = build(SMALL), torch.linspace(-1, 1, 6 * DIM).to(HERE).requires_grad_()
        out, _ = layer(x.view(1, 6, DIM))
        with torch.autocast(HERE.type, torch.bfloat16, enabled=autocast):
            out.backward(torch.ones_like(out))
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(autocast=True), gradient(autocast=False))


def test_a_fused_layer_holds_nothing_once_its_backward_has_run():
    x = tokens(1, 6).requires_grad_()
    out, _ = build(SMALL)(x)
    node = out.grad_fn
    assert type(node).__name__ == "_FusedLayerBackward"
    out.sum().backward()
    held = torch.utils._pytree.tree_leaves(vars(node))
    assert held
    assert not any(isinstance(value, Tensor) for value in held)
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = node.saved_tensors


def test_a_fused_layer_can_be_learned_from_through_its_state_alone(monkeypatch):
    x = tokens(1, 6)

    def gradients() -> list[Tensor]:
        layer, given = build(SMALL), x.clone().requires_grad_()
        layer(given)[1].hidden.square().sum().backward()
        grads = [given.grad, *(p.grad for p in layer.memory.parameters())]
        return [grad for grad in grads if grad is not None and grad.count_nonzero()]

    got = gradients()
    plainly(monkeypatch)
    expected = gradients()
    assert len(expected) > 5
    for mine, right in zip(got, expected, strict=True):
        assert_same_rms("gradient", mine, right.double(), torch.float32)


def swapped(layer: MemoryResidual) -> None:
    """Other values at other addresses, under the same parameters, in another type."""
    for parameter in layer.parameters():
        parameter.data = (parameter.data + 0.1 * torch.randn(parameter.shape).to(HERE)).bfloat16()


def shared(layer: MemoryResidual) -> None:
    """One head for reads and writes, where there were two."""
    layer.memory.read_coordinate.weight = layer.memory.write_coordinate.weight


def test_a_layer_sees_its_weights_as_they_are_now():
    config = replace(SERVED["separate coordinates"], read_heads=1, write_heads=1)
    used, fresh = build(config), build(config)
    x = tokens(1, 6)
    everything(used, x)
    for layer in (used, fresh):
        torch.manual_seed(1)
        shared(layer)
        swapped(layer)
    x = x.to(used.gate.dtype)
    got, expected = everything(used, x), everything(fresh, x)
    assert_same_state(got.pop("state"), expected.pop("state"))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_a_layer_of_mixed_types_gives_each_weight_what_one_of_float32_gives():
    mixed, single, x = build(SMALL), build(SMALL), tokens(1, 6)
    mixed.norm.to(torch.bfloat16)
    single.norm.load_state_dict(mixed.norm.state_dict())  # the same values in float32
    with torch.autocast(HERE.type, torch.bfloat16):
        got, expected = everything(mixed, x), everything(single, x)
    for name, parameter in mixed.named_parameters():
        assert got[name].dtype == parameter.dtype, name
        assert got[name].stride() == parameter.stride(), name
        assert torch.equal(got[name], expected[name].to(parameter.dtype)), name


@pytest.mark.parametrize("low", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_layer_that_keeps_fewer_states_learns_the_same(low):
    x = tokens(1, 9)
    with torch.autocast(HERE.type, torch.bfloat16, enabled=low):
        expected = everything(build(SMALL), x)
        got = everything(build(replace(SMALL, checkpoint_every=2)), x)
    for name in got.keys() - {"state"}:
        dtype = torch.bfloat16 if low else torch.float32
        assert_same_rms(name, got[name], expected[name].double(), dtype)


def test_a_frozen_memory_passes_gradients_on():
    layer = build(SMALL)
    layer.memory.requires_grad_(False)
    assert_fused_is_plain(layer, tokens(1, 6))


def test_a_layer_drops_in_training_alone():
    layer, x = build(SMALL, dropout=0.5, drop_path=0.2), tokens(2, 3)
    state = layer(tokens(2, 3))[1].detach()
    added = layer.eval()(x, state)[0] - x
    dropped = layer.train()(x, state)[0] - x
    gone = dropped.abs() < 1e-5
    assert torch.allclose(dropped[~gone], added[~gone] / (0.5 * 0.8), atol=1e-4)
    assert gone.any()
    assert not gone.all()


WATCHED = {
    "norm": lambda module, note: module.register_forward_pre_hook(note),
    "memory": lambda module, note: module.register_forward_hook(note),
    "memory.content": lambda module, note: module.register_full_backward_hook(note),
    "memory.output": lambda module, note: module.register_full_backward_pre_hook(note),
    "memory.coordinate": lambda module, note: setattr(
        module, "forward", lambda x, forward=module.forward: (note(), forward(x))[1]
    ),
    "": lambda _, note: register_module_forward_hook(note),  # on all modules
}


@pytest.mark.parametrize("name", WATCHED)
def test_a_module_that_is_watched_in_any_way_is_called(name):
    layer, seen = build(SMALL), []
    handle = WATCHED[name](layer.get_submodule(name), lambda *_: seen.append(1))
    layer(tokens(1, 3).requires_grad_())[0].sum().backward()
    if name == "":
        handle.remove()
    assert seen


def test_modules_of_another_kind_are_not_plain():
    class OwnLinear(nn.Linear):
        pass

    assert not fused._are_plain_heads([OwnLinear(DIM, 2, bias=False)])
    assert not fused._is_plain_norm(nn.RMSNorm(DIM), DIM)
    assert not fused._is_plain_norm(nn.LayerNorm((2, DIM)), DIM)


def test_types_and_backends_that_are_not_served_take_the_plain_code():
    x = tokens(2, 6)
    assert fused._fused_ops(x, "triton") is not None
    assert fused._fused_ops(x.double(), "triton") is None
    assert fused._fused_ops(x[:, :0], "triton") is None
    assert fused._fused_ops(x, "reference") is None
    assert fused._fused_ops(x.new_ones(1, 1, 8193), "triton") is None
    with torch.autocast(HERE.type, torch.float16):
        assert fused._fused_ops(x, "triton") is None
    volume = torch.ones(1, 16, 2, device=HERE)
    own, weights = volume.as_subclass(nn.Buffer), ops.LayerWeights(*[volume] * 13)
    assert ops.serves_state(volume, volume, weights)
    assert not ops.serves_state(volume, own, weights)
    assert not ops.serves_state(volume, volume, weights._replace(mix=own))
    large = torch.ones(1, 16, 4097, device=HERE)
    assert not ops.serves_state(large, large, weights)


def bias(size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size).to(HERE))


CHANGES = {
    "norm without bias": lambda layer: setattr(layer, "norm", nn.LayerNorm(DIM, bias=False)),
    "norm without weights": lambda layer: setattr(layer, "norm", nn.LayerNorm(DIM, 1e-5, False)),
    "spread without bias": lambda layer: setattr(layer.memory.spread, "bias", None),
    "content with bias": lambda layer: setattr(layer.memory.content, "bias", bias(16)),
    "output with bias": lambda layer: setattr(layer.memory.output, "bias", bias(DIM)),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_biases_that_were_taken_away_or_added_count(change, monkeypatch):
    layer, x = build(SMALL).eval(), tokens(1, 6)
    CHANGES[change](layer)
    layer.to(HERE)

    def results() -> tuple[Tensor, Tensor]:
        whole, state = layer(x)
        return whole, layer(x[:, :1], state)[0]

    got = results()
    plainly(monkeypatch)
    for mine, right in zip(got, results(), strict=True):
        assert_same(mine, right)


def scatter(layer: MemoryResidual) -> None:
    """The same weights, each with something else between its values."""
    names = ("norm.weight", "norm.bias", "memory.spread.bias", "memory.coordinate.weight",
             "memory.output.weight")  # fmt: skip
    for name in names:
        parameter = layer.get_parameter(name)
        parameter.data = torch.stack([parameter.data, torch.randn_like(parameter)], -1)[..., 0]
        assert not parameter.is_contiguous()


def test_weights_need_not_be_contiguous():
    config = replace(SMALL, read_heads=2, write_heads=2)
    layer, usual, x = build(config), build(config), tokens(2, 6)
    scatter(layer)
    assert_fused_is_plain(layer, x)
    with torch.no_grad():
        state = usual(x)[1]
        assert torch.equal(layer(x[:, :1], state)[0], usual(x[:, :1], state)[0])


# One token.


@pytest.mark.parametrize(
    "option",
    [
        "paper",
        "token reads, heads",
        pytest.param("separate coordinates", marks=pytest.mark.exhaustive),
    ],
)
@torch.no_grad()
def test_tokens_one_by_one_give_what_all_at_once_give(option, fused_calls, monkeypatch):
    layer, x = build(replace(SERVED[option], grid=(2, 3))).eval(), tokens(2, 7)
    outputs, state = [], None
    for token in x.split(1, dim=1):
        out, state = layer(token, state)
        outputs.append(out)
        if len(outputs) == 6:
            complete = state
    assert fused_calls == ["token_forward"] * 7
    plainly(monkeypatch)
    expected, expected_state = layer(x)
    assert_same(torch.cat(outputs, dim=1), expected)
    assert_same_state(state, expected_state)
    assert state.aligned == expected_state.aligned
    assert_same_state(complete, layer(x[:, :6])[1])  # nothing of a written chunk is left


@torch.no_grad()
def test_a_token_leaves_the_state_it_was_given_as_it_was():
    layer, x = build(SMALL).eval(), tokens(2, 4)
    _, before = layer(x[:, :2])
    copies = [getattr(before, name).clone() for name in ("hidden", "cell", "tokens", "fill")]
    layer(x[:, 2:3], before)
    for name, copy in zip(("hidden", "cell", "tokens", "fill"), copies, strict=True):
        assert torch.equal(getattr(before, name), copy), name


def test_a_token_is_learned_from_through_its_state_or_its_memory_alone():
    layer, x = build(SMALL), tokens(2, 1)
    state = layer(tokens(2, 3))[1].detach()
    layer.requires_grad_(False)
    hidden = state.hidden.clone().requires_grad_()
    layer(x, replace(state, hidden=hidden))[0].sum().backward()
    assert hidden.grad.any()
    weight = layer.memory.output.weight.requires_grad_()
    other = MemoryResidual(layer.memory, own_memory=False).to(HERE).requires_grad_(False)
    other(x, state)[0].sum().backward()
    assert weight.grad.any()


@torch.no_grad()
def test_a_token_may_end_a_frame_or_be_dropped():
    layer = build(SMALL, dropout=0.5).eval()
    x, state = tokens(2, 1), layer(tokens(2, 3))[1]
    _, after = layer(x, state, flush=True)
    assert after.fill.eq(0).all()
    assert not torch.equal(after.cell, state.cell)
    dropped = layer.train()(x, state)[0] == x
    assert dropped.any()
    assert not dropped.all()
