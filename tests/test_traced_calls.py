"""Calls that nobody computes, or a compiler does: on the meta device, and in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from memories import OPTIONS
from tensor_memory import MemoryConfig, MemoryResidual, PlaceConfig, PlaceMemory, TensorMemory
from tolerances import assert_same

DIM = 6
MEMORIES: dict[str, Any] = {
    **OPTIONS,
    "kept in parts": MemoryConfig(channels=2, grid=(3, 2), chunk_size=2, checkpoint_every=2),
    "gaussian places": PlaceConfig(grid=(3, 4), channels=2, heads=2),
    "few of many places": PlaceConfig(grid=(12, 12), channels=2, heads=2, kernel="linear"),
    "overwritten": PlaceConfig(grid=(12, 12), channels=2, kernel="linear", rule="delta"),
}


def build(name: str, device: str = "cpu") -> nn.Module:
    config = MEMORIES[name]
    kind: Any = TensorMemory if isinstance(config, MemoryConfig) else PlaceMemory
    with torch.device(device):
        return kind(DIM, config)


def marks(name: str, device: str = "cpu") -> list[dict[str, Any]]:
    """Ways to call: nothing, and every mark by itself, then all."""
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3], device=device)
    reset = torch.zeros(2, 7, dtype=torch.bool, device=device)
    reset[0, 3] = reset[1, 1] = True
    ways: list[dict[str, Any]] = [{}, {"mask": mask}, {"reset": reset}]
    if isinstance(MEMORIES[name], PlaceConfig):
        return [*ways, {"mask": mask, "reset": reset}]
    flush = torch.zeros_like(reset)
    flush[0, 5] = True
    ways += [{"flush": True}, {"flush": 3}, {"flush": flush}]
    return [*ways, {"mask": mask, "reset": reset, "flush": flush}]


def state_shapes(state: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in torch.utils._pytree.tree_leaves(state)]


SOME = ("paper", "token reads, heads", "few of many places")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SOME else pytest.mark.exhaustive) for name in MEMORIES],
)
def test_a_forward_on_meta_has_the_shapes_of_one_on_a_cpu(name):
    layer = MemoryResidual(build(name))
    meta = MemoryResidual(build(name, "meta")).to("meta")
    x = torch.randn(2, 7, DIM)
    state = meta_state = None
    for way, meta_way in zip(marks(name), marks(name, "meta"), strict=True):
        m, state = layer(x, state, **way)
        meta_m, meta_state = meta(x.to("meta"), meta_state, **meta_way)
        assert meta_m.is_meta
        assert meta_m.shape == m.shape
        assert state_shapes(meta_state) == state_shapes(state)
    if "nearest" not in name:
        meta_m.sum().backward()
        assert all(p.grad is not None for p in meta.parameters())


EVERY = [("few of many places", 3)]  # every mark together
WAYS = [(name, number) for name in ("paper", "gaussian places") for number in range(4)]
REST = [(name, len(marks(name)) - 1) for name in MEMORIES]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *EVERY,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in dict.fromkeys([*WAYS, ("paper", 4), ("paper", 5), *REST])
            if case not in EVERY
        ),
    ],
)
def test_one_graph_takes_every_mark(name, number):
    way = marks(name)[number]
    torch.compiler.reset()
    layer, x = MemoryResidual(build(name)), torch.randn(2, 7, DIM)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _, state = layer(x)

    def run(call: Any) -> tuple[Tensor, Any, list[Tensor]]:
        layer.zero_grad()
        m, after = call(x, state.detach(), **way)
        m.square().sum().backward()
        return m, after, [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    (m, after, grads), (expected, end, right) = run(compiled), run(layer)
    assert_same(m, expected)
    for mine, theirs in zip((*grads, *leaves(after)), (*right, *leaves(end)), strict=True):
        assert_same(mine, theirs, torch.float32)


def test_one_graph_takes_calls_of_every_length_in_one_chunk():
    torch.compiler.reset()
    graphs = CompileCounter()
    layer = MemoryResidual(PlaceMemory(DIM, PlaceConfig(channels=4, heads=2)))
    compiled = torch.compile(layer, backend=graphs)
    with torch.no_grad():
        for tokens in (2, 4, 6, 8, 12, 20):
            x = torch.randn(2, tokens, DIM)
            assert_same(compiled(x)[0], layer(x)[0], torch.float32)
    assert graphs.frame_count <= 2  # of one length, and then of any


@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_of_different_dropout_are_one_graph_each(dynamic):
    torch.compiler.reset()
    x = torch.randn(2, 5, DIM)
    for rate in (0.0, 0.3, 0.6):
        layer = MemoryResidual(build("gaussian places"), dropout=rate)
        compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=dynamic)
        found = []
        for call in (compiled, layer):
            torch.manual_seed(0)
            found.append(call(x)[0])
        assert_same(*found)


@pytest.mark.parametrize("name", ["paper", "gaussian places"])
def test_an_exported_layer_is_saved_loaded_and_called_with_its_state(name, tmp_path):
    layer = MemoryResidual(build(name)).eval().requires_grad_(False)
    x = torch.randn(2, 1, DIM)
    _, state = layer(x)
    program = torch.export.export(layer, (x, state))
    program.example_inputs = None  # would be pickled
    torch.export.save(program, tmp_path / "step.pt2")
    loaded = torch.export.load(tmp_path / "step.pt2").module()
    m, after = loaded(x, state)
    expected, end = layer(x, state)
    assert_same(m, expected, torch.float32)
    for mine, theirs in zip(leaves(after), leaves(end), strict=True):
        assert_same(mine, theirs, torch.float32)


def leaves(state: Any) -> list[Tensor]:
    return [leaf.detach().double() for leaf in torch.utils._pytree.tree_leaves(state)]
