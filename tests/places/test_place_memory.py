"""The laws of the place memory, and its agreement with an oracle written apart."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import place_oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memories import stirred
from tensor_memory import MemoryResidual, PlaceConfig, PlaceMemory, PlaceState, place_scan
from tensor_memory.ops.places import chunked
from tolerances import assert_same, assert_same_rms

DIM = 4
EXACT = 1e-10


@st.composite
def configs(draw, **fixed):
    axes = draw(st.integers(1, 4))
    places = draw(st.sampled_from(["learned", "given", "offset"]))
    options = {
        "grid": tuple(draw(st.integers(2, 5 if axes < 3 else 3)) for _ in range(axes)),
        "channels": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 2)),
        "rule": draw(st.sampled_from(["linear", "delta"])),
        "kernel": draw(st.sampled_from(["gaussian", "linear"])),
        "places": places,
        "share_places": places == "given" or draw(st.booleans()),
        "wrap": tuple(draw(st.booleans()) for _ in range(axes)),
        "keep_bias": draw(st.sampled_from([6.0, 0.0])),
        "backend": draw(st.sampled_from(["auto", "reference"])),
    }
    return PlaceConfig(**options | fixed)


@st.composite
def calls(draw, least=1, most=9, **fixed):
    """A memory whose every weight counts, and a call of it: x, where (or None), a state."""
    config = draw(configs(**fixed))
    B, N = draw(st.integers(1, 3)), draw(st.integers(least, most))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    memory = stirred(PlaceMemory(DIM, config).double())
    where = torch.rand(B, N, config.axes, dtype=torch.float64) * 2 - 1
    values = torch.randn(B, config.heads, *config.grid, config.channels, dtype=torch.float64)
    state = PlaceState(values, torch.zeros(B, config.axes, dtype=torch.float64), config.wrap)
    x = torch.randn(B, N, DIM, dtype=torch.float64)
    return memory, x, None if config.places == "learned" else where, state


def marks(shape, share):
    return torch.rand(shape) < share


def at(where, rows):
    return None if where is None else where[rows]


def assert_near(one, other):
    assert one.shape == other.shape
    assert torch.isfinite(one).all()
    assert (one - other).abs().max().item() <= EXACT if one.numel() else True


def assert_all_near(results):
    for one, other in zip(*results, strict=True):
        scale = 1 + other.abs().max()
        assert_near(one / scale, other / scale)


@given(call=calls())
def test_the_memory_agrees_with_the_oracle(call):
    memory, x, where, state = call
    mask, reset = marks(x.shape[:2], 0.8), marks(x.shape[:2], 0.2)
    m, after = memory(x, state, where=where, mask=mask, reset=reset)
    weights = {name: p.detach().numpy() for name, p in memory.state_dict().items()}
    for row in range(len(x)):
        expected, values = place_oracle.run(
            weights, memory.config, x[row].numpy(), None if where is None else where[row].numpy(),
            state.values[row].numpy(), mask[row].numpy(), reset[row].numpy(),
        )  # fmt: skip
        assert np.abs(m[row].detach().numpy() - expected).max() <= EXACT
        assert np.abs(after.values[row].detach().numpy() - values).max() <= EXACT


@given(
    call=calls(most=150, backend="auto"),
    way=st.sampled_from(["dense", "sparse", "sparse, in a graph"]),
)
def test_parallel_equals_sequential_with_every_gradient(call, way):
    memory, x, where, state = call
    can_ask = chunked.can_ask if way != "sparse, in a graph" else lambda _: False
    reset = marks(x.shape[:2], 0.05)
    results = []
    for backend in ("reference", "torch"):
        memory.config = replace(memory.config, backend=backend)
        memory.zero_grad()
        leaves = [t.clone().requires_grad_() for t in (x, state.values)]
        given_where = None if where is None else where.clone().requires_grad_()
        before = PlaceState(leaves[1], state.origin, state.wrap)
        with (
            patch.object(chunked, "SPARSE_FROM", 10**9 if way == "dense" else 0),
            patch.object(chunked, "can_ask", can_ask),
        ):
            m, after = memory(leaves[0], before, where=given_where, reset=reset)
        weight = torch.linspace(0.5, 1.5, m.numel(), dtype=m.dtype).view_as(m)
        (m * weight).sum().add(after.values.square().sum()).backward()
        gradients = [leaf.grad for leaf in leaves] + [p.grad for p in memory.parameters()]
        if given_where is not None:
            gradients.append(given_where.grad)
        results.append([m, after.values, *gradients])
    assert_all_near(results)


class Largest(TorchDispatchMode):
    """Watches how many numbers the largest tensor has that is computed, views among them."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


