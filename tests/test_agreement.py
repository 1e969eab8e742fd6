"""TensorMemory against the NumPy oracle, which shares nothing with it but the paper."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from memories import DIM, OPTIONS, SEEDS, Call, calls, configs, make_memory, make_state, make_tokens
from tensor_memory import MemoryConfig, MemoryState, TensorMemory
from tolerances import assert_same


def oracle_states(state: MemoryState) -> list[oracle.OracleState]:
    states = []
    for b, fill in enumerate(state.fill.tolist()):
        kept = state.readout.shape[1] > 0 and fill > 0
        states.append(
            oracle.OracleState(
                hidden=state.hidden[b].numpy(),
                cell=state.cell[b].numpy(),
                pending=list(state.tokens[b, :fill].numpy()),
                readout=state.readout[b].numpy() if kept else None,
            )
        )
    return states


def row(marks: torch.Tensor | bool | None, b: int) -> np.ndarray | bool | None:
    return marks[b].numpy() if isinstance(marks, torch.Tensor) else marks


@torch.no_grad()
def assert_follows_the_oracle(memory: TensorMemory, pieces: list[Call], state: MemoryState) -> None:
    weights = {name: value.numpy() for name, value in memory.state_dict().items()}
    expected = oracle_states(state)
    for call in pieces:
        m, state = memory(call.x, state, **call.marks)
        for b, before in enumerate(expected):
            expected_m, expected[b] = oracle.forward(
                call.x[b].numpy(),
                weights,
                memory.config,
                before,
                mask=row(call.mask, b),
                reset=row(call.reset, b),
                flush=row(call.ends, b),
            )
            assert_same(m[b], torch.from_numpy(expected_m))
        for b, (got, after) in enumerate(zip(oracle_states(state), expected, strict=True)):
            assert_same(state.hidden[b], torch.from_numpy(after.hidden))
            assert_same(state.cell[b], torch.from_numpy(after.cell))
            assert len(got.pending) == len(after.pending)
            for token, expected_token in zip(got.pending, after.pending, strict=True):
                np.testing.assert_array_equal(token, expected_token)
            assert (got.readout is None) == (after.readout is None)
            if after.readout is not None:
                assert_same(state.readout[b], torch.from_numpy(after.readout))
        unused = torch.arange(state.tokens.shape[1]) >= state.fill[:, None]
        assert state.tokens[unused].eq(0).all()
        assert state.readout[state.fill == 0].eq(0).all()


@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.data(), config=configs(), rows=st.integers(1, 2), seed=SEEDS, together=st.booleans())
def test_any_memory_follows_the_oracle_over_several_calls(data, config, rows, seed, together):
    pieces = data.draw(st.lists(calls(rows, st.integers(0, 9)), min_size=1, max_size=3))
    state = make_state(config, rows, seed=seed, together=together)
    assert_follows_the_oracle(make_memory(config, seed=seed), pieces, state)


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
@pytest.mark.parametrize("grid", [(5,), (2, 4), (3, 2, 4), (2, 3, 2, 2)])
def test_every_grid_and_chunk_size_follows_the_oracle(grid, chunk_size):
    config = MemoryConfig(channels=2, grid=grid, chunk_size=chunk_size)
    whole = Call(make_tokens(2, 2 * chunk_size + 1, DIM))
    empty = MemoryState.zeros(config, DIM, 2, dtype=torch.float64)
    assert_follows_the_oracle(make_memory(config), [whole, whole], empty)
    assert_follows_the_oracle(make_memory(config), [whole], make_state(config, 2))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_follows_the_oracle_as_initialised(option):
    config = OPTIONS[option]
    memory = TensorMemory(DIM, config).double()
    whole = Call(make_tokens(2, 7, DIM))
    assert_follows_the_oracle(memory, [whole, whole], make_state(config, 2))
