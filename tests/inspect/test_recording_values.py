"""What is recorded is what the equations say, however the tokens came."""

import itertools

import chunk_oracle
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from memories import DIM, OPTIONS, Call, calls, configs, make_marks, make_memory, make_tokens, run
from tensor_memory import MemoryResidual, MemoryState
from tensor_memory.inspect import record
from tolerances import assert_same

FLOATS = ("read_at", "readout", "hidden_norm", "use")
OF_A_WRITE = ("write_at", "content_norm", "gates", "spread", "mask")


def watch(memory, pieces, **options):
    with record(memory, dtype=torch.float64, max_chunks=10_000, **options) as recording:
        run(memory, pieces)
    (layer,) = recording.layers
    return layer


def pieces_of(call, cuts):
    edges = [0, *sorted(cuts), call.x.shape[1]]
    return [call.part(a, b) for a, b in itertools.pairwise(edges) if b > a or b == 0]


def assert_as_expected(layer, memory, call, gate=1.0):
    for row in range(call.x.shape[0]):
        expected = chunk_oracle.expected_chunks(memory, call, row, gate)
        assert layer.present[:, row].sum() == len(expected) == layer.seen[row]
        for number, chunk in enumerate(expected):
            got = layer[number, row]
            assert got.present
            assert (got.chunk, [got.start, got.stop]) == (number, chunk["span"])
            assert got.written == chunk["written"]
            for name in FLOATS:
                value, wanted = np.asarray(getattr(got, name)), np.asarray(chunk[name])
                if name in ("read_at", "readout"):  # slots without a token read nothing
                    assert np.isnan(value[len(wanted) :]).all()
                    value = value[: len(wanted)]
                np.testing.assert_allclose(value, wanted, atol=1e-10, rtol=1e-10, err_msg=name)
            for name in OF_A_WRITE:
                value = getattr(got, name)
                if value is None:
                    assert memory.config.write == "nearest"
                elif chunk["written"]:
                    close = 1e-5 if name == "mask" else 1e-10  # a mask is computed in float32
                    np.testing.assert_allclose(value, chunk[name], atol=close, err_msg=name)
                else:
                    assert value.isnan().all()


@pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_recorded_as_the_oracle_computes_it(config):
    memory = make_memory(config)
    call = Call(
        make_tokens(2, 11, DIM, seed=1),
        mask=make_marks(2, 11, 0.8, seed=2),
        reset=make_marks(2, 11, 0.15, seed=3),
        flush=make_marks(2, 11, 0.15, seed=4),
    )
    assert_as_expected(watch(memory, [call]), memory, call)


@hypothesis.given(data=st.data())
def test_any_memory_and_any_call_is_recorded_as_the_oracle_computes_it(data):
    memory = make_memory(data.draw(configs()), seed=data.draw(st.integers(0, 99)))
    call = data.draw(calls(2, st.integers(1, 12)))
    cuts = data.draw(st.lists(st.integers(1, call.x.shape[1]), max_size=4))
    assert_as_expected(watch(memory, pieces_of(call, cuts)), memory, call)


def test_a_residual_records_its_gate_and_what_it_adds():
    memory = make_memory(OPTIONS["paper"])
    layer = MemoryResidual(memory, gate_init=-1.0, norm=False).double()
    call = Call(make_tokens(1, 7, DIM), flush=True)
    with record(layer, dtype=torch.float64) as recording:
        layer(call.x, flush=True)
    gate = 1 / (1 + np.exp(1.0))
    assert recording.layers[0].gate == pytest.approx(gate)
    assert_as_expected(recording[0], memory, call, gate)


def test_use_is_measured_against_what_the_norm_has_not_touched():
    layer = MemoryResidual(make_memory(OPTIONS["paper"])).double()
    x = 7 * make_tokens(1, 6, DIM)
    with record(layer, dtype=torch.float64) as recording:
        y, _ = layer(x)
    ratio = (y - x).norm(dim=-1) / x.norm(dim=-1)  # (1, 6)
    assert_same(recording[0].use[:, 0], ratio[0].reshape(2, 3).mean(1))