@pytest.mark.parametrize("device", ["cpu", "meta"])  # as a compiler, meta has no values
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_on_a_large_grid_no_token_touches_more_than_the_voxels_around_it(rule, device):
    config = PlaceConfig(grid=(80, 80), channels=1, heads=1, kernel="linear", rule=rule)
    memory = PlaceMemory(DIM, config).to(device)
    x = torch.randn(1, 2 * chunked.CHUNK, DIM, device=device)
    with Largest() as made:
        m, after = memory(x)
        (m.sum() + after.values.sum()).backward()
    assert made.numel <= x.shape[1] * 80  # the factors of an axis, and not 6400 by token


def test_within_a_chunk_addresses_meet_axis_by_axis():
    memory = PlaceMemory(DIM, PlaceConfig(grid=(20, 20), heads=1, rule="delta"))
    inputs, _ = memory.steer(torch.randn(1, 2 * chunked.CHUNK, DIM), None)
    with Largest() as made:
        chunks = chunked.cut_into_chunks(inputs)
        chunked.attention(chunks)
        chunked.delta_inverse(chunks)
    assert made.numel <= chunks.within.numel()  # 64 numbers by token, and not an address of 400


@torch.no_grad()
@pytest.mark.parametrize("grid", [(10, 12), (16, 16)])  # dense, sparse
def test_no_tensor_but_the_tokens_grows_with_the_length_of_a_call_without_gradients(grid):
    config = PlaceConfig(grid=grid, channels=1, heads=1, kernel="linear")
    memory, largest = PlaceMemory(DIM, config), []
    for length in (5_000, 10_000):
        x = torch.randn(1, length, DIM)
        with Largest() as made:
            _, state = memory(x)
            chunked.read_before(memory.steer(x, state)[0], state.values)
        largest.append(made.numel)
    assert largest[0] == largest[1] > x.numel()


@torch.no_grad()
def test_addresses_of_a_large_grid_are_made_for_fewer_tokens_at_once():
    config = PlaceConfig(grid=(64, 64), channels=1, heads=1)
    memory = PlaceMemory(DIM, config)
    x = torch.randn(1, 1_000, DIM)
    with Largest() as made:
        _, state = memory(x)
        chunked.read_before(memory.steer(x, state)[0], state.values)
    assert made.numel <= 256 * 64 * 64  # tokens at once, and not all thousand


