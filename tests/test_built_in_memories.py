"""Memories built in by hand: whatever works on an attached host works there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
    attach,
    detach,
    find_leak,
    load_memory,
    memory_disabled,
    record,
    save_memory,
)

DIM = 8
CONFIG = MemoryConfig(channels=4, grid=(3, 3), chunk_size=2)
PLACES = PlaceConfig(grid=(3, 3), channels=4, heads=2)


class Decoder(nn.Module):
    """Blocks of its author's own making, each with a memory behind it."""

    def __init__(self, *memories: nn.Module, own: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in memories)
        if not own:
            self.shared = memories[0]
        self.memories = nn.ModuleList(MemoryResidual(m, own_memory=own) for m in memories)

    def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, list[Any]]:
        after = []
        for number, (block, memory) in enumerate(zip(self.blocks, self.memories, strict=True)):
            x, state = memory(block(x).tanh(), states[number] if states else None)
            after.append(state)
        return x, after


def build(kind: str) -> Decoder:
    if kind == "shared":
        memory = TensorMemory(DIM, CONFIG)
        return Decoder(memory, memory, own=False)
    if kind == "partly shared":
        memory = TensorMemory(DIM, CONFIG)
        return Decoder(memory, TensorMemory(DIM, CONFIG), memory)
    if kind == "two kinds":
        return Decoder(TensorMemory(DIM, CONFIG), PlaceMemory(DIM, PLACES))
    return Decoder(TensorMemory(DIM, CONFIG), TensorMemory(DIM, CONFIG))


KINDS = ["one each", "shared", "partly shared", "two kinds"]
X = torch.randn(2, 9, DIM, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_memories_are_saved_and_loaded_without_the_model_around_them(tmp_path: Path, kind: str):
    first, second = build(kind), build(kind)
    save_memory(first, tmp_path)
    described = json.loads((tmp_path / "memory.json").read_text())
    assert described["blocks"] == [f"memories.{i}" for i in range(len(first.memories))]
    second.blocks.load_state_dict(first.blocks.state_dict())
    assert not torch.equal(first(X)[0], second(X)[0])
    load_memory(second, tmp_path)
    assert torch.equal(first(X)[0], second(X)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_is_refused_and_left_as_it_was(tmp_path: Path, kind: str):
    save_memory(build(kind), tmp_path)
    for other in KINDS:
        model = build(other)
        if other == kind:
            continue
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"expected .* got .*; "):
            load_memory(model, tmp_path)
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_memory_goes_from_an_attached_host_into_a_model_built_by_hand(tmp_path: Path):
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True)
    host = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    attach(host, CONFIG)
    save_memory(host, tmp_path)
    model = build("shared")
    load_memory(model, tmp_path, same_blocks=False)
    for name, tensor in host.tensor_memory.memory.state_dict().items():
        assert torch.equal(model.shared.state_dict()[name], tensor)
    detach(host)


def test_a_memory_without_a_residual_is_saved_too(tmp_path: Path):
    first, second = (nn.ModuleDict({"m": TensorMemory(DIM, CONFIG)}) for _ in range(2))
    save_memory(first, tmp_path)
    load_memory(second, tmp_path)
    assert torch.equal(first["m"](X)[0], second["m"](X)[0])  # type: ignore[operator]


def test_another_grid_of_built_in_places_is_told_how_to_get_there(tmp_path: Path):
    small, large = (
        nn.ModuleDict({"m": PlaceMemory(DIM, PlaceConfig(grid=(n, n)))}) for n in (4, 8)
    )
    save_memory(small, tmp_path)
    remedy = r"build the model with the config .* take memory\.resized\(\[8, 8\]\)"
    with pytest.raises(ValueError, match=remedy):
        load_memory(large, tmp_path)


