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


@pytest.fixture
def memory() -> TensorMemory:
    return make_memory(PAPER)


@pytest.fixture
def x() -> torch.Tensor:
    return make_tokens(2, 5, DIM)


def test_a_wrong_width_is_refused(memory):
    message = r"^x: expected tokens of shape \(B, N, 3\), got \(2, 5, 4\); .* built for width 3"
    with pytest.raises(ValueError, match=message):
        memory(make_tokens(2, 5, 4))


@pytest.mark.parametrize("shape", [(3,), (5, 3), (1, 2, 5, 3)])
def test_a_wrong_rank_is_refused(memory, shape):
    with pytest.raises(ValueError, match=r"^x: expected tokens of shape \(B, N, 3\), got \("):
        memory(make_tokens(*shape))


def test_token_ids_are_refused(memory):
    message = r"^x: expected a float type, got torch.int64; embed token ids first"
    with pytest.raises(TypeError, match=message):
        memory(torch.zeros(2, 5, DIM, dtype=torch.long))


def test_tokens_of_another_type_than_the_weights_are_refused(memory, x):
    message = r"^x: expected torch.float64 like .*, got torch.float32; convert one .*autocast"
    with pytest.raises(TypeError, match=message):
        memory(x.float())


def test_tokens_on_another_device_than_the_weights_are_refused(memory, x):
    message = r"^x: expected device cpu like the memory's weights, got meta; move one of them"
    with pytest.raises(ValueError, match=message):
        memory(x.to("meta"))


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


def test_a_state_of_another_type_is_refused(memory, x):
    message = (
        r"^state\.hidden: expected torch.float64 for an input of type torch.float64, "
        r"got torch.float32; convert it with state\.to\(torch.float64\)"
    )
    with pytest.raises(TypeError, match=message):
        memory(x, MemoryState.zeros(PAPER, DIM, 2, dtype=torch.float32))


def test_a_state_on_another_device_is_refused(memory, x):
    message = r"^state\.hidden: expected device cpu .*, got meta; move it with state\.to\('cpu'\)"
    with pytest.raises(ValueError, match=message):
        memory(x, make_state(PAPER, 2).to("meta"))


def test_the_remedies_for_a_refused_state_work(memory, x):
    memory(x, MemoryState.zeros(PAPER, DIM, 2, dtype=torch.float32).to(x.dtype))
    memory(x, make_state(PAPER, 3).select([0, 2]))


def test_what_is_no_state_is_refused(memory, x):
    message = r"^state: expected a MemoryState, got Tensor; pass what the previous call returned"
    with pytest.raises(TypeError, match=message):
        memory(x, torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("shape", [(2, 4), (5,), (2, 5, 1), (1, 5)])
@pytest.mark.parametrize("layer", [lambda memory: memory, MemoryResidual])
def test_marks_of_another_shape_are_refused(memory, x, name, shape, layer):
    message = rf"^{name}: expected shape \(B, N\) = \(2, 5\), got \({shape[0]}.*; give one mark per"
    with pytest.raises(ValueError, match=message):
        layer(memory).double()(x, **{name: torch.ones(shape, dtype=torch.bool)})


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
@pytest.mark.parametrize("layer", [lambda memory: memory, MemoryResidual])
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


@pytest.mark.parametrize("method", ["select", "reset"])
def test_rows_that_are_no_whole_numbers_are_refused(method):
    message = rf"^MemoryState.{method}: expected whole numbers as row indices, got torch.float32; "
    with pytest.raises(TypeError, match=message):
        getattr(make_state(PAPER, 2), method)([0.5])


@pytest.mark.parametrize(
    ("method", "make"),
    [
        ("to", lambda: make_state(PAPER, 2).to(torch.int8)),
        ("zeros", lambda: MemoryState.zeros(PAPER, DIM, 2, dtype=torch.int8)),
    ],
)
def test_a_state_of_tokens_that_are_no_floats_is_refused(method, make):
    message = rf"^MemoryState.{method}: expected the tokens' float type, got torch.int8; pass the"
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PAPER.to_dict(), DIM, 2), r"expected a MemoryConfig first, got dict; pass the memory's"),
        ((PAPER, "8", 2), r"expected dim as an integer, got '8'; convert it with int\(\)"),
        ((PAPER, DIM, 2.0), r"expected batch_size as an integer, got 2.0; convert it with int"),
    ],
)
def test_a_state_made_of_something_else_is_refused(arguments, message):
    with pytest.raises(TypeError, match=rf"^MemoryState.zeros: {message}"):
        MemoryState.zeros(*arguments)


@pytest.mark.parametrize("method", ["select", "reset"])
def test_rows_in_several_axes_are_refused(method):
    message = rf"^MemoryState.{method}: expected row indices of shape \(rows,\), got \(2, 2\); flat"
    with pytest.raises(ValueError, match=message):
        getattr(make_state(PAPER, 2), method)([[0, 1], [1, 0]])


def test_a_state_of_fewer_than_no_rows_is_refused():
    message = r"^MemoryState.zeros: expected batch_size of at least 0, got -1; it is the number of"
    with pytest.raises(ValueError, match=message):
        MemoryState.zeros(PAPER, DIM, -1)


