"""cu_seqlens: documents packed into one row give what they give one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from memories import DIM, OPTIONS, make_memory, make_tokens
from tensor_memory import MemoryResidual, PlaceConfig, PlaceMemory, record
from tolerances import assert_same


def build(kind: str) -> nn.Module:
    memory: Any = make_memory(OPTIONS["paper"])
    if "places" in kind:
        memory = PlaceMemory(DIM, PlaceConfig(grid=(3, 4), channels=2, heads=2)).double()
    return MemoryResidual(memory).double() if "residual" in kind else memory


KINDS = ["chunks", "places", "chunks, residual", "places, residual"]


def cuts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    started=st.booleans(),
)
def test_packed_documents_are_what_they_are_alone(kind, lengths, started):
    memory, x = build(kind), make_tokens(1, sum(lengths), DIM)
    state = memory(make_tokens(1, 4, DIM, seed=1))[1] if started else None
    packed, after = memory(x, state, cu_seqlens=cuts(lengths))
    alone, ends = [], []
    for number, part in enumerate(x.split(lengths, dim=1)):
        m, end = memory(part, state if number == 0 else None)
        alone.append(m)
        ends.append(end)
    assert_same(packed, torch.cat(alone, dim=1))
    last = max((number for number, length in enumerate(lengths) if length), default=0)
    name = "values" if "places" in kind else "cell"
    assert_same(getattr(after, name), getattr(ends[last], name))


def test_cuts_and_resets_add_up():
    memory, x = build("chunks"), make_tokens(1, 9, DIM)
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, 4] = True
    both = memory(x, reset=reset, cu_seqlens=cuts([2, 7]))[0]
    assert torch.equal(both, memory(x, cu_seqlens=cuts([2, 2, 5]))[0])


@pytest.mark.parametrize("kind", ["chunks, residual", "places"])
def test_packed_calls_are_recorded(kind):
    memory, x = build(kind), make_tokens(1, 9, DIM)
    with record(memory) as recording:
        memory(x, cu_seqlens=cuts([2, 7]))
    with record(memory) as expected:
        memory(x, reset=torch.arange(9)[None] == 2)
    for name, array in recording[0].to_numpy().items():
        torch.testing.assert_close(array, expected[0].to_numpy()[name], equal_nan=True)


def test_a_trace_knows_packed_documents():
    memory, x = build("places"), make_tokens(1, 9, DIM)
    trace = memory.trace(x, reads=[5], cu_seqlens=cuts([3, 6]))  # type: ignore[operator]
    assert not trace.share[:, :, :3].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "rows", "error", "message"),
    [
        ([0, 9], 1, TypeError, r"a tensor of int32 or int64, got list; pass the cumulative"),
        (torch.tensor([0.0, 9.0]), 1, TypeError, r"a tensor of int32 or int64, got torch.float32"),
        (torch.tensor([0, 9]), 2, ValueError, r"documents packed into one row, got 2 rows; pack"),
        (torch.tensor(9), 1, ValueError, r"shape \(documents \+ 1,\), got \(\); pass"),
        (torch.tensor([0]), 1, ValueError, r"shape \(documents \+ 1,\), got \(1,\); pass"),
        (torch.tensor([0, 8]), 1, ValueError, r"rising numbers from 0 to N = 9, got \[0, 8\]; pa"),
        (torch.tensor([1, 9]), 1, ValueError, r"rising numbers from 0 to N = 9, got \[1, 9\]; pa"),
        (torch.tensor([0, 5, 3, 9]), 1, ValueError, r"rising numbers from 0 to N = 9, got"),
        (torch.tensor([0, -3, 9]), 1, ValueError, r"rising numbers from 0 to N = 9, got"),
        (torch.tensor([0, 9], device="meta"), 1, ValueError, r"device cpu like x, got meta; move"),
    ],
)
def test_wrong_cuts_are_refused(kind, given, rows, error, message):
    with pytest.raises(error, match=f"^cu_seqlens: expected {message}"):
        build(kind)(make_tokens(rows, 9, DIM), cu_seqlens=given)
