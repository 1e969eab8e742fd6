"""What a memory refuses: the error names what was expected, what came, and what to do."""

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
from tensor_memory import MemoryConfig, MemoryResidual, MemoryState, TensorMemory

PAPER = OPTIONS["paper"]  # chunks of 3, grid (2, 3, 2), 2 channels
MARKS = ["mask", "reset", "flush"]


LAYERS = pytest.mark.parametrize("layer", [lambda memory: memory, MemoryResidual])


@pytest.fixture
def memory() -> TensorMemory:
    return make_memory(PAPER)


@pytest.fixture
def x() -> torch.Tensor:
    return make_tokens(2, 5, DIM)


@LAYERS
@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (
            torch.zeros(2, 5, 4),
            ValueError,
            r"tokens of shape \(B, N, 3\), got \(2, 5, 4\); .*width 3",
        ),
        (
            torch.zeros(2, 3),
            ValueError,
            r"tokens of shape \(B, N, 3\), got \(2, 3\); one token per row is x\[:, None\]",
        ),
        (torch.zeros(3), ValueError, r"tokens of shape \(B, N, 3\), got \(3,\)"),
        (torch.zeros(1, 2, 5, 3), ValueError, r"tokens of shape \(B, N, 3\), got \(1, 2, 5, 3\)"),
        (torch.zeros(2, 5, 3).long(), TypeError, r"a float type, got torch.int64; embed token ids"),
        (torch.zeros(2, 5).long(), TypeError, r"a float type, got torch.int64; embed token ids"),
        (torch.zeros(2, 5, 3), TypeError, r"torch.float64 like .*, got torch.float32; .*autocast"),
        (
            torch.zeros(2, 5, 3, device="meta"),
            ValueError,
            r"device cpu like .*, got meta; move one",
        ),
        (
            [[[1.0, 2.0, 3.0]]],
            TypeError,
            r"a tensor of shape \(B, N, 3\), got list; convert it with",
        ),
    ],
    ids=["width", "two axes", "one axis", "four axes", "ids", "flat ids", "type", "device", "list"],
)
def test_tokens_that_do_not_fit_are_refused(memory, layer, tokens, error, message):
    with pytest.raises(error, match=rf"^x: expected {message}"):
        layer(memory).double()(tokens)


@pytest.mark.parametrize(
    ("state", "name", "expected", "got"),
    [
        (make_state(PAPER, 3), "hidden", r"\(2, 2, 2, 3, 2\)", r"\(3, 2, 2, 3, 2\)"),
        (make_state(OPTIONS["heads"], 2), "hidden", r"\(2, 2, 2, 3, 2\)", r"\(2, 2, 3, 2\)"),
        (
            make_state(MemoryConfig(channels=2, grid=(2, 2, 2), chunk_size=3), 2),
            "hidden",
            r"\(2, 2, 2, 3, 2\)",
            r"\(2, 2, 2, 2, 2\)",
        ),
        (
            make_state(MemoryConfig(channels=2, grid=(2, 3, 2), chunk_size=4), 2),
            "tokens",
            r"\(2, 3, 3\)",
            r"\(2, 4, 3\)",
        ),
        (make_state(PAPER, 2, dim=5), "tokens", r"\(2, 3, 3\)", r"\(2, 3, 5\)"),
        (
            make_state(MemoryConfig(channels=2, grid=(2, 3, 2), chunk_size=3, reads="token"), 2),
            "readout",
            r"\(2, 2\)",
            r"\(2, 0\)",
        ),
    ],
    ids=["batch", "axes", "grid", "chunk size", "width", "reads"],
)
def test_a_state_of_another_shape_is_refused(memory, x, state, name, expected, got):
    message = rf"^state\.{name}: expected shape {expected} .*\(2, 5, 3\), got {got}; .*select\(\)"
    with pytest.raises(ValueError, match=message):
        memory(x, state)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            MemoryState.zeros(PAPER, DIM, 2, dtype=torch.float32),
            TypeError,
            r"state\.hidden: expected torch.float64 for an input of type torch.float64, "
            r"got torch.float32; convert it with state\.to\(torch.float64\)",
        ),
        (
            make_state(PAPER, 2).to("meta"),
            ValueError,
            r"state\.hidden: expected device cpu .*, got meta; move it with state\.to\('cpu'\)",
        ),
        (
            torch.ones(2, 5, dtype=torch.bool),
            TypeError,
            r"state: expected a MemoryState, got Tensor; pass what the previous call returned",
        ),
    ],
    ids=["type", "device", "mask"],
)
def test_a_state_that_does_not_fit_is_refused(memory, x, state, error, message):
    with pytest.raises(error, match=f"^{message}"):
        memory(x, state)


def test_the_remedies_for_a_refused_state_work(memory, x):
    memory(x, MemoryState.zeros(PAPER, DIM, 2, dtype=torch.float32).to(x.dtype))
    memory(x, make_state(PAPER, 3).select([0, 2]))


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("shape", [(2, 4), (5,), (2, 5, 1), (1, 5)])
@LAYERS
def test_marks_of_another_shape_are_refused(memory, x, name, shape, layer):
    message = rf"^{name}: expected shape \(B, N\) = \(2, 5\), got \({shape[0]}.*; give one mark per"
    with pytest.raises(ValueError, match=message):
        layer(memory).double()(x, **{name: torch.ones(shape, dtype=torch.bool)})


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@LAYERS
def test_marks_that_are_not_bool_are_refused(memory, x, name, dtype, layer):
    message = rf"^{name}: expected a bool tensor of shape \(B, N\), got {dtype}; convert .*bool\(\)"
    with pytest.raises(TypeError, match=message):
        layer(memory).double()(x, **{name: torch.ones(2, 5, dtype=dtype)})