@pytest.mark.parametrize("kind", [TensorMemory, PlaceMemory])
def test_a_memory_and_a_residual_around_one_are_told_apart(tmp_path: Path, kind: Any):
    config = CONFIG if kind is TensorMemory else PLACES
    alone, layer = kind(DIM, config), MemoryResidual(kind(DIM, config))
    words = ["one memory without a MemoryResidual or shared by all layers"]
    words += ["a memory of its own for every layer"]
    for saved, here, got, expected in ((alone, layer, *words), (layer, alone, *words[::-1])):
        save_memory(saved, tmp_path)
        match = f"expected {expected} as in this model, got {got}; load into a model built like"
        with pytest.raises(ValueError, match=match):
            load_memory(here, tmp_path)
    save_memory(alone, tmp_path)
    load_memory(layer.memory, tmp_path)
    assert torch.equal(layer.memory(X)[0], alone(X)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_the_model_is_its_blocks_and_states_stay(kind: str):
    model = build(kind)
    _, states = model(X)
    with memory_disabled(model):
        off, same = model(X, states)
        fresh = model(X)[1]
        with memory_disabled(model):
            pass
        assert torch.equal(model(X)[0], off)
    x = X
    for block in model.blocks:
        x = block(x).tanh()
    assert torch.equal(off, x)
    assert all(mine is before for mine, before in zip(same, states, strict=True))
    assert [type(state) for state in fresh] == [type(state) for state in states]
    assert not torch.equal(model(X)[0], off)


@pytest.mark.parametrize("memory", [TensorMemory(DIM, CONFIG), PlaceMemory(DIM, PLACES)])
def test_a_disabled_layer_refuses_what_it_refuses_otherwise(memory: TensorMemory | PlaceMemory):
    layer = MemoryResidual(memory)
    state = layer(X)[1]
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (
            TypeError,
            r"wherre: expected one of .* got wherre=, which no .*; leave",
            (X,),
            {"wherre": 3},
        ),
        (TypeError, r"state: expected a \w+State, got str", (X, "hello"), {}),
        (ValueError, "state", (X[:1], state), {}),
        (TypeError, "mask: expected a bool tensor", (X,), {"mask": 1}),
    ]
    for error, match, arguments, options in wrong:
        with pytest.raises(error, match=match):
            layer(*arguments, **options)
        with memory_disabled(layer), pytest.raises(error, match=match):
            layer(*arguments, **options)


def test_a_disabled_layer_takes_every_option_of_its_memory():
    chunks = MemoryResidual(TensorMemory(DIM, CONFIG))
    places = MemoryResidual(PlaceMemory(DIM, PlaceConfig.map(axes=2)))
    with memory_disabled(chunks), memory_disabled(places):
        assert chunks(X, flush=3)[0] is X
        assert places(X, where=X[..., :2], group=None)[0] is X
        assert chunks(X[:1], cu_seqlens=torch.tensor([0, 4, 9]))[0].shape == (1, 9, DIM)


def test_a_disabled_layer_does_not_warn_of_what_it_cannot_learn(recwarn: pytest.WarningsRecorder):
    config = MemoryConfig(channels=4, grid=(3, 3), chunk_size=1, forget_bias=-3.0)
    layer = MemoryResidual(TensorMemory(DIM, config)).train()
    x = X[:, :1].expand(-1, 4096, -1)
    with memory_disabled(layer):
        layer(x)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="forget"):
        layer.memory.check(x)


def test_a_compiled_model_is_traced_again_without_its_memories():
    model = build("two kinds")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    on = model(X)[0]
    assert torch.equal(compiled(X)[0], on)
    with memory_disabled(model):
        assert torch.equal(compiled(X)[0], model(X)[0])
    assert torch.equal(compiled(X)[0], on)


def test_a_wrapper_around_an_attached_host_switches_both_off():
    layer = nn.TransformerEncoderLayer(DIM, 2, 16, dropout=0, batch_first=True)
    host = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    bare = host(X)
    attach(host, CONFIG)
    wrapper = nn.Sequential(host)
    with memory_disabled(wrapper):
        assert torch.equal(wrapper(X), bare)
    assert not torch.equal(wrapper(X), bare)


def test_a_memory_that_nothing_adds_cannot_be_switched_off():
    model = nn.ModuleDict({"m": TensorMemory(DIM, CONFIG)})
    message = r"expected memories inside a MemoryResidual, got a TensorMemory by itself at 'm'.*; p"
    with pytest.raises(ValueError, match=message), memory_disabled(model):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_is_recorded(kind: str):
    model = build(kind)
    with record(model) as recording:
        model(X)
    assert recording.names == [f"memories.{i}" for i in range(len(model.memories))]
    assert all(len(layer) for layer in recording)
    with (
        pytest.warns(UserWarning, match="got none; memories that are disabled"),
        record(model) as recording,
        memory_disabled(model),
    ):
        model(X)
    assert not any(len(layer) for layer in recording)


def test_a_leak_is_found_where_a_state_goes_through_depth():
    class Leaking(Decoder):
        def forward(self, x: Tensor, states: Any = None) -> tuple[Tensor, list[Any]]:
            state = None
            for memory in self.memories:
                x, state = memory(x, state)
            return x, [state]

    memory = TensorMemory(DIM, CONFIG)
    assert not find_leak(build("shared"), X)
    assert find_leak(Leaking(memory, memory, own=False), X)


def test_attach_refuses_a_model_that_holds_one_already():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.TransformerEncoderLayer(DIM, 2, 16, batch_first=True)
            self.memory = MemoryResidual(TensorMemory(DIM, CONFIG))

    model = nn.ModuleList(Block() for _ in range(2))
    message = r"expected a model without a memory, got ModuleList with .* at '0.memory', '1.memory'"
    with pytest.raises(ValueError, match=message):
        attach(model, CONFIG, layers="*.block")
