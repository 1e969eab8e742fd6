"""Input at the edge of what a memory takes; `test_wrong_arguments` has most of what it refuses."""

import pytest
import torch

from memories import (
    DIM,
    OPTIONS,
    assert_identical_state,
    assert_same_state,
    make_memory,
    make_state,
    make_tokens,
)
from tensor_memory import MemoryConfig, MemoryState, TensorMemory

PAPER = OPTIONS["paper"]  # chunks of 3, grid (2, 3, 2), 2 channels


@pytest.fixture
def memory() -> TensorMemory:
    return make_memory(PAPER)


@pytest.fixture
def x() -> torch.Tensor:
    return make_tokens(2, 5, DIM)


def test_the_remedy_for_tokens_without_an_axis_works(memory, x):
    with pytest.raises(ValueError, match=r"one token per row is x\[:, None\]"):
        memory(x[:, 0])
    memory(x[:, 0][:, None])


@pytest.mark.parametrize("mark", ["mask", "reset", "flush"])
def test_marks_of_one_row_are_not_those_of_all(memory, x, mark):
    with pytest.raises(ValueError, match=rf"^{mark}: expected .*\(2, 5\), got \(1, 5\)"):
        memory(x, **{mark: torch.ones(1, 5, dtype=torch.bool)})


def test_token_ids_are_refused_for_what_they_are_and_not_for_their_shape(memory):
    with pytest.raises(TypeError, match=r"^x: expected a float type, got torch.int64; embed"):
        memory(torch.zeros(2, 5).long())


def test_a_state_on_another_device_is_refused(memory, x):
    with pytest.raises(ValueError, match=r"^state\.hidden: expected device cpu .*, got meta; "):
        memory(x, make_state(PAPER, 2).to("meta"))


def test_the_remedies_for_a_refused_state_work(memory, x):
    memory(x, MemoryState.zeros(PAPER, DIM, 2, dtype=torch.float32).to(x.dtype))
    memory(x, make_state(PAPER, 3).select([0, 2]))


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_flush_of_no_tokens_is_refused(memory, x, tokens):
    with pytest.raises(ValueError, match=rf"^flush: expected at least 1 token .*, got {tokens}; "):
        memory(x, flush=tokens)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("marked", [False, True])
def test_an_empty_sequence_is_legal_and_keeps_the_state(option, marked):
    memory, state = make_memory(OPTIONS[option]), make_state(OPTIONS[option], 2)
    nothing = torch.ones(2, 0, dtype=torch.bool)
    marks = {"mask": nothing, "reset": nothing, "flush": nothing} if marked else {}
    m, end = memory(make_tokens(2, 0, DIM), state, **marks)
    assert m.shape == (2, 0, DIM)
    assert_identical_state(end, state)
    m, end = memory(make_tokens(2, 0, DIM), **marks)
    fresh = MemoryState.zeros(OPTIONS[option], DIM, 2, dtype=torch.float64)
    assert_identical_state(end, fresh)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_empty_sequence_can_flush(option):
    memory = make_memory(OPTIONS[option])
    x, nothing = make_tokens(2, 5, DIM), make_tokens(2, 0, DIM)
    flushed = memory(x, flush=True)[1]
    later = memory(nothing, memory(x)[1], flush=True)[1]  # all rows at the same place
    assert_same_state(later, flushed)
    apart = make_state(OPTIONS[option], 3)
    m, end = memory(nothing[:1].expand(3, 0, DIM), apart, flush=True)
    assert m.shape == (3, 0, DIM)
    assert end.fill.eq(0).all()
    for b in range(3):
        before = apart.select([b])
        unchanged = before.fill.item() == 0
        assert torch.equal(end.cell[b], before.cell[0]) == unchanged


def test_a_batch_of_no_rows_is_legal(memory):
    none = torch.ones(0, 5, dtype=torch.bool)
    for marks in ({}, {"mask": none}, {"mask": none, "reset": none, "flush": none}):
        m, state = memory(make_tokens(0, 5, DIM), **marks)
        assert m.shape == (0, 5, DIM)
        assert state.batch_size == 0


def test_a_backend_that_cannot_serve_is_refused_before_the_first_chunk_is_full(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    memory = TensorMemory(DIM, MemoryConfig(chunk_size=16, backend="triton"))
    message = r"^backend 'triton' cannot serve this request: (it needs a CUDA|triton is not inst)"
    with pytest.raises(ValueError, match=message):
        memory(torch.zeros(1, 1, DIM))
