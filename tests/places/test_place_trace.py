"""Where a read came from: exact shares of all writes, within a call and across recorded calls."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_place_memory import DIM, Largest, assert_near, at, calls, marks
from test_place_recording import CHANGES, GOES_ON

from tensor_memory import PlaceConfig, PlaceMemory, PlaceState, Recording, record
from tensor_memory.ops.places import chunked, shares
from tensor_memory.ops.places.place_scan import place_scan

SMALL = PlaceConfig(grid=(4, 3), channels=3, heads=2)


@pytest.fixture(params=["as it comes", "small blocks", "corners"])
def way(request, monkeypatch):
    """Blocks of one token, one read at a time; or addresses of 2ⁿ corners."""
    if request.param == "small blocks":
        monkeypatch.setattr(shares, "VALUES", 1)
    if request.param == "corners":
        monkeypatch.setattr(chunked, "SPARSE_FROM", 0)


def heard(memory, reads):
    """Let `reads` have what every call of a memory reads, (B, N, H, C)."""
    return memory.norm.register_forward_pre_hook(lambda _, inputs: reads.append(inputs[0].detach()))


def summed(trace, read):
    """The read as the trace explains it, (H, C)."""
    told = (trace.share[read, ..., None] * trace.content(read)).sum(0)
    return told + trace.others[read] + trace.rest[read]


@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
def test_shares_of_several_blocks_add_up_to_the_read(rule, kernel, way):
    config = replace(SMALL, rule=rule, kernel=kernel, share_places=False, keep_bias=2.0)
    memory, x = PlaceMemory(DIM, config).double(), torch.randn(2, 150, DIM).double()
    values = torch.randn(2, 2, 4, 3, 3).double()
    state = PlaceState(values, torch.zeros(2, 2).double(), config.wrap)
    mask, reset = marks(x.shape[:2], 0.8), marks(x.shape[:2], 0.02)
    reads, asked = [], [0, 149, 70, 64, 63, 70]
    heard(memory, reads)
    memory(x, state, mask=mask, reset=reset)
    trace = memory.trace(x, state, reads=asked, mask=mask, reset=reset)
    total = torch.einsum("brnh,bnhc->brhc", trace.share, trace.content) + trace.rest
    assert_near(total, reads[0][:, asked])
    for r, t in enumerate(asked):
        assert not trace.share[:, r, t + 1 :].any()


def test_what_a_notebook_prints_has_shapes_and_no_values():
    memory, x = PlaceMemory(DIM, SMALL), torch.randn(2, 50, DIM)
    with record(memory) as recording:
        memory(x)
    assert repr(memory.trace(x, reads=[9])).startswith("Trace(share (2, 1, 50, 2), content (2, 50")
    assert repr(recording[0].trace([9])).startswith("RecordedTrace(share (1, 10, 2), position (1,")
    for told in (recording[0], recording[0].head(0), recording[0].history):
        assert repr(told).startswith(f"{type(told).__name__}(")
        assert "write_at (50, 2, " in repr(told)
        assert "tensor" not in repr(told)


def test_nothing_asked_for_is_nothing_told():
    memory, x = PlaceMemory(DIM, SMALL), torch.randn(2, 5, DIM)
    trace = memory.trace(x, reads=torch.zeros(0, dtype=torch.long))
    assert trace.share.shape == (2, 0, 5, 2)


@given(call=calls(least=6, most=14), data=st.data())
def test_shares_across_calls_add_up_to_the_read(call, data):
    """Whatever happens to the state between calls, with rows left out and beginnings forgotten."""
    memory, x, where, state = call
    B, N = x.shape[:2]
    state = data.draw(st.sampled_from([state, None]))
    max_rows, max_tokens = data.draw(st.sampled_from([(1, 1000), (100, 1000), (100, 5)]))
    changes = GOES_ON if max_rows == 1 else CHANGES
    reads, widen = [], data.draw(st.booleans())
    hook = heard(memory, reads)
    with record(memory, max_rows=max_rows, max_tokens=max_tokens) as recording:
        start = 0
        while start < N:
            rows = (slice(None), slice(start, start + data.draw(st.integers(1, 5))))
            mask, reset = marks(x[rows].shape[:2], 0.8), marks(x[rows].shape[:2], 0.1)
            _, state = memory(x[rows], state, where=at(where, rows), mask=mask, reset=reset)
            start = rows[1].stop
            state = changes[data.draw(st.sampled_from(list(changes)))](state)
            if widen and memory.config.kernel == "gaussian":  # as a training step does
                memory.log_width.data += 0.1
    hook.remove()
    layer, start = recording[0], 0
    # A state of elsewhere starts new rows: the last call is in the last ones.
    last, row = reads[-2], recording.rows - min(B, recording.rows)  # recording norms them again
    stop = int(layer.history.first[row] + layer.history.count[row])
    asked = [stop - 1, stop - last.shape[1], stop - 1]
    asked = [max(position, int(layer.history.first[row])) for position in asked]
    trace = layer.trace(asked, row=row)
    few = layer.trace(asked, row=row, top=2)
    for r, position in enumerate(asked):
        assert_near(summed(trace, r), trace.read[r])
        assert_near(summed(few, r), trace.read[r])
        assert_near(trace.read[r], last[0, position - stop])
        assert not trace.share[r][trace.position[r] > position].any()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rule", [pytest.param("linear", marks=pytest.mark.exhaustive), "delta"])
def test_what_happened_between_calls_is_followed_back(change, rule, way):
    config = PlaceConfig(
        grid=(4, 6), channels=2, heads=2, wrap=(True, False), rule=rule, kernel="linear"
    )
    memory, x, state = PlaceMemory(DIM, config).double(), torch.randn(3, 12, DIM).double(), None
    reads = []
    hook = heard(memory, reads)
    with record(memory) as recording:
        for part in x.split(3, 1):
            _, state = memory(part, state if state is None else CHANGES[change](state))
    hook.remove()
    told = torch.cat(reads[::2], 1)  # recording norms them again
    layer = recording[0]
    if change == "another state":
        for row in range(12):
            trace = layer.trace([0, 2], row=row)
            expected = told[row % 3, row // 3 * 3 :][[0, 2]]
            assert_near(torch.stack([summed(trace, r) for r in range(2)]), expected)
            assert bool(trace.rest.any()) == (row >= 3)
        return
    for row in range(3):
        trace = layer.trace(range(12), row=row)
        assert_near(trace.read, told[row])
        assert_near(torch.stack([summed(trace, r) for r in range(12)]), told[row])
        assert not trace.rest.any()
        assert trace.call[0, :, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        if change == "select":  # a row goes on from the one above it
            assert trace.row[11, ::3, 0].tolist() == [(row - back) % 3 for back in (3, 2, 1, 0)]
        if change == "nothing":
            assert trace.share[11, :3].any()


def test_widths_that_were_trained_between_calls_are_those_of_each_call():
    memory, x = PlaceMemory(DIM, SMALL).double(), torch.randn(1, 9, DIM).double()
    reads, state = [], None
    hook = heard(memory, reads)
    with record(memory) as recording:
        for part in x.split(3, 1):
            _, state = memory(part, state)
            memory.log_width.data += 0.4
    hook.remove()
    assert_near(recording[0].trace([8, 5]).read, torch.cat(reads[::2], 1)[0, [8, 5]])


def test_the_largest_shares_are_told_first():
    memory = PlaceMemory(DIM, replace(SMALL, rule="delta")).double()
    with record(memory) as recording:
        _, state = memory(torch.randn(1, 70, DIM).double())
        memory(torch.randn(1, 80, DIM).double(), state)
    whole, few = (recording[0].trace([149, 90], top=top) for top in (None, 5))
    assert few.share.shape == (2, 5, 2)
    size, best = whole.share.abs().topk(5, dim=1)
    assert_near(few.share.abs(), size)
    assert torch.equal(few.position, best)
    assert torch.equal(few.call, (best >= 70).long())
    assert recording[0].trace([1], top=100).share.shape == (1, 2, 2)


def test_a_beginning_that_was_forgotten_is_in_the_rest():
    memory = PlaceMemory(DIM, SMALL).double()
    x, reads, state = torch.randn(1, 50, DIM).double(), [], None
    hook = heard(memory, reads)
    memory(x)
    hook.remove()
    with record(memory, max_tokens=10) as recording:
        for part in x.split(7, 1):
            _, state = memory(part, state)
    trace = recording[0].trace([49])
    assert trace.position[0, 0, 0] == int(recording[0].history.first) >= 40
    assert trace.rest.any()
    assert_near(summed(trace, 0), reads[0][0, 49])


@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_more_reads_than_are_followed_at_once_need_no_larger_tensors(rule, kernel, monkeypatch):
    monkeypatch.setattr(shares, "VALUES", 1024)  # the addresses of two reads, or of two tokens
    config = PlaceConfig(grid=(16, 16), channels=2, heads=1, rule=rule, kernel=kernel)
    memory, x = PlaceMemory(DIM, config), torch.randn(2, 9, DIM)
    with record(memory) as recording:
        memory(x)
    with Largest() as made:
        memory.trace(x, reads=range(9))
        recording[0].trace(range(9))
    assert made.numel <= shares.VALUES


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_beside_the_shares_no_tensor_grows_with_what_is_traced(rule, monkeypatch):
    monkeypatch.setattr(shares, "VALUES", 512)
    config = PlaceConfig(grid=(4, 4), channels=3, heads=2, rule=rule)
    memory, N = PlaceMemory(DIM, config), 400
    with record(memory, every=N) as recording:
        memory(torch.randn(1, N, DIM))
    layer, reads = recording[0], [N - 1, 7, N // 2]
    with Largest() as whole:
        layer.trace(reads)
    with Largest() as few:
        layer.trace(reads, top=4)
    assert whole.numel == len(reads) * N * config.heads
    assert few.numel <= N * config.heads  # the widths, which are looked through for changes


def test_a_trace_of_a_saved_recording_is_the_same(tmp_path):
    memory = PlaceMemory(DIM, SMALL)
    with record(memory) as recording:
        _, state = memory(torch.randn(2, 5, DIM))
        memory(torch.randn(2, 5, DIM), state.moved([0.9, 0.0]).select([1, 0]))
    recording.save(tmp_path / "run.safetensors")
    loaded = Recording.load(tmp_path / "run.safetensors")
    one, other = (each[0].trace([9], row=1) for each in (recording, loaded))
    assert torch.equal(one.share, other.share)
    assert one.share.dtype == torch.float64


def test_a_quantized_state_is_followed_as_if_it_were_not_rounded():
    memory, x = PlaceMemory(DIM, SMALL), torch.randn(1, 12, DIM)
    state, reads = PlaceState.zeros(SMALL, 1).quantized(torch.bfloat16), []
    heard(memory, reads)
    with record(memory) as recording:
        for part in x.split(1, 1):
            _, state = memory(part, state)
    assert (recording.rows, len(recording[0])) == (1, 12)
    assert len(recording[0].history.entry_at) == 0
    trace = recording[0].trace([11])
    torch.testing.assert_close(trace.read[0].float(), reads[-2][0, 0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_a_state_that_is_quantized_between_calls_is_followed_as_if_it_were_not_rounded(dtype):
    memory, x, state = PlaceMemory(DIM, SMALL), torch.randn(2, 12, DIM), None
    changes = {
        3: lambda state: state.quantized(dtype),
        6: lambda state: state.quantized(torch.int8).select([1, 0]),
        9: PlaceState.dequantized,
    }
    with record(memory) as recording:
        for start in range(0, 12, 3):
            _, state = memory(
                x[:, start : start + 3], state if state is None else changes[start](state)
            )
    assert (recording.rows, len(recording[0])) == (2, 12)
    assert len(recording[0].history.entry_at) == 0
    crossed = torch.cat([x[:, :6].flip(0), x[:, 6:]], 1)
    expected = memory.double().trace(crossed.double(), reads=[11])
    for row in range(2):
        trace = recording[0].trace([11], row=row)
        assert trace.row[0, ::3, 0].tolist() == [1 - row, 1 - row, row, row]
        torch.testing.assert_close(trace.share[0], expected.share[row, 0], rtol=0, atol=1e-5)
        assert not trace.rest.any()


def test_a_quantized_state_that_moves_is_followed():
    memory, x, state = PlaceMemory(DIM, SMALL), torch.randn(2, 12, DIM), None
    with record(memory) as recording:
        for part in x.split(3, 1):
            _, state = memory(part, state)
            state = state.quantized(torch.float16).moved([0.9, 0.3])
    assert (recording.rows, len(recording[0].history.entry_at)) == (2, 0)
    assert len(recording[0].history.moves) == 6


def test_a_trace_that_cannot_be_given_says_why():
    memory = PlaceMemory(DIM, SMALL)
    with record(memory, max_tokens=4) as recording:
        memory(torch.randn(1, 10, DIM))
    with record(memory, max_tokens=0) as without:
        memory(torch.randn(1, 10, DIM))
    layer = recording[0]
    for error, match, trace in (
        (ValueError, r"history of row 0 has, 8 to 9, got \[2\]; record with a larger max_tokens",
         lambda: layer.trace([2])),
        (ValueError, r"got \[10\]", lambda: layer.trace([10])),
        (TypeError, "expected reads as a list of token positions", lambda: layer.trace([0.5])),
        (TypeError, "expected reads as a list of token positions", lambda: layer.trace([])),
        (ValueError, "top: expected a number of writes", lambda: layer.trace([9], top=0)),
        (IndexError, "row 3: this recording has 1 row", lambda: layer.trace([9], row=3)),
        (ValueError, "record with max_tokens above 0", lambda: without[0].trace([9])),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            trace()


def test_a_trace_under_autocast_adds_up_to_a_read_in_float32():
    memory, x = PlaceMemory(DIM, SMALL), torch.randn(2, 70, DIM)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        trace, (inputs, _) = memory.trace(x, reads=[0, 40]), memory.steer(x, None)
    reads, _ = place_scan(*inputs[:7], rule=inputs.rule, wrap=inputs.wrap)
    torch.testing.assert_close(trace.read, reads.detach()[:, [0, 40]])


def test_a_trace_of_no_rows_is_empty():
    memory = PlaceMemory(DIM, SMALL)
    assert memory.trace(torch.randn(0, 5, DIM), reads=[3]).share.shape == (0, 1, 5, 2)
