"""A fused layer around a place memory, and one token in one launch, against the plain layer."""

import contextlib
from dataclasses import replace

import pytest
import torch

from tensor_memory import (
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    attach,
    fixed_weights,
    residual,
)
from tolerances import assert_same, assert_same_rms

token = pytest.importorskip(
    "tensor_memory.ops.places.triton.token", reason="the fused backend needs triton"
)
fused = pytest.importorskip("tensor_memory.ops.places.triton.layer")
launch = pytest.importorskip("tensor_memory.ops.launch")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DIM, ROWS = 12, 3

CONFIGS = {
    "two axes": PlaceConfig(grid=(3, 5), channels=3, heads=2),
    "delta, a circle, given": PlaceConfig(
        grid=(3, 4), channels=4, heads=2, rule="delta", wrap=True, places="given"
    ),
    "one axis, interpolated": PlaceConfig(grid=(5,), channels=2, kernel="linear"),
    "three axes, offset, read elsewhere": PlaceConfig(
        grid=(2, 3, 2), channels=2, heads=2, places="offset", share_places=False
    ),
    "more channels than the token is wide": PlaceConfig(grid=(3,), channels=40, heads=1),
    "four axes, read elsewhere": PlaceConfig(
        grid=(2, 2, 3, 2), channels=2, heads=2, rule="delta", kernel="linear", share_places=False
    ),
}
SMALL = PlaceConfig(grid=(3,), channels=2, heads=2)  # where it matters when, not what, is computed
each_config = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] * ("three" in name or "one" in name))
        for name in CONFIGS
    ],
)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


TYPES = {}
"""Of a kernel's tensors, by the kernel and the number that `Alike` has for them."""


@pytest.fixture(autouse=True)
def _launches_are_alike(monkeypatch):
    """A launch inside `Alike` is as promised: its number tells all types, and no address is odd."""
    run = launch.BoundKernel.__call__

    def checked(self, grid, tensors, numbers=()):
        kind = launch._thread.kind
        if kind is not None:
            types = [tensor.dtype for tensor in tensors]
            assert TYPES.setdefault((id(self), kind), types) == types
            assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        run(self, grid, tensors, numbers)

    monkeypatch.setattr(launch.BoundKernel, "__call__", checked)


@pytest.fixture
def launches(monkeypatch):
    """Counts tokens that went through in one launch."""
    found = []
    run = token.token_forward
    monkeypatch.setattr(token, "token_forward", lambda *a: (found.append(1), run(*a))[1])
    return found


def build(config):
    torch.manual_seed(0)
    memory = PlaceMemory(DIM, replace(config, backend="triton"))
    layer = MemoryResidual(memory, gate_init=0.3).to(HERE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape).to(HERE)
    return layer


def draw(config, rows=ROWS):
    x = torch.randn(rows, 4, DIM).to(HERE)
    where = torch.rand(rows, 4, config.axes).to(HERE) * 2.4 - 1.2  # some beyond the border
    return x, None if config.places == "learned" else where


def stream(layer, x, where):
    """Token by token: what came out, and the state after."""
    found, state = [], None
    for t in range(x.shape[1]):
        at = {} if where is None else {"where": where[:, t : t + 1]}
        y, state = layer(x[:, t : t + 1], state, **at)
        found.append(y)
    return torch.cat(found, 1), state


def plain(monkeypatch, layer, *tokens):
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(residual, "fused_layer", lambda *_, **__: None)
        layer.memory.config = replace(layer.memory.config, backend="reference")
        found = stream(layer, *tokens)
        layer.memory.config = replace(layer.memory.config, backend="triton")
    return found


def weights_like(out):
    return torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)


def everything(layer, x, where, reset):
    """Output, state and every gradient of a call that continues another."""
    state = layer(x[:, :1], **({} if where is None else {"where": where[:, :1]}))[1].detach()
    state = replace(state, values=state.values.requires_grad_())
    x = x.clone().requires_grad_()
    at = {} if where is None else {"where": where.clone().requires_grad_()}
    layer.zero_grad()
    out, after = layer(x, state, reset=reset, **at)
    ((out * weights_like(out)).sum() + after.values.square().sum()).backward()
    found = {"out": out, "after": after.values, "x": x.grad, "state": state.values.grad}
    found |= {name: given.grad for name, given in at.items()}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters()}