@given(call=calls(most=80, kernel="linear", backend="torch"))
def test_sparse_equals_dense(call):
    memory, x, where, state = call
    results = []
    sparse = chunked.SparseChunks
    for bound in (0, 10**9):
        with (
            patch.object(chunked, "SPARSE_FROM", bound),
            patch.object(sparse, "apply", wraps=sparse.apply) as taken,
        ):
            m, after = memory(x, state, where=where)
        assert taken.called == (bound == 0)
        results.append((m, after.values))
    for one, other in zip(*results, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("keep", [0.0, 6.0])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_sparse_call_of_several_chunks_has_the_gradients_of_the_sequential_one(rule, keep):
    config = PlaceConfig(
        grid=(20, 20), channels=2, heads=2, kernel="linear", rule=rule, keep_bias=keep
    )
    x = torch.randn(2, 200, DIM, dtype=torch.float64, requires_grad=True)
    memory, results = PlaceMemory(DIM, config).double(), []
    for backend in ("reference", "torch"):
        memory.config = replace(config, backend=backend)
        m, after = memory(x)
        loss = m.square().sum() + after.values.square().sum()
        gradients = torch.autograd.grad(loss, [x, *memory.parameters()])
        results.append([m, after.values, *gradients])
    assert_all_near(results)


@pytest.mark.parametrize("keep", [-30.0, -2.0, 6.0])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_sparse_survives_any_decay_in_float32(rule, keep):
    config = PlaceConfig(
        grid=(20, 20), channels=2, heads=1, kernel="linear", rule=rule, keep_bias=keep
    )
    memory, x = PlaceMemory(DIM, config), torch.randn(1, 300, DIM)
    m, after = memory(x)
    exact, exact_after = memory.double()(x.double())
    torch.testing.assert_close(m.double(), exact, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(after.values.double(), exact_after.values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("grid", [(3, 4), (20, 20)])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_token_that_forgets_all_costs_the_others_no_digits(grid, rule):
    at, content = torch.rand(1, 60, 1, 2) * 2 - 1, torch.randn(1, 60, 1, 2)
    rate, state = torch.rand(1, 60, 1), torch.randn(1, 1, *grid, 2)
    log_keep = torch.full((1, 60, 1), -0.01)
    log_keep[:, 20] = torch.finfo(torch.float32).min
    given = [at, None, content, rate, log_keep, None, state]
    exact = place_scan(
        *(t if t is None else t.double() for t in given), rule=rule, backend="reference"
    )
    for got, expected in zip(place_scan(*given, rule=rule), exact, strict=True):
        assert_same_rms("", got, expected, torch.float32)


@given(call=calls(least=2, most=70), data=st.data())
def test_no_output_depends_on_a_later_input_bit_for_bit(call, data):
    memory, x, where, state = call
    t = data.draw(st.integers(1, x.shape[1] - 1))
    changed = x.clone()
    changed[:, t:] = torch.randn_like(changed[:, t:])
    moved = None if where is None else torch.cat([where[:, :t], where[:, t:].flip(1)], 1)
    one, _ = memory(x, state, where=where)
    other, _ = memory(changed, state, where=moved)
    assert torch.equal(one[:, :t], other[:, :t])


@given(call=calls(least=2, most=70), data=st.data())
def test_cutting_anywhere_changes_nothing(call, data):
    memory, x, where, state = call
    mask, reset = marks(x.shape[:2], 0.8), marks(x.shape[:2], 0.1)
    whole, after = memory(x, state, where=where, mask=mask, reset=reset)
    cut = data.draw(st.integers(0, x.shape[1]))
    parts, carried = [], state
    for part in (slice(0, cut), slice(cut, None)):
        rows = (slice(None), part)
        m, carried = memory(
            x[rows], carried, where=at(where, rows), mask=mask[rows], reset=reset[rows]
        )
        parts.append(m)
    assert_near(torch.cat(parts, 1), whole)
    assert_near(carried.values, after.values)
    assert carried.nbytes == state.nbytes == after.nbytes


@given(call=calls(least=2))
def test_one_token_at_a_time_changes_nothing(call):
    memory, x, where, state = call
    whole, after = memory(x, state, where=where)
    parts = []
    for t in range(x.shape[1]):
        rows = (slice(None), slice(t, t + 1))
        m, state = memory(x[rows], state, where=at(where, rows))
        parts.append(m)
    assert_near(torch.cat(parts, 1), whole)
    assert_near(state.values, after.values)


@given(call=calls(least=1, most=12), left=st.booleans())
def test_a_padded_row_gives_what_the_row_gives_alone(call, left):
    memory, x, where, state = call
    pad = torch.full((len(x), 3, DIM), torch.nan, dtype=x.dtype)
    order = (pad, x) if left else (x, pad)
    mask = torch.cat([torch.full(t.shape[:2], t is x) for t in order], 1)
    places = None
    if where is not None:
        nowhere = where.new_full((len(x), 3, where.shape[2]), torch.nan)
        places = torch.cat([nowhere, where] if left else [where, nowhere], 1)
    alone, after = memory(x, state, where=where)
    memory.zero_grad()
    m, padded = memory(torch.cat(order, 1), state, where=places, mask=mask)
    m.sum().backward()
    assert_near(m[mask].view_as(alone), alone)
    assert torch.equal(m[~mask], torch.zeros_like(m[~mask]))
    assert_near(padded.values, after.values)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in memory.parameters())


@pytest.mark.parametrize("share_places", [True, False])
def test_an_offset_starts_at_the_given_places(share_places):
    config = PlaceConfig(
        grid=(3, 4), channels=2, heads=2, places="offset", share_places=share_places
    )
    memory = PlaceMemory(DIM, config)
    given = PlaceMemory(DIM, replace(config, places="given", share_places=True))
    given.load_state_dict(memory.state_dict(), strict=False)
    x, where = torch.randn(2, 5, DIM), torch.rand(2, 5, 2)
    assert torch.equal(memory(x, where=where)[0], given(x, where=where)[0])


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("places", ["given", "offset"])
def test_a_masked_place_may_be_anything(places, by_head):
    config = PlaceConfig(grid=(3, 4), channels=2, heads=2, places=places, share_places=True)
    memory = stirred(PlaceMemory(DIM, config).double())
    x, where = torch.randn(2, 5, DIM).double(), torch.rand(2, 5, *[2] * by_head, 2).double()
    mask = torch.tensor([True, False, True, True, False]).expand(2, 5)
    alone, after = memory(x[:, mask[0]], where=where[:, mask[0]])
    where[~mask] = torch.nan
    m, masked = memory(x, where=where.requires_grad_(), mask=mask)
    (m.sum() + masked.values.sum()).backward()
    assert_near(m[:, mask[0]], alone)
    assert_near(masked.values, after.values)
    assert where.grad.isfinite().all()
    assert not where.grad[~mask].any()


@given(call=calls())
def test_an_all_masked_row_keeps_its_state_bit_for_bit(call):
    memory, x, where, state = call
    nothing = torch.zeros(x.shape[:2], dtype=torch.bool)
    m, after = memory(x, state, where=where, mask=nothing)
    assert torch.equal(after.values, state.values)
    assert not m.any()


@given(call=calls(least=2, most=70), data=st.data())
def test_documents_in_a_row_know_nothing_of_each_other(call, data):
    memory, x, where, state = call
    t = data.draw(st.integers(0, x.shape[1] - 1))
    reset = torch.zeros(x.shape[:2], dtype=torch.bool)
    reset[:, t] = True
    m, after = memory(x, state, where=where, reset=reset)
    rows = (slice(None), slice(t, None))
    alone, alone_after = memory(x[rows], where=at(where, rows))
    assert_near(m[rows], alone)
    assert_near(after.values, alone_after.values)


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_a_reset_at_the_first_token_frees_a_row_of_what_is_not_a_number(rule):
    """One NaN pose must not outlive its episode in an agent that acts step by step."""
    memory = PlaceMemory(DIM, PlaceConfig.map(2, rule=rule)).double()
    x, where = torch.randn(2, 3, DIM).double(), torch.rand(2, 3, 2)
    _, spoilt = memory(x, where=where * torch.tensor([torch.nan, 1.0]).view(2, 1, 1))
    starts = torch.tensor([[True, False, False], [False, False, False]])
    m, state = memory(x, spoilt, where=where, reset=starts)
    assert_near(m[:1], memory(x[:1], where=where[:1])[0])
    assert state.values.isfinite().all()


@given(call=calls(most=30), data=st.data())
def test_shares_add_up_to_the_read(call, data):
    memory, x, where, state = call
    mask, reset = marks(x.shape[:2], 0.8), marks(x.shape[:2], 0.1)
    N = x.shape[1]
    asked = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=3))
    heard = []
    memory.norm.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0]))
    memory(x, state, where=where, mask=mask, reset=reset)
    traced = memory.trace(x, state, reads=asked, where=where, mask=mask, reset=reset)
    total = torch.einsum("brnh,bnhc->brhc", traced.share, traced.content) + traced.rest
    assert_near(total, heard[0][:, asked].detach())
    for r, t in enumerate(asked):
        assert not traced.share[:, r, t + 1 :].any()


