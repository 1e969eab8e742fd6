"""A compiled host notices that its memory came, was switched off and went."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hosts import SMALL, WIDTH, Custom, encoder
from torch import Tensor

from tensor_memory import attach, detach, memory_disabled
from tolerances import assert_same


@pytest.fixture(autouse=True)
def as_torch_comes() -> Iterator[None]:
    """Dynamo assumes that hooks never change, until a memory is attached."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (encoder, torch.randn(1, 7, WIDTH, dtype=torch.float64)),
        pytest.param(Custom, torch.arange(7)[None], marks=pytest.mark.exhaustive),
    ],
)
@torch.no_grad()
def test_a_host_compiled_and_run_before_carries_the_memory_attached_since(
    build: Any, x: Tensor
) -> None:
    model = build().double().eval()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    bare = compiled(x)
    attach(model, SMALL)
    with_memory = model(x)
    assert not torch.equal(with_memory, bare)
    assert_same(compiled(x), with_memory)
    detach(model)
    assert_same(compiled(x), bare)


@pytest.mark.exhaustive
def test_a_compiled_host_has_its_memory_back_after_it_was_disabled() -> None:
    model, x = encoder().double().eval(), torch.randn(1, 7, WIDTH, dtype=torch.float64)
    bare = model(x)
    attach(model, SMALL)
    with_memory = model(x)
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        assert_same(compiled(x), with_memory)
        with memory_disabled(model):
            assert_same(compiled(x), bare)
    assert not torch.equal(with_memory, bare)


def test_what_compile_returns_is_refused() -> None:
    compiled: Any = torch.compile(encoder(), backend="eager")
    match = r"got a compiled TransformerEncoder; attach to the model it was compiled from"
    with pytest.raises(ValueError, match=match):
        attach(compiled, SMALL)
    assert attach(compiled._orig_mod, SMALL).paths == ["layers.0", "layers.1"]
