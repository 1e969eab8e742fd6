"""What surrounds a fused scan, against the plain code it stands in for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from scans import HERE
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from memories import OPTIONS, assert_same_state
from tensor_memory import MemoryConfig, MemoryResidual, MemoryState, TensorMemory, residual
from tensor_memory.ops import why_not
from tensor_memory.ops.scan.memory_scan import fused_layer
from tolerances import RMS_RATIO, assert_same, assert_same_rms

pytestmark = pytest.mark.skipif(
    why_not("triton", HERE) is not None, reason=f"triton: {why_not('triton', HERE)}"
)
DIM = 10
SERVED = {  # what differs outside the scan; interpreted, every voxel counts
    name: replace(OPTIONS[name], backend="triton", channels=16, grid=(2,))
    for name in ("paper", "token reads, heads", "separate coordinates", "nearest", "sigma, biases")
}
SMALL = SERVED["paper"]
SERVED["few channels"] = replace(SMALL, channels=3)  # which the scan widens to 16
SERVED["long chunks"] = replace(SMALL, chunk_size=6)  # more tokens than one draw drops from


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN on a CPU, so that what nobody has written shows."""
    torch.use_deterministic_algorithms(HERE.type == "cpu")  # cuBLAS would want settings of its own
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def build(config: MemoryConfig, seed: int = 0, **options: float) -> MemoryResidual:
    torch.manual_seed(seed)
    layer = MemoryResidual(TensorMemory(DIM, config), gate_init=0.3, **options).to(HERE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn(parameter.shape).to(HERE)
    return layer


def everything(layer: MemoryResidual, x: Tensor, state: MemoryState | None, **call) -> dict:
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
    monkeypatch.setattr(residual, "fused_layer", lambda *_: None)
    monkeypatch.setattr("tensor_memory.tensor.fused_layer", lambda *_: None)


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


@pytest.mark.parametrize("option", SERVED)
def test_a_fused_layer_is_the_plain_one(option):
    x = torch.randn(2, 2 * SERVED[option].chunk_size, DIM).to(HERE)  # a first chunk reads nothing
    assert_fused_is_plain(build(SERVED[option]), x)


@pytest.mark.parametrize("reads", ["chunk", "token"])
@pytest.mark.parametrize(("waiting", "length"), [(0, 5), (1, 1), (2, 4), (2, 1), (1, 3)])
def test_a_fused_layer_continues_an_unfinished_chunk(reads, waiting, length):
    layer = build(replace(SMALL, reads=reads))
    x = torch.randn(2, waiting + length, DIM).to(HERE)
    state = None
    if waiting:
        state = layer(x[:, :waiting])[1].detach()
    assert_fused_is_plain(layer, x[:, waiting:], state)


@pytest.mark.parametrize(
    ("reads", "flush"), [("chunk", 4), ("token", 4), ("chunk", 2), ("token", True)]
)
def test_a_fused_layer_flushes_frames(reads, flush):
    layer = build(replace(SMALL, reads=reads))
    x = torch.randn(2, 8, DIM).to(HERE)
    assert_fused_is_plain(layer, x, flush=flush)


def test_under_autocast_a_fused_layer_is_as_exact_as_the_plain_one(monkeypatch):
    layer, x = build(SMALL), torch.randn(2, 6, DIM).to(HERE)
    with torch.autocast(HERE.type, torch.bfloat16):
        fused = everything(layer, x, None)
        plainly(monkeypatch)
        plain = everything(layer, x, None)
    exact = everything(layer, x, None)
    del exact["state"]
    for name, value in exact.items():
        size = value.square().mean().sqrt()
        fused_error, plain_error = (
            ((d[name] - value).square().mean().sqrt() / size).item() for d in (fused, plain)
        )
        assert fused[name].dtype == plain[name].dtype == torch.float32
        assert fused_error <= max(3 * plain_error, RMS_RATIO[torch.bfloat16]), name


def test_a_backward_multiplies_as_its_forward_did_whatever_autocast_says_by_then():
    def gradient(autocast: bool) -> Tensor:
        layer, x = build(SMALL), torch.linspace(-1, 1, 12 * DIM).to(HERE).requires_grad_()
        out, _ = layer(x.view(2, 6, DIM))
        with torch.autocast(HERE.type, torch.bfloat16, enabled=autocast):
            out.backward(torch.ones_like(out))
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(autocast=True), gradient(autocast=False))