@given(
    rule=st.sampled_from(["linear", "delta"]),
    kernel=st.sampled_from(["gaussian", "linear"]),
    wrap=st.lists(st.booleans(), min_size=1, max_size=3),
    data=st.data(),
)
def test_moving_every_place_by_voxels_and_rolling_the_grid_changes_nothing(
    rule, kernel, wrap, data
):
    """Anywhere on axes that wrap, and 4 voxels from the borders on others: e⁻³² of a write."""
    sizes = {True: st.integers(2, 5), False: st.integers(15, 17)}
    grid = [data.draw(sizes[wraps]) for wraps in wrap]
    steps = [data.draw(st.integers(-2, 2)) for _ in wrap]
    config = PlaceConfig.map(
        grid=grid, channels=3, heads=2, wrap=tuple(wrap), rule=rule, kernel=kernel
    )
    memory = PlaceMemory(DIM, config).double()
    x, at = torch.randn(2, 20, DIM).double(), torch.rand(2, 20, len(grid)).double() * 2 - 1
    at = at * torch.tensor([size if wraps else 1 for size, wraps in zip(grid, wrap, strict=True)])
    voxel = torch.tensor([2 / (size - 1) for size in grid], dtype=torch.float64)
    m, after = memory(x, where=(at * voxel).flip(2))  # coordinate 0 is the last axis
    moved, moved_after = memory(x, where=((at + torch.tensor(steps)) * voxel).flip(2))
    assert_near(moved, m)
    assert_near(moved_after.values, after.values.roll(steps, list(range(2, 2 + len(grid)))))


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
@pytest.mark.parametrize(
    ("wrap", "empty"), [(False, True), (True, True), (True, False), ((True, False), False)]
)
def test_a_walk_in_the_agents_frame_equals_one_in_the_worlds(wrap, empty, kernel, rule):
    """Out by more than the grid and back, every row its own way, in steps of any size.

    The world stands still: it is large, or a circle where a circle is kept. What is outside the
    agent's grid is taken out of a large one. All here is in voxels but what the memories get.
    """
    options = {"channels": 2, "heads": 2, "wrap": wrap, "kernel": kernel, "rule": rule}
    config = PlaceConfig.map(grid=(15, 17), **options)
    out = torch.tensor([[1.5, -0.9], [-1.4, 1.6], [0.2, -1.7]]).double()
    steps = torch.stack([out] * 12 + [-out] * 12) + torch.rand(24, 3, 2).double() - 0.5
    steps[::5] = steps[::5].round()
    steps[9, 2], steps[13, 2] = torch.tensor([18.0, 0.0]), torch.tensor([-18.0, 0.0])
    path = steps.cumsum(0)
    room = 2 * int(path.abs().max() + 10) + 1
    circle = [wraps and not empty for wraps in config.wrap]
    world_grid = [size if c else room for size, c in zip(config.grid, circle, strict=True)]
    memory = PlaceMemory(DIM, config).double()
    world = memory.resized(world_grid)
    voxel, of_world = (
        torch.tensor([2 / (size - 1) for size in reversed(grid)], dtype=torch.float64)
        for grid in (config.grid, world_grid)
    )
    x = torch.randn(24, 3, 2, DIM).double()
    reach = torch.rand(24, 3, 2, 2).double() * 4 - 2  # it looks and writes around itself
    state, expected_state = memory.empty_state(x[0]), world.empty_state(x[0])
    for t in range(24):
        state = state.moved(steps[t] * voxel, empty=empty)
        values = expected_state.values
        for axis in range(2):
            if not circle[axis]:
                far = torch.arange(room) - room // 2 - path[t, :, 1 - axis, None].round()
                inside = far.abs() <= config.grid[axis] // 2  # (B, room)
                values = values * inside.view(3, 1, *[(room, 1), (1, room)][axis], 1)
        m, state = memory(x[t], state, where=reach[t] * voxel)
        expected, expected_state = world(
            x[t], replace(expected_state, values=values),
            where=(path[t, :, None] + reach[t]) * of_world,
        )  # fmt: skip
        assert_near(m, expected)


