"""The fused place memory against the sequential one: reads, state and every gradient."""

import pytest
import torch

from tensor_memory import PlaceConfig, PlaceMemory
from tensor_memory.ops.places import chunked
from tensor_memory.ops.places.place_scan import PLACES, place_inputs, run_places
from tolerances import RMS_RATIO, assert_same, assert_same_rms

fused = pytest.importorskip(
    "tensor_memory.ops.places.triton", reason="the fused backend needs triton"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


pytestmark = pytest.mark.usefixtures("poisoned_memory")


CASES = {  # grid, channels, tokens, rule, Gaussian, resets, wrap, one place for both
    "two axes": ((3, 5), 4, 70, "linear", True, True, False, False),
    "delta, a circle": ((3, 5), 4, 40, "delta", True, True, True, False),
    "one axis, interpolated": ((6,), 2, 33, "delta", False, False, False, True),
    "three axes, interpolated": ((2, 3, 4), 2, 33, "linear", False, True, True, False),
    "four axes": ((2, 3, 2, 3), 2, 9, "delta", True, True, False, False),
    "a single token": ((4, 4), 3, 1, "linear", True, False, False, True),
    "sparse": ((4, 5), 3, 70, "linear", False, True, False, False),
    "sparse, delta, a torus": ((2, 3, 4), 2, 40, "delta", False, True, True, False),
    "sparse, one place": ((4, 4), 2, 35, "delta", False, False, True, True),
    "sparse, voxels never met": ((9, 11), 2, 35, "linear", False, True, False, False),
    "sparse, hardly moving": ((4, 5), 3, 100, "linear", False, True, False, True),
    "sparse, forgetting": ((4, 5), 3, 40, "linear", False, False, False, False),
    "sparse, delta, forgetting": ((4, 5), 3, 130, "delta", False, False, False, False),
    "sparse, fading": ((33,), 2, 100, "linear", False, False, False, True),
    "sparse, a torus": ((2, 3, 4), 2, 40, "linear", False, True, True, False),
    "many tokens": ((2, 3, 2, 3), 2, 170, "linear", True, True, False, True),
    "whole chunks": ((8, 8), 16, 96, "linear", True, True, False, False),
    "delta, hardly moving": ((4, 4), 2, 70, "delta", True, False, False, False),
}


def drawn(name):
    """Tensors of a case, what else it says, and the generator that drew them."""
    grid, C, N, rule, gaussian, resets, wrap, same = CASES[name]
    reach = 0.05 if "hardly moving" in name else 1.2  # some beyond the border
    draw, n, B, H = torch.Generator().manual_seed(0), len(grid), 2, 2

    def rand(*shape):
        return torch.rand(*shape, generator=draw)

    def places():
        return (rand(B, N, H, n) * 2 - 1) * reach

    leaves = {
        "write_at": places(),
        "read_at": None if same else places(),
        "content": torch.randn(B, N, H, C, generator=draw),
        "rate": rand(B, N, H),
        "log_keep": -rand(B, N, H) / 8,
        "width": rand(H) + 0.4 if gaussian else None,
        "state": torch.randn(B, H, *grid, C, generator=draw),
    }
    if "forgetting" in name:  # all of it, at times
        at_times = rand(B, N, H) < 0.2
        if rule == "delta":  # in whole chunks: within one no digits are left for its other tokens
            at_times = (torch.arange(N) < 64)[None, :, None]
        leaves["log_keep"] = torch.where(at_times, -1e3, leaves["log_keep"])
    if "fading" in name:  # soon: what log α receives is small beside what it is the difference of
        leaves["log_keep"] -= 1
    marks = None
    if resets:  # in one row
        marks = ((rand(B, N) < 0.1) & (torch.arange(B) == 0)[:, None]).to(DEVICE)
    return leaves, {"rule": rule, "wrap": (wrap,) * n, "resets": marks}, draw


def results(name, products, dtype, backend, by_state=True):
    leaves, others, draw = drawn(name)
    given = {
        name: None if leaf is None else leaf.to(DEVICE, dtype).requires_grad_()
        for name, leaf in leaves.items()
    }
    reads, after = run_places(place_inputs(**given, **others), backend, products)
    loss = (reads * torch.randn(reads.shape, generator=draw).to(reads)).sum()
    if by_state:
        loss = loss + (after * torch.randn(after.shape, generator=draw).to(after)).sum()
    names = [name for name, leaf in given.items() if leaf is not None]
    gradients = torch.autograd.grad(loss, [given[name] for name in names])
    return dict(zip(["reads", "state after", *names], [reads, after, *gradients], strict=True))


def make_sparse(monkeypatch):
    """Corner by corner on small grids too, the list of visits in many pieces."""
    monkeypatch.setattr(fused, "SPARSE_FROM", {"linear": 1, "delta": 1})
    monkeypatch.setattr(fused.visits, "PIECE", 32)


def check(name, products, monkeypatch, by_state=True):
    if name.startswith("sparse"):
        make_sparse(monkeypatch)
    got = results(name, products, torch.float32, "triton", by_state)
    expected = results(name, torch.float64, torch.float64, "torch", by_state)
    for part in expected:
        assert_same_rms(part, got[part], expected[part], products)


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("two axes", torch.float32),
        ("delta, a circle", torch.float32),
        ("a single token", torch.bfloat16),
        ("sparse, hardly moving", torch.float32),
        ("sparse, delta, forgetting", torch.float32),
        ("sparse, fading", torch.bfloat16),
    ],
)
def test_the_fused_places_agree_with_the_chunked_ones(name, products, monkeypatch):
    check(name, products, monkeypatch)