@pytest.mark.parametrize("flush", [False, 4])
def test_training_takes_a_whole_layer_as_one_function(flush, monkeypatch):
    taken = []
    door = fused_layer(torch.ones(1, 1, DIM).to(HERE), "triton")
    whole = door.whole
    monkeypatch.setattr(door, "whole", lambda *a: (taken.append(1), whole(*a))[1])
    layer, x = build(SMALL), torch.randn(2, 8, DIM).to(HERE)
    layer(x[:, :6])
    assert taken == [1]
    layer(x, flush=flush)  # eight tokens leave two of three waiting, unless frames are flushed
    with torch.no_grad():
        layer(x[:, :6])
    assert len(taken) == (2 if flush else 1)


def test_a_whole_layer_holds_nothing_once_its_backward_has_run():
    layer, x = build(SMALL), torch.randn(2, 6, DIM).to(HERE).requires_grad_()
    out, _ = layer(x)
    node = out.grad_fn
    assert type(node).__name__ == "_WholeBackward"
    out.sum().backward()
    held = torch.utils._pytree.tree_leaves(vars(node))
    assert held
    assert not any(isinstance(value, Tensor) for value in held)
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = node.saved_tensors


def test_a_whole_layer_can_be_learned_from_through_its_state_alone(monkeypatch):
    def gradients() -> list[Tensor]:
        layer, x = build(SMALL), torch.randn(2, 6, DIM).to(HERE).requires_grad_()
        layer(x)[1].hidden.square().sum().backward()
        return [x.grad, *(p.grad for p in layer.memory.parameters() if p.grad is not None)]

    torch.manual_seed(1)
    fused = gradients()
    plainly(monkeypatch)
    torch.manual_seed(1)
    plain = [grad for grad in gradients() if grad.count_nonzero()]
    fused = [grad for grad in fused if grad.count_nonzero()]
    assert len(plain) > 5
    for got, expected in zip(fused, plain, strict=True):
        assert_same_rms("gradient", got, expected.double(), torch.float32)


@pytest.mark.parametrize("length", [6, 5])  # in one function, and part by part
def test_a_second_derivative_of_a_fused_layer_is_refused_with_the_remedy(length):
    layer, x = build(SMALL), torch.randn(2, length, DIM).to(HERE).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r'second derivative; use backend="reference"'):
        grad.sum().backward()


def swapped(layer: MemoryResidual) -> None:
    """Other values at other addresses, under the same parameters."""
    for parameter in layer.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape).to(HERE)


def overwritten(layer: MemoryResidual) -> None:
    """Other values at the same addresses."""
    for parameter in layer.parameters():
        parameter.data.mul_(0.5)


def narrowed(layer: MemoryResidual) -> None:
    layer.to(torch.bfloat16)


def shared(layer: MemoryResidual) -> None:
    """One head for reads and writes, where there were two."""
    layer.memory.read_coordinate.weight = layer.memory.write_coordinate.weight