@each_config
def test_a_fused_layer_is_the_plain_one(name, monkeypatch):
    layer, (x, where) = build(CONFIGS[name]), draw(CONFIGS[name])
    reset = torch.zeros(ROWS, 4, dtype=torch.bool, device=HERE)
    reset[1, 2] = True
    ran = []
    run = fused.place_layer
    monkeypatch.setattr(fused, "place_layer", lambda *a: (ran.append(1), run(*a))[1])
    got = everything(layer, x, where, reset)
    assert ran == [1, 1]
    monkeypatch.setattr(residual, "fused_layer", lambda *_, **__: None)
    layer.memory.config = replace(layer.memory.config, backend="reference")
    wide = None if where is None else where.double()
    expected = everything(layer.double(), x.double(), wide, reset)
    # The gate's gradient is one sum over all outputs: of 10 in absolute values 0.17 is left.
    by_gate = weights_like(x) * (expected["out"] - x) * (1 - layer.gate.sigmoid())
    for part, value in expected.items():
        terms = by_gate if part == "gate" else None
        assert_same_rms(part, got[part], value, torch.float32, terms)


def test_a_large_grid_starts_empty(monkeypatch):
    config = PlaceConfig(grid=(16, 16), channels=2, heads=1, kernel="linear")
    layer, (x, _) = build(config), draw(config, 1)
    with torch.no_grad():
        got, state = layer(x)
    expected, expected_state = plain(monkeypatch, layer, x, None)
    assert_same(got, expected)
    assert_same(state.values, expected_state.values)


def test_more_rows_than_a_gpu_launches_go_the_plain_way(monkeypatch):
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    expected = layer(x)[0]
    monkeypatch.setattr(fused, "place_layer", None)
    monkeypatch.setattr(fused, "MOST_PROGRAMS", len(x))
    assert_same(layer(x)[0], expected)


def test_an_odd_number_of_places_leaves_no_odd_address():
    layer = build(PlaceConfig(grid=(260,), channels=2, heads=1, rule="delta", kernel="linear"))
    TYPES.clear()
    out, _ = layer(torch.randn(1, 3, DIM).to(HERE))
    out.sum().backward()
    assert len(TYPES) > 12  # so many kernels were launched inside `Alike`, and looked at


def test_what_runs_while_saved_tensors_are_fetched_is_not_taken_for_alike():
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    kinds = []

    def fetched(tensor):  # as activation checkpointing does, which runs a block again here
        kinds.append(launch._thread.kind)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, fetched):
        layer(x)[0].sum().backward()
    assert kinds
    assert set(kinds) == {None}


def test_a_layer_runs_under_autocast_and_without_in_turn():
    layer, (x, _) = build(SMALL), draw(SMALL, 1)
    found = []
    for low in (False, True, False):
        with torch.autocast(HERE.type, torch.bfloat16, enabled=low):
            out, _ = layer(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    exact, low, again = found
    assert all(map(torch.equal, exact, again))
    assert_same_rms("out", low[0], exact[0].double(), torch.bfloat16)


def test_a_fused_layer_drops_what_its_backward_drops():
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    layer.dropout, x = 0.5, x.requires_grad_()
    out, _ = layer(x)
    dropped = out == x
    assert 0.3 < dropped.float().mean() < 0.7
    (by_output,) = torch.autograd.grad(out[dropped].sum(), [layer.memory.output.weight])
    assert not by_output.any()


@pytest.fixture
def packings(monkeypatch):
    """Counts how often the weights of a memory were packed."""
    found = []
    run = fused._packed
    monkeypatch.setattr(fused, "_packed", lambda *a: (found.append(1), run(*a))[1])
    return found


def shared_layers():
    layer = build(SMALL)
    return layer, MemoryResidual(layer.memory, gate_init=-0.4, own_memory=False).to(HERE)


def through(layers, x, between=lambda: None):
    first, second = layers
    x, _ = first(x)
    between()
    return second(x)[0]


def test_layers_that_share_a_memory_pack_it_once_and_learn_the_same(packings):
    layers, (x, _) = shared_layers(), draw(SMALL, 1)
    weights = dict(torch.nn.ModuleList(layers).named_parameters())
    found = []
    for pass_ in (contextlib.nullcontext(), fixed_weights()):
        with pass_:
            out = through(layers, x)
        weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)
        grads = torch.autograd.grad((out * weight).sum(), list(weights.values()))
        found.append([out, *grads])
    assert len(packings) == 2 + 1
    for name, once, apart in zip(["out", *weights], found[1], found[0], strict=True):
        assert_same_rms(name, once, apart.double(), torch.float32)


def test_attached_layers_pack_a_shared_memory_once_a_call(packings):
    block = torch.nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True)
    host = torch.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).to(HERE)
    attach(host, replace(SMALL, backend="triton"))
    for calls in (1, 2):
        host(torch.randn(1, 4, DIM).to(HERE)).sum().backward()
        assert len(packings) == calls


