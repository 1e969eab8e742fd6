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
    fits_fused,
    floats,
    near_the_start,
    run,
)

from tensor_memory import memory_scan
from tensor_memory.ops.scan import torch as torch_scan
from tensor_memory.ops.scan.inputs import ScanInputs
from tensor_memory.ops.scan.torch import axis_filter
from tolerances import assert_same_rms

CASES = awkward_cases()
FUSED_CASES = [  # interpreted on a CPU, so every program counts
    *(
        replace(case, B=min(case.B, 2), S=min(case.S, most), M=min(case.M, most))
        for case in CASES
        if fits_fused(case)
        for most in [3 if len(case.grid) == 1 else 2]
    ),
    Case(B=3, S=4, Q=1, M=1, C=16, grid=(3, 2)),
    Case(B=3, S=4, Q=1, M=1, C=16, grid=(3, 2), writes=False),
    Case(B=1, S=2, Q=1, M=1, C=64, grid=(2, 3, 2), writes=False),  # neighbours in one sum
]
WIDENED = Case(B=1, S=2, Q=1, M=1, C=3, grid=(2, 3))  # to 16 channels


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that what nobody has written shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torch_agrees_with_the_reference(case, dtype):
    request = case.make(dtype)
    assert_agree(run(request, "torch"), run(as_double(request), "reference"), dtype)


@pytest.mark.parametrize("case", CASES[::5], ids=str)
@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_checkpointing_changes_nothing(case, every):
    request = case.make()
    assert_agree(run(request, "torch", every), run(request, "reference"), torch.float64)


@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_of_rows_change_nothing(rows, monkeypatch):
    case = Case(B=5)
    monkeypatch.setattr(torch_scan, "BLOCK_VALUES", rows * case.C * 24)
    request = case.make()
    assert_agree(run(request, "torch"), run(request, "reference"), torch.float64)


@pytest.mark.parametrize("states", [0, 3])  # of 7 steps; one takes more room than there is, or not
def test_pieces_of_what_is_kept_change_nothing(states, monkeypatch):
    case = Case()
    state_bytes = 2 * case.C * 24 * case.B * 8
    monkeypatch.setattr(torch_scan, "PIECE_BYTES", max(1, states * state_bytes))
    request = case.make()
    *_, kept = torch_scan.forward(request, keep=True, products=torch.float64)
    assert [len(piece) for piece in kept] == ([3, 3, 1] if states else [1] * 7)
    assert_agree(run(request, "torch"), run(request, "reference"), torch.float64)


@pytest.mark.parametrize("case", [Case(), Case(B=2, S=3, grid=(2, 3, 2, 2))], ids=str)
def test_filters_that_are_matrices_change_nothing(case, monkeypatch):
    monkeypatch.setattr(axis_filter, "LONG_RUN", 1)  # else a matter of large grids alone
    request = case.make()
    assert_agree(run(request, "torch"), run(request, "reference"), torch.float64)


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropping_the_tails_of_narrow_writes_changes_nothing(spread, dtype):
    request = Case(grid=(4, 5, 3)).make(dtype)
    request = request._replace(spread=torch.full_like(request.spread, spread))
    assert_agree(run(request, "torch"), run(as_double(request), "reference"), dtype)


def test_what_fades_ends_at_zero_before_it_becomes_denormal():
    S = 200
    case = Case(B=1, S=S, Q=1, M=1, C=4, grid=(6, 6), writes=False, resets=False)
    request = near_the_start(case)._replace(bias=torch.zeros(16, device=HERE))
    request = request._replace(content=request.content * (torch.arange(S) < 1)[:, None, None])
    _, hidden, cell, kept = torch_scan.forward(request, keep=True, products=torch.float32)
    assert hidden.count_nonzero() == cell.count_nonzero() == 0
    (states,) = kept  # (S, 2C, *grid, B), the cell behind the hidden state
    cells = states[:, 4:].abs()
    assert cells[0].count_nonzero() > 0
    assert 1e-12 < cells[cells > 0].min() < 1e-10
    late = torch.ones(1, S, 1, 4) * (torch.arange(S) == S - 1)[:, None, None]
    grads = torch_scan.backward(late, hidden, cell, request, kept, products=torch.float32)
    assert grads[7].count_nonzero() == grads[8].count_nonzero() == 0
    to_content = grads[3].abs()
    assert to_content[to_content > 0].min() < 1e-22  # not much before, either
    reference = run(as_double(request), "reference")
    assert 0 < reference["cell"].abs().max() < 1e-12


