"""What each process of a group checks: `test_place_parallel` starts them.

A process makes the whole call too, and compares its own part with it.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memories import stirred
from tensor_memory import MemoryResidual, PlaceConfig, PlaceMemory, PlaceState

SIZE, DIM, ROWS, TOKENS = 4, 4, 2, 150
RULES = ("linear", "delta")
EXACT = 1e-10
CASES = {
    "linear": PlaceConfig(grid=(3, 4), channels=2, heads=2, share_places=False, keep_bias=3.0),
    "delta": PlaceConfig(grid=(3, 4), channels=2, heads=2, rule="delta", keep_bias=3.0),
    "sparse": PlaceConfig.map(2, grid=(16, 16), channels=2, heads=2, kernel="linear", wrap=True),
    "sparse delta": PlaceConfig(
        grid=(16, 16), channels=2, heads=1, kernel="linear", rule="delta", places="offset"
    ),
    "reference": PlaceConfig(grid=(5,), channels=2, heads=1, backend="reference"),
}


def run(rank, meeting):
    """Everything that four processes must show together, and in pairs."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE,
        timeout=timedelta(seconds=100),
    )  # fmt: skip
    group = dist.group.WORLD
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    pair, other = pairs if rank < 2 else reversed(pairs)
    for name, config in CASES.items():
        parts_equal_the_whole(config, group, RESETS if name in RULES else RESETS[-1:])
    for rule in RULES:
        config = CASES[rule]
        parts_equal_the_whole(config, pair, RESETS[-1:])
        a_loss_on_the_second_of_two_calls_reaches_the_first(config, group)
        states_are_the_same_bits_everywhere(config, group)
        a_second_derivative_is_refused(config, pair)
        wrapped_models_have_the_gradients_of_one_process(config, group)
    one_exchange_of_a_constant_size_serves_the_linear_rule(CASES["linear"], group)
    with pytest.raises(TypeError, match=r"a torch.distributed.ProcessGroup that this process"):
        memory_of(config)(tokens(), group=other)
    dist.destroy_process_group()


def memory_of(config):
    torch.manual_seed(1)
    return stirred(PlaceMemory(DIM, config).double())


def tokens(count=TOKENS):
    return torch.randn(ROWS, count, DIM, dtype=torch.float64)


def part_of(count, group):
    """This process' tokens: parts differ in length, and of four the third has none."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    cuts = {2: [0, 0.3, 1], 4: [0, 0.1, 0.55, 0.55, 1]}[size]
    return slice(round(cuts[rank] * count), round(cuts[rank + 1] * count))


def assert_near(one, other):
    assert one.shape == other.shape
    if one.numel():
        scale = 1 + other.abs().max()
        assert ((one - other) / scale).abs().max() <= EXACT


def gradient_of(tensor):
    """A process without tokens has none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def summed(gradient, group):
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


def resets(*places):
    """(B, N) with these (row, token) true."""
    found = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    for place in places:
        found[place] = True
    return found


RESETS = [None, resets((0, 20)), resets((0, 20), (1, 20), (1, 90), (0, 140))]
"""In no part, in one part of one row, and in several parts."""


def parts_equal_the_whole(config, group, resets):
    """Outputs, final state, and the gradients of tokens, places, weights and the state before."""
    memory, x = memory_of(config), tokens()
    where = torch.rand(ROWS, TOKENS, config.axes, dtype=torch.float64) * 2 - 1
    where = None if config.places == "learned" else where
    values = torch.randn(ROWS, config.heads, *config.grid, config.channels, dtype=torch.float64)
    origin = torch.rand(ROWS, config.axes, dtype=torch.float64) * 0.1
    factor = torch.randn(ROWS, TOKENS, DIM, dtype=torch.float64)
    mask = torch.rand(ROWS, TOKENS) < 0.9
    share = (1 + dist.get_rank(group)) / sum(range(1, 1 + dist.get_world_size(group)))
    for reset in resets:
        results = []
        for cut, processes in ((slice(None), None), (part_of(TOKENS, group), group)):
            memory.zero_grad()
            leaves = {"x": x[:, cut], "values": values}
            if where is not None:
                leaves["where"] = where[:, cut]
            leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
            m, after = memory(
                leaves["x"], PlaceState(leaves["values"], origin, config.wrap),
                where=leaves.get("where"), mask=mask[:, cut],
                reset=None if reset is None else reset[:, cut], group=processes,
            )  # fmt: skip
            of_state = after.values.square().sum() * (1 if processes is None else share)
            ((m * factor[:, cut]).sum() + of_state).backward()
            weights = [gradient_of(weight) for weight in memory.parameters()]
            gradients = {name: gradient_of(leaf) for name, leaf in leaves.items()}
            results.append((m, after, gradients, weights))
        (whole, whole_after, expected, of_whole), (m, after, found, of_parts) = results
        assert_near(m, whole[:, part_of(TOKENS, group)])
        assert_near(after.values, whole_after.values)
        assert torch.equal(after.origin, origin)
        assert_near(summed(found.pop("values"), group), expected.pop("values"))
        for name, gradient in found.items():
            assert_near(gradient, expected[name][:, part_of(TOKENS, group)])
        for gradient, of_all in zip(of_parts, of_whole, strict=True):
            assert_near(summed(gradient, group), of_all)


