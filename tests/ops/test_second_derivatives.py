"""Second derivatives are those of the reference, or refused; none is silently left out."""

from dataclasses import replace

import pytest
import torch
from scans import FUSED, HERE, Case, floats
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
    memory_scan,
)
from tensor_memory.ops.scan.memory_scan import SCAN
from tolerances import assert_same_rms

SMALL = {"channels": 16, "grid": (2, 3)}
MEMORIES = {
    "chunks": MemoryConfig(**SMALL, chunk_size=2),
    "kept in parts": MemoryConfig(**SMALL, chunk_size=2, checkpoint_every=2),
    "gaussian places": PlaceConfig(**SMALL, heads=2, rule="delta"),
    "linear places": PlaceConfig(**SMALL, heads=2, kernel="linear", share_places=False),
    "few of many places": PlaceConfig(grid=(12, 12), channels=2, heads=2, kernel="linear"),
    "few of many, overwritten": PlaceConfig(
        grid=(12, 12), channels=2, heads=2, kernel="linear", rule="delta"
    ),
}


def build(config: MemoryConfig | PlaceConfig) -> nn.Module:
    torch.manual_seed(0)
    memory = (TensorMemory if isinstance(config, MemoryConfig) else PlaceMemory)(6, config).to(HERE)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter += 0.3 * torch.randn(parameter.shape).to(HERE)
    return memory


def of_gradient(memory: nn.Module, x: Tensor, how: str) -> dict[str, Tensor]:
    """The gradients of a penalty on the gradient for x: by every parameter, and by x."""
    x = x.clone().requires_grad_()
    m, _ = memory(x)
    (gradient,) = torch.autograd.grad(m.sin().sum(), x, create_graph=True)
    penalty = gradient.sin().sum()
    leaves = {"x": x} | dict(memory.named_parameters())
    if how == "grad":
        found = torch.autograd.grad(penalty, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), found, strict=True)
        }
    penalty.backward(inputs=list(leaves.values()) if how == "backward(inputs)" else None)
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize(
    ("option", "backend"),
    [
        *((option, "torch") for option in MEMORIES),
        *(
            pytest.param(option, "triton", marks=[*FUSED.marks, *more])
            for option, more in (
                ("chunks", ()),
                ("kept in parts", [pytest.mark.exhaustive]),
                ("gaussian places", ()),
                ("linear places", [pytest.mark.exhaustive]),
            )
        ),
    ],
)
def test_a_penalty_on_a_gradient_has_the_gradient_of_the_reference(option, backend):
    config = MEMORIES[option]
    dtype = torch.float32 if backend == "triton" else torch.float64
    x = torch.randn(2, 7, 6).to(HERE, dtype)
    got = of_gradient(build(replace(config, backend=backend)).to(dtype), x, "grad")
    exact = replace(config, backend="reference")
    if isinstance(exact, MemoryConfig):
        exact = replace(exact, checkpoint_every=None)
    expected = of_gradient(build(exact).double(), x.double(), "grad")
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_same_rms(name, got[name], gradient, dtype)


@pytest.mark.parametrize("how", ["grad", "backward", "backward(inputs)"])
def test_however_it_is_asked_for(how):
    memory, x = build(MEMORIES["chunks"]).double(), torch.randn(2, 7, 6).double().to(HERE)
    got = of_gradient(memory, x, how)
    expected = of_gradient(build(replace(MEMORIES["chunks"], backend="reference")).double(), x, how)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_same_rms(name, got[name], gradient, torch.float64)


@pytest.mark.parametrize("way", ["operator", "eager"])
def test_the_scan_alone_by_operator_or_function(way):
    case = Case(B=2, S=3)

    def second(backend: str) -> list[Tensor]:
        inputs = case.make(torch.float64)
        leaves = [v.requires_grad_() for v in floats(inputs)]
        if way == "operator" and backend != "reference":
            marks = (inputs.writes, inputs.resets)
            reads, *_ = SCAN.operator(*leaves, *marks, True, 0, torch.float64, backend)
        else:
            marks = {"writes": inputs.writes, "resets": inputs.resets}
            reads, *_ = memory_scan(*leaves, **marks, backend=backend)
        assert reads is not None
        first = torch.autograd.grad(reads.sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.sin().sum() for g in first), leaves))

    for mine, right in zip(second("torch"), second("reference"), strict=True):
        assert_same_rms("second derivative", mine, right, torch.float64)


def test_an_input_computed_from_another_is_not_counted_twice():
    inputs = Case(B=1, S=2, resets=False).make(torch.float64)

    def first(backend: str) -> Tensor:
        content = inputs.content.clone().requires_grad_()
        spread = content.square().mean(-1) + 0.5
        given = inputs._replace(content=content, spread=spread)
        reads, *_ = memory_scan(*given[:9], backend=backend)
        assert reads is not None
        (gradient,) = torch.autograd.grad(reads.sin().sum(), content, create_graph=True)
        return gradient

    assert_same_rms("gradient", first("torch"), first("reference"), torch.float64)


@pytest.mark.parametrize("backend", [FUSED])
@pytest.mark.parametrize("option", ["chunks", "gaussian places"])
def test_a_fused_layer_refuses_and_names_the_backend_that_has_one(option, backend):
    config = MEMORIES[option]
    layer = MemoryResidual(build(replace(config, backend=backend))).to(HERE)
    x = torch.randn(2, 6, 6).to(HERE).requires_grad_()
    with pytest.raises(NotImplementedError, match=r'got create_graph=True; .*backend="torch"'):
        torch.autograd.grad(layer(x)[0].sum(), x, create_graph=True)
    torch.autograd.grad(layer(x)[0].sum(), x)
    plain = MemoryResidual(build(replace(config, backend="torch"))).to(HERE)
    torch.autograd.grad(plain(x)[0].sum(), x, create_graph=True)
