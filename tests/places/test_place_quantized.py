"""A state in fewer bytes: what rounding keeps exactly, and how far it is off otherwise."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tensor_memory import PlaceConfig, PlaceMemory, PlaceState

CONFIG = PlaceConfig(grid=(4, 5), channels=32, heads=2, wrap=(True, False))
HALF_STEP = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.int8: 1 / 254}
each_type = pytest.mark.parametrize("dtype", HALF_STEP, ids=str)


def filled(rows=2):
    """Voxels that differ in size by powers of ten; some are empty."""
    values = torch.randn(rows, 2, 4, 5, 32) * 10.0 ** torch.randint(-6, 4, (rows, 2, 4, 5, 1))
    values[:, :, 1, 1] = 0
    return PlaceState(values, torch.rand(rows, 2) * 0.1, CONFIG.wrap)


def assert_same(one, other):
    assert one.values.dtype == other.values.dtype
    for ours, theirs in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        assert torch.equal(ours, theirs)


@each_type
def test_a_value_is_off_by_half_a_step_of_its_voxel_at_most(dtype):
    state = filled()
    quantized = state.quantized(dtype)
    error = (quantized.dequantized().values - state.values).abs()
    largest = state.values.abs().amax(-1, keepdim=True)
    assert (error <= largest * (HALF_STEP[dtype] * 1.0001)).all()
    assert quantized.scale is not None
    assert quantized.dequantized().scale is None
    assert quantized.nbytes == 2 * 2 * 20 * (32 * dtype.itemsize + 4) + 2 * 2 * 4


@each_type
def test_what_is_not_written_is_not_rounded_again(dtype):
    state = filled().quantized(dtype)
    assert_same(state.dequantized().quantized(dtype), state)
    memory, x = PlaceMemory(6, CONFIG), torch.randn(2, 3, 6)
    _, masked = memory(x, state, mask=torch.zeros(2, 3, dtype=torch.bool))
    assert_same(masked, state)
    faded = state.with_values(state.dequantized().values * 0.9975)
    assert torch.equal(faded.values, state.values)


def stream(memory, x, dtype):
    """Token by token: what was read, and a state that never grew."""
    state, parts = PlaceState.zeros(memory.config, 2).quantized(dtype), []
    size = state.nbytes
    for token in x.split(1, dim=1):
        m, state = memory(token, state)
        parts.append(m)
        assert state.nbytes == size
    return torch.cat(parts, 1), state


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("linear", torch.bfloat16),
        ("delta", torch.int8),
        pytest.param("linear", torch.float16, marks=pytest.mark.exhaustive),
        pytest.param("linear", torch.int8, marks=pytest.mark.exhaustive),
        pytest.param("delta", torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param("delta", torch.float16, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_stream_of_single_tokens_stays_near_float32(rule, dtype):
    """Independent errors of half a step, √200 of them within the reach of α, and no drift.

    A voxel's largest value is about 2.4 times their mean square, so that 20 half steps bound both.
    Rounding to bfloat16 without a scale loses the fading, and its state is off by more.
    """
    config = PlaceConfig(grid=(4, 5), channels=32, heads=2, rule=rule)
    memory, x = PlaceMemory(16, config), torch.randn(2, 400, 16)
    with torch.no_grad():
        exact, after = memory(x)
        (m, end), *twice = (stream(memory, tokens, dtype) for tokens in (x, x[:, :40], x[:, :40]))
    assert_same(*(state for _, state in twice))  # repeatable
    values = end.dequantized().values
    for found, expected in ((m, exact), (values, after.values)):
        assert (found - expected).norm() <= 20 * HALF_STEP[dtype] * expected.norm()


@each_type
def test_a_quantized_state_does_what_a_state_does(dtype, tmp_path):
    state = filled()
    quantized = state.quantized(dtype)
    quantized.save(tmp_path / "state.safetensors")
    assert_same(PlaceState.load(tmp_path / "state.safetensors"), quantized)
    assert_same(quantized.select([1, 1]), state.select([1, 1]).quantized(dtype))
    assert_same(quantized.reset([0]), state.reset([0]).quantized(dtype))
    assert_same(quantized.moved([0.7, -0.4]), state.moved([0.7, -0.4]).quantized(dtype))
    larger = quantized.resized((8, 9))
    assert_same(larger, quantized.dequantized().resized((8, 9)).quantized(dtype))
    leaves, tree = pytree.tree_flatten(quantized)
    assert_same(pytree.tree_unflatten(leaves, tree), quantized)
    assert_same(quantized.to("cpu").detach(), quantized)
    assert quantized.to(torch.float64).dequantized().values.dtype == torch.float64
    assert f"channels=32, {str(dtype)[6:]}, " in repr(quantized)


def test_a_call_has_gradients_and_a_quantized_state_has_none():
    memory, x = PlaceMemory(6, CONFIG), torch.randn(2, 3, 6, requires_grad=True)
    m, state = memory(x, filled().quantized(torch.bfloat16))
    assert not state.values.requires_grad
    m.sum().backward()
    assert x.grad is not None


def test_another_type_is_refused():
    with pytest.raises(TypeError, match=r"expected torch.bfloat16, .* got torch.int16; dequant"):
        filled().quantized(torch.int16)
    with pytest.raises(ValueError, match=r"state.scale: expected shape \(2, 2, 4, 5, 1\)"):
        PlaceMemory(6, CONFIG)(
            torch.randn(2, 3, 6),
            PlaceState(filled().values.bfloat16(), torch.zeros(2, 2), CONFIG.wrap, torch.ones(2)),
        )


@each_type
def test_rows_of_quantized_states_are_put_together_as_the_error_says(dtype):
    memory, x = PlaceMemory(6, CONFIG), torch.randn(4, 3, 6)
    states = [filled().quantized(dtype)] * 2

    def together(states):
        values = torch.cat([state.values for state in states])
        return PlaceState(values, torch.cat([s.origin for s in states]), states[0].wrap)

    match = rf"got {dtype}; .*; of a quantized state take state.dequantized\(\).values$"
    with pytest.raises(TypeError, match=match):
        memory(x, together(states))
    memory(x, together([state.dequantized() for state in states]))
