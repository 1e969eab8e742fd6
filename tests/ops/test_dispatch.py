"""The door in front of the scans: what it refuses, what it chooses, what it promises."""

import logging

import pytest
import torch
from scans import FUSED, HERE, Case, floats
from torch import Tensor

from tensor_memory import memory_scan
from tensor_memory.ops import BACKENDS, dispatch, memory_read, why_not
from tensor_memory.ops.scan import torch as torch_scan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SERVING = [b for b in BACKENDS if why_not(b, CPU) is None and b != "triton"]


def scan(**changes):
    """A scan with some of its arguments changed."""
    request = Case().make()._asdict()
    options = {k: v for k, v in changes.items() if k not in request}
    request |= {k: v for k, v in changes.items() if k in request}
    masks = {name: request.pop(name) for name in ("writes", "resets")}
    return memory_scan(*request.values(), **masks, **options)


WRONG_SHAPES = {
    "hidden": (
        torch.zeros(3, 3),
        r"expected hidden of shape \(B, C, \*grid\) with 1 to 4 grid axes, got \(3, 3\)",
    ),
    "write_at": (
        torch.zeros(3, 7, 3),
        r"expected write_at of shape \(B, S, M, n\), got \(3, 7, 3\)",
    ),
    "read_at": (
        torch.zeros(3, 6, 2, 3),
        r"expected read_at of shape \(B, S, Q, n\) = \(3, 7, 2, 3\) to go with hidden "
        r"\(3, 3, 3, 4, 2\) and write_at \(3, 7, 2, 3\), got \(3, 6, 2, 3\)",
    ),
    "spread": (torch.zeros(3, 7), r"spread of shape \(B, S, M\) = \(3, 7, 2\)"),
    "content": (torch.zeros(3, 7, 2, 4), r"content of shape \(B, S, M, C\) = \(3, 7, 2, 3\)"),
    "taps": (torch.zeros(3, 3, 3), r"taps of shape \(n, 2C, 3\) = \(3, 6, 3\)"),
    "mix": (torch.zeros(6, 12), r"mix of shape \(4C, 2C\) = \(12, 6\)"),
    "bias": (torch.zeros(3), r"bias of shape \(4C\) = \(12,\)"),
    "cell": (torch.zeros(3, 3, 3, 4, 3), r"cell of shape \(B, C, \*grid\) = \(3, 3, 3, 4, 2\)"),
    "writes": (torch.ones(3, 6).bool(), r"writes of shape \(B, S\) = \(3, 7\)"),
    "resets": (torch.ones(7, 3).bool(), r"resets of shape \(B, S\) = \(3, 7\)"),
}


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_wrong_shape_is_named_with_the_one_expected(name):
    tensor, message = WRONG_SHAPES[name]
    with pytest.raises(ValueError, match=message):
        scan(**{name: tensor})


def test_a_fifth_axis_is_refused():
    volume = torch.zeros(3, 3, 2, 2, 2, 2, 2)
    with pytest.raises(ValueError, match=r"with 1 to 4 grid axes, got \(3, 3, 2, 2, 2, 2, 2\)"):
        scan(hidden=volume, cell=volume)


def test_places_to_read_that_lack_axes_are_refused():
    with pytest.raises(ValueError, match=r"read_at of shape \(B, S, Q, n\) = \(3, 7, 1, 3\)"):
        scan(read_at=torch.zeros(3, 7))


def test_an_axis_of_one_voxel_is_refused():
    volume = torch.zeros(3, 3, 1, 4, 2)
    with pytest.raises(ValueError, match=r"at least 2 voxels along every axis, got \(1, 4, 2\)"):
        scan(hidden=volume, cell=volume)


@pytest.mark.parametrize("name", ["writes", "resets"])
def test_a_mask_that_is_not_bool_is_refused(name):
    with pytest.raises(TypeError, match=rf"expected {name} of type bool, got torch.int64"):
        scan(**{name: torch.ones(3, 7).long()})


def test_a_tensor_that_is_not_float_is_refused():
    with pytest.raises(TypeError, match=r"expected content of a float type, got torch.int64"):
        scan(content=torch.ones(3, 7, 2, 3).long())


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"expected mix on cpu like hidden, got meta"):
        scan(mix=torch.zeros(12, 6, device="meta"))


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


def test_a_missing_triton_is_named_as_the_reason(monkeypatch):
    monkeypatch.setattr(dispatch, "_TRITON_INSTALLED", False)
    assert "triton is not installed" in str(why_not("triton", CUDA))


