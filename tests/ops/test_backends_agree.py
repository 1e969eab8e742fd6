"""Every fast backend against the float64 reference: outputs, final state, every gradient."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from scans import (
    FUSED,
    HERE,
    Case,
    as_double,
    assert_agree,
    awkward_cases,
    floats,
    near_the_start,
    run,
)

from sampled import exhaustive_but
from tensor_memory import memory_scan
from tensor_memory.ops.scan import torch as torch_backend
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.torch import axis_filter
from tolerances import assert_same_rms

CASES = awkward_cases()
SMALL = Case(B=2, S=3, Q=1, M=1, C=16, grid=(2,))
WIDE = Case(B=1, S=2, Q=1, M=1, C=64, grid=(2, 3, 2), writes=False)  # neighbours in one sum
FUSED_SAMPLE = [  # interpreted on a CPU, so every program counts
    SMALL,
    WIDE,
    Case(B=2, S=2, Q=2, M=1, C=16, grid=(3, 2), writes=False),
    Case(B=1, S=2, Q=1, M=2, C=16, grid=(2, 3, 2), nearest=True, resets=False),
    Case(B=1, S=2, Q=None, M=1, C=16, grid=(5,), pointwise=True, writes=False, resets=False),
    Case(B=1, S=2, Q=1, M=1, C=3, grid=(2, 3)),  # widened to 16 channels
    Case(B=2, S=0, C=16, grid=(2,)),
]
FUSED_CASES = [
    *FUSED_SAMPLE,
    *(
        replace(case, B=min(case.B, 2), S=min(case.S, most), M=min(case.M, most))
        for case in CASES
        if case.C % 16 == 0 and len(case.grid) <= 3
        for most in [3 if len(case.grid) == 1 else 2]
    ),
    Case(B=3, S=4, Q=1, M=1, C=16, grid=(3, 2)),
]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.whole_cross
@pytest.mark.parametrize("case", exhaustive_but(CASES[::2], CASES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_agrees_with_the_reference(case, dtype):
    inputs = case.make(dtype)
    assert_agree(run(inputs, "torch"), run(as_double(inputs), "reference"), dtype)


@pytest.mark.parametrize("backend", [FUSED])
@pytest.mark.parametrize("case", exhaustive_but(FUSED_SAMPLE, FUSED_CASES))
def test_the_fused_scan_agrees_with_the_reference(backend, case):
    inputs = case.make(torch.float32)
    assert_agree(run(inputs, backend), run(as_double(inputs), "reference"), torch.float32)


def test_the_fused_cases_mark_rows_inside_the_scan():
    marked = [case.make() for case in FUSED_SAMPLE if case.resets]
    assert any(inputs.resets[:, 1:].any() and inputs.writes is None for inputs in marked)
    assert any(inputs.resets[:, 1:].any() and inputs.writes is not None for inputs in marked)


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("case", exhaustive_but([SMALL], [WIDE, *FUSED_CASES[::4]]))
def test_in_bfloat16_a_scan_stays_close_to_the_reference(backend, case):
    inputs = near_the_start(replace(case, B=case.B + 3))  # of two numbers one may cancel out
    inputs = inputs._replace(content=inputs.content.bfloat16())
    with torch.autocast(HERE.type, torch.bfloat16):
        got = run(inputs, backend)
    assert got["hidden"].dtype == got["cell"].dtype == torch.float32
    assert_agree(got, run(as_double(inputs), "reference"), torch.bfloat16)


@pytest.fixture
def small_tiles(monkeypatch) -> Iterator[None]:
    """Plans made anew, with tiles of 16 voxels in the scans; thrown away afterwards."""
    from tensor_memory.ops.scan.triton import backward_scan, forward_scan, plan, weight_gradients

    caches = (
        plan.plan_of,
        forward_scan._write_launch,
        forward_scan._scan_launch,
        backward_scan._scan_launch,
        weight_gradients.mix_launch,
    )
    monkeypatch.setattr(plan, "SCAN_TILE", dict.fromkeys((16, 32, 64, 128), 16))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


TILED = [  # 18 voxels are two tiles; of the first, one row does not begin with a write
    Case(B=2, S=3, Q=1, M=1, C=16, grid=(18,)),
    Case(B=1, S=2, Q=1, M=1, C=16, grid=(3, 3, 2), writes=False, resets=False),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", [FUSED])
@pytest.mark.parametrize(
    "recomputed", exhaustive_but(["inside it"], ["in float32", "before the scan", "inside it"])
)
@pytest.mark.parametrize("case", exhaustive_but([TILED[0]], [*TILED, SMALL, WIDE]))
def test_gates_are_recomputed_in_the_backward_scan_or_before_it(
    backend, recomputed, case, monkeypatch
):
    from tensor_memory.ops.scan.triton import plan

    low = recomputed != "in float32"
    monkeypatch.setattr(plan, "INSIDE", dict.fromkeys((16, 64), recomputed == "inside it"))
    inputs = near_the_start(case) if low else case.make(torch.float32)
    products = torch.bfloat16 if low else torch.float32
    rows = plan.layout(plan.Shape.of(inputs, products), plan.BACKWARD_SHARE)
    assert rows.constants["TILES"] == (2 if case in TILED else 1)
    with torch.autocast(HERE.type, torch.bfloat16, enabled=low):
        got = run(inputs, backend)
    assert_agree(got, run(as_double(inputs), "reference"), products)


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("nearest", [False, True])
def test_places_on_the_border_and_halfway_between_voxels_agree(backend, nearest):
    inputs = Case(B=2, S=2, C=16, grid=(2, 3), nearest=nearest).make(torch.float32)
    inputs = inputs._replace(read_at=inputs.read_at.round(), write_at=inputs.write_at.round())
    for at in (inputs.read_at, inputs.write_at):
        assert set(at.flatten().tolist()) == {-1.0, 0.0, 1.0}
    assert_agree(run(inputs, backend), run(as_double(inputs), "reference"), torch.float32)


@pytest.mark.parametrize("backend", ["reference", "torch", FUSED])
def test_a_row_that_never_writes_keeps_every_bit_until_it_is_emptied(backend):
    inputs = Case(B=3, S=2, Q=1, M=1, C=16, grid=(3, 2)).make(torch.float32)
    writes = torch.tensor([[True, True], [False, False], [False, False]], device=HERE)
    resets = torch.tensor([[False, False], [False, False], [False, True]], device=HERE)
    with torch.autocast(HERE.type, torch.bfloat16):
        _, hidden, cell = memory_scan(
            *floats(inputs), writes=writes, resets=resets, backend=backend
        )
    assert torch.equal(hidden[1], inputs.hidden[1])
    assert torch.equal(cell[1], inputs.cell[1])
    assert hidden[2].eq(0).all()
    assert cell[2].eq(0).all()


@pytest.mark.parametrize("backend", ["reference", "torch", FUSED])
def test_nothing_passes_a_reset_forwards_or_backwards(backend):
    """Row 1 is emptied at the first step, row 2 at the last, row 0 never."""
    inputs = replace(SMALL, B=3).make(torch.float32)
    inputs.resets.zero_()
    inputs.resets[1, 0] = inputs.resets[2, 2] = True
    expected = run(inputs, backend)

    late = inputs._replace(content=inputs.content.clone())
    late.content[1, 0] = late.content[2, 2] = torch.nan  # written after the row was emptied
    got = run(late, backend)
    for name in ("hidden", "cell"):
        assert torch.equal(got[f"gradient of {name}"], expected[f"gradient of {name}"])
    name = "gradient of content"
    assert torch.equal(got[name][2, :2], expected[name][2, :2])

    early = inputs._replace(hidden=inputs.hidden.clone(), cell=inputs.cell.clone())
    early.hidden[1:], early.cell[1:] = torch.nan, torch.inf
    got = run(early, backend)
    for name in ("hidden", "cell"):
        assert torch.equal(got[name], expected[name])
    for row, at in ((0, 0), (1, 0), (2, 2)):
        assert torch.equal(got["reads"][row, at:], expected["reads"][row, at:])


@pytest.mark.parametrize("backend", ["torch", FUSED])
@torch.no_grad()
def test_tensors_need_not_be_contiguous(backend):
    inputs = SMALL.make(torch.float32)
    scattered = ScanInputs._make(torch.stack([t, torch.ones_like(t)], -1)[..., 0] for t in inputs)
    assert not any(t.is_contiguous() for t in scattered)
    expected, got = (
        memory_scan(*floats(i), writes=i.writes, resets=i.resets, backend=backend)
        for i in (inputs, scattered)
    )
    for mine, right in zip(got, expected, strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("every", [None, 2])
def test_an_empty_batch_teaches_nothing(backend, every):
    inputs = Case(B=0, C=16, grid=(3, 2)).make(torch.float32)
    got = run(inputs, backend, every)
    assert_agree(got, run(as_double(inputs), "reference"), torch.float32)
    assert got["gradient of mix"].eq(0).all()


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_checkpointing_changes_nothing(case, every):
    inputs = case.make()
    assert_agree(run(inputs, "torch", every), run(inputs, "reference"), torch.float64)


@pytest.mark.parametrize("backend", [FUSED])
def test_checkpointing_the_fused_scan_changes_nothing(backend):
    inputs = SMALL.make(torch.float32)
    assert_agree(run(inputs, backend, 2), run(as_double(inputs), "reference"), torch.float32)


@pytest.mark.parametrize("backend", [FUSED])
@torch.no_grad()
def test_segments_of_a_fused_scan_that_keeps_nothing_change_nothing(backend, monkeypatch):
    from tensor_memory.ops.scan import triton as triton_backend

    monkeypatch.setattr(triton_backend, "SEGMENT", 2)
    inputs = replace(SMALL, S=5).make(torch.float32)
    masks = {"writes": inputs.writes, "resets": inputs.resets}
    expected = memory_scan(*floats(as_double(inputs)), **masks, backend="reference")
    got = memory_scan(*floats(inputs), **masks, backend=backend)
    for name, mine, theirs in zip(("reads", "hidden", "cell"), got, expected, strict=True):
        assert_same_rms(name, mine, theirs, torch.float32)


# The torch backend's own ways: blocks, pieces, matrices, tails.


@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_rows_change_nothing(rows, monkeypatch):
    case = Case(B=5)
    monkeypatch.setattr(torch_backend, "BLOCK_VALUES", rows * case.C * 24)
    inputs = case.make()
    assert_agree(run(inputs, "torch"), run(inputs, "reference"), torch.float64)


@pytest.mark.parametrize("states", [0, 3])  # of 7 steps; one takes more room than there is, or not
def test_pieces_of_what_is_kept_change_nothing_and_are_all_written(states, monkeypatch):
    case = Case()
    state_bytes = 2 * case.C * 24 * case.B * 8
    monkeypatch.setattr(torch_backend, "PIECE_BYTES", max(1, states * state_bytes))
    inputs = case.make()
    inputs.writes[:, 2] = False  # no row writes at this step
    *_, kept = torch_backend.forward(inputs, keep=True, products=torch.float64)
    assert [len(piece) for piece in kept] == ([3, 3, 1] if states else [1] * 7)
    assert all(tensor.isfinite().all() for tensor in kept)
    assert_agree(run(inputs, "torch"), run(inputs, "reference"), torch.float64)


@pytest.mark.parametrize("case", [Case(), Case(B=2, S=3, grid=(2, 3, 2, 2))], ids=str)
def test_filters_that_are_matrices_change_nothing(case, monkeypatch):
    monkeypatch.setattr(axis_filter, "LONG_RUN", 1)  # else a matter of large grids alone
    inputs = case.make()
    assert_agree(run(inputs, "torch"), run(inputs, "reference"), torch.float64)


@pytest.mark.parametrize("spread", [0.05, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropping_the_tails_of_narrow_writes_changes_nothing(spread, dtype):
    inputs = Case(grid=(4, 5, 3)).make(dtype)
    inputs = inputs._replace(spread=torch.full_like(inputs.spread, spread))
    assert_agree(run(inputs, "torch"), run(as_double(inputs), "reference"), dtype)


def test_what_fades_ends_at_zero_before_it_becomes_denormal():
    S = 200
    case = Case(B=1, S=S, Q=1, M=1, C=4, grid=(6, 6), writes=False, resets=False)
    inputs = near_the_start(case)._replace(bias=torch.zeros(16, device=HERE))
    inputs = inputs._replace(content=inputs.content * (torch.arange(S) < 1)[:, None, None])
    _, hidden, cell, kept = torch_backend.forward(inputs, keep=True, products=torch.float32)
    assert hidden.count_nonzero() == cell.count_nonzero() == 0
    (states,) = kept  # (S, 2C, *grid, B), the cell behind the hidden state
    cells = states[:, 4:].abs()
    assert cells[0].count_nonzero() > 0
    assert 1e-12 < cells[cells > 0].min() < 1e-10
    late = torch.ones(1, S, 1, 4) * (torch.arange(S) == S - 1)[:, None, None]
    grads = torch_backend.backward(late, hidden, cell, inputs, kept, products=torch.float32)
    assert grads.hidden.count_nonzero() == grads.cell.count_nonzero() == 0
    to_content = grads.content.abs()
    assert to_content[to_content > 0].min() < 1e-22  # not much before, either
    reference = run(as_double(inputs), "reference")
    assert 0 < reference["cell"].abs().max() < 1e-12


@pytest.mark.parametrize("every", [None, 2])
def test_autocast_does_not_reach_inside_the_torch_scan(every):
    inputs = Case().make(torch.float32)
    expected = run(inputs, "torch", every)
    with torch.autocast(HERE.type, torch.bfloat16):
        got = run(inputs, "torch", every)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("name", ScanInputs._fields[:9])
def test_a_planted_wrong_gradient_is_noticed(name, monkeypatch):
    right = torch_backend.backward

    def wrong(*args, **options):
        grads = right(*args, **options)
        return grads._replace(**{name: getattr(grads, name) * (1 + 1e-4)})

    inputs = Case().make(torch.float32)
    expected = run(as_double(inputs), "reference")
    assert_agree(run(inputs, "torch"), expected, torch.float32)
    monkeypatch.setattr(torch_backend, "backward", wrong)
    with pytest.raises(AssertionError, match=f"gradient of {name}: rms error"):
        assert_agree(run(inputs, "torch"), expected, torch.float32)
