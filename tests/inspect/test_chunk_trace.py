"""Where the reads of a `TensorMemory` came from: the module again, one write removed by hand."""

from dataclasses import replace

import pytest
import torch

from memories import DIM, OPTIONS, Call, make_marks, make_memory, make_state, make_tokens, run
from tensor_memory import MemoryConfig, MemoryState, Recording, memory_scan, record
from tensor_memory.inspect import chunk_trace
from tolerances import assert_same

SMALL = MemoryConfig(channels=3, grid=(3, 2), chunk_size=2)


def read_without(memory, x, chunk, without=(), state=None):
    """The reads (R, C) of one chunk of row 0: a scan by hand; some chunks write nothing."""
    K, config = memory.config.chunk_size, memory.config
    S = -(-x.shape[1] // K)
    tokens = torch.nn.functional.pad(x[:1], (0, 0, 0, S * K - x.shape[1]))
    at = memory.steer(tokens.reshape(1, S, K, -1))
    writes = torch.ones(1, S, dtype=torch.bool)
    for other in without:
        writes[0, other] = False
    empty = torch.zeros(1, config.channels, *config.grid).double()
    hidden, cell = (empty, empty) if state is None else (state.hidden[:1], state.cell[:1])
    taps = memory.taps if config.mixing == "factorized" else None
    reads, *_ = memory_scan(
        at.read_at, at.write_at, at.spread, at.content,
        taps, memory.mix.weight, memory.mix.bias, hidden, cell,
        writes=writes, backend="reference",
    )  # fmt: skip
    assert reads is not None
    return reads[0, chunk]


@pytest.mark.parametrize("name", ["paper", "token reads, heads", "nearest", "pointwise"])
@pytest.mark.parametrize("at_once", [2, 64])
@torch.no_grad()
def test_an_effect_is_what_the_module_reads_less_with_that_one_write_removed(
    name, at_once, monkeypatch
):
    monkeypatch.setattr(chunk_trace, "AT_ONCE", at_once)
    memory = make_memory(OPTIONS[name])
    x = make_tokens(2, 15, DIM)
    with record(memory) as recording:
        state = None
        for part in x.split([4, 1, 5, 5], dim=1):
            _, state = memory(part, state)
    trace = recording[0].trace([4, 2])
    assert trace.chunk.tolist() == [0, 1, 2, 3, 4]
    for r, chunk in enumerate((4, 2)):
        whole = read_without(memory, x, chunk)
        assert_same(trace.read[r], whole)
        for w in range(5):
            less = whole - read_without(memory, x, chunk, [w])
            assert_same(trace.effect[r, w], less)
    assert trace.effect[0, 0].abs().max() > 1e-3
    assert_same(trace.joint, trace.read - trace.effect.sum(1))  # nothing was there before
    assert trace.joint.abs().max() > 1e-3
    assert (trace.rest == 0).all()


@torch.no_grad()
def test_a_state_from_before_and_what_is_not_additive_are_told_apart():
    memory = make_memory(SMALL)
    x = make_tokens(1, 8, DIM)
    before = MemoryState.zeros(SMALL, DIM, 1, dtype=torch.float64)
    full = make_state(SMALL, 1)
    before = replace(before, hidden=full.hidden, cell=full.cell)
    with record(memory) as recording:
        memory(x, before)
    trace = recording[0].trace([3])
    whole = read_without(memory, x, 3, state=before)
    assert_same(trace.read[0], whole)
    assert_same(trace.rest[0], whole - read_without(memory, x, 3))
    assert_same(trace.effect.sum(1) + trace.rest + trace.joint, trace.read)


@torch.no_grad()
def test_parts_sum_to_one_and_a_write_has_a_life():
    memory = make_memory(OPTIONS["token reads"])
    with record(memory) as recording:
        memory(make_tokens(1, 17, DIM))  # the last chunk waits for a token
    layer = recording[0]
    trace, lives = layer.trace(range(6)), layer.follow(0, 2)
    for t in range(1, 6):
        part = (trace.effect[t] * trace.read[t]).sum((1, 2)) / trace.read[t].square().sum()
        best = part.abs().topk(min(2, t)).indices
        assert lives.position[t, : len(best), 0].tolist() == best.tolist()
        assert_same(lives.part[t, : len(best), 0], part[best])
        joint = (trace.joint[t] * trace.read[t]).sum() / trace.read[t].square().sum()
        assert_same(lives.joint[t, 0], joint)
    total = lives.part.sum(1) + lives.others + lives.rest + lives.joint
    assert_same(total[1:], torch.ones(5, 1).double())
    assert lives.position[0].tolist() == [[-1], [-1]]  # the first read an empty memory
    assert lives.left[:5].isfinite().all()
    assert lives.left[5].isnan()  # it was never written
    assert (lives.half[:4] > 0).any()


@torch.no_grad()
def test_rows_that_move_are_emptied_or_replaced_keep_an_exact_history():
    memory = make_memory(SMALL)
    x = make_tokens(3, 12, DIM)
    with record(memory) as recording:
        _, state = memory(x[:, :4])
        _, state = memory(x[:, 4:8], state.select([1, 0, 0]))
        state = state.reset([2])
        _, state = memory(x[:, 8:11], state)
    layer = recording[0]
    joined = [torch.cat([x[b : b + 1, :4], x[a : a + 1, 4:]], 1) for a, b in enumerate((1, 0, 0))]
    for row in range(2):
        trace = layer.trace([5], row=row)
        whole = read_without(memory, joined[row], 5)
        assert_same(trace.read[0], whole)
        assert_same(trace.effect[0, 1], whole - read_without(memory, joined[row], 5, [1]))
    trace = layer.trace([5], row=2)  # chunks 4 and 5 are the first of a new document
    assert_same(trace.read[0], read_without(memory, x[2:, 8:], 1))
    assert (trace.effect[0, :4] == 0).all()


@torch.no_grad()
def test_marks_are_followed_as_the_memory_followed_them():
    memory = make_memory(OPTIONS["token reads"])
    call = Call(
        make_tokens(2, 23, DIM),
        mask=make_marks(2, 23, 0.8, 2),
        reset=make_marks(2, 23, 0.1, 3),
        flush=make_marks(2, 23, 0.1, 4),
    )
    with record(memory, dtype=torch.float64) as recording:
        run(memory, [call.part(0, 7), call.part(7, 8), call.part(8, 23)])
    layer = recording[0]
    for row in range(2):
        count = int(layer.seen[row])
        read = layer.trace(range(count), row=row).read
        assert_same(read, layer.readout[:count, row].nan_to_num())


@torch.no_grad()
def test_a_chunk_that_waits_knows_nothing_of_the_document_before():
    memory = make_memory(OPTIONS["paper"])
    N = 2 * memory.config.chunk_size + 1
    with record(memory, dtype=torch.float64) as recording:
        m, _ = memory(make_tokens(1, N, DIM), reset=torch.arange(N)[None] == N - 1)
    assert (m[0, -1] == 0).all()
    trace = recording[0].trace([2])
    assert (trace.read == 0).all()
    assert (trace.effect == 0).all()


@torch.no_grad()
def test_a_longer_stream_forgets_its_beginning_and_keeps_the_state_that_it_left(tmp_path):
    memory = make_memory(SMALL)
    x, state = make_tokens(1, 40, DIM), None
    with record(memory, max_tokens=12) as recording:
        for part in x.split(5, dim=1):
            _, state = memory(part, state)
    history = recording[0].history
    assert history.writes.shape[0] <= 6
    first = int(history.first[0])
    assert first + int(history.count[0]) == 20
    trace = recording[0].trace([19])
    assert_same(trace.read[0], read_without(memory, x, 19))
    assert trace.chunk.tolist() == list(range(first, 20))
    with pytest.raises(ValueError, match="expected chunks that the history of row 0 has"):
        recording[0].trace([first - 1])
    with record(memory, max_tokens=0) as none:
        memory(x)
    with pytest.raises(ValueError, match="record with max_tokens above 0"):
        none[0].trace([3])
    recording.save(tmp_path / "run.safetensors")
    again = Recording.load(tmp_path / "run.safetensors")
    assert torch.equal(again[0].trace([19]).effect, trace.effect)
    assert torch.equal(again[0][:, :1].trace([19]).effect, trace.effect)


@torch.no_grad()
def test_weights_that_change_begin_a_new_history():
    memory = make_memory(SMALL)
    x = make_tokens(1, 12, DIM)
    with record(memory) as recording:
        _, before = memory(x[:, :6])
        memory.mix.weight.mul_(0.5)
        memory(x[:, 6:], before)
    trace = recording[0].trace([5])
    assert trace.chunk.tolist() == [3, 4, 5]
    assert_same(trace.read[0], read_without(memory, x[:, 6:], 2, state=before))
