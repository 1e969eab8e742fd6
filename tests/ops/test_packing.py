"""Weights cast into one buffer and gradients gathered from many, against PyTorch's own calls."""

from __future__ import annotations

import pytest
import torch
from scans import HERE
from torch import Tensor

from tensor_memory.ops import why_not
from tolerances import assert_same, assert_same_rms

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

from tensor_memory.ops.packing import Heads, Packed, Sizes, gather, pack

D, WIDE, COLUMNS = 10, 40, 16


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).to(HERE)


def heads(shared: bool, gaussian: bool) -> Heads:
    write_coordinate = draw(6, D)
    return Heads(
        write_proj=draw(D, WIDE),
        read_coordinate=write_coordinate if shared else draw(9, D),
        write_coordinate=write_coordinate,
        content=draw(32, D),
        spread=draw(2, D) if gaussian else None,
        spread_bias=draw(2) if gaussian else None,
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
        raw_writes[:, -2:].double().sum(0) if gaussian else None,
        products.output,
    )
    for got, right in zip(found, expected, strict=True):
        if right is None:
            assert got is None
        else:
            assert_same_rms("gradient", got, right, torch.float32)