def test_what_leaves_the_grid_is_gone_and_what_comes_in_is_empty():
    for wrap in (False, True):
        config = PlaceConfig(grid=(4,), channels=1, heads=1, wrap=wrap)
        values = torch.arange(1.0, 5.0).view(1, 1, 4, 1)
        state = PlaceState(values, torch.zeros(1, 1), config.wrap)
        assert state.moved([2 / 3]).values.flatten().tolist() == [2, 3, 4, 0]
        assert state.moved([-4 / 3]).values.flatten().tolist() == [0, 0, 1, 2]
        round_again = [2, 3, 4, 1] if wrap else [2, 3, 4, 0]
        assert state.moved([2 / 3], empty=False).values.flatten().tolist() == round_again


@pytest.mark.parametrize("wrap", [False, True])
def test_a_state_goes_to_a_larger_grid_and_back(wrap):
    config = PlaceConfig(grid=(4, 5), channels=3, heads=2, wrap=wrap)
    state = PlaceState(torch.randn(2, 2, 4, 5, 3), torch.zeros(2, 2), config.wrap)
    grid = (8, 10) if wrap else (7, 9)  # every second voxel is an old one
    larger = state.resized(grid)
    torch.testing.assert_close(larger.values[:, :, ::2, ::2], state.values)
    torch.testing.assert_close(larger.resized((4, 5)).values, state.values)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_resized_memory_finds_in_a_resized_state_what_lay_there(wrap):
    config = PlaceConfig(
        grid=(4, 5), channels=3, heads=2, wrap=wrap, kernel="linear", places="given"
    )
    memory, old = PlaceMemory(DIM, config).double(), torch.tensor([5, 4])
    voxel = torch.stack([torch.randint(5, (2, 6)), torch.randint(4, (2, 6))], -1)
    x, where = torch.randn(2, 6, DIM).double(), 2 * voxel.double() / (old - 1) - 1
    _, state = memory(x[:, :4], where=where[:, :4])
    expected, _ = memory(x[:, 4:], state, where=where[:, 4:])
    grid = (8, 10) if wrap else (7, 9)  # every second voxel is an old one
    new = torch.tensor(grid[::-1])
    where = 2 * (2 * voxel).double() / (new - 1) - 1
    m, _ = memory.resized(grid)(x[:, 4:], state.resized(grid), where=where[:, 4:])
    assert_same(m, expected)


