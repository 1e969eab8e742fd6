"""One token on a CPU without gradients takes a path of its own, and computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memories import stirred
from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
    fused_layer,
)
from tolerances import assert_same

DIM, ROWS, TOKENS = 6, 2, 7

TENSOR = {
    "paper": dict(channels=3, grid=(3, 4, 5), chunk_size=3),
    "every token reads": dict(channels=3, grid=(4, 3), chunk_size=3, reads="token"),
    "heads": dict(channels=2, grid=(5,), chunk_size=2, read_heads=2, write_heads=2),
    "own coordinates": dict(
        channels=3, grid=(3, 3), chunk_size=2, read_heads=2, write_heads=3, share_coordinates=False
    ),
    "pointwise": dict(channels=3, grid=(2, 3, 2, 2), chunk_size=4, mixing="pointwise"),
    "chunks of one": dict(channels=3, grid=(3, 3), chunk_size=1, sigma_scale=0.5, gain=2.0),
}
PLACE = {
    "gaussian": dict(grid=(4, 4), channels=3, heads=2),
    "delta": dict(grid=(4, 4), channels=3, heads=2, rule="delta", share_places=False),
    "linear kernel": dict(grid=(3, 4), channels=3, heads=2, kernel="linear"),
    "unequal and wrapped": dict(grid=(3, 5, 2), channels=2, heads=1, wrap=(True, False, False)),
    "given": dict(grid=(5, 5), channels=3, heads=2, places="given"),
    "offset": dict(grid=(4, 4, 4), channels=3, heads=2, places="offset"),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the paths taken."""
    found: list[str] = []
    for name in ("tensor_token", "place_token"):
        path = getattr(fused_layer, name)

        def watched(*args: Any, path: Any = path, name: str = name) -> Any:
            found.append(name)
            return path(*args)

        monkeypatch.setattr(fused_layer, name, watched)
    return found


def layer(memory: Any, **options: Any) -> MemoryResidual:
    return stirred(MemoryResidual(memory, gate_init=0.3, **options).double().eval())


def assert_same_states(one: Any, other: Any) -> None:
    for name, value in vars(one).items():
        if isinstance(value, Tensor):
            assert_same(value.double(), getattr(other, name).double())


def assert_steps_as_with_gradients(made: MemoryResidual, **options: Tensor) -> None:
    x, slow, fast = torch.randn(ROWS, TOKENS, DIM, dtype=torch.float64), None, None
    for t in range(TOKENS):
        now = {name: value[:, t : t + 1] for name, value in options.items()}
        expected, slow = made(x[:, t : t + 1], slow, **now)
        with torch.no_grad():
            y, fast = made(x[:, t : t + 1], fast, **now)
        assert_same(y, expected.detach())
        assert_same_states(fast, slow.detach())


@pytest.mark.parametrize("config", TENSOR.values(), ids=TENSOR)
def test_a_token_is_read_and_written_as_with_gradients(config: Any, taken: list[str]) -> None:
    assert_steps_as_with_gradients(layer(TensorMemory(DIM, MemoryConfig(**config))))
    assert taken == ["tensor_token"] * TOKENS


@pytest.mark.parametrize("config", PLACE.values(), ids=PLACE)
def test_a_token_goes_to_its_place_as_with_gradients(config: Any, taken: list[str]) -> None:
    made = PlaceConfig(**config)
    options = {}
    if made.places != "learned":
        options["where"] = torch.rand(ROWS, TOKENS, made.axes, dtype=torch.float64) * 2 - 1
    assert_steps_as_with_gradients(layer(PlaceMemory(DIM, made)), **options)
    assert taken == ["place_token"] * TOKENS


def test_a_moved_state_and_places_by_head_are_taken_too(taken: list[str]) -> None:
    config = PlaceConfig(grid=(5, 5), channels=3, heads=2, places="given")
    made = layer(PlaceMemory(DIM, config))
    x = torch.randn(1, 1, DIM, dtype=torch.float64)
    where = torch.rand(1, 1, 2, 2, dtype=torch.float64)
    state = made(x, where=where)[1].detach().moved([0.3, -0.2])
    expected, slow = made(x, state, where=where)
    with torch.no_grad():
        y, fast = made(x, state, where=where)
    assert_same(y, expected.detach())
    assert_same_states(fast, slow.detach())
    assert taken == ["place_token"]


