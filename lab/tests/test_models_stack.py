"""What layers carry, how they start, and that a call cut in two is the same call."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tensor_memory import MemoryConfig, MemoryResidual, PlaceConfig, TensorMemory
from tensor_memory_lab.models.attention import SelfAttention
from tensor_memory_lab.models.block import Block, initialise, kept_rows
from tensor_memory_lab.models.language import LanguageModelConfig
from tensor_memory_lab.models.peers import PeerConfig
from tensor_memory_lab.models.stack import Stack, StackConfig
from tensor_memory_lab.models.toy import ToyModelConfig
from tolerances import assert_same

MEMORY = MemoryConfig(channels=3, grid=(3, 4), chunk_size=3)
PLACE = PlaceConfig(channels=3, grid=(3, 4), heads=2, share_places=False, rule="delta")
PEER = PeerConfig(state_bytes=4 * 32, heads=2)
PLAIN = StackConfig(dim=8, layers=2, heads=2, length=12, carried=True)
CARRIED = {  # attention that cannot reach into the call before, so that only the state does
    "tensor": replace(PLAIN, window=1, side="tensor", memory=MEMORY, side_layers=(0, 1)),
    "tensor, token reads": replace(
        PLAIN, window=1, side="tensor", memory=replace(MEMORY, reads="token"), side_layers=(1,)
    ),
    "tensor, own weights": replace(
        PLAIN, window=1, side="tensor", memory=MEMORY, side_layers=(0, 1), share_weights=False
    ),
    "place": replace(PLAIN, window=1, side="place", place=PLACE, side_layers=(0, 1)),
    "linear side": replace(PLAIN, window=1, side="linear", memory=MEMORY, side_layers=(0, 1)),
    "linear": replace(PLAIN, attention="linear"),
    "xl": replace(PLAIN, attention="relative", segment=3, cache=4),
    "window+": replace(PLAIN, window=2, extra_keys=3, rotary=True),
    "gla": replace(PLAIN, window=1, side="gla", peer=PEER, side_layers=(0, 1)),
    "gated-deltanet": replace(PLAIN, window=1, side="gated-deltanet", peer=PEER, side_layers=(1,)),
    "recurrent slots": replace(PLAIN, recurrent_slots=2, segment=3),
}


def made(config):
    torch.manual_seed(3)
    stack = Stack(config)
    initialise(stack, std=0.3)
    return stack.double().eval()


def tokens(rows=2, length=12):
    return torch.randn(rows, length, 8, dtype=torch.float64)


def in_calls(stack, x, lengths, carry=None):
    parts = []
    for part in x.split(lengths, dim=1):
        y, carry = stack(part, carry, torch.zeros(len(x), dtype=torch.bool))
        parts.append(y)
    return torch.cat(parts, dim=1), carry


@pytest.mark.parametrize("name", CARRIED)
def test_carried_calls_equal_one_long_pass(name):
    stack, x = made(CARRIED[name]), tokens()
    whole, _ = stack(x)
    cut, carry = in_calls(stack, x, [6, 3, 3])
    assert_same(cut, whole)
    assert not any(tensor.requires_grad for tensor in carry.values())
    assert made(replace(CARRIED[name], carried=False))(x)[1] is None


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 2, 9], [6, 1, 5]])
@pytest.mark.parametrize(
    "name", ["tensor", "tensor, token reads", "place", "linear", "linear side", "gla", "window+"]
)
def test_calls_may_be_cut_inside_a_chunk(name, lengths):
    stack, x = made(CARRIED[name]), tokens()
    assert_same(in_calls(stack, x, lengths)[0], stack(x)[0])


def test_a_diagnostic_model_starts_for_long_gaps_with_what_else_was_chosen():
    sizes = {"channels": 3, "grid": (3, 4), "chunk_size": 3}
    made = ToyModelConfig(method="tensor-long", memory=MemoryConfig(**sizes, mixing="pointwise"))
    assert made.stack(8).memory == MemoryConfig.long_gap(**sizes, mixing="pointwise")
    with pytest.raises(ValueError, match=r"model\.memory\.forget_bias: expected the default, 0\.0"):
        ToyModelConfig(method="tensor-long", memory=MemoryConfig(forget_bias=1.0))


@pytest.mark.parametrize("name", CARRIED)
def test_a_fresh_row_forgets_and_the_others_remember(name):
    stack, x = made(CARRIED[name]), tokens(rows=3)
    _, carry = stack(x[:, :6])
    remembered, _ = stack(x[:, 6:], carry)
    forgotten, _ = stack(x[:, 6:])
    got, _ = stack(x[:, 6:], carry, torch.tensor([True, False, True]))
    assert_same(got[0], forgotten[0])
    assert_same(got[1], remembered[1])
    assert_same(got[2], forgotten[2])
    alone, _ = stack(x[1:2, 6:], {key: tensor[1:2] for key, tensor in carry.items()})
    assert_same(alone, remembered[1:2])  # rows do not see each other
    assert (remembered - forgotten).abs().amax((1, 2)).min() > 1e-6  # what is carried matters


@pytest.mark.parametrize("name", CARRIED)
def test_zeros_in_fresh_rows_equal_a_start_from_nothing(name):
    stack, x = made(CARRIED[name]), tokens()
    expected, after = stack(x)
    empty = stack.empty_carry(2, x)
    assert all(not tensor.any() for tensor in empty.values())
    got, kept = stack(x, empty, torch.ones(2, dtype=torch.bool))
    assert_same(got, expected)
    assert kept.keys() == after.keys() == empty.keys()
    for key in kept:
        assert kept[key].shape == empty[key].shape
        assert kept[key].dtype == empty[key].dtype
        assert_same(kept[key].double(), after[key].double())


@pytest.mark.parametrize("name", CARRIED)
def test_the_bytes_stated_are_the_bytes_carried(name):
    stack = made(CARRIED[name]).float()
    _, carry = stack(torch.randn(5, 12, 8))
    state = [tensor for tensor in carry.values() if tensor.is_floating_point()]
    assert sum(tensor.nbytes for tensor in state) == 5 * stack.state_bytes() > 0
    counters = [tensor for tensor in carry.values() if not tensor.is_floating_point()]
    assert all(tensor.shape == (5,) for tensor in counters)


def test_one_memory_is_registered_once_and_shared():
    stack = made(CARRIED["tensor"])
    memories = [module for module in stack.modules() if isinstance(module, TensorMemory)]
    assert memories == [stack.memory]
    assert all(block.side.memory is stack.memory for block in stack.blocks)
    assert len([name for name in stack.state_dict() if "write_proj" in name]) == 1


@pytest.mark.parametrize("layers", [(0, 2), (0, 0)])
def test_a_memory_layer_that_does_not_exist_or_is_named_twice_is_refused(layers):
    with pytest.raises(ValueError, match=r"memory_layers: expected different layers of 0 to 1, go"):
        ToyModelConfig(method="xl", layers=2, memory_layers=layers)


TINY = MemoryConfig(channels=1, grid=(2,), chunk_size=1)


@pytest.mark.parametrize(
    "config",
    [
        LanguageModelConfig(method="recurrent-slots", memory=TINY),
        ToyModelConfig(method="slots", slots=0),
        ToyModelConfig(method="slots-matched", memory=TINY),
        ToyModelConfig(method="recurrent-slots", window=2, memory=TINY),
        ToyModelConfig(method="recurrent-slots", window=2, slots=-1),
    ],
)
def test_a_method_of_slots_without_any_is_refused(config):
    with pytest.raises(ValueError, match=rf"model.slots: expected 1 or more for {config.method}, "):
        config.stack(12, *[False] * isinstance(config, LanguageModelConfig))


@pytest.mark.parametrize("side", ["tensor", "place", "linear"])
def test_the_initialiser_leaves_memory_norms_and_gates_alone(side):
    stack = Stack(replace(CARRIED["tensor"], side=side, gate_init=-2.0))
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    initialise(stack)
    for name, after in stack.state_dict().items():
        kept = "memory" in name or "norm" in name or name.endswith("gate")
        if name.endswith("bias") and not kept:
            assert not after.any()
        else:
            assert torch.equal(after, before[name]) == kept, name
    if side == "tensor":
        assert stack.memory.spread.bias.item() == 1.0
    if side == "place":
        assert stack.memory.keep.bias.tolist() == [6.0] * 4
    assert stack.blocks[0].side.gate.item() == -2.0


def test_extra_keys_are_a_longer_window_whose_bytes_count():
    plain, more = (
        made(replace(PLAIN, carried=False, **changes))
        for changes in ({"window": 5}, {"window": 2, "extra_keys": 3, "cache_type": "bf16"})
    )
    x = tokens()
    assert torch.equal(plain(x)[0], more(x)[0])
    assert (plain.state_bytes(), more.state_bytes()) == (0, 2 * 2 * 2 * 8 * 3)


@pytest.mark.parametrize("changes", [{"window": None}, {"window": 2, "attention": "linear"}])
def test_extra_keys_without_a_window_are_refused(changes):
    with pytest.raises(ValueError, match="extra_keys: expected 0 or more, and 0 without a window"):
        replace(PLAIN, extra_keys=2, **changes)


def test_places_that_the_caller_gives_are_refused_for_text():
    with pytest.raises(ValueError, match=r"place.places: expected learned, .* got 'given'"):
        LanguageModelConfig(method="place", place=PlaceConfig.map())


def test_all_methods_start_from_the_same_weights_under_one_seed():
    layers = [nn.Linear(400, 400) for _ in range(2)]
    for seed, layer in enumerate(layers):
        torch.manual_seed(seed)
        initialise(layer)
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not torch.equal(layers[0].weight, layers[1].weight)
    plain = made(replace(PLAIN, window=1)).state_dict()
    for config in CARRIED.values():
        for name, tensor in made(config).state_dict().items():
            if name in plain:
                assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("place", ["after_mlp", "after_attention"])
def test_a_side_path_stands_where_it_is_put(place):
    memory = TensorMemory(8, MEMORY)
    side = MemoryResidual(memory)
    block = Block(8, attention=SelfAttention(8, 2), side_place=place)
    block.side = side
    x = torch.randn(2, 6, 8)
    got, _ = block(x)
    y, _ = block.attend(x)
    if place == "after_attention":
        expected = block.transform(side(y)[0])
    else:
        expected, _ = side(block.transform(y))
    assert torch.equal(got, expected)


def test_drop_path_drops_whole_rows_and_keeps_the_mean():
    module = nn.Identity()
    kept = kept_rows(torch.ones(4000, 3), 0.25, module)
    assert kept.shape == (4000, 1)
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3])
    assert kept.mean().item() == pytest.approx(1, abs=0.05)
    assert kept_rows(torch.ones(4, 3), 0.25, module.eval()) is None


def test_slots_are_those_of_a_loop_written_out():
    """Segment after segment by the definition, with the prepared masks made anew."""
    stack, m = made(CARRIED["recurrent slots"]), 2
    x = tokens(length=11)
    slots, expected = stack.slots.empty.expand(2, -1, -1), []
    for start in range(0, 11, 3):
        part = x[:, start : start + 3]
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