def test_the_fused_cases_mark_rows_inside_the_scan():
    marked = [case.make() for case in FUSED_CASES if case.resets]
    assert any(request.resets[:, 1:].any() and request.writes is None for request in marked)
    assert any(request.resets[:, 1:].any() and request.writes is not None for request in marked)


@pytest.mark.parametrize("backend", [FUSED])
@pytest.mark.parametrize("case", [*FUSED_CASES, WIDENED], ids=str)
def test_the_fused_scan_agrees_with_the_reference(backend, case):
    request = case.make(torch.float32)
    assert_agree(run(request, backend), run(as_double(request), "reference"), torch.float32)


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("case", FUSED_CASES[::4], ids=str)
def test_in_bfloat16_a_scan_stays_close_to_the_reference(backend, case):
    request = near_the_start(case)
    request = request._replace(content=request.content.bfloat16())
    with torch.autocast(HERE.type, torch.bfloat16):
        got = run(request, backend)
    assert got["hidden"].dtype == got["cell"].dtype == torch.float32
    assert_agree(got, run(as_double(request), "reference"), torch.bfloat16)


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


WHOLE = [Case(B=2, S=3, Q=1, M=1, C=16, grid=(2,)), FUSED_CASES[-1]]
TILED = [  # 18 voxels are two tiles; of the first, one row does not begin with a write
    Case(B=2, S=3, Q=1, M=1, C=16, grid=(18,)),
    Case(B=1, S=2, Q=1, M=1, C=16, grid=(3, 3, 2), writes=False, resets=False),
]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("backend", [FUSED])
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("case", [*WHOLE, *TILED], ids=str)
def test_gates_are_recomputed_in_the_backward_scan_or_before_it(
    backend, products, inside, case, monkeypatch
):
    from tensor_memory.ops.scan.triton import plan

    for table in ("INSIDE", "INSIDE_FLOAT"):
        monkeypatch.setattr(plan, table, dict.fromkeys((16, 64), inside))
    low = products == torch.bfloat16
    request = near_the_start(case) if low else case.make(torch.float32)
    shape = plan.Shape.of(request, products)
    rows = plan.layout(shape, plan.BACKWARD_SHARE)
    assert rows.constants["TILES"] == (2 if case in TILED else 1)
    with torch.autocast(HERE.type, torch.bfloat16, enabled=low):
        got = run(request, backend)
    assert_agree(got, run(as_double(request), "reference"), products)


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("nearest", [False, True])
def test_places_on_the_border_and_halfway_between_voxels_agree(backend, nearest):
    request = Case(B=2, S=2, C=16, grid=(2, 3), nearest=nearest).make(torch.float32)
    request = request._replace(read_at=request.read_at.round(), write_at=request.write_at.round())
    for at in (request.read_at, request.write_at):
        assert set(at.flatten().tolist()) == {-1.0, 0.0, 1.0}
    assert_agree(run(request, backend), run(as_double(request), "reference"), torch.float32)


@pytest.mark.parametrize("backend", ["reference", "torch", FUSED])
def test_a_row_that_never_writes_keeps_every_bit_until_it_is_emptied(backend):
    request = Case(B=3, S=2, Q=1, M=1, C=16, grid=(3, 2)).make(torch.float32)
    writes = torch.tensor([[True, True], [False, False], [False, False]], device=HERE)
    resets = torch.tensor([[False, False], [False, False], [False, True]], device=HERE)
    with torch.autocast(HERE.type, torch.bfloat16):
        _, hidden, cell = memory_scan(
            *floats(request), writes=writes, resets=resets, backend=backend
        )
    assert torch.equal(hidden[1], request.hidden[1])
    assert torch.equal(cell[1], request.cell[1])
    assert hidden[2].eq(0).all()
    assert cell[2].eq(0).all()


@pytest.mark.parametrize("backend", [FUSED])
@torch.no_grad()
def test_segments_of_a_fused_scan_that_keeps_nothing_change_nothing(backend, monkeypatch):
    from tensor_memory.ops.scan import triton as triton_scan

    monkeypatch.setattr(triton_scan, "SEGMENT", 2)
    request = Case(B=2, S=5, Q=1, M=1, C=16, grid=(2,)).make(torch.float32)
    masks = {"writes": request.writes, "resets": request.resets}
    expected = memory_scan(*floats(as_double(request)), **masks, backend="reference")
    got = memory_scan(*floats(request), **masks, backend=backend)
    for name, mine, theirs in zip(("reads", "hidden", "cell"), got, expected, strict=True):
        assert_same_rms(name, mine, theirs, torch.float32)