def test_a_reset_mask_of_another_shape_is_refused():
    message = r"expected a mask of shape \(B,\) = \(2,\), got \(3,\); give one mark per row"
    with pytest.raises(ValueError, match=message):
        make_state(PAPER, 2).reset(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("dim", [0, -1])
def test_a_width_below_one_is_refused(dim):
    with pytest.raises(
        ValueError, match=rf"^dim: expected the tokens' width, at least 1, got {dim}"
    ):
        TensorMemory(dim, PAPER)


def test_what_is_no_config_is_refused():
    message = r"^config: expected a MemoryConfig, got dict; MemoryConfig\.from_dict\(\) makes one"
    with pytest.raises(TypeError, match=message):
        TensorMemory(DIM, {"channels": 3})


def test_an_unknown_backend_is_refused():
    message = r"^config\.backend: expected one of auto, .*, got 'gpu'; leave it out for the fastest"
    with pytest.raises(ValueError, match=message):
        TensorMemory(DIM, MemoryConfig(backend="gpu"))


@pytest.mark.parametrize("name", ["dropout", "drop_path"])
@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan"), "a", None, True])
def test_a_rate_that_is_no_probability_is_refused(memory, name, rate):
    message = rf"^{name}: expected a probability in \[0, 1\), got {rate!r}; 0 drops nothing"
    with pytest.raises(ValueError, match=message):
        MemoryResidual(memory, **{name: rate})


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


def test_tokens_that_are_no_tensor_are_refused(memory):
    message = r"^x: expected a tensor of shape \(B, N, 3\), got list; convert it with torch.as_tens"
    with pytest.raises(TypeError, match=message):
        memory([[[1.0, 2.0, 3.0]]])


@pytest.mark.parametrize("dim", [8.0, "8", True])
def test_a_width_that_is_no_integer_is_refused(dim):
    with pytest.raises(TypeError, match=r"^dim: expected .* integer, got .*; convert it with int"):
        TensorMemory(dim)


@pytest.mark.parametrize("flush", [None, 2.5, "yes"])
def test_a_flush_of_another_kind_is_refused(memory, x, flush):
    message = rf"^flush: expected True, False, a whole number of tokens .*, got {flush!r}; "
    with pytest.raises(TypeError, match=message):
        memory(x, flush=flush)


@pytest.mark.parametrize("frame", [0, -3])
def test_frames_of_no_tokens_are_refused(memory, x, frame):
    with pytest.raises(ValueError, match=rf"^flush: expected at least 1 token .*, got {frame}; "):
        memory(x, flush=frame)


@pytest.mark.parametrize("gate", [float("nan"), float("inf"), None, "0"])
def test_a_gate_that_is_not_finite_is_refused(memory, gate):
    with pytest.raises(ValueError, match=r"^gate_init: expected a finite number, got .*; 0 opens"):
        MemoryResidual(memory, gate_init=gate)


@pytest.mark.parametrize("rows", [[2], [0, -1], torch.tensor([5])])
@pytest.mark.parametrize("method", ["select", "reset"])
def test_rows_that_do_not_exist_are_refused(memory, x, method, rows):
    _, state = memory(x)
    message = rf"^MemoryState.{method}: expected rows from 0 to 1, got .*; this state holds 2 rows"
    with pytest.raises(ValueError, match=message):
        getattr(state, method)(rows)


def test_a_choice_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match=r"^share_coordinates: expected True or False, got 'no'"):
        MemoryConfig(share_coordinates="no")


@pytest.mark.parametrize("name", ["norm", "own_memory"])
def test_a_choice_of_the_residual_that_is_no_bool_is_refused(memory, name):
    message = rf"^{name}: expected True or False, got LayerNorm\(.*; leave it out for True"
    with pytest.raises(TypeError, match=message):
        MemoryResidual(memory, **{name: torch.nn.LayerNorm(DIM)})


def test_a_zero_init_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match=r"^zero_init: expected True or False, got 'no'; leave it"):
        TensorMemory(DIM, PAPER, zero_init="no")


def test_a_residual_of_what_is_no_memory_is_refused():
    message = r"^memory: expected a TensorMemory, got MemoryConfig; make one with TensorMemory\(dim"
    with pytest.raises(TypeError, match=message):
        MemoryResidual(PAPER)


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (make_tokens(2, 5, 4), ValueError, r"^x: expected tokens of shape \(B, N, 3\), got \(2, 5"),
        (make_tokens(2, 5, 3).float(), TypeError, r"^x: expected torch.float64 like .*, got torch"),
        ([[[1.0, 2.0, 3.0]]], TypeError, r"^x: expected a tensor of shape \(B, N, 3\), got list"),
    ],
)
def test_a_residual_refuses_what_its_memory_refuses_in_the_same_words(
    memory, tokens, error, message
):
    with pytest.raises(error, match=message):
        MemoryResidual(memory).double()(tokens)


def test_a_backend_that_cannot_serve_is_refused_before_the_first_chunk_is_full(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    memory = TensorMemory(DIM, MemoryConfig(chunk_size=16, backend="triton"))
    message = r"^backend 'triton' cannot serve this request: (it needs a CUDA|triton is not inst)"
    with pytest.raises(ValueError, match=message):
        memory(torch.zeros(1, 1, DIM))


def test_a_scale_of_true_is_refused():
    with pytest.raises(ValueError, match=r"^sigma_scale: expected a finite number, got True"):
        MemoryConfig(sigma_scale=True)
