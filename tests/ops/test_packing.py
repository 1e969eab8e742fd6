"""Weights cast into one buffer and gradients gathered from many, against PyTorch's own calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scans import HERE
from torch import Tensor

from tensor_memory.ops import why_not
from tolerances import assert_same, assert_same_rms

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

import triton.language as tl

from tensor_memory.ops import packing
from tensor_memory.ops.packing import Heads, Packed, Sizes, gather, pack

D, WIDE, COLUMNS = 10, 40, 16
BLOCK = 16


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).to(HERE)


def heads(shared: bool, gaussian: bool) -> Heads:
    write_coordinate = draw(6, D)
    return Heads(
        write_proj=draw(D, WIDE),
        read_coordinate=write_coordinate if shared else draw(9, D),
        write_coordinate=write_coordinate,
        content=draw(48, D),
        spread=draw(3, D) if gaussian else None,  # no power of two
        spread_bias=draw(3) if gaussian else None,
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gaussian", [True, False])
@pytest.mark.parametrize("with_output", [True, False])
def test_packed_weights_are_the_weights(shared, gaussian, with_output):
    given, output = heads(shared, gaussian), draw(D, COLUMNS)
    packed = pack(given, output if with_output else None, torch.float32)
    writes = [given.write_coordinate, given.content, *([given.spread] if gaussian else [])]
    assert torch.equal(packed.write_proj, given.write_proj)
    assert torch.equal(packed.reads, given.read_coordinate)
    assert torch.equal(packed.writes, torch.cat(writes))
    assert torch.equal(packed.output, output if with_output else output[:, :0])


def test_weights_that_lie_crosswise_are_packed_as_they_read():
    given = heads(shared=True, gaussian=True)
    crosswise = given._replace(write_proj=draw(WIDE, D).t())
    packed = pack(crosswise, None, torch.float32)
    assert torch.equal(packed.write_proj, crosswise.write_proj)


@pytest.mark.parametrize("shared", [True, False])
def test_what_needs_no_cast_is_not_copied(shared):
    given, output = heads(shared, gaussian=True), draw(D, COLUMNS)
    packed = pack(given, output, torch.float32)
    assert packed.write_proj is given.write_proj
    assert packed.output is output
    assert shared or packed.reads is given.read_coordinate
    assert packed.writes.untyped_storage().nbytes() == packed.writes.nbytes


def test_one_matrix_that_needs_a_cast_is_copied_alone():
    given, output = heads(shared=False, gaussian=True), draw(D, COLUMNS).bfloat16()
    packed = pack(given, output, torch.float32)
    assert packed.reads is given.read_coordinate
    assert torch.equal(packed.output, output.float())
    values = packed.writes.numel() + output.numel()
    assert packed.writes.untyped_storage().nbytes() == 4 * values


def test_packing_casts():
    given = heads(shared=False, gaussian=True)
    packed = pack(given, None, torch.bfloat16)
    # The interpreter cuts digits off where a device rounds to the nearest.
    assert_same(packed.write_proj.float(), given.write_proj, torch.bfloat16)
    assert all(matrix.dtype == torch.bfloat16 for matrix in packed)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gaussian", [True, False])
def test_what_weights_receive_is_copied_and_summed_over_any_number_of_rows(shared, gaussian):
    given = heads(shared, gaussian)
    sizes = Sizes.of(given)
    products = Packed(
        write_proj=draw(D, WIDE),
        reads=draw(len(given.read_coordinate), D),
        writes=draw(sum(sizes), D),
        output=draw(D, COLUMNS),
    )
    shares = ((300, 2, D), (2100, sum(sizes)), (4200,))
    by_norm, raw_writes, by_gate = (draw(*shape).abs() for shape in shares)
    found = gather(products, sizes, shared, by_norm, raw_writes, by_gate, torch.float32)
    at, content, spread = products.writes.split(list(sizes))
    expected = (
        *by_norm.double().sum(0),
        by_gate.double().sum(0, keepdim=True),
        products.write_proj,
        None if shared else products.reads,
        at + products.reads if shared else at,
        content,
        spread if gaussian else None,
        raw_writes[:, -3:].double().sum(0) if gaussian else None,
        products.output,
    )
    for got, right in zip(found, expected, strict=True):
        if right is None:
            assert got is None
        else:
            assert_same_rms("gradient", got, right, torch.float32)


FAR = 2**31  # the first place that 32 bits do not count to


@pytest.fixture
def stored_by_a_far_program(monkeypatch) -> list[int]:
    """Addresses that a kernel stores to as the program of place FAR; nothing is touched."""
    from triton.runtime import interpreter

    addresses, builder = [], interpreter.InterpreterBuilder

    def far(self, axis):
        return interpreter.TensorHandle(np.array([FAR // BLOCK], dtype=np.int32), tl.int32)

    def load(self, pointers, mask, other, *_):
        return other

    def store(self, pointers, value, mask, _):
        addresses.extend(pointers.data[mask.data].tolist())

    monkeypatch.setattr(builder, "create_get_program_id", far)
    monkeypatch.setattr(builder, "create_masked_load", load)
    monkeypatch.setattr(builder, "create_masked_store", store)
    return addresses


@pytest.mark.skipif(HERE.type != "cpu", reason="only the interpreter can pretend")
@pytest.mark.parametrize("kernel", ["pack_kernel", "gather_kernel"])
def test_a_buffer_may_hold_more_values_than_32_bits_count(kernel, stored_by_a_far_program):
    some = torch.zeros(16)
    large = {"D": 2**16, "SPREAD": 0, "WIDE": 2**15, "COLUMNS": 0, "READS": 0, "BLOCK": BLOCK}
    if kernel == "pack_kernel":
        packing.pack_kernel[(1,)](*[some] * 7, **large, AT=1, CONTENT=1)
    else:
        packing.gather_kernel[(1,)](
            *[some] * 8, 1, 1, 1,
            **large, WRITES=2, SPREAD_PADDED=1, SHARED=True, TILE=16, TILE_COLUMNS=16,
        )  # fmt: skip
    first = some.data_ptr() + 4 * FAR
    assert stored_by_a_far_program == list(range(first, first + 4 * BLOCK, 4))