@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gradients_are_right(rule, kernel, backend):
    config = PlaceConfig(
        grid=(3, 4), channels=2, heads=2, rule=rule, kernel=kernel, places="offset",
        share_places=False, backend=backend,
    )  # fmt: skip
    memory = stirred(PlaceMemory(3, config).double())
    names, parameters = zip(*memory.named_parameters(), strict=True)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    where = (torch.rand(2, 5, 2, dtype=torch.float64) - 0.5).requires_grad_()
    values = torch.randn(2, 2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    origin = torch.zeros(2, 2, dtype=torch.float64)

    def call(x, where, values, *weights):
        state = PlaceState(values, origin, config.wrap)
        m, after = torch.func.functional_call(
            memory, dict(zip(names, weights, strict=True)), (x, state), {"where": where}
        )
        return m, after.values

    with patch.object(chunked, "SPARSE_FROM", 0):
        assert torch.autograd.gradcheck(call, (x, where, values, *parameters), fast_mode=True)


def test_weights_have_their_published_names_and_start():
    memory = PlaceMemory(6, PlaceConfig(grid=(3, 4), channels=5, heads=2, share_places=False))
    shapes = {name: tuple(p.shape) for name, p in memory.state_dict().items()}
    assert shapes == {
        "write_place.weight": (4, 6),
        "read_place.weight": (4, 6),
        "content.weight": (10, 6),
        "rate.weight": (2, 6),
        "rate.bias": (2,),
        "keep.weight": (2, 6),
        "keep.bias": (2,),
        "log_width": (2,),
        "gate.weight": (10, 6),
        "norm.weight": (5,),
        "output.weight": (6, 10),
    }
    assert memory.keep.bias.tolist() == [6.0, 6.0]
    assert not memory.keep.weight.any()
    assert memory.log_width.exp().tolist() == pytest.approx([0.5, 0.5])
    given_places = PlaceMemory(6, PlaceConfig.map(2, kernel="linear")).state_dict()
    assert not {"write_place.weight", "read_place.weight", "log_width"} & set(given_places)


def test_zero_init_adds_nothing():
    m, _ = PlaceMemory(6, zero_init=True)(torch.randn(2, 5, 6))
    assert not m.any()


def test_half_precision_keeps_a_float32_state():
    memory = PlaceMemory(8).bfloat16()
    m, state = memory(torch.randn(2, 5, 8, dtype=torch.bfloat16))
    assert (m.dtype, state.values.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_reads_that_float16_cannot_hold_are_normed_all_the_same(size):
    config = PlaceConfig(grid=(3, 4), channels=8, heads=2)
    memory, x = PlaceMemory(DIM, config).half(), torch.randn(2, 3, DIM).half()
    state = PlaceState.zeros(config, 2)
    state = state.with_values(size * torch.randn_like(state.values))
    m, _ = memory(x, state)
    exact, _ = memory.float()(x.float(), state)
    assert_same(m, exact)


def test_a_pose_in_float64_gives_what_it_gives_in_float32():
    layer = MemoryResidual(PlaceMemory(8, PlaceConfig.map(axes=2)))
    x, where = torch.randn(2, 1, 8), torch.rand(2, 1, 2) * 2 - 1
    for call in (layer, torch.no_grad()(layer)):
        y, state = call(x, where=where)
        again, other = call(x, where=where.double())
        assert torch.equal(again, y)
        assert torch.equal(other.values, state.values)
        assert other.nbytes == state.nbytes


def test_a_state_is_saved_and_loaded(tmp_path):
    config = PlaceConfig(grid=(3, 4), channels=2, heads=1, wrap=(True, False))
    state = PlaceState(torch.randn(2, 1, 3, 4, 2), torch.rand(2, 2), config.wrap)
    state.save(tmp_path / "state.safetensors")
    loaded = PlaceState.load(tmp_path / "state.safetensors")
    assert torch.equal(loaded.values, state.values)
    assert torch.equal(loaded.origin, state.origin)
    assert loaded.wrap == state.wrap


@pytest.mark.parametrize(
    ("values", "scale", "axes", "message"),
    [
        (torch.zeros(()), None, 1, r"state.values: expected \(B, H, \*grid, C\) with 1 to 4"),
        (torch.zeros(2, 3, 4), None, 0, r"state.values: .* of at least 2 voxels, got \(2, 3, 4\)"),
        (torch.zeros(2, 3, 1, 4), None, 1, r"state.values: .*, got \(2, 3, 1, 4\)"),
        (torch.zeros(2, 3, *[2] * 5, 4), None, 5, "state.values: expected .* 1 to 4 grid axes"),
        (torch.zeros(2, 3, 5, 4), None, 2, r"state: expected wrap \(1\) and origin .*, got 2 and"),
        (
            torch.zeros(2, 3, 5, 4).bfloat16(), torch.ones(1), 1,
            r"state.scale: expected shape \(2, 3, 5, 1\) beside values .*, got \(1,\)",
        ),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_possible_state_is_refused(tmp_path, values, scale, axes, message):
    path = tmp_path / "state.safetensors"
    PlaceState(values, torch.zeros(2, axes), (False,) * axes, scale).save(path)
    with pytest.raises(ValueError, match=f"state.safetensors: {message}.*; pass a state"):
        PlaceState.load(path)


def test_a_state_follows_a_float_tensor():
    state = PlaceState(torch.randn(3, 1, 4, 2), torch.rand(3, 1), (False,))
    assert state.to(torch.zeros((), dtype=torch.float64)).values.dtype == torch.float64
    assert state.to(torch.zeros((), dtype=torch.bfloat16)).values.dtype == torch.float32
    assert state.to(torch.zeros((), device="meta")).origin.is_meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(2, 4, 8, 8, 32).half()}, "state.values: expected one of torch.flo"),
        ({"values": torch.zeros(2, 4, 8, 8, 32).long()}, "state.values: expected one of torch.flo"),
        ({"origin": torch.zeros(2, 2).long()}, "state.origin: expected one of torch.float32"),
        ({"origin": torch.zeros(2, 3)}, r"state.origin: expected shape \(2, 2\)"),
        ({"wrap": (True, False)}, r"state.wrap: expected \(False, False\)"),
        ({"scale": torch.ones(2, 4, 8, 8, 1)}, "state.values: expected one of torch.bfloat16"),
    ],
)
def test_an_impossible_state_is_refused(changes, message):
    memory, x = PlaceMemory(DIM), torch.randn(2, 3, DIM)
    state = replace(PlaceState.zeros(PlaceConfig(), 2), **changes)
    with pytest.raises((TypeError, ValueError), match=f"{message}.*; "):
        memory(x, state)