def a_loss_on_the_second_of_two_calls_reaches_the_first(config, group):
    """On every process, though the state before counts on the first alone."""
    memory, x, next_x = memory_of(config), tokens(), tokens()
    gradients = []
    for cut, processes in ((slice(None), None), (part_of(TOKENS, group), group)):
        leaf = x[:, cut].clone().requires_grad_()
        _, state = memory(leaf, group=processes)
        m, _ = memory(next_x[:, cut], state, group=processes)
        m.square().sum().backward()
        gradients.append(leaf.grad)
    assert_near(gradients[1], gradients[0][:, part_of(TOKENS, group)])


@torch.no_grad()
def states_are_the_same_bits_everywhere(config, group):
    _, state = memory_of(config)(tokens()[:, part_of(TOKENS, group)], group=group)
    first = state.values.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, state.values)
    assert state.values.any()


def a_second_derivative_is_refused(config, group):
    memory, x = memory_of(config), tokens(8).requires_grad_()
    m, _ = memory(x, group=group)
    with pytest.raises(NotImplementedError, match="no second derivative: leave group out"):
        torch.autograd.grad(m.square().sum(), x, create_graph=True)


class Exchanges(TorchDispatchMode):
    """Watches what goes between processes: names, and how many numbers the tensors have."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((function.__name__, sum(tensor.numel() for tensor in tensors)))
        return function(*args, **kwargs or {})


def one_exchange_of_a_constant_size_serves_the_linear_rule(config, group):
    """One forward, one backward, whatever the number of tokens; P + 1 or 2 P parts by process."""
    memory, P = memory_of(config), dist.get_world_size(group)
    packed = ROWS * config.heads * (1 + config.voxels * config.channels)
    for count in (8, TOKENS):
        x = tokens(count)[:, part_of(count, group)]
        with Exchanges() as forward:
            m, state = memory(x, group=group)
        assert forward.seen == [("allgather_.default", (P + 1) * packed)]
        with Exchanges() as backward:
            (m.sum() + state.values.sum()).backward()
        assert backward.seen == [("alltoall_base_.default", 2 * P * packed)]


class Model(nn.Module):
    """Two layers with a memory each."""

    def __init__(self, config):
        super().__init__()
        layers = [MemoryResidual(memory_of(config)) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers).double(), nn.Linear(DIM, 3).double()

    def forward(self, x, group=None):
        for layer in self.layers:
            x, _ = layer(x, group=group)
        return self.head(x)


def wrapped_models_have_the_gradients_of_one_process(config, group):
    """DDP and FSDP2, rows or sequences cut over the processes; both take the mean of gradients."""
    torch.manual_seed(2)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = torch.randn(size, 8 * size, DIM, dtype=torch.float64)
    plain = Model(config)
    plain(x).square().mean().backward()
    for wrap in (DistributedDataParallel, _sharded):
        for by_rows in (True, False):
            model = wrap(Model(config))
            own = slice(rank, rank + 1) if by_rows else slice(None)
            tokens = slice(None) if by_rows else slice(8 * rank, 8 * rank + 8)
            for _ in range(2):  # a second step finds what the first has left behind
                model.zero_grad()
                out = model(x[own, tokens], group=None if by_rows else group)
                out.square().mean().backward()
            for ours, theirs in zip(plain.parameters(), model.parameters(), strict=True):
                gradient = theirs.grad
                if wrap is _sharded:
                    gradient = gradient.full_tensor()
                assert_near(gradient, ours.grad)


def _sharded(model):
    for layer in model.layers:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