@pytest.mark.parametrize("change", [swapped, overwritten, narrowed, shared])
def test_a_layer_sees_its_weights_as_they_are_now(change):
    config = replace(SERVED["separate coordinates"], read_heads=1, write_heads=1)
    used, fresh = build(config), build(config)
    x = torch.randn(1, 6, DIM).to(HERE)
    everything(used, x, None)
    for layer in (used, fresh):
        torch.manual_seed(1)
        change(layer)
    x = x.to(used.gate.dtype)
    got, expected = everything(used, x, None), everything(fresh, x, None)
    assert_same_state(got.pop("state"), expected.pop("state"))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_a_layer_of_mixed_types_gives_each_weight_what_one_of_float32_gives():
    mixed, single, x = build(SMALL), build(SMALL), torch.randn(2, 6, DIM).to(HERE)
    mixed.norm.to(torch.bfloat16)
    single.norm.load_state_dict(mixed.norm.state_dict())  # the same values in float32
    with torch.autocast(HERE.type, torch.bfloat16):
        got, expected = everything(mixed, x, None), everything(single, x, None)
    for name, parameter in mixed.named_parameters():
        assert got[name].dtype == parameter.dtype, name
        assert got[name].stride() == parameter.stride(), name
        assert torch.equal(got[name], expected[name].to(parameter.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part_by_part", [False, True])
def test_a_call_keeps_no_copy_of_weights_that_need_no_cast(dtype, part_by_part):
    config = replace(SERVED["separate coordinates"], chunk_size=3)
    layer, kept = build(config).to(dtype), []
    x = torch.randn(2, 6, DIM).to(HERE, dtype)
    served = layer.memory if part_by_part else layer
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        served(x)
    addresses = {tensor.data_ptr() for tensor in kept}
    memory = layer.memory
    for head in (memory.write_proj, memory.read_coordinate, memory.output):
        assert head.weight.data_ptr() in addresses
    largest = memory.write_proj.weight.nbytes
    copies = [t for t in kept if t.shape == memory.write_proj.weight.shape]
    assert sum(t.untyped_storage().nbytes() for t in copies) == largest


def test_a_layer_that_keeps_fewer_states_learns_the_same():
    x = torch.randn(1, 12, DIM).to(HERE)
    expected = everything(build(SMALL), x, None)
    got = everything(build(replace(SMALL, checkpoint_every=3)), x, None)
    assert_same_state(got.pop("state"), expected.pop("state"))
    for name, value in got.items():
        assert_same_rms(name, value, expected[name].double(), torch.float32)


def test_under_autocast_too_a_layer_may_keep_fewer_states():
    x = torch.randn(1, 6, DIM).to(HERE)
    with torch.autocast(HERE.type, torch.bfloat16):
        expected = everything(build(SMALL), x, None)
        got = everything(build(replace(SMALL, checkpoint_every=1)), x, None)
    for name in set(got) - {"state"}:
        assert_same_rms(name, got[name], expected[name].double(), torch.bfloat16)


def test_a_frozen_memory_passes_gradients_on():
    layer, x = build(SMALL), torch.randn(2, 6, DIM).to(HERE)
    layer.memory.requires_grad_(False)
    assert_fused_is_plain(layer, x)


def test_dropout_drops_its_share_and_keeps_the_mean():
    layer = build(SMALL, dropout=0.25)
    x = torch.randn(3, 24, DIM).to(HERE)
    added = layer.eval()(x)[0] - x
    dropped = layer.train()(x)[0] - x
    ratio = dropped / added
    there = added.abs() > 1e-3
    gone = (ratio[there].abs() < 1e-3).float().mean().item()
    assert abs(gone - 0.25) < 0.04
    assert ratio[there].mean().item() == pytest.approx(1, abs=0.06)
    x = x[:1, :6]
    assert not torch.equal(layer(x)[0], layer(x)[0])


def test_a_dropped_path_drops_whole_rows():
    layer = build(SMALL, drop_path=0.5)
    x = torch.randn(16, 6, DIM).to(HERE)
    added = layer.eval()(x)[0] - x
    dropped = layer.train()(x)[0] - x
    kept = (dropped[:, -1] - 2 * added[:, -1]).abs().amax(1) < 1e-4
    gone = dropped.abs().amax((1, 2)) < 1e-5
    assert (kept | gone).all()
    assert 2 < gone.sum() < 14


def test_the_backward_drops_what_the_forward_dropped():
    """Linear in the output weight: f(w) = ⟨∇f, w⟩ holds for the same draw alone."""
    layer = build(SMALL, dropout=0.5, drop_path=0.2)
    x = torch.randn(4, 6, DIM).to(HERE)
    out, _ = layer(x)
    weight = torch.randn(out.shape).to(HERE)
    value = ((out - x) * weight).sum()
    value.backward()
    back = (layer.memory.output.weight.grad * layer.memory.output.weight).sum()
    assert_same(value.detach(), back, torch.float32)


def test_who_is_watched_is_called():
    layer, seen = build(SMALL), []
    handle = layer.memory.register_forward_hook(lambda *_: seen.append(1))
    layer(torch.randn(2, 6, DIM).to(HERE))
    handle.remove()
    layer(torch.randn(2, 6, DIM).to(HERE))
    assert seen == [1]


def watch_forward(module: nn.Module, seen: list[int]) -> None:
    forward = module.forward
    module.forward = lambda *a: (seen.append(1), forward(*a))[1]


def watch_backward(module: nn.Module, seen: list[int]) -> None:
    module.register_full_backward_pre_hook(lambda *_: seen.append(1))


@pytest.mark.parametrize("watch", [watch_forward, watch_backward])
@pytest.mark.parametrize("name", ["norm", "memory.content", "memory.output", "memory.coordinate"])
def test_a_part_that_is_watched_is_called(watch, name):
    layer, seen = build(SMALL), []
    watch(layer.get_submodule(name), seen)
    layer(torch.randn(2, 6, DIM).to(HERE).requires_grad_())[0].sum().backward()
    assert seen


def test_a_hook_on_all_modules_sees_a_layers_parts():
    layer, seen = build(SMALL), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    layer(torch.randn(2, 6, DIM).to(HERE))
    handle.remove()
    assert layer.norm in seen
    assert layer.memory.content in seen


def norm_without_bias(layer: MemoryResidual) -> None:
    layer.norm = nn.LayerNorm(DIM, bias=False).to(HERE)


def norm_without_weights(layer: MemoryResidual) -> None:
    layer.norm = nn.LayerNorm(DIM, elementwise_affine=False)


def spread_without_bias(layer: MemoryResidual) -> None:
    layer.memory.spread.bias = None


def content_with_bias(layer: MemoryResidual) -> None:
    layer.memory.content.bias = nn.Parameter(torch.randn(16).to(HERE))


def output_with_bias(layer: MemoryResidual) -> None:
    layer.memory.output.bias = nn.Parameter(torch.randn(DIM).to(HERE))


CHANGES = [
    norm_without_bias, norm_without_weights, spread_without_bias, content_with_bias,
    output_with_bias,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("length", [6, 5])  # in one function, and part by part
def test_biases_that_were_taken_away_or_added_count(change, length, monkeypatch):
    layer, x = build(SMALL), torch.randn(1, length, DIM).to(HERE)
    change(layer)
    got = everything(layer, x, None)
    plainly(monkeypatch)
    expected = everything(layer, x, None)
    assert_same_state(got.pop("state"), expected.pop("state"))
    for name, value in expected.items():
        assert_same(got[name], value, torch.float32)


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_biases_that_were_taken_away_or_added_count_for_single_tokens(change, monkeypatch):
    layer, x = build(SMALL).eval(), torch.randn(2, 4, DIM).to(HERE)
    change(layer)

    def stepped() -> Tensor:
        outputs, state = [], None
        for token in x.split(1, dim=1):
            out, state = layer(token, state)
            outputs.append(out)
        return torch.cat(outputs, dim=1)

    got = stepped()
    plainly(monkeypatch)
    assert_same(got, stepped())


def scatter(layer: MemoryResidual) -> None:
    """The same weights, each with something else between its values."""
    names = ("norm.weight", "norm.bias", "memory.spread.bias", "memory.coordinate.weight",
             "memory.output.weight")  # fmt: skip
    for name in names:
        parameter = layer.get_parameter(name)
        parameter.data = torch.stack([parameter.data, torch.randn_like(parameter)], -1)[..., 0]
        assert not parameter.is_contiguous()


@pytest.mark.parametrize("length", [6, 5])  # in one function, and part by part
def test_weights_need_not_be_contiguous(length):
    layer, x = (
        build(replace(SMALL, read_heads=2, write_heads=2)),
        torch.randn(2, length, DIM).to(HERE),
    )
    scatter(layer)
    assert_fused_is_plain(layer, x)


def test_types_and_backends_that_are_not_served_take_the_plain_code():
    x = torch.randn(2, 6, DIM).to(HERE)
    assert fused_layer(x, "triton") is not None
    assert fused_layer(x.double(), "triton") is None
    assert fused_layer(x[:, :0], "triton") is None
    assert fused_layer(x, "reference") is None
    assert fused_layer(x.new_ones(1, 1, 8192), "triton") is not None
    assert fused_layer(x.new_ones(1, 1, 8193), "triton") is None
    with torch.autocast(HERE.type, torch.float16):
        assert fused_layer(x, "triton") is None


@pytest.mark.parametrize("option", ["paper", "token reads, heads", "separate coordinates"])
@torch.no_grad()
def test_tokens_one_by_one_give_what_all_at_once_give(option, monkeypatch):
    layer = build(replace(SERVED[option], grid=(2, 3))).eval()
    x = torch.randn(2, 7, DIM).to(HERE)
    launches = []
    step = fused_layer(x, "triton").token_step
    monkeypatch.setattr(
        "tensor_memory.ops.layer.token_step", lambda *a: (launches.append(1), step(*a))[1]
    )
    outputs, state = [], None
    for token in x.split(1, dim=1):
        out, state = layer(token, state)
        outputs.append(out)
    assert len(launches) == 7
    plainly(monkeypatch)
    expected, expected_state = layer(x)
    assert_same(torch.cat(outputs, dim=1), expected)
    assert_same_state(state, expected_state)
    assert state.aligned == expected_state.aligned


@torch.no_grad()
def test_a_step_that_completes_a_chunk_leaves_nothing_behind(monkeypatch):
    layer, x, state = build(SMALL).eval(), torch.randn(2, 3, DIM).to(HERE), None
    for token in x.split(1, dim=1):
        _, state = layer(token, state)
    plainly(monkeypatch)
    assert_same_state(state, layer(x)[1])


@torch.no_grad()
def test_a_step_takes_weights_that_are_not_contiguous():
    config = replace(SMALL, read_heads=2, write_heads=2)
    used, expected = build(config).eval(), build(config).eval()
    scatter(used)
    x = torch.randn(2, 1, DIM).to(HERE)
    state = expected(torch.randn(2, 3, DIM).to(HERE))[1]
    assert torch.equal(used(x, state)[0], expected(x, state)[0])


@torch.no_grad()
def test_a_step_leaves_the_state_it_was_given_as_it_was():
    layer = build(SMALL).eval()
    x = torch.randn(2, 4, DIM).to(HERE)
    _, before = layer(x[:, :2])
    copies = [getattr(before, name).clone() for name in ("hidden", "cell", "tokens", "fill")]
    layer(x[:, 2:3], before)
    for name, copy in zip(("hidden", "cell", "tokens", "fill"), copies, strict=True):
        assert torch.equal(getattr(before, name), copy), name


def test_a_single_token_is_learned_from_through_its_state_or_its_memory_alone():
    layer = build(SMALL)
    x, state = torch.randn(2, 1, DIM).to(HERE), layer(torch.randn(2, 3, DIM).to(HERE))[1].detach()
    layer.requires_grad_(False)
    hidden = state.hidden.clone().requires_grad_()
    layer(x, replace(state, hidden=hidden))[0].sum().backward()
    assert hidden.grad.any()
    weight = layer.memory.output.weight.requires_grad_()
    other = MemoryResidual(layer.memory, own_memory=False).to(HERE).requires_grad_(False)
    other(x, state)[0].sum().backward()
    assert weight.grad.any()


@torch.no_grad()
def test_a_single_token_may_end_a_frame_or_be_dropped():
    layer = build(SMALL, drop_path=0.5).eval()
    x, state = torch.randn(16, 1, DIM).to(HERE), layer(torch.randn(16, 3, DIM).to(HERE))[1]
    _, after = layer(x, state, flush=True)
    assert after.fill.eq(0).all()
    assert not torch.equal(after.cell, state.cell)
    dropped = (layer.train()(x, state)[0] == x).flatten(1).all(1)
    assert dropped.any()
    assert not dropped.all()