def test_under_autocast_the_heads_are_recorded_as_the_model_ran_them():
    memory = make_memory(OPTIONS["paper"], dtype=torch.float32)
    x = make_tokens(1, 7, DIM, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with record(memory, dtype=torch.float64) as recording:
            _, state = memory(x)
        at = memory.coordinate(x[:, ::3]).float().tanh()
    assert torch.equal(recording[0].read_at[:, 0, 0], at[0].double())
    assert_same(recording[0].hidden_norm[-1, 0], state.hidden.norm(dim=1)[0], torch.float32)


def test_a_half_precision_stream_under_autocast_is_recorded_to_its_end():
    layer = MemoryResidual(make_memory(OPTIONS["paper"], dtype=torch.float32))
    x, state = make_tokens(1, 7, DIM, dtype=torch.bfloat16), None
    with torch.autocast("cpu", torch.bfloat16), record(layer) as recording:
        for part in x.split(2, dim=1):
            _, state = layer(part, state)
    assert recording[0].seen.tolist() == [3]
    assert_same(recording[0].hidden_norm[-1, 0], state.hidden.norm(dim=1)[0], torch.bfloat16)


def test_a_flush_without_tokens_writes_what_was_waiting():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(2, 4, DIM)
    with record(memory, dtype=torch.float64) as recording:
        _, state = memory(x)
        memory(x[:, :0], state, flush=True)
    assert_as_expected(recording[0], memory, Call(x, flush=True))


def test_a_state_reset_between_calls_drops_the_unfinished_chunk():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(2, 8, DIM)
    with record(memory, dtype=torch.float64) as recording:
        _, state = memory(x[:, :4])
        memory(x[:, 4:], state.reset([0]))
    reset = torch.zeros(2, 8, dtype=torch.bool)
    reset[0, 4] = True
    assert_as_expected(recording[0], memory, Call(x, reset=reset))


def test_rows_that_change_places_take_along_how_far_they_had_come():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(2, 8, DIM)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :3] = False  # the second row has one token, and waits with it
    swapped = x.clone()
    swapped[:, 4:] = x[[1, 0], 4:]
    with record(memory, dtype=torch.float64) as recording:
        _, state = memory(x[:, :4], mask=mask[:, :4])
        memory(swapped[:, 4:], state.select([1, 0]))
    assert recording.rows == 2
    layer = recording[0]
    with record(memory, dtype=torch.float64) as alone:
        memory(x, mask=mask)
    for row, other in ((0, 1), (1, 0)):  # each ends as the row that came to its place
        assert layer.seen[row] == alone[0].seen[other]
        last = int(layer.seen[row]) - 1
        got, expected = layer[last, row], alone[0][last, other]
        assert (got.start, got.stop) == (expected.start, expected.stop)
        assert_same(got.hidden_norm, expected.hidden_norm)
        assert got.use == pytest.approx(expected.use)


def test_rows_repeated_into_a_larger_batch_become_new_rows_that_count_on():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(1, 8, DIM)
    with record(memory, dtype=torch.float64) as recording:
        _, state = memory(x[:, :4])
        memory(x[:, 4:].expand(3, -1, -1), state.select([0, 0, 0]))
    layer = recording[0]
    assert recording.rows == 4
    assert layer.span[1].tolist() == [[3, 4], *[[3, 6]] * 3]
    assert layer.written[1].tolist() == [False, True, True, True]
    assert layer.seen.tolist() == [2, 3, 3, 3]


def test_a_state_taken_up_again_later_starts_new_rows():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(1, 9, DIM)
    with record(memory, dtype=torch.float64) as recording:
        _, early = memory(x[:, :3])
        memory(x[:, 3:], early)
        memory(x[:, 6:], early)
    assert recording.rows == 2
    assert recording[0].present.sum(0).tolist() == [3, 1]


def test_recording_that_starts_in_the_middle_counts_from_the_waiting_tokens():
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(1, 9, DIM)
    _, state = memory(x[:, :4])
    with record(memory, dtype=torch.float64) as recording:
        memory(x[:, 4:], state)
    layer = recording[0]
    assert layer.span[:, 0].tolist() == [[0, 3], [3, 6]]
    whole = watch(memory, [Call(x)])
    for name in ("write_at", "readout", "hidden_norm", "gates"):
        assert_same(getattr(layer, name), getattr(whole, name)[1:])


def test_a_value_too_large_for_the_kept_type_stays_finite():
    memory = make_memory(OPTIONS["paper"])
    with torch.no_grad():
        memory.content.weight.mul_(1e9)
    with record(memory) as recording:
        memory(make_tokens(1, 3, DIM))
    assert recording[0].content_norm.item() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("length", [2, 4])
def test_one_state_continued_twice_gives_two_rows(length):
    memory = make_memory(OPTIONS["paper"])
    x = make_tokens(1, 8, DIM)
    empty = MemoryState.zeros(memory.config, DIM, 1, dtype=torch.float64)
    with record(memory, dtype=torch.float64) as recording:
        for _ in range(2):
            _, state = memory(x[:, :length], empty)
            memory(x[:, length:], state)
    layer = recording[0]
    assert recording.rows == 2
    assert layer.seen.tolist() == [3, 3]
    assert torch.equal(layer.span[:, 0], layer.span[:, 1])