def test_readable_backends_serve_anywhere():
    for backend in ("auto", "reference", "torch"):
        assert why_not(backend, CPU) is None
        assert why_not(backend, CUDA) is None


@pytest.mark.parametrize("every", [0, -1])
def test_checkpoints_of_no_steps_are_refused(every):
    with pytest.raises(ValueError, match=r"expected None or a number of steps, got"):
        scan(checkpoint_every=every)


def test_the_reference_refuses_to_pretend_that_it_checkpoints():
    with pytest.raises(ValueError, match=r"backend 'reference' leaves its backward to autograd"):
        scan(backend="reference", checkpoint_every=2)


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
    request = Case(S=S).make()
    if never:
        request = request._replace(
            writes=torch.zeros_like(request.writes), resets=torch.zeros_like(request.resets)
        )
    results = memory_scan(
        *floats(request), writes=request.writes, resets=request.resets, backend=backend
    )
    assert not storages(*results) & storages(*request)
    assert len(storages(*results)) == len([r for r in results if r.numel()])


@pytest.mark.parametrize("backend", ["torch", FUSED])
@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_scan_of_no_steps_shares_no_memory_either_way(backend, checkpoint_every):
    request = Case(S=0).make(torch.float32)
    hidden = request.hidden.requires_grad_()
    options = {"backend": backend, "checkpoint_every": checkpoint_every}
    results = memory_scan(*floats(request), **options)
    assert not storages(*results) & storages(*request)
    given = torch.ones_like(hidden)
    (grad,) = torch.autograd.grad(results[1], hidden, given)
    assert torch.equal(grad, given)
    assert not storages(grad) & storages(given)


@pytest.mark.parametrize("backend", SERVING)
@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_scan_and_its_backward_leave_their_inputs_as_they_were(backend, checkpoint_every):
    if backend == "reference":
        checkpoint_every = None
    request = Case(B=1).make()  # with one row, a transposed volume is the volume itself
    copies = [None if value is None else value.clone() for value in request]
    leaves = [None if value is None else value.requires_grad_() for value in floats(request)]
    results = memory_scan(
        *leaves,
        writes=request.writes,
        resets=request.resets,
        backend=backend,
        checkpoint_every=checkpoint_every,
    )
    ones = [torch.ones_like(result) for result in results]
    torch.autograd.backward(results, ones, retain_graph=True)
    first = [leaf.grad.clone() for leaf in leaves]
    torch.autograd.backward(results, ones)
    for leaf, grad in zip(leaves, first, strict=True):
        assert torch.equal(leaf.grad, 2 * grad)
    for value, copy in zip(request, copies, strict=True):
        assert torch.equal(value, copy)
    assert all(one.eq(1).all() for one in ones)


@pytest.mark.parametrize("backend", SERVING)
def test_half_precision_comes_back_as_float32(backend):
    request = Case(resets=False).make(torch.bfloat16)
    results = memory_scan(*floats(request), writes=request.writes, backend=backend)
    assert {result.dtype for result in results} == {torch.float32}


def test_autocast_does_not_reach_inside_the_reference():
    request = Case(resets=False).make(torch.float32)
    expected = memory_scan(*floats(request), backend="reference")
    with torch.autocast(HERE.type, torch.bfloat16):
        got = memory_scan(*floats(request), backend="reference")
    for mine, right in zip(got, expected, strict=True):
        assert torch.equal(mine, right)


def test_a_read_is_as_wide_as_the_wider_of_place_and_volume():
    request = Case().make(torch.float32)
    assert memory_read(request.read_at.double(), request.hidden).dtype == torch.float64
    assert memory_read(request.read_at, request.hidden.double()).dtype == torch.float64


@pytest.mark.parametrize("backend", SERVING)
def test_no_reads_wanted_gives_none_and_the_same_state(backend):
    with_reads, without = scan(backend=backend), scan(backend=backend, read_at=None)
    assert without[0] is None
    assert torch.equal(with_reads[1], without[1])
    assert torch.equal(with_reads[2], without[2])


def test_only_a_scan_that_will_be_differentiated_keeps_anything(monkeypatch):
    asked, forward = [], torch_scan.forward

    def spy(*args, keep, **options):
        asked.append(keep)
        return forward(*args, keep=keep, **options)

    monkeypatch.setattr(torch_scan, "forward", spy)
    content = torch.zeros(3, 7, 2, 3, requires_grad=True)
    scan(backend="torch")
    with torch.no_grad():
        scan(backend="torch", content=content)
    scan(backend="torch", content=content)
    assert asked == [False, False, True]
