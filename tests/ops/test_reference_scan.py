"""The reference scan against the NumPy oracle, row by row, and against numeric derivatives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import FUSED, Case, floats
from torch import Tensor

import oracle
from tensor_memory import memory_scan
from tensor_memory.ops import memory_read
from tolerances import assert_same


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any options, on grids small enough for the oracle's loops."""
    axes = draw(st.integers(1, 4))
    return Case(
        B=draw(st.integers(0, 2)),
        S=draw(st.integers(0, 4)),
        Q=draw(st.sampled_from([None, 1, 2, 3])),
        M=draw(st.integers(1, 3)),
        C=draw(st.integers(1, 3)),
        grid=tuple(draw(st.integers(2, 5 if axes < 3 else 3)) for _ in range(axes)),
        nearest=draw(st.booleans()),
        pointwise=draw(st.booleans()),
        writes=draw(st.booleans()),
        resets=draw(st.booleans()),
    )


@settings(max_examples=2 * settings.default.max_examples)
@given(case=cases(), seed=st.integers(0, 2**31), backend=st.sampled_from(["reference", "torch"]))
def test_a_scan_is_what_the_oracle_says(case, seed, backend):
    request = case.make(seed=seed)
    got = memory_scan(
        *floats(request), writes=request.writes, resets=request.resets, backend=backend
    )
    for b in range(case.B):

        def row(value: Tensor | None, b: int = b) -> np.ndarray | None:
            return None if value is None else value[b].cpu().numpy()

        r = request
        weights = [None if w is None else w.cpu().numpy() for w in (r.taps, r.mix, r.bias)]
        expected = oracle.scan(
            *map(row, (r.read_at, r.write_at, r.spread, r.content)),
            *weights,
            *map(row, (r.hidden, r.cell, r.writes, r.resets)),
        )
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                assert_same(mine[b].cpu(), torch.from_numpy(theirs))


@given(case=cases(), seed=st.integers(0, 2**31))
def test_a_read_that_no_write_follows_is_what_the_oracle_says(case, seed):
    request = case.make(seed=seed)
    if request.read_at is None:
        return
    reads = memory_read(request.read_at, request.hidden).cpu()
    for b, s, q in np.ndindex(*reads.shape[:3]):
        at, hidden = request.read_at[b, s, q].cpu().numpy(), request.hidden[b].cpu().numpy()
        assert_same(reads[b, s, q], torch.from_numpy(oracle.sample(hidden, at)))


SMALL = [
    Case(B=2, S=3, Q=1, M=1, C=1, grid=(3,)),
    Case(B=1, S=2, Q=2, M=2, C=1, grid=(2, 3)),
    Case(B=1, S=2, Q=1, M=1, C=1, grid=(2, 2, 2), writes=False, resets=False),
    Case(B=1, S=2, Q=1, M=1, C=1, grid=(2, 2, 2, 2), writes=False, resets=False),
    Case(B=2, S=3, Q=1, M=2, C=2, grid=(3,), nearest=True),
    Case(B=1, S=2, Q=1, M=1, C=2, grid=(2, 2), pointwise=True),
    Case(B=1, S=2, Q=None, M=1, C=2, grid=(2,)),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("options", [("reference", None), ("torch", 2)], ids=str)
def test_gradients_are_the_numeric_ones(case, options):
    backend, checkpoint_every = options
    request = case.make()
    present = [i for i, value in enumerate(floats(request)) if value is not None]

    def scan(*leaves: Tensor) -> tuple[Tensor, ...]:
        floats: list[Tensor | None] = [None] * 9
        for i, leaf in zip(present, leaves, strict=True):
            floats[i] = leaf
        results = memory_scan(
            *floats,
            writes=request.writes,
            resets=request.resets,
            backend=backend,
            checkpoint_every=checkpoint_every,
        )
        return tuple(result for result in results if result is not None)

    leaves = [request[i].requires_grad_() for i in present]
    assert torch.autograd.gradcheck(scan, leaves, fast_mode=True, atol=1e-7, rtol=1e-6)


def test_a_read_s_gradients_are_the_numeric_ones():
    request = Case(B=2, S=2, Q=2, C=2, grid=(3, 2)).make()
    leaves = (request.read_at.requires_grad_(), request.hidden.requires_grad_())
    assert torch.autograd.gradcheck(memory_read, leaves)
    assert torch.autograd.gradgradcheck(memory_read, leaves)


@pytest.mark.parametrize("backend", ["reference", "torch", FUSED])
def test_a_coordinate_that_is_not_a_number_spoils_its_own_row_alone(backend):
    case = Case(B=3, S=2, Q=1, M=1, C=16, grid=(3,), writes=False, resets=False)
    request = case.make(torch.float32)
    spoiled = request._replace(read_at=request.read_at.clone(), write_at=request.write_at.clone())
    spoiled.read_at[1] = spoiled.write_at[1] = torch.nan
    expected = memory_scan(*floats(request), backend=backend)
    got = memory_scan(*floats(spoiled), backend=backend)
    for mine, clean in zip(got, expected, strict=True):
        assert torch.equal(mine[[0, 2]], clean[[0, 2]])
        assert mine[1].isnan().any()
    assert got[0][1].isnan().all()  # nowhere is read as nothing else