def test_a_config_may_change_its_number_of_axes():
    for wrap in (False, True):
        config = replace(PlaceConfig(grid=(4, 5), wrap=wrap), grid=(3, 4, 5))
        assert config.wrap == (wrap,) * 3
        assert PlaceConfig.from_dict(config.to_dict()) == config
    for mixed in (PlaceConfig(grid=(4, 5), wrap=(True, False)), PlaceConfig(grid=(4, 5))):
        assert replace(mixed, grid=(3, 4)).wrap == mixed.wrap
    with pytest.raises(ValueError, match=r"wrap: expected one value per axis .*, got .*; True or"):
        replace(PlaceConfig(grid=(4, 5), wrap=(True, False)), grid=(3, 4, 5))
    with pytest.raises(ValueError, match=r"wrap: expected one value per axis .*, got .*; True or"):
        PlaceConfig(grid=(3, 4, 5), wrap=(True, True))


def test_rows_are_selected_and_emptied():
    state = PlaceState(torch.randn(3, 1, 4, 2), torch.rand(3, 1), (False,))
    assert torch.equal(state.select([2, 2]).values, state.values[[2, 2]])
    emptied = state.reset([1])
    assert not emptied.values[1].any()
    assert torch.equal(emptied.values[[0, 2]], state.values[[0, 2]])
    with pytest.raises(ValueError, match="expected rows from 0 to 2, got 3; there are 3 rows"):
        state.select([3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, x: m(x), ValueError, r"where: expected places of shape \(B, N, n\)"),
        (lambda m, x: m(x, where=x), ValueError, r"where: expected places .* got \(2, 5, 6\)"),
        (lambda m, x: m(x, where=[0]), TypeError, "floats, got list; .*torch.as_tensor"),
        (
            lambda m, x: m(x, where=x[..., :2].to_sparse()),
            TypeError,
            r"floats, got a sparse or nested one; convert it with .to_dense\(\)",
        ),
        (
            lambda m, x: m(x, where=x[..., :3]),
            ValueError,
            r"got \(2, 5, 3\); give each token 2 coordinates, one per axis of the grid \(8, 8\)",
        ),
        (
            lambda m, x: m(x, x[..., :2]),
            TypeError,
            "state: expected a PlaceState, got Tensor; .* where, mask and reset by name",
        ),
        (
            lambda m, x: MemoryResidual(m)(x, where=x[..., :2], places=x[..., :2]),
            TypeError,
            r"^places: expected one of mask, reset, cu_seqlens, where, group.* got places=, which "
            "no memory takes; leave it out$",
        ),
        (lambda m, x: m([1]), TypeError, r"x: expected a tensor of shape \(B, N, 6\), got list"),
        (lambda m, x: m(x.double(), where=x[..., :2]), TypeError, "x: expected torch.float32"),
        (
            lambda m, x: m(x, where=x[..., :2], mask=x[..., 0]),
            TypeError,
            "mask: expected",
        ),
        (
            lambda m, x: m(x, m(x[:1], where=x[:1, :, :2])[1], where=x[..., :2]),
            ValueError,
            "state.values: expected shape",
        ),
        (
            lambda m, x: PlaceMemory(6)(x, where=x),
            ValueError,
            "where: expected None, since this memory learns its places",
        ),
        (lambda m, x: m.resized((4,)), ValueError, "resized: expected a grid of 2 axes"),
    ],
)
def test_bad_input_gets_a_clear_error(call, error, message):
    memory = PlaceMemory(6, PlaceConfig.map(2))
    with pytest.raises(error, match=message):
        call(memory, torch.randn(2, 5, 6))