@pytest.mark.parametrize(
    "name",
    ["sparse, voxels never met", pytest.param("sparse, one place", marks=pytest.mark.exhaustive)],
)
def test_no_gradient_of_the_state_after_is_a_gradient_of_zero(name, monkeypatch):
    check(name, torch.float32, monkeypatch, by_state=False)


@pytest.mark.parametrize(
    "name",
    [
        "two axes",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                "whole chunks",
                "three axes, interpolated",
                "a single token",
                "many tokens",
            )
        ),
    ],
)
def test_reading_by_segments_agrees_as_exactly_in_float32(name, monkeypatch):
    # It serves bfloat16 alone, where small mistakes hide.
    monkeypatch.setattr(fused.segments, "TYPES", (torch.float32,))
    monkeypatch.setattr(fused.dense, "forward", None)
    check(name, torch.float32, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_the_fused_places_agree_in_every_case(name, products, monkeypatch):
    check(name, products, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_the_fused_places_agree_on_a_gpu(name, products, monkeypatch):
    check(name, products, monkeypatch)


# A case of every way to launch.
WAYS = [
    "two axes",
    "whole chunks",
    "delta, a circle",
    "sparse, delta, a torus",
    "sparse, hardly moving",
]


def check_causal(name, products, monkeypatch):
    if name.startswith("sparse"):
        make_sparse(monkeypatch)
    leaves, others, _ = drawn(name)
    given = {part: leaf if leaf is None else leaf.to(DEVICE) for part, leaf in leaves.items()}
    reads, _ = run_places(place_inputs(**given, **others), "triton", products)
    now = reads.shape[1] - 12  # within a chunk
    told = [part for part in given.keys() - {"width", "state"} if given[part] is not None]
    later = {part: given[part][:, now:].flip(1) for part in told}
    later |= {part: 0.5 * later[part] for part in told if part.endswith("_at")}  # in other voxels
    changed = given | {part: torch.cat([given[part][:, :now], x], 1) for part, x in later.items()}
    marks = others["resets"].clone()
    marks[:, now:].logical_not_()
    inputs = place_inputs(**changed, **others | {"resets": marks})
    again, _ = run_places(inputs, "triton", products)
    assert torch.equal(again[:, :now], reads[:, :now])
    assert not torch.equal(again[:, now:], reads[:, now:])


@pytest.mark.parametrize("name", WAYS)
def test_no_fused_read_depends_on_a_later_token(name, monkeypatch):
    check_causal(name, torch.bfloat16 if name == "whole chunks" else torch.float32, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_no_fused_read_depends_on_a_later_token_on_a_gpu(name, products, monkeypatch):
    check_causal(name, products, monkeypatch)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_a_place_on_a_voxel_has_the_slope_of_what_follows(backend, sparse, monkeypatch):
    bound = 0 if sparse else 10**9
    monkeypatch.setattr(chunked, "SPARSE_FROM", bound)
    monkeypatch.setattr(fused, "SPARSE_FROM", {"linear": bound})

    def value(at, backend):
        one = torch.ones(1, 4, 1).to(at)
        state = torch.linspace(-1, 2, 5).square().view(1, 1, 5, 1).to(at)
        inputs = place_inputs(
            write_at=at.view(1, 4, 1, 1), read_at=None, content=one[..., None], rate=one,
            log_keep=-one, width=None, state=state, rule="linear", wrap=(False,), resets=None,
        )  # fmt: skip
        return run_places(inputs, backend, at.dtype)[0].sum()

    at = torch.linspace(-1, 1, 5, dtype=torch.float64)[:4]
    slopes = [
        (value(at + step, "reference") - value(at, "reference")) / 1e-7
        for step in torch.eye(4).double() * 1e-7
    ]
    here = at.to(DEVICE, torch.float32).requires_grad_()
    (got,) = torch.autograd.grad(value(here, backend), here)
    torch.testing.assert_close(got.cpu().double(), torch.stack(slopes), rtol=1e-5, atol=1e-5)


def placed(backend, where, grid, wrap, kernel, rule):
    """Reads (B, N, C) and the state after, of tokens at places (B, N) on a diagonal."""
    (B, N), n = where.shape, len(grid)
    one = torch.ones(B, N, 1, device=DEVICE)
    inputs = place_inputs(
        write_at=where[..., None, None].expand(-1, -1, 1, n).to(DEVICE), read_at=None,
        content=one[..., None], rate=one, log_keep=-one,
        width=one[0, 0] if kernel == "gaussian" else None,
        state=torch.zeros(B, 1, *grid, 1, device=DEVICE),
        rule=rule, wrap=(wrap,) * n, resets=None,
    )  # fmt: skip
    reads, after = run_places(inputs, backend, torch.float32)
    return reads[:, :, 0], after


@pytest.mark.whole_cross
@pytest.mark.parametrize("rule", ["linear", "delta"])
@pytest.mark.parametrize("kernel", ["linear", "gaussian"])
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_a_place_that_is_not_a_number_spoils_its_row_alone(
    backend, wrap, kernel, rule, monkeypatch
):
    monkeypatch.setattr(chunked, "SPARSE_FROM", 0)
    monkeypatch.setattr(fused, "SPARSE_FROM", {"linear": 1, "delta": 1})
    where = torch.tensor([[0.1, torch.nan, 0.1], [0.1, 0.4, 0.1]])
    reads, after = placed(backend, where, (5, 4), wrap, kernel, rule)
    assert reads[0, 1].isnan().all()
    assert after[0].isnan().any()
    assert reads[1].isfinite().all()
    assert after[1].isfinite().all()


def test_a_place_many_turns_away_is_a_place_of_the_grid(monkeypatch):
    monkeypatch.setattr(fused, "SPARSE_FROM", {"linear": 1})
    found, run = [], fused.visits.forward
    keeping = lambda *a, **k: (found.append(run(*a, **k | {"keep": True})), found[-1])[1]  # noqa: E731
    monkeypatch.setattr(fused.visits, "forward", keeping)
    where = torch.logspace(7, 12, 200).view(2, 100) * torch.tensor([[1.0], [-1.0]])
    placed("triton", where, (17,), True, "linear", "linear")
    voxels = fused.visits.Kept(*found[0][2]).voxels
    assert (voxels.min().item(), voxels.max().item()) == (0, 16)


@pytest.mark.parametrize(
    "name", ["two axes", "delta, a circle", "sparse, a torus", "sparse, delta, a torus"]
)
def test_a_reset_at_the_first_token_frees_a_row_of_what_is_not_a_number(name, monkeypatch):
    if name.startswith("sparse"):
        make_sparse(monkeypatch)
    grid, C, _, rule, gaussian, _, wrap, _ = CASES[name]
    n, ones = len(grid), torch.ones(2, 3, 1, device=DEVICE)
    state = torch.zeros(2, 1, *grid, C, device=DEVICE)
    state[0] = torch.nan
    leaves = {
        "write_at": ones[..., None].expand(-1, -1, -1, n) * 0.3,
        "read_at": None,
        "content": ones[..., None].expand(-1, -1, -1, C),
        "rate": ones * 0.5,
        "log_keep": -ones,
        "width": ones[0, 0] if gaussian else None,
        "state": state,
    }
    given = {
        name: None if leaf is None else leaf.clone().requires_grad_()
        for name, leaf in leaves.items()
    }
    starts = torch.tensor([[True, False, False]], device=DEVICE).expand(2, -1)
    inputs = place_inputs(**given, rule=rule, wrap=(wrap,) * n, resets=starts)
    reads, after = run_places(inputs, "triton", torch.float32)
    (reads.sum() + after.sum()).backward()
    found = [reads, after, *(leaf.grad for leaf in given.values() if leaf is not None)]
    for values in found:  # both rows had the same tokens
        assert values.isfinite().all()
        if values.ndim > 1:
            assert_same(values[0], values[1])


def test_a_planted_wrong_gradient_is_noticed(monkeypatch):
    run = fused.backward

    def wrong(*arguments, **options):
        found = run(*arguments, **options)
        return found._replace(write_at=found.write_at * (1 + 100 * RMS_RATIO[torch.float32]))

    monkeypatch.setattr(fused, "backward", wrong)
    with pytest.raises(AssertionError, match="write_at"):
        check("a single token", torch.float32, monkeypatch)


@pytest.mark.parametrize(
    ("rule", "sparse"),
    [
        ("linear", False),
        pytest.param("delta", False, marks=pytest.mark.exhaustive),
        pytest.param("linear", True, marks=pytest.mark.exhaustive),
        pytest.param("delta", True, marks=pytest.mark.exhaustive),
    ],
)
def test_the_operator_tells_compilers_the_truth(rule, sparse, monkeypatch):
    monkeypatch.setattr(fused, "SPARSE_FROM", {"linear": 1, "delta": 1})
    draw = torch.Generator().manual_seed(0)
    at = (torch.rand(2, 5, 1, 2, generator=draw, device="cpu") * 2 - 1).to(DEVICE)
    content = torch.randn(2, 5, 1, 3, generator=draw).to(DEVICE)
    rate = torch.rand(2, 5, 1, generator=draw).to(DEVICE)
    width = None if sparse else rate[0, 0]
    tensors = (at, None, content, rate, -rate, width, content.new_zeros(2, 1, 3, 4, 3))
    leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
    options = (True, 0, torch.float32, "triton")
    torch.library.opcheck(PLACES.operator, (*leaves, None, rule, [True, False], *options))


def test_a_compiled_memory_runs_the_fused_places():
    config = PlaceConfig(grid=(3, 4), channels=4, heads=2, backend="triton")
    memory = PlaceMemory(8, config).to(DEVICE)
    x = torch.randn(2, 5, 8, device=DEVICE)
    expected, _ = memory(x)
    expected.square().sum().backward()
    by_hand = memory.content.weight.grad.clone()
    memory.zero_grad()
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    m, _ = compiled(x)
    m.square().sum().backward()
    assert_same(m, expected)
    assert_same(memory.content.weight.grad, by_hand)


def test_what_the_kernels_cannot_hold_is_refused_by_name():
    state = torch.zeros(1, 1, 64, 64, 4)
    at, content, rate = torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1)
    inputs = place_inputs(
        at, None, content, rate, rate, torch.ones(1), state, rule="delta", wrap=None, resets=None
    )
    assert "rule 'delta' it takes up to 256 voxels, got 4096" in (fused.why_not(inputs) or "")
    assert fused.why_not(inputs._replace(width=None)) is None


@pytest.mark.parametrize(
    ("rows", "tokens", "grid"),
    [(32_768, 1, (2, 2)), (1, 65_535 * 256 + 1, (2, 2)), (1, 1, (2048, 2048))],
    ids=["rows", "tokens", "voxels"],
)
def test_more_programs_than_a_gpu_launches_are_refused(rows, tokens, grid):
    def drawn(rows, tokens, grid):
        rate = torch.empty(rows, tokens, 2, device="meta")
        at, content = rate[..., None].expand(-1, -1, -1, 2), rate[..., None]
        state = torch.empty(rows, 2, *grid, 1, device="meta")
        return place_inputs(
            at, None, content, rate, rate, None, state, rule="linear", wrap=None, resets=None
        )

    assert "65,535 rows × heads" in (fused.why_not(drawn(rows, tokens, grid)) or "")
    assert fused.why_not(drawn(min(rows, 32_767), min(tokens, 65_535 * 256), (2, 2))) is None


def test_more_visits_than_a_gpu_launches_are_refused():
    def why_not(tokens, same):
        rate = torch.empty(1, tokens, 1, device="meta")
        at = rate[..., None].expand(-1, -1, -1, 3)
        inputs = place_inputs(
            at, None if same else at, rate[..., None], rate, rate, None,
            torch.empty(1, 1, 16, 16, 16, 1, device="meta"), rule="linear", wrap=None, resets=None,
        )  # fmt: skip
        return fused.why_not(inputs)

    most = 65_535 * 256 // 8  # of 8 corners each
    assert why_not(most, same=True) is None
    assert "2,097,120 tokens" in (why_not(most + 1, same=True) or "")
    assert why_not(most // 2, same=False) is None
    assert "1,048,560 tokens" in (why_not(most // 2 + 1, same=False) or "")


def test_more_values_than_segments_count_in_32_bits_are_left_to_others():
    def serves(heads):
        rate = torch.empty(1, 2**22, heads, device="meta")
        inputs = place_inputs(
            rate[..., None].expand(-1, -1, -1, 4), None, rate[..., None], rate, rate, None,
            torch.empty(1, heads, 2, 2, 2, 2, 1, device="meta"), rule="linear", wrap=None,
            resets=None,
        )  # fmt: skip
        return fused.segments.serves(inputs, fused.make_plan(inputs, torch.bfloat16))

    assert serves(127)
    assert not serves(128)  # 2³¹ coordinates
