"""What must hold for any input: cuts, masks, documents, flushes, rows and batches."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memories import (
    DIM,
    OPTIONS,
    SEEDS,
    Call,
    assert_identical_state,
    assert_same_state,
    calls,
    make_marks,
    make_memory,
    make_state,
    make_tokens,
    run,
)
from tensor_memory import MemoryState
from tolerances import assert_same

OPTION = st.sampled_from(sorted(OPTIONS))
LENGTH = st.integers(1, 10)
STARTS = st.sampled_from(["empty", "apart", "together"])  # where the rows stand


def build(option, rows, seed, started):
    config = OPTIONS[option]
    if started == "empty":
        return make_memory(config, seed=seed), None
    state = make_state(config, rows, seed=seed, together=started == "together")
    return make_memory(config, seed=seed), state


@settings(max_examples=3 * settings.default.max_examples)
@given(
    option=OPTION,
    call=calls(2, st.integers(0, 12)),
    places=st.lists(st.integers(0, 12), max_size=4) | st.just(range(12)),
    seed=SEEDS,
    started=STARTS,
)
def test_cutting_anywhere_changes_nothing(option, call, places, seed, started):
    memory, state = build(option, 2, seed, started)
    N = call.x.shape[1]
    edges = [0, *sorted(min(place, N) for place in places), N]
    pieces = [call.part(a, b) for a, b in itertools.pairwise(edges)]
    whole, end = run(memory, [call], state)
    joined, joined_end = run(memory, pieces, state)
    assert_same(joined, whole)
    assert_same_state(joined_end, end)


def padded(kind: str, rows: int, length: int, seed: int) -> torch.Tensor:
    """A mask (B, N) with padding on the left, on the right, or in holes, a row at times empty."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(0, length + 1, (rows, 1), generator=generator)
    place = torch.arange(length)
    if kind == "left":
        return place >= length - count
    if kind == "right":
        return place < count
    return make_marks(rows, length, 0.6, seed)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    option=OPTION,
    kind=st.sampled_from(["left", "right", "holes"]),
    length=LENGTH,
    flush=st.booleans(),
    seed=SEEDS,
    started=STARTS,
)
def test_a_padded_row_gives_what_the_row_gives_alone(option, kind, length, flush, seed, started):
    memory, state = build(option, 3, seed, started)
    x, mask = make_tokens(3, length, DIM, seed=seed), padded(kind, 3, length, seed)
    m, end = memory(x, state, mask=mask, flush=flush)
    assert m[~mask].eq(0).all()
    for b in range(3):
        before = None if state is None else state.select([b])
        alone, alone_end = memory(x[b, mask[b]][None], before, flush=flush)
        assert_same(m[b, mask[b]], alone[0])
        assert_same_state(end.select([b]), alone_end)


@given(option=OPTION, call=calls(3, LENGTH), row=st.integers(0, 2), seed=SEEDS)
def test_an_all_masked_row_reads_nothing_and_keeps_its_state_bit_for_bit(option, call, row, seed):
    memory, state = build(option, 3, seed, started="apart")
    mask = torch.ones(call.x.shape[:2], dtype=torch.bool) if call.mask is None else call.mask
    mask = mask.index_fill(0, torch.tensor([row]), False)
    m, end = memory(call.x, state, mask=mask)
    assert m[row].eq(0).all()
    assert_identical_state(end.select([row]), state.select([row]))


@pytest.mark.whole_cross
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("garbage", [torch.nan, -torch.inf])
def test_garbage_in_masked_tokens_changes_nothing_in_value_or_gradient(option, garbage):
    config = OPTIONS[option]
    mask = torch.stack([padded(kind, 1, 9, 3)[0] for kind in ("left", "right", "holes")])
    clean = make_tokens(3, 9, DIM).masked_fill(~mask[..., None], 0)
    results = []
    for x in (clean, clean.masked_fill(~mask[..., None], garbage)):
        memory, x = make_memory(config), x.clone().requires_grad_()
        m, end = memory(x, make_state(config, 3), mask=mask)
        (m.square().sum() + end.hidden.sum() + end.cell.sum() + end.tokens.sum()).backward()
        weight_grads = [parameter.grad for parameter in memory.parameters()]
        results.append([m, *end._tensors().values(), x.grad, *weight_grads])
        assert x.grad[~mask].eq(0).all()
    for kept, disturbed in zip(*results, strict=True):
        assert torch.equal(kept, disturbed)


@given(
    option=OPTION,
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=SEEDS,
    started=STARTS,
    flush=st.booleans(),
)
def test_documents_in_a_row_know_nothing_of_each_other(option, lengths, seed, started, flush):
    memory, state = build(option, 2, seed, started)
    x = make_tokens(2, sum(lengths), DIM, seed=seed)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    reset = torch.zeros(2, sum(lengths), dtype=torch.bool).index_fill(1, starts, True)
    m, end = memory(x, state, reset=reset, flush=flush)
    documents = x.split(lengths, dim=1)
    alone = [memory(document, flush=flush) for document in documents]
    assert_same(m, torch.cat([m for m, _ in alone], dim=1))
    assert_same_state(end, alone[-1][1])


@given(option=OPTION, length=LENGTH, at=st.integers(0, 9), seed=SEEDS)
def test_a_reset_on_a_masked_position_counts(option, length, at, seed):
    memory, state = build(option, 1, seed, started="apart")
    at = min(at, length - 1)
    x, place = make_tokens(1, length, DIM, seed=seed), torch.arange(length)[None]
    m, end = memory(x, state, mask=place != at, reset=place == at)
    before, _ = memory(x[:, :at], state)
    after, after_end = memory(x[:, at + 1 :])
    assert_same(m, torch.cat([before, torch.zeros_like(x[:, :1]), after], dim=1))
    assert_same_state(end, after_end)