def test_a_map_has_the_axes_that_were_asked_for():
    assert PlaceConfig.map().grid == (8, 8)
    assert PlaceConfig.map(3).grid == (8, 8, 8)
    assert PlaceConfig.map(grid=(4, 5, 6)).axes == 3
    with pytest.raises(ValueError, match=r"grid: expected 2 sizes, .* got \(4, 5, 6\); leave axes"):
        PlaceConfig.map(2, grid=(4, 5, 6))
    with pytest.raises(ValueError, match="axes: expected 1 to 4, got 5; grid="):
        PlaceConfig.map(5)


def test_a_moved_torus_keeps_its_share_of_a_turn_when_resized():
    state = PlaceState(torch.arange(8.0).view(1, 1, 8, 1), torch.zeros(1, 1), (True,))
    moved, turn = state.moved([0.05 * 16 / 7], empty=False), {8: 16 / 7, 16: 32 / 15}
    share = moved.origin / turn[8]
    assert share.item() == pytest.approx(0.05)
    torch.testing.assert_close(moved.resized((16,)).origin / turn[16], share)
    open_axes = PlaceState(torch.zeros(1, 1, 4, 5, 1), torch.tensor([[0.1, 0.2]]), (False, False))
    assert torch.equal(open_axes.resized((7, 9)).origin, open_axes.origin)
    mixed = PlaceState(torch.zeros(1, 1, 4, 8, 1), torch.tensor([[0.1, 0.2]]), (False, True))
    expected = torch.tensor([[0.1 * turn[16] / turn[8], 0.2]])  # x goes along the last axis
    torch.testing.assert_close(mixed.resized((7, 16)).origin, expected)
