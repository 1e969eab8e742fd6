"""Large grids with the linear kernel on a CPU: a call is cut where too much has been forgotten."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensor_memory import PlaceConfig, PlaceMemory
from tensor_memory.ops.places.chunked import SparseChunks


def forgetful(rule: str, keep_bias: float) -> PlaceMemory:
    """A memory on a large grid that forgets now more, now less."""
    config = PlaceConfig(grid=(20, 20), kernel="linear", rule=rule, share_places=False)
    memory = PlaceMemory(4, replace(config, keep_bias=keep_bias))
    torch.nn.init.normal_(memory.keep.weight, std=0.5)
    return memory


@pytest.mark.parametrize("rule", ["linear", "delta"])
def test_rows_may_forget_at_different_times(rule):
    torch.manual_seed(0)
    memory = forgetful(rule, -1.0)
    plain = PlaceMemory(4, replace(memory.config, backend="reference"))
    plain.load_state_dict(memory.state_dict())
    x, mask = torch.randn(2, 256, 4), torch.zeros(2, 256, dtype=torch.bool)
    mask[0, :128] = mask[1, 128:] = True
    found = []
    for one in (memory, plain):
        m, state = one(x, mask=mask)
        (m.square().sum() + state.values.square().sum()).backward()
        found.append([m, state.values, *(p.grad for p in one.parameters())])
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-4)


def test_documents_make_no_more_segments_than_there_are_chunks():
    """Every segment copies the whole grid, and keeps it for the backward."""
    x, reset = torch.randn(2, 130, 4), torch.rand(2, 130) < 0.5
    with patch.object(SparseChunks, "apply", wraps=SparseChunks.apply) as segment:
        forgetful("linear", 6.0)(x, reset=reset)
    assert segment.call_count == 3


@given(st.integers(0, 2**16), st.sampled_from(["linear", "delta"]), st.integers(1, 129))
def test_no_output_depends_on_a_later_input_bit_for_bit(seed, rule, now):
    torch.manual_seed(seed)
    memory, x = forgetful(rule, 2.0), torch.randn(2, 130, 4)
    later = (torch.arange(130) >= now).expand(2, -1)
    marks = later & (torch.rand(2, 130) < 0.3)
    with torch.no_grad():
        m, _ = memory(x)
        louder, _ = memory(torch.where(later[..., None], 3 * x, x))
        others = [louder, memory(x, reset=marks)[0], memory(x, mask=~marks)[0]]
    assert all(torch.equal(m[:, :now], other[:, :now]) for other in others)


def test_a_compiled_call_with_resets_gives_the_same():
    """A graph cannot ask for decays, so it makes no segments: each chunk meets the grid."""
    memory, x, reset = forgetful("delta", -1.0), torch.randn(2, 70, 4), torch.rand(2, 70) < 0.1
    compiled = torch.compile(memory, backend="eager", fullgraph=True)
    (m, state), (other, after) = memory(x, reset=reset), compiled(x, reset=reset)
    torch.testing.assert_close(other, m)
    torch.testing.assert_close(after.values, state.values)