def test_a_reset_drops_the_half_filled_chunk_unwritten():
    memory = make_memory(OPTIONS["paper"])
    x, place = make_tokens(1, 5, DIM), torch.arange(5)[None]
    _, end = memory(x[:, :5], reset=place == 4)
    assert end.hidden.eq(0).all()
    assert end.cell.eq(0).all()
    assert end.fill.tolist() == [1]
    assert_identical_state(end, memory(x[:, 4:])[1])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_nothing_of_a_document_that_overflowed_survives_a_reset(option, backend):
    memory = make_memory(replace(OPTIONS[option], backend=backend))
    x, place = make_tokens(1, 8, DIM), torch.arange(8)[None]
    poisoned = x.masked_fill((place < 4)[..., None], torch.nan)
    m, end = memory(poisoned, reset=place == 4)
    assert m[:, 3].isnan().all()
    alone, alone_end = memory(x[:, 4:])
    assert_same(m[:, 4:], alone)
    assert_same_state(end, alone_end)


@given(option=OPTION, call=calls(2, LENGTH), seed=SEEDS, at=st.integers(0, 9))
def test_a_marked_flush_is_a_flush_at_the_end_of_a_call(option, call, seed, at):
    memory, state = build(option, 2, seed, started="apart")
    N = call.x.shape[1]
    at = min(at, N - 1)
    marked = (torch.arange(N) == at).expand(2, N)
    whole, end = run(memory, [replace(call, flush=marked)], state)
    pieces = [replace(call.part(0, at + 1), flush=True), replace(call.part(at + 1, N), flush=False)]
    joined, joined_end = run(memory, pieces, state)
    assert_same(joined, whole)
    assert_same_state(joined_end, end)


@given(
    option=OPTION,
    length=st.integers(1, 14),
    frame=st.integers(1, 8),
    seed=SEEDS,
    started=STARTS,
)
def test_a_flush_every_so_many_tokens_is_one_marked_at_each(option, length, frame, seed, started):
    memory, state = build(option, 2, seed, started)
    call = Call(make_tokens(2, length, DIM, seed=seed).requires_grad_(), flush=frame)
    results = [run(memory, [c], state) for c in (call, replace(call, flush=call.ends))]
    (m, end), (marked, marked_end) = results
    assert_same(m, marked)
    assert_same_state(end, marked_end)
    weight = make_tokens(2, length, DIM, seed=seed + 1)
    got, expected = (
        torch.autograd.grad((m * weight).sum() + end.cell.square().sum(), leaves)
        for (m, end), leaves in zip(results, [[call.x, memory.output.weight]] * 2, strict=True)
    )
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)


@given(option=OPTION, length=st.integers(0, 7), seed=SEEDS)
def test_a_flush_writes_the_unfinished_chunk_padded_with_zeros(option, length, seed):
    memory, _ = build(option, 2, seed, started="empty")
    K = memory.config.chunk_size
    x = make_tokens(2, length, DIM, seed=seed)
    m, end = memory(x, flush=True)
    zeros = torch.zeros(2, -length % K, DIM, dtype=x.dtype)
    filled, filled_end = memory(torch.cat([x, zeros], dim=1))
    assert_same(m, filled[:, :length])
    assert_same_state(end, filled_end)
    assert end.fill.eq(0).all()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_flush_with_nothing_waiting_changes_nothing(option):
    memory = make_memory(OPTIONS[option])
    x = make_tokens(2, 6, DIM)  # whole chunks of 1 and of 3
    assert_identical_state(memory(x, flush=True)[1], memory(x)[1])
    marked = torch.ones(2, 6, dtype=torch.bool)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    end = memory(x)[1]
    assert_identical_state(memory(x, end, mask=padding, flush=marked)[1], end)


@given(option=OPTION, call=calls(3, LENGTH), seed=SEEDS, started=STARTS)
def test_a_row_alone_equals_the_row_in_a_batch(option, call, seed, started):
    memory, state = build(option, 3, seed, started)
    m, end = run(memory, [call], state)
    for b in range(3):
        before = None if state is None else state.select([b])
        alone_m, alone_end = run(memory, [call.rows([b])], before)
        assert_same(alone_m, m[b : b + 1])
        assert_same_state(alone_end, end.select([b]))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_row_that_overflowed_disturbs_no_other(option, backend):
    memory = make_memory(replace(OPTIONS[option], backend=backend))
    x = make_tokens(3, 8, DIM)
    poisoned = x.index_fill(0, torch.tensor([1]), torch.nan)
    m, end = memory(x)
    poisoned_m, poisoned_end = memory(poisoned)
    assert torch.equal(poisoned_m[[0, 2]], m[[0, 2]])
    assert_identical_state(poisoned_end.select([0, 2]), end.select([0, 2]))
    assert poisoned_m[1].isnan().all()


@given(option=OPTION, call=calls(2, LENGTH), seed=SEEDS)
def test_a_call_leaves_its_arguments_as_they_were(option, call, seed):
    memory, state = build(option, 2, seed, started="apart")
    given_state = MemoryState(**{name: t.clone() for name, t in state._tensors().items()})
    x = call.x.clone()
    memory(call.x, state, **call.marks)
    assert torch.equal(call.x, x)
    assert_identical_state(state, given_state)