@torch.no_grad()
def test_what_is_unusual_takes_the_plain_path(taken: list[str]) -> None:
    made = layer(TensorMemory(DIM, MemoryConfig(**TENSOR["paper"])))
    x = torch.randn(ROWS, 1, DIM, dtype=torch.float64)
    marks = torch.ones(ROWS, 1, dtype=torch.bool)
    made(x, mask=marks)
    made(x, reset=marks)
    made(x, flush=True)
    made(x.expand(-1, 2, -1))
    with torch.autocast("cpu", torch.bfloat16):
        made(x)
    made.bfloat16()(x.bfloat16())
    layer(TensorMemory(DIM, MemoryConfig(channels=2, grid=(3, 3), write="nearest")))(x)
    layer(TensorMemory(DIM, MemoryConfig(channels=2, grid=(3, 3), backend="reference")))(x)
    layer(TensorMemory(DIM, MemoryConfig(channels=2, grid=(3, 3))), norm=False)(x)
    place = layer(PlaceMemory(DIM, PlaceConfig(grid=(3, 3), channels=2, heads=1)))
    place(x, place(x.expand(-1, 2, -1))[1].quantized(torch.int8))
    seen: list[Tensor] = []
    place.memory.content.register_forward_hook(lambda module, args, out: seen.append(out))
    place(x)
    assert len(seen) == 1
    assert taken == []


@pytest.mark.parametrize(
    "memory",
    [
        PlaceMemory(DIM, PlaceConfig(**PLACE["gaussian"])),
        TensorMemory(DIM, MemoryConfig(**TENSOR["chunks of one"])),
    ],
    ids=["places", "tensor"],
)
def test_a_part_that_was_given_a_bias_has_one(memory: Any, taken: list[str]) -> None:
    memory.content = torch.nn.Linear(DIM, memory.content.out_features)
    assert_steps_as_with_gradients(layer(memory))
    assert taken == []


@torch.no_grad()
def test_what_is_wrong_is_refused_as_on_the_plain_path(taken: list[str]) -> None:
    made = layer(TensorMemory(DIM, MemoryConfig(**TENSOR["paper"])))
    x = torch.randn(ROWS, 1, DIM, dtype=torch.float64)
    state = made(x)[1]
    with pytest.raises(ValueError, match=r"state.hidden: expected shape"):
        made(x[:1], state)
    with pytest.raises(TypeError, match=r"expected torch.float64"):
        made(x.float())
    with pytest.raises(ValueError, match=r"x: expected tokens of shape"):
        made(x[..., :-1])
    assert taken == ["tensor_token"]


def test_a_state_with_a_graph_keeps_it(taken: list[str]) -> None:
    made = layer(TensorMemory(DIM, MemoryConfig(**TENSOR["paper"]))).requires_grad_(False)
    x = torch.randn(ROWS, 4, DIM, dtype=torch.float64, requires_grad=True)
    state = made(x)[1]
    y, _ = made(x.detach()[:, :1], state)
    assert y.requires_grad
    assert taken == []


def test_a_frozen_layer_hands_a_gradient_on_that_waits_in_its_chunk() -> None:
    made = layer(TensorMemory(DIM, MemoryConfig(**TENSOR["paper"]))).requires_grad_(False)
    prompt = torch.randn(ROWS, 1, DIM, dtype=torch.float64, requires_grad=True)
    after = torch.randn(ROWS, 4, DIM, dtype=torch.float64)

    def gradient(*parts: Tensor) -> Tensor:
        y, state = made(prompt)
        for part in parts:
            y, state = made(part, state)
        return torch.autograd.grad(y[:, -1].sum(), prompt)[0]

    assert_same(gradient(*after.split(1, dim=1)), gradient(after))


def test_a_token_is_made_where_it_is_whatever_device_is_the_default(taken: list[str]) -> None:
    made = layer(PlaceMemory(DIM, PlaceConfig(grid=(11, 11), channels=3)))
    x = torch.randn(ROWS, 1, DIM, dtype=torch.float64)
    with torch.no_grad(), torch.device("meta"):
        y, _ = made(x)
    assert taken == ["place_token"]
    with torch.no_grad():
        assert_same(y, made(x)[0])


@pytest.mark.parametrize("given", ["where", "shift"])
def test_a_frozen_layer_tells_where_a_single_token_should_have_been(
    given: str, taken: list[str]
) -> None:
    config = PlaceConfig(grid=(4, 4), channels=3, heads=2, places="given")
    made = layer(PlaceMemory(DIM, config)).requires_grad_(False)
    x, where = torch.randn(1, 1, DIM).double(), torch.rand(1, 1, 2).double()
    places = {"where": where, "shift": torch.tensor([0.1, -0.05]).double()}
    state = made(x, where=-where)[1]
    taken.clear()

    def read(place: Tensor) -> Tensor:
        at = places | {given: place}
        return made(x, state.moved(at["shift"]), where=at["where"])[0]

    assert torch.autograd.gradcheck(read, places[given].requires_grad_())
    assert taken == []
