"""MemoryResidual: x̂ = x + σ(γ)·D(memory(LayerNorm(x)))."""

import copy
import pickle

import pytest
import torch
from torch import nn

from memories import DIM, OPTIONS, assert_identical_state, make_memory, make_state, make_tokens
from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
    attach,
    memory_disabled,
)
from tolerances import assert_same


def make_layer(**options) -> MemoryResidual:
    return MemoryResidual(make_memory(OPTIONS["paper"]), **options).double()


@pytest.mark.parametrize("gate", [0.0, -2.0, 1.25])
@pytest.mark.parametrize("norm", [True, False])
def test_the_residual_is_its_formula(gate, norm):
    layer = make_layer(gate_init=gate, norm=norm)
    x, state = make_tokens(2, 7, DIM), make_state(OPTIONS["paper"], 2)
    y, end = layer(x, state)
    source = torch.nn.functional.layer_norm(x, (DIM,)) if norm else x
    m, expected_end = layer.memory(source, state)
    assert_same(y, x + m / (1 + torch.tensor(-gate, dtype=x.dtype).exp()))
    assert_identical_state(end, expected_end)


def test_masks_documents_and_flushes_reach_the_memory():
    layer = make_layer(norm=False)
    x, place = make_tokens(2, 7, DIM), torch.arange(7).expand(2, 7)
    marks = {"mask": place != 2, "reset": place == 4, "flush": place == 5}
    y, end = layer(x, **marks)
    m, expected_end = layer.memory(x, **marks)
    assert_same(y, x + 0.5 * m)
    assert_identical_state(end, expected_end)
    assert torch.equal(y[:, 2], x[:, 2])


@pytest.mark.parametrize(
    ("memory", "name", "takes", "other"),
    [
        (TensorMemory(DIM), "where", "flush", "PlaceMemory"),
        (TensorMemory(DIM), "group", "flush", "PlaceMemory"),
        (PlaceMemory(DIM), "flush", "where, group", "TensorMemory"),
    ],
)
def test_an_option_of_the_other_memory_is_named(memory, name, takes, other):
    layer, x = MemoryResidual(memory), make_tokens(2, 7, DIM, dtype=torch.float32)
    match = (
        f"^{name}: expected one of mask, reset, cu_seqlens, {takes}, since the memory is a "
        f"{type(memory).__name__}, got {name}=, which only a {other} takes; leave it out$"
    )
    with pytest.raises(TypeError, match=match):
        layer(x, **{name: x[..., :2]})
    with memory_disabled(layer), pytest.raises(TypeError, match=match):
        layer(x, **{name: x[..., :2]})


def test_a_memory_of_another_class_takes_options_of_its_own():
    class Louder(TensorMemory):
        def forward(self, x, state=None, *, times=1.0, **options):
            m, state = super().forward(x, state, **options)
            return times * m, state

    layer, x = MemoryResidual(Louder(DIM)), make_tokens(2, 7, DIM, dtype=torch.float32)
    assert torch.equal(layer(x, times=0.0, flush=True)[0], x)


def test_garbage_under_the_mask_reaches_no_gradient():
    grads = []
    for garbage in (0.0, torch.nan):
        layer = make_layer()
        mask = torch.arange(7).expand(2, 7) != 2
        x = make_tokens(2, 7, DIM).masked_fill(~mask[..., None], garbage)
        layer(x, mask=mask)[0][mask].square().sum().backward()
        grads.append([parameter.grad for parameter in layer.parameters()])
    assert all(torch.equal(clean, dirty) for clean, dirty in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "memory",
    [
        lambda: TensorMemory(DIM, MemoryConfig.long_gap(grid=(3, 3)), zero_init=True),
        lambda: PlaceMemory(DIM, PlaceConfig.map(axes=2), zero_init=True),
    ],
    ids=["tensor", "place"],
)
def test_a_layer_made_on_meta_is_drawn_by_reset_parameters(memory):
    with torch.device("meta"):
        layer = MemoryResidual(memory(), gate_init=-2.0)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))

    def draw(module):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    torch.manual_seed(1)
    layer.apply(draw)
    torch.manual_seed(1)
    expected = MemoryResidual(memory(), gate_init=-2.0)
    for name, start in expected.memory.named_parameters():
        found = layer.memory.get_parameter(name)
        assert not found.isnan().any()
        if name.endswith("bias") or not start.any():  # what is not drawn
            assert torch.equal(found, start), name
    assert not layer.memory.output.weight.any()
    assert layer.gate.item() == -2


def test_zero_init_is_the_identity_at_first():
    layer = MemoryResidual(TensorMemory(DIM, OPTIONS["paper"], zero_init=True), dropout=0.3)
    x = make_tokens(2, 7, DIM, dtype=torch.float32)
    assert torch.equal(layer(x)[0], x)


@pytest.mark.parametrize("option", [{"dropout": 0.4}, {"drop_path": 0.4}])
def test_eval_mode_drops_nothing(option):
    x = make_tokens(2, 7, DIM)
    assert torch.equal(make_layer(**option).eval()(x)[0], make_layer().eval()(x)[0])