@pytest.mark.parametrize("name", MARKS)
def test_marks_that_are_no_tensor_are_refused(memory, x, name):
    remedy = "leave it out to write no" if name == "flush" else "give one mark per token of x"
    message = rf"^{name}: expected .*a bool tensor of shape \(B, N\), got \[\[True, .*; {remedy}"
    with pytest.raises(TypeError, match=message):
        memory(x, **{name: [[True] * 5] * 2})


@pytest.mark.parametrize("name", MARKS)
def test_marks_on_another_device_are_refused(memory, x, name):
    message = rf"^{name}: expected device cpu like x, got meta; move it with \.to\(\)"
    with pytest.raises(ValueError, match=message):
        memory(x, **{name: torch.ones(2, 5, dtype=torch.bool, device="meta")})


@pytest.mark.parametrize(
    ("flush", "error", "message"),
    [
        (None, TypeError, "True, False, a whole number of tokens .*, got None"),
        (2.5, TypeError, r"True, False, a whole number of tokens .*, got 2\.5"),
        (0, ValueError, "at least 1 token .*, got 0"),
        (-3, ValueError, "at least 1 token .*, got -3"),
    ],
)
def test_a_flush_of_another_kind_is_refused(memory, x, flush, error, message):
    with pytest.raises(error, match=f"^flush: expected {message}; "):
        memory(x, flush=flush)


@pytest.mark.parametrize("method", ["select", "reset"])
@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0.5], TypeError, r".*row indices( or a \(B,\) bool mask)?, got torch.float32"),
        ([[0, 1], [1, 0]], ValueError, r"row indices of shape \(rows,\), got \(2, 2\); flatten"),
        ([2], ValueError, "rows from 0 to 1, got 2; there are 2 rows"),
        ([0, -1], ValueError, "rows from 0 to 1, got -1; there are 2 rows"),
    ],
)
def test_rows_that_do_not_exist_are_refused(method, rows, error, message):
    with pytest.raises(error, match=rf"^MemoryState.{method}: expected {message}"):
        getattr(make_state(PAPER, 2), method)(rows)


def test_a_reset_mask_of_another_shape_is_refused():
    message = r"expected a mask of shape \(B,\) = \(2,\), got \(3,\); give one mark per row"
    with pytest.raises(ValueError, match=message):
        make_state(PAPER, 2).reset(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: MemoryState.zeros(PAPER.to_dict(), DIM, 2),
            TypeError,
            "a MemoryConfig first, got d",
        ),
        (
            lambda: MemoryState.zeros(PAPER, "8", 2),
            TypeError,
            "dim as an integer, got '8'; convert",
        ),
        (
            lambda: MemoryState.zeros(PAPER, DIM, 2.0),
            TypeError,
            "batch_size as an integer, got 2.0",
        ),
        (
            lambda: MemoryState.zeros(PAPER, DIM, -1),
            ValueError,
            "batch_size of at least 0 .*got -1",
        ),
        (lambda: MemoryState.zeros(PAPER, 0, 2), ValueError, "dim of at least 1 .* got 0; it is"),
        (
            lambda: MemoryState.zeros(PAPER, DIM, 2, dtype=torch.int8),
            TypeError,
            "the tokens' float type, got torch.int8; pass",
        ),
        (
            lambda: make_state(PAPER, 2).to(torch.int8),
            TypeError,
            "the tokens' float type, got torch",
        ),
    ],
)
def test_a_state_made_of_something_else_is_refused(make, error, message):
    with pytest.raises(error, match=rf"^MemoryState\.\w+: expected {message}"):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 0}, ValueError, "TensorMemory: expected dim of at least 1 .*, got 0; it is the w"),
        ({"dim": 8.0}, TypeError, "TensorMemory: expected dim as an integer, got 8.0; convert it"),
        ({"dim": True}, TypeError, "TensorMemory: expected dim as an integer, got True; convert"),
        ({"config": {}}, TypeError, r"config: expected a MemoryConfig, got dict; MemoryConfig.fr"),
        ({"config": 0}, TypeError, r"config: expected a MemoryConfig, got int; MemoryConfig.from"),
        (
            {"config": {"channels": 3}},
            TypeError,
            r"config: expected a MemoryConfig, got dict; Memory",
        ),
        (
            {"config": MemoryConfig(backend="gpu")},
            ValueError,
            r"config\.backend: expected one of auto, .*, got 'gpu'; leave it out for the fastest",
        ),
        ({"zero_init": "no"}, TypeError, "zero_init: expected True or False, got 'no'; leave it"),
    ],
)
def test_a_memory_of_something_else_is_refused(arguments, error, message):
    with pytest.raises(error, match=f"^{message}"):
        TensorMemory(**{"dim": DIM, "config": PAPER} | arguments)


@pytest.mark.parametrize(
    ("name", "values", "error", "message"),
    [
        (
            "memory",
            [PAPER],
            TypeError,
            r"expected a TensorMemory or a PlaceMemory, got MemoryConfig",
        ),
        ("norm", ["no"], TypeError, "expected True or False, got .*; leave it out for True"),
        ("own_memory", ["no"], TypeError, "expected True or False, got .*; leave it out for True"),
        *(
            (
                rate,
                [-0.1, 1.0, float("nan"), "a", None, True],
                ValueError,
                r"expected a prob.*; 0 drops",
            )
            for rate in ("dropout", "drop_path")
        ),
        (
            "gate_init",
            [float("nan"), None, "0"],
            ValueError,
            "expected a finite number, got .*; 0 ope",
        ),
    ],
)
def test_a_residual_of_something_else_is_refused(memory, name, values, error, message):
    for value in values:
        with pytest.raises(error, match=f"^{name}: {message}"):
            MemoryResidual(**{"memory": memory, name: value})


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
