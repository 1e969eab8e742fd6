"""The scan's two ways into autograd: operators for compilers, a function for eager code."""

import functools
import shutil
from dataclasses import replace

import pytest
import torch
from scans import FUSED, Case, floats, run
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from memories import assert_identical_state, assert_same_state
from tensor_memory import MemoryConfig, MemoryState, TensorMemory, memory_scan
from tensor_memory.ops import autograd, dispatch
from tensor_memory.ops.scan.memory_scan import SCAN
from tolerances import assert_same, assert_same_rms

CASES = [
    Case(B=2, S=3),
    Case(B=2, S=3, Q=0, M=1, nearest=True, pointwise=True, writes=False, resets=False),
]
CONFIG = MemoryConfig(channels=4, grid=(3, 3), chunk_size=2)


def arguments(case: Case, backend: str, checkpoint_every: int, grad: bool) -> tuple:
    dtype = torch.float32 if backend == "triton" else torch.float64
    inputs = case.make(dtype)
    leaves = [v if v is None else v.requires_grad_(grad) for v in floats(inputs)]
    return (*leaves, inputs.writes, inputs.resets, True, checkpoint_every, dtype, backend)


@pytest.mark.parametrize(
    ("backend", "case", "checkpoint_every"),
    [
        ("torch", CASES[1], 0),
        pytest.param("torch", CASES[0], 1, marks=pytest.mark.exhaustive),
        pytest.param(
            *FUSED.values,
            Case(B=1, S=2, Q=1, M=1, C=16, grid=(2,)),
            1,
            marks=[*FUSED.marks, pytest.mark.exhaustive],
        ),
    ],
    ids=str,
)
def test_the_operators_are_registered_as_pytorch_wants_them(backend, case, checkpoint_every):
    torch.library.opcheck(SCAN.operator, arguments(case, backend, checkpoint_every, grad=True))
    inputs = arguments(case, backend, checkpoint_every, grad=False)
    *results, kept = SCAN.operator(*inputs)
    grads = [torch.ones_like(result) for result in results]
    torch.library.opcheck(SCAN.backward_operator, (*grads, *inputs[:11], kept, *inputs[12:]))


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize(
    ("checkpoint_every", "C"),
    [(0, 3), pytest.param(2, 16, marks=pytest.mark.exhaustive)],  # widened, and as it is
)
def test_no_result_of_the_operators_shares_memory_with_another(backend, checkpoint_every, C):
    """A compiler may overwrite one of them; versions of PyTorch differ in whether they look."""
    case = Case(B=1, S=3, C=C, grid=(3, 2), Q=1, M=1)
    inputs = arguments(case, backend, checkpoint_every, grad=False)
    *results, kept = SCAN.operator(*inputs)
    grads = [torch.ones_like(result) for result in results]
    gradients = SCAN.backward_operator(*grads, *inputs[:11], kept, *inputs[12:])
    tensors = [t for t in (*inputs, *grads, *results, *kept, *gradients) if torch.is_tensor(t)]
    tensors = [t for t in tensors if t.numel()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_without_keep_nothing_is_kept_and_no_backward_is_possible(checkpoint_every):
    inputs = list(arguments(CASES[0], "torch", checkpoint_every, grad=True))
    inputs[11] = False
    reads, *_, kept = SCAN.operator(*inputs)
    assert kept == []
    with pytest.raises(RuntimeError, match=r"a backward needs what a forward with keep=True"):
        reads.sum().backward()


def test_checkpoints_keep_less():
    def bytes_kept(checkpoint_every: int) -> int:
        inputs = arguments(Case(S=12), "torch", checkpoint_every, grad=False)
        return sum(tensor.nbytes for tensor in SCAN.operator(*inputs)[3])

    assert bytes_kept(4) * 4 == bytes_kept(0)  # 3 states instead of 12


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("checkpoint_every", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    "used", [pytest.param((0,), marks=pytest.mark.exhaustive), (2,), (0, 1)], ids=str
)
def test_outputs_that_nobody_uses_send_nothing_back(backend, checkpoint_every, used):
    case = Case(B=1, S=3, Q=1, M=1, C=16, grid=(2,), resets=False)

    def gradients(scan, *args) -> list[Tensor]:
        results = scan(*args)
        sum(results[place].sum() for place in used).backward()  # ones that lie in one place
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in args[:9]]

    inputs = arguments(case, backend, checkpoint_every, grad=True)
    got = gradients(SCAN.operator, *inputs)
    doubles = [t.detach().double().requires_grad_() for t in inputs[:9]]
    exact = functools.partial(memory_scan, writes=inputs[9], backend="reference")
    for mine, right in zip(got, gradients(exact, *doubles), strict=True):
        assert_same_rms("gradient", mine, right, inputs[3].dtype)


COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
            pytest.mark.exhaustive,  # a minute
        ],
    ),
]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compiled_memory_is_the_memory(compiler):
    memory = TensorMemory(6, CONFIG)
    x = torch.randn(2, 5, 6)
    _, state = memory(x)
    compiled = torch.compile(memory, fullgraph=True, backend=compiler)

    expected, end = memory(x, state.detach())
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in memory.parameters()]
    memory.zero_grad()
    got, got_end = compiled(x, state.detach())
    got.square().sum().backward()
    assert_same(got, expected)
    assert_same_state(got_end.detach(), end.detach())
    for parameter, gradient in zip(memory.parameters(), gradients, strict=True):
        assert_same(parameter.grad, gradient)


@pytest.mark.parametrize("backend", [FUSED])
@torch.no_grad()
def test_choosing_the_fused_backend_breaks_no_graph(backend):
    memory = TensorMemory(6, replace(CONFIG, channels=16, grid=(2,), backend=backend))
    x = torch.randn(1, 4, 6)
    compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x)[0], memory(x)[0])


@torch.no_grad()
def test_an_exported_memory_is_the_memory_and_continues_its_state():
    memory = TensorMemory(6, CONFIG)
    x = torch.randn(2, 5, 6)
    _, state = memory(x)
    program = torch.export.export(memory, (x, state))
    names = [str(node.target) for node in program.graph.nodes]
    assert "tensor_memory.scan.default" in names
    m, end = program.module()(x, state)
    expected, expected_end = memory(x, state)
    assert torch.equal(m, expected)
    assert isinstance(end, MemoryState)
    assert end.aligned == expected_end.aligned
    assert_identical_state(end, expected_end)


@torch.no_grad()
def test_an_exported_memory_takes_batches_and_lengths_it_has_not_seen():
    memory = TensorMemory(6, CONFIG)
    chunks, rows = torch.export.Dim("chunks", min=2, max=64), torch.export.Dim("rows", max=64)
    shapes = {"x": {0: rows, 1: 2 * chunks}}
    program = torch.export.export(memory, (torch.randn(2, 6, 6),), dynamic_shapes=shapes)
    x = torch.randn(3, 14, 6)
    assert torch.equal(program.module()(x)[0], memory(x)[0])


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("checkpoint_every", [pytest.param(None, marks=pytest.mark.exhaustive), 2])
def test_eager_code_gets_what_the_operator_gives(backend, checkpoint_every, monkeypatch):
    case = Case(B=2, S=3, C=16, grid=(2,), Q=1, M=1)
    inputs = case.make(torch.float32)
    direct_results = run(inputs, backend, checkpoint_every)
    monkeypatch.setattr(autograd, "is_plain_eager", lambda inputs: False)
    for name, value in run(inputs, backend, checkpoint_every).items():
        assert torch.equal(direct_results[name], value), name


def test_compilers_tracers_and_transforms_get_the_operator():
    inputs = Case(B=1, S=2).make()
    assert autograd.is_plain_eager(inputs)
    seen = []
    with FlopCounterMode(display=False):
        seen.append(autograd.is_plain_eager(inputs))
    one = torch.ones(1)
    torch.vmap(lambda x: (seen.append(autograd.is_plain_eager(inputs)), x)[1])(one)
    with forward_ad.dual_level():
        seen.append(autograd.is_plain_eager(inputs))
    assert seen == [False, False, False]


def by_reference(function, x):
    """What `function` of a memory and x gives where the reference is asked for by name."""
    torch.manual_seed(0)
    return function(TensorMemory(6, replace(CONFIG, backend="reference")).double(), x)


def tangent(memory, x):
    with forward_ad.dual_level():
        m, _ = memory(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(m).tangent.detach()


def tangent_without_gradients(memory, x):
    with torch.no_grad():
        return tangent(memory, x)


TRANSFORMS = {
    "jvp": lambda memory, x: torch.func.jvp(lambda x: memory(x)[0], (x,), (x,))[1],
    "grad": lambda memory, x: torch.func.grad(lambda x: memory(x)[0].pow(2).sum())(x),
    "vmap": lambda memory, x: torch.vmap(lambda row: memory(row[None])[0])(x),
    "forward mode": tangent,
    "forward mode without gradients": tangent_without_gradients,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_see_through_what_auto_chooses(name):
    x = torch.randn(2, 6, 6, dtype=torch.float64)
    torch.manual_seed(0)
    got = TRANSFORMS[name](TensorMemory(6, CONFIG).double(), x)
    assert got.abs().max() > 0
    assert_same(got, by_reference(TRANSFORMS[name], x))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_backend_that_transforms_cannot_see_through_is_refused_by_name(name):
    memory = TensorMemory(6, replace(CONFIG, backend="torch"))
    with pytest.raises(
        ValueError, match=r"'torch' cannot serve .* torch.func .*; use 'auto' or 'reference'"
    ):
        TRANSFORMS[name](memory, torch.randn(2, 6, 6))


def test_functionalized_code_keeps_the_fast_backend(monkeypatch):
    chosen = []
    monkeypatch.setattr(dispatch, "_announce", lambda _, name, why: (chosen.append(name), name)[1])
    x, memory = torch.randn(2, 6, 6), TensorMemory(6, CONFIG)
    m = torch.func.functionalize(lambda x: memory(x)[0])(x)
    assert_same(m, memory(x)[0])
    assert chosen == ["torch", "torch"]