def readouts(layer: MemoryResidual, rows: int) -> torch.Tensor:
    """σ(γ)·D(m) for equal rows, over its value without D: 0 where dropped."""
    x, start = make_tokens(1, 4, DIM), make_state(OPTIONS["paper"], 1)
    many, state = x.expand(rows, -1, -1), start.select([0] * rows)
    kept = make_layer().eval()(x, start)[0] - x
    return (layer.train()(many, state)[0] - many) / kept


def test_dropout_drops_single_features_and_keeps_the_mean():
    ratio = readouts(make_layer(dropout=0.4), rows=1000)
    dropped = ratio.abs() < 1e-9
    assert_same(ratio[~dropped], torch.full_like(ratio[~dropped], 1 / 0.6))
    assert dropped.double().mean().item() == pytest.approx(0.4, abs=0.02)  # 5 deviations: 0.022
    assert dropped.any(-1).logical_xor(dropped.all(-1)).any()


def test_drop_path_drops_whole_rows_and_keeps_the_mean():
    ratio = readouts(make_layer(drop_path=0.4), rows=4000)
    dropped = ratio.abs() < 1e-9
    assert torch.equal(dropped.any((1, 2)), dropped.all((1, 2)))
    assert_same(ratio[~dropped], torch.full_like(ratio[~dropped], 1 / 0.6))
    assert dropped[:, 0, 0].double().mean().item() == pytest.approx(0.4, abs=0.04)  # 5 deviations


def test_dropping_the_readout_does_not_touch_the_state():
    x = make_tokens(2, 7, DIM)
    for option in ({"dropout": 0.9}, {"drop_path": 0.9}):
        assert_identical_state(make_layer(**option).train()(x)[1], make_layer()(x)[1])


def test_layers_may_share_one_memory_and_keep_their_own_states_and_gates():
    memory = make_memory(OPTIONS["paper"])
    stack = nn.ModuleList([MemoryResidual(memory, gate_init=g) for g in (0.0, 1.0)]).double()
    names = [name for name, _ in stack.named_parameters()]
    assert sum("write_proj" in name for name in names) == 1
    assert sum("gate" in name for name in names) == 2
    x = make_tokens(2, 7, DIM)
    first, first_state = stack[0](x)
    second, second_state = stack[1](first)
    assert not torch.equal(first_state.cell, second_state.cell)
    second.sum().backward()
    apart = copy.deepcopy(memory), copy.deepcopy(memory)
    for layer, own in zip(stack, apart, strict=True):
        own.zero_grad()
        layer.memory = own
    stack[1](stack[0](x)[0])[0].sum().backward()
    for shared, *own in zip(memory.parameters(), *(m.parameters() for m in apart), strict=True):
        assert_same(shared.grad, own[0].grad + own[1].grad)


@pytest.mark.parametrize("own", [True, False])
def test_another_memory_is_registered_where_the_first_was(own):
    layer, other = make_layer(own_memory=own), make_memory(OPTIONS["paper"])
    names = sorted(layer.state_dict())
    layer.memory = other
    assert sorted(layer.state_dict()) == names
    assert ("memory" in layer._modules) == own
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer):
        assert sorted(copied.state_dict()) == names
        copied.memory = memory = make_memory(OPTIONS["paper"])
        assert copied.memory is memory
        assert sorted(copied.state_dict()) == names


def test_a_shared_memory_is_resized_once_for_all_layers():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    host = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False).eval()
    attachment = attach(host, PlaceConfig(grid=(3, 3), channels=2, heads=1), causal=False)
    names = sorted(attachment.state_dict())
    attachment.memory = attachment.memory.resized((6, 6))
    for layer in attachment.layers:
        layer.memory = attachment.memory
    assert sorted(attachment.state_dict()) == names
    host(torch.randn(2, 5, 8)).sum().backward()
    assert all(p.grad is not None for p in attachment.parameters())
    copied = copy.deepcopy(attachment.layers)
    assert copied[0].memory is copied[1].memory
    assert copied[0].memory.config.grid == (6, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_layer_follows_float64(dtype):
    layer = make_layer().to(dtype)
    x = make_tokens(2, 7, DIM, dtype=dtype)
    y, state = layer(x)
    exact, exact_state = make_layer().to(dtype).double()(x.double())
    assert y.dtype == state.tokens.dtype == dtype
    assert state.hidden.dtype == state.cell.dtype == torch.float32
    assert_same(y, exact)
    assert_same(state.cell, exact_state.cell, dtype)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_residual_stream_as_it_was_and_the_state_in_float32(tokens):
    layer = make_layer().float()
    x = make_tokens(2, 7, DIM, dtype=tokens)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        y, state = layer(x, state)
    assert y.dtype == tokens
    assert state.hidden.dtype == state.cell.dtype == torch.float32
    exact = make_layer()
    assert_same(y, exact(x.double(), exact(x.double())[1])[0], torch.bfloat16)


def test_a_large_configuration_trains_without_a_hitch():
    config = MemoryConfig(channels=8, grid=(4, 4, 4), chunk_size=4, reads="token")
    layer = MemoryResidual(TensorMemory(16, config), dropout=0.1, drop_path=0.1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = make_tokens(4, 32, 16, dtype=torch.float32)
    target = x.cumsum(1) / torch.arange(1, 33)[:, None]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (layer(x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
