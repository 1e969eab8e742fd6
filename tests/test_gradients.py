"""Analytic against numeric gradients in float64: every input, every weight, the initial state."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from memories import OPTIONS, Call, make_marks, make_memory, make_state, make_tokens
from tensor_memory import MemoryConfig, MemoryResidual, MemoryState

DIM, LENGTH = 2, 4
CLOSE = {"fast_mode": True, "atol": 1e-7, "rtol": 1e-6}  # one random direction for all numbers
FLOATS = ("hidden", "cell", "tokens", "readout")


def small(config: MemoryConfig) -> MemoryConfig:
    """Numeric derivatives cost one run per number."""
    return replace(
        config,
        channels=2 if config.axes == 1 else 1,
        grid=(2,) * config.axes,
        chunk_size=min(config.chunk_size, 2),
    )


def assert_gradients(config: MemoryConfig, call: Call, cut: int | None = None) -> None:
    """Of the output and the final state, in one call or cut in two."""
    memory = make_memory(config, DIM)
    start = make_state(config, call.x.shape[0], DIM)
    names = [name for name, _ in memory.named_parameters()]

    def forward(x, hidden, cell, tokens, readout, *weights):
        state = MemoryState(hidden, cell, tokens, start.fill, readout)
        whole = replace(call, x=x)
        pieces = [whole] if cut is None else [whole.part(0, cut), whole.part(cut, LENGTH)]
        outputs = []
        for piece in pieces:
            m, state = functional_call(
                memory, dict(zip(names, weights, strict=True)), (piece.x, state), piece.marks
            )
            outputs.append(m)
        return (*outputs, *(getattr(state, name) for name in FLOATS))

    inputs = [call.x, *(getattr(start, name) for name in FLOATS), *memory.parameters()]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    assert torch.autograd.gradcheck(forward, leaves, **CLOSE)


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_right_for_every_option(option):
    assert_gradients(small(OPTIONS[option]), Call(make_tokens(1, LENGTH, DIM)))


@pytest.mark.parametrize(
    ("option", "cut"),
    [
        ("paper", 1),
        ("token reads", 2),
        pytest.param("separate coordinates", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_are_right_through_a_cut(option, cut):
    assert_gradients(small(OPTIONS[option]), Call(make_tokens(1, LENGTH, DIM)), cut)


@pytest.mark.parametrize(
    ("reads", "flush"),
    [
        pytest.param("chunk", "no", marks=pytest.mark.exhaustive),
        pytest.param("token", "end", marks=pytest.mark.exhaustive),
        ("token", "marked"),
        ("chunk", "frames"),
    ],
)
def test_gradients_are_right_with_masks_documents_and_flushes(reads, flush):
    config = MemoryConfig(channels=1, grid=(2,), chunk_size=2, reads=reads)
    marked = make_marks(2, LENGTH, 0.3, seed=6)
    call = Call(
        make_tokens(2, LENGTH, DIM),
        mask=make_marks(2, LENGTH, 0.7, seed=4),
        reset=make_marks(2, LENGTH, 0.3, seed=5),
        flush={"no": False, "end": True, "marked": marked, "frames": 3}[flush],
    )
    assert_gradients(config, call)
    assert_gradients(config, replace(call, reset=None), cut=2)


def test_gradients_are_right_through_the_residual():
    config = MemoryConfig(channels=1, grid=(2, 2), chunk_size=2)
    layer = MemoryResidual(make_memory(config, DIM), gate_init=0.3).double()
    names = [name for name, _ in layer.named_parameters()]

    def forward(x, *weights):
        return functional_call(layer, dict(zip(names, weights, strict=True)), (x,))[0]

    leaves = [
        t.detach().requires_grad_() for t in (make_tokens(1, LENGTH, DIM), *layer.parameters())
    ]
    assert torch.autograd.gradcheck(forward, leaves, **CLOSE)


def test_a_wrong_gradient_is_noticed(monkeypatch):
    """The check itself must be able to fail: one factor of 1.001 on one path."""
    linear = torch.nn.Linear.forward

    def crooked(layer, source):
        out = linear(layer, source)
        return out.detach() + 1.001 * (out - out.detach())

    monkeypatch.setattr(torch.nn.Linear, "forward", crooked)
    config = MemoryConfig(channels=1, grid=(2,), chunk_size=2)
    with pytest.raises(GradcheckError):
        assert_gradients(config, Call(make_tokens(1, LENGTH, DIM)))