def test_other_weights_inside_a_pass_are_packed_again(packings):
    layers, (x, _) = shared_layers(), draw(SMALL, 1)
    memory = layers[0].memory

    def change():
        with torch.no_grad():
            memory.content.weight += 1.0

    with fixed_weights():
        before = through(layers, x)
        through(layers, x)
        assert len(packings) == 1
        got = through(layers, x, change)
        assert len(packings) == 2
        plain = layers[0](x)[0] - x
        double = memory.output.weight.detach() * 2
        while double._version < memory.output.weight._version:
            double.mul_(1)
        given = {"memory.output.weight": double}
        doubled = torch.func.functional_call(layers[0], given, (x,))[0] - x
        assert len(packings) == 3
    assert not torch.equal(got, before)
    assert_same(doubled, 2 * plain)
    memory.content.weight.data -= 1.0  # nothing is held after a pass
    with fixed_weights():
        assert_same(through(layers, x), before)


def test_weights_set_free_inside_a_pass_learn(packings):
    layers, (x, _) = shared_layers(), draw(SMALL, 1)
    memory = layers[0].memory.requires_grad_(False)
    with fixed_weights():
        layers[0](x)
        memory.requires_grad_(True)
        layers[1](x)[0].sum().backward()
    assert all(weight.grad is not None for weight in memory.parameters())


def test_a_pass_within_a_pass_leaves_nothing_behind(packings):
    layers, (x, _) = shared_layers(), draw(SMALL, 1)
    with fixed_weights():
        through(layers, x)
        with fixed_weights():
            through(layers, x)
        through(layers, x)
    assert len(packings) == 2
    through(layers, x)
    assert len(packings) == 4


def test_weights_made_in_inference_mode_run_in_a_pass():
    with torch.inference_mode():
        layers = [layer.requires_grad_(False) for layer in shared_layers()]
    x, _ = draw(SMALL, 1)
    with fixed_weights():
        got = through(layers, x)
    assert torch.equal(got, through(layers, x))


@each_config
def test_a_token_in_one_launch_is_the_plain_token(name, launches, monkeypatch):
    layer, tokens = build(CONFIGS[name]), draw(CONFIGS[name])
    expected, expected_state = plain(monkeypatch, layer, *tokens)
    with torch.no_grad():
        got, state = stream(layer, *tokens)
    assert len(launches) == 4
    assert_same(got, expected)
    assert_same(state.values, expected_state.values)


def test_an_agent_that_has_moved_writes_where_it_stands(launches, monkeypatch):
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    shift = torch.tensor([[0.3, 0.1]]).expand(ROWS, 2).to(HERE)
    found = []
    for way in (lambda *a, **k: None, residual.fused_layer):
        monkeypatch.setattr(residual, "fused_layer", way)
        with torch.no_grad():
            _, state = layer(x[:, :1])
            found.append(layer(x[:, 1:2], state.moved(shift))[0])
    assert len(launches) == 2
    assert_same(*found)


def test_what_must_be_learned_from_or_heard_runs_plainly(launches):
    layer, (x, _) = build(SMALL), draw(SMALL, 1)
    layer(x[:, :1])  # gradients
    with torch.no_grad():
        layer(x[:, :2])  # two tokens
        layer(x[:, :1], mask=torch.ones(1, 1, dtype=torch.bool, device=HERE))
        heard = []
        handle = layer.memory.content.register_forward_hook(lambda *_: heard.append(1))
        layer(x[:, :1])
        assert heard == [1]
        handle.remove()
        layer.memory.content = torch.nn.Sequential(layer.memory.content)  # as an adapter does
        layer(x[:, :1])
    assert not launches


def test_a_frozen_layer_tells_where_a_single_token_should_have_been(launches):
    layer, (x, _) = build(CONFIGS["two axes"]).requires_grad_(False), draw(CONFIGS["two axes"])
    state, shift = layer(x)[1], torch.tensor([0.1, 0.05], device=HERE, requires_grad=True)
    layer(x[:, :1], state.moved(shift))[0].sum().backward()
    assert shift.grad is not None
    assert shift.grad.all()
    assert not launches


def test_a_part_that_was_given_a_bias_has_one():
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    before, _ = layer(x)
    content = torch.nn.Linear(DIM, 6).to(HERE)
    content.weight, content.bias.data[:] = layer.memory.content.weight, 5.0
    layer.memory.content = content
    assert not torch.equal(layer(x)[0], before)


def test_a_state_in_float64_is_refused_as_without_a_layer():
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    _, state = layer(x)
    for call in (layer, layer.memory):
        with pytest.raises(ValueError, match=r"it computes in float32, got torch\.float64"):
            call(x, state.to(torch.float64))


@pytest.mark.gpu
def test_a_token_takes_one_launch():
    layer, (x, _) = build(CONFIGS["two axes"]), draw(CONFIGS["two axes"])
    token = x[:, :1].contiguous()
    with torch.no_grad():
        _, state = layer(token)
        layer(token, state)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            layer(token, state)
            torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, [event.name for event in kernels]
