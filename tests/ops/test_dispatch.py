"""A call of a scan before any backend runs: what is refused, chosen and promised."""

import logging
from dataclasses import replace

import pytest
import torch
from scans import FUSED, HERE, Case, floats
from torch import Tensor

from tensor_memory import (
    MemoryConfig,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
    backends,
    memory_scan,
)
from tensor_memory.ops import BACKENDS, dispatch, memory_read, why_not
from tensor_memory.ops.scan import torch as torch_backend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SERVING = [b for b in BACKENDS if why_not(b, CPU) is None and b != "triton"]


def scan(**changes):
    """A scan with some of its arguments changed."""
    inputs = Case().make()._asdict()
    options = {k: v for k, v in changes.items() if k not in inputs}
    inputs |= {k: v for k, v in changes.items() if k in inputs}
    masks = {name: inputs.pop(name) for name in ("writes", "resets")}
    return memory_scan(*inputs.values(), **masks, **options)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


REFUSED = [
    (
        {"hidden": zeros(3, 3)},
        r"hidden of shape \(B, C, \*grid\) with 1 to 4 grid axes, got \(3, 3\)",
    ),
    ({"hidden": zeros(3, 3, 2, 2, 2, 2, 2)}, r"1 to 4 grid axes, got \(3, 3, 2, 2, 2, 2, 2\)"),
    ({"hidden": zeros(3, 3, 1, 4, 2)}, r"at least 2 voxels along every axis, got \(1, 4, 2\)"),
    ({"write_at": zeros(3, 7, 3)}, r"write_at of shape \(B, S, M, n\), got \(3, 7, 3\)"),
    (
        {"read_at": zeros(3, 6, 2, 3)},
        r"expected read_at of shape \(B, S, Q, n\) = \(3, 7, 2, 3\) to go with hidden "
        r"\(3, 3, 3, 4, 2\) and write_at \(3, 7, 2, 3\), got \(3, 6, 2, 3\)",
    ),
    ({"read_at": zeros(3, 7)}, r"read_at of shape \(B, S, Q, n\) = \(3, 7, 1, 3\)"),
    ({"spread": zeros(3, 7)}, r"spread of shape \(B, S, M\) = \(3, 7, 2\)"),
    ({"content": zeros(3, 7, 2, 4)}, r"content of shape \(B, S, M, C\) = \(3, 7, 2, 3\)"),
    ({"taps": zeros(3, 3, 3)}, r"taps of shape \(n, 2C, 3\) = \(3, 6, 3\)"),
    ({"mix": zeros(6, 12)}, r"mix of shape \(4C, 2C\) = \(12, 6\)"),
    ({"bias": zeros(3)}, r"bias of shape \(4C\) = \(12,\)"),
    ({"cell": zeros(3, 3, 3, 4, 3)}, r"cell of shape \(B, C, \*grid\) = \(3, 3, 3, 4, 2\)"),
    ({"writes": zeros(3, 6).bool()}, r"writes of shape \(B, S\) = \(3, 7\)"),
    ({"resets": zeros(7, 3).bool()}, r"resets of shape \(B, S\) = \(3, 7\)"),
    (
        {"writes": zeros(3, 7).long()},
        r"writes of type bool, got torch.int64; convert it with .bool",
    ),
    (
        {"resets": zeros(3, 7).long()},
        r"resets of type bool, got torch.int64; convert it with .bool",
    ),
    ({"content": zeros(3, 7, 2, 3).long()}, r"content of a float type, got torch.int64; convert"),
    ({"mix": zeros(12, 6).to("meta")}, r"expected mix on cpu like hidden, got meta; move it"),
    ({"checkpoint_every": 0}, r"expected None or a whole number of steps, got 0"),
    (
        {"backend": "reference", "checkpoint_every": 2},
        r"'reference' leaves its backward to autograd",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused_with_what_was_expected(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        scan(**changes)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    message = r"expected one of auto, reference, torch, triton, got 'cuda'; 'auto' picks"
    with pytest.raises(ValueError, match=message):
        scan(backend="cuda")
    with pytest.raises(ValueError, match=message):
        why_not("cuda", CPU)


def test_the_fused_backend_never_falls_back_on_a_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    message = r"backend 'triton' cannot serve this request: it needs a CUDA device, got cpu"
    with pytest.raises(ValueError, match=message):
        scan(backend="triton")


def test_backends_says_who_can_serve_and_why_not(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backends("cpu") == {
        "reference": None,
        "torch": None,
        "triton": "it needs a CUDA device, got cpu; TRITON_INTERPRET=1 runs its kernels on a CPU, "
        "slowly, to test them",
    }
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    assert "triton is not installed" in str(backends("cuda")["triton"])
    assert backends("cuda")["torch"] is None


@pytest.mark.skipif(dispatch.why_not("triton", CUDA) is not None, reason="needs triton")
def test_a_memory_says_which_backend_it_will_use():
    config = MemoryConfig(channels=16, grid=(4, 4))
    assert TensorMemory(8, config).backend_on("cpu") == "torch"
    assert TensorMemory(8, config).backend_on("cuda") == "triton"
    assert TensorMemory(8, config).backend_on("cuda", torch.float64) == "torch"
    large = replace(config, grid=(65, 65))
    assert TensorMemory(8, large).backend_on("cuda", torch.bfloat16) == "torch"
    with pytest.raises(ValueError, match=r"'triton' cannot serve .* up to 4096 voxels, got 4225"):
        TensorMemory(8, replace(large, backend="triton")).backend_on("cuda")
    places = PlaceConfig(grid=(8, 8))
    assert PlaceMemory(8, places).backend_on("cpu") == "torch"
    assert PlaceMemory(8, places).backend_on("cuda") == "triton"
    assert PlaceMemory(8, places).backend_on("cuda", torch.float64) == "torch"
    wide = replace(places, channels=65)
    assert PlaceMemory(8, wide).backend_on("cuda") == "torch"
    with pytest.raises(ValueError, match=r"'triton' cannot serve .* up to 64 channels"):
        PlaceMemory(8, replace(wide, backend="triton")).backend_on("cuda")


def test_auto_says_once_what_it_chose(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_announced", set())
    with caplog.at_level(logging.INFO, logger="tensor_memory"):
        scan(backend="auto")
        scan(backend="auto")
        scan(backend="torch")
    assert [record.message for record in caplog.records] == [
        "memory_scan: backend 'auto' chose 'torch' on device cpu"
    ]


def storages(*tensors: Tensor | None) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()}


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize("S", [0, 1, 3])
@pytest.mark.parametrize("never", [False, True])
def test_results_never_share_memory_with_the_inputs(backend, S, never):
    inputs = Case(S=S).make()
    if never:
        inputs = inputs._replace(
            writes=torch.zeros_like(inputs.writes), resets=torch.zeros_like(inputs.resets)
        )
    results = memory_scan(
        *floats(inputs), writes=inputs.writes, resets=inputs.resets, backend=backend
    )
    assert not storages(*results) & storages(*inputs)
    assert len(storages(*results)) == len([r for r in results if r.numel()])


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_scan_of_no_steps_shares_no_memory_either_way(backend, checkpoint_every):
    inputs = Case(S=0).make(torch.float32)
    hidden = inputs.hidden.requires_grad_()
    options = {"backend": backend, "checkpoint_every": checkpoint_every}
    results = memory_scan(*floats(inputs), **options)
    assert not storages(*results) & storages(*inputs)
    given = torch.ones_like(hidden)
    (grad,) = torch.autograd.grad(results[1], hidden, given)
    assert torch.equal(grad, given)
    assert not storages(grad) & storages(given)


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_scan_and_its_backward_leave_their_inputs_as_they_were(backend, checkpoint_every):
    if backend == "reference":
        checkpoint_every = None
    inputs = Case(B=1).make()  # with one row, a transposed volume is the volume itself
    copies = [None if value is None else value.clone() for value in inputs]
    leaves = [None if value is None else value.requires_grad_() for value in floats(inputs)]
    results = memory_scan(
        *leaves,
        writes=inputs.writes,
        resets=inputs.resets,
        backend=backend,
        checkpoint_every=checkpoint_every,
    )
    ones = [torch.ones_like(result) for result in results]
    torch.autograd.backward(results, ones, retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    torch.autograd.backward(results, ones)
    for leaf, grad in zip(leaves, first, strict=True):
        assert torch.equal(leaf.grad, 2 * grad)
    for value, copy in zip(inputs, copies, strict=True):
        assert torch.equal(value, copy)
    assert all(one.eq(1).all() for one in ones)


@pytest.mark.parametrize("backend", SERVING)
def test_half_precision_comes_back_as_float32(backend):
    inputs = Case(resets=False).make(torch.bfloat16)
    results = memory_scan(*floats(inputs), writes=inputs.writes, backend=backend)
    assert {result.dtype for result in results} == {torch.float32}


def test_autocast_does_not_reach_inside_the_reference():
    inputs = Case(resets=False).make(torch.float32)
    expected = memory_scan(*floats(inputs), backend="reference")
    with torch.autocast(HERE.type, torch.bfloat16):
        got = memory_scan(*floats(inputs), backend="reference")
    for mine, right in zip(got, expected, strict=True):
        assert torch.equal(mine, right)


def test_a_read_is_as_wide_as_the_wider_of_place_and_volume():
    inputs = Case().make(torch.float32)
    assert memory_read(inputs.read_at.double(), inputs.hidden).dtype == torch.float64
    assert memory_read(inputs.read_at, inputs.hidden.double()).dtype == torch.float64


@pytest.mark.parametrize("backend", SERVING)
def test_no_reads_wanted_gives_none_and_the_same_state(backend):
    with_reads, without = scan(backend=backend), scan(backend=backend, read_at=None)
    assert without[0] is None
    assert torch.equal(with_reads[1], without[1])
    assert torch.equal(with_reads[2], without[2])


def test_only_a_scan_that_will_be_differentiated_keeps_anything(monkeypatch):
    asked, forward = [], torch_backend.forward

    def spy(*args, keep, **options):
        asked.append(keep)
        return forward(*args, keep=keep, **options)

    monkeypatch.setattr(torch_backend, "forward", spy)
    content = torch.zeros(3, 7, 2, 3, requires_grad=True)
    scan(backend="torch")
    with torch.no_grad():
        scan(backend="torch", content=content)
    scan(backend="torch", content=content)
    assert asked == [False, False, True]