@pytest.mark.parametrize("backend", ["torch", FUSED])
@torch.no_grad()
def test_tensors_need_not_be_contiguous(backend):
    request = Case(B=2, S=2, Q=1, M=1, C=16, grid=(2, 2)).make(torch.float32)
    scattered = ScanInputs._make(torch.stack([t, torch.ones_like(t)], -1)[..., 0] for t in request)
    assert not any(t.is_contiguous() for t in scattered)
    expected, got = (
        memory_scan(*floats(r), writes=r.writes, resets=r.resets, backend=backend)
        for r in (request, scattered)
    )
    for mine, right in zip(got, expected, strict=True):
        assert torch.equal(mine, right)


RESETS = pytest.mark.parametrize(("rows", "at"), [([1], 0), ([1], 2)])


def emptied(rows: list[int], at: int) -> ScanInputs:
    """A scan in which these rows alone are emptied, at this step alone."""
    request = Case(B=2, S=3, Q=1, M=1, C=16, grid=(2,)).make(torch.float32)
    request.resets.zero_()
    request.resets[rows, at] = True
    return request


@pytest.mark.parametrize("backend", ["reference", "torch", FUSED])
@RESETS
def test_a_reset_empties_a_row_that_is_no_longer_finite(backend, rows, at):
    request = emptied(rows, at)
    spoiled = request._replace(hidden=request.hidden.clone(), cell=request.cell.clone())
    spoiled.hidden[1], spoiled.cell[1] = torch.nan, torch.inf
    expected, got = run(request, backend), run(spoiled, backend)
    assert torch.equal(got["hidden"], expected["hidden"])
    assert torch.equal(got["cell"], expected["cell"])
    assert torch.equal(got["reads"][:, at:], expected["reads"][:, at:])


@pytest.mark.parametrize("backend", ["reference", "torch", FUSED])
@RESETS
def test_nothing_gets_back_past_a_reset(backend, rows, at):
    request = emptied(rows, at)
    spoiled = request._replace(content=request.content.clone())
    spoiled.content[1, at] = torch.nan
    expected, got = run(request, backend), run(spoiled, backend)
    for name in ("hidden", "cell"):
        assert torch.equal(got[f"gradient of {name}"], expected[f"gradient of {name}"])
    name = "gradient of content"
    assert torch.equal(got[name][:, :at], expected[name][:, :at])


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("every", [None, 2])
def test_an_empty_batch_teaches_nothing(backend, every):
    request = Case(B=0, C=16, grid=(3, 2)).make(torch.float32)
    got = run(request, backend, every)
    assert_agree(got, run(as_double(request), "reference"), torch.float32)
    assert got["gradient of mix"].eq(0).all()


@pytest.mark.parametrize("every", [None, 2])
def test_autocast_does_not_reach_inside_the_torch_scan(every):
    request = Case().make(torch.float32)
    expected = run(request, "torch", every)
    with torch.autocast(HERE.type, torch.bfloat16):
        got = run(request, "torch", every)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("backend", [FUSED])
@pytest.mark.parametrize("every", [2, 3])
def test_checkpointing_the_fused_scan_changes_nothing(backend, every):
    request = Case(B=2, S=4, Q=1, M=1, C=16, grid=(2,)).make(torch.float32)
    expected = run(as_double(request), "reference")
    assert_agree(run(request, backend, every), expected, torch.float32)


def test_what_is_kept_is_all_written():
    request = Case().make()
    request.writes[:, 2] = False  # no row writes at this step
    options = {"keep": True, "products": torch.float64}
    *_, kept = torch_scan.forward(request, **options)
    assert all(tensor.isfinite().all() for tensor in kept)


GRADIENTS = ("read_at", "write_at", "spread", "content", "taps", "mix", "bias", "hidden", "cell")


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_planted_wrong_gradient_is_noticed(name, monkeypatch):
    right = torch_scan.backward

    def wrong(*args, **options):
        grads = list(right(*args, **options))
        place = GRADIENTS.index(name)
        grads[place] = grads[place] * (1 + 1e-4)
        return tuple(grads)

    request = Case().make(torch.float32)
    expected = run(as_double(request), "reference")
    assert_agree(run(request, "torch"), expected, torch.float32)
    monkeypatch.setattr(torch_scan, "backward", wrong)
    with pytest.raises(AssertionError, match=f"gradient of {name}: rms error"):
        assert_agree(run(request, "torch"), expected, torch.float32)
