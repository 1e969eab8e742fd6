"""The parts of a fused layer by themselves: norm, heads, gated sum, packed weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scans import HERE
from torch import Tensor, nn

from tensor_memory.ops import why_not
from tolerances import assert_same, assert_same_rms

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

import triton.language as tl

from tensor_memory.ops import layer_norm as norm
from tensor_memory.ops.gated_sum import Drop, ReadoutLayout, add_gated, add_gated_backward
from tensor_memory.ops.scan.layer import heads, weights
from tensor_memory.ops.scan.layer.weights import LayerWeights, Packed, gather, pack

D, WIDE, COLUMNS = 10, 40, 16
BLOCK = 16


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).to(HERE)


# Rows behind the last one have no deviation: nothing of them may arrive anywhere.
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_norms_of_many_tokens_share_the_sums_for_their_weights(epsilon, monkeypatch):
    monkeypatch.setattr(norm, "NORM_PROGRAMS", 2)  # for five blocks of 128 tokens
    x, grad, past = draw(600, D).requires_grad_(), *draw(2, 600, D)
    layer = nn.LayerNorm(D, epsilon).to(HERE)
    nn.init.normal_(layer.bias)
    torch.autograd.backward([layer(x), x], [grad, past])
    given = x.detach()
    out = norm.layer_norm(given, layer.weight, layer.bias, epsilon, torch.float32)
    assert_same_rms("norm", out, layer(x).detach().double(), torch.float32)
    normed = torch.full_like(given, torch.nan)
    grad_x, partial = norm.layer_norm_backward(
        given, layer.weight, epsilon, grad, past, layer.bias, normed
    )
    assert_same(normed, out)
    expected = (x.grad, layer.weight.grad, layer.bias.grad)
    for got, right in zip((grad_x, *partial.sum(0)), expected, strict=True):
        assert_same_rms("gradient", got, right.double(), torch.float32)


def test_a_narrow_spread_keeps_its_digits():
    bias, nothing = torch.tensor([-12.0, -3.0, 30.0]).to(HERE), torch.zeros(D, D).to(HERE)
    rows = weights.HeadRows(3, 3, 3)
    packed = Packed(nothing, nothing[:3], nothing[:9], nothing)
    one = torch.ones(1, D).to(HERE)
    _, steering = heads.run_heads(one, one, packed, rows, bias, (1, 1, 1), 1.0)
    expected = nn.functional.softplus(bias.double()) + 1e-4
    for got, right in zip(steering.spread.flatten(), expected, strict=True):
        assert_same_rms("spread", got, right, torch.float32)


LAYOUT = ReadoutLayout(repeat=6, frame=10, units=2)  # the second of two is for four tokens


def add(rows: int, drop: Drop) -> tuple[Tensor, Tensor, Tensor]:
    """Readouts m (rows · 2, D), how much of each was added to its tokens (rows, 10, D), seeds."""
    x, m = torch.zeros(rows, 10, D).to(HERE), draw(rows * 2, D)
    out, seeds = add_gated(x, m, torch.zeros(1).to(HERE), LAYOUT, drop)  # half open
    first, second = m.view(rows, 2, 1, D).unbind(1)
    return m, out / torch.cat([first.expand(-1, 6, -1), second.expand(-1, 4, -1)], 1), seeds


def test_a_readout_reaches_the_tokens_of_its_unit_and_no_others():
    m, share, seeds = add(3, Drop(0.0, 0.0))
    assert torch.allclose(share, torch.tensor(0.5).to(HERE))
    grad, gate = torch.ones(3, 10, D).to(HERE), torch.zeros(1).to(HERE)
    grad_m, by_gate = add_gated_backward(grad, m, gate, seeds, LAYOUT, Drop(0.0, 0.0))
    assert_same(grad_m[:, 0], torch.tensor([3.0, 2.0] * 3).to(HERE))
    assert_same(by_gate, 0.5 * (grad_m * m).sum(1), torch.float32)


def test_dropout_drops_its_share_keeps_the_mean_and_drops_the_same_in_the_backward():
    drop = Drop(0.25, 0.0)
    m, share, seeds = add(8, drop)
    gone = share == 0
    assert abs(gone.float().mean().item() - 0.25) < 0.06
    assert torch.allclose(share[~gone], torch.tensor(0.5 / 0.75).to(HERE))
    grad, gate = torch.ones(8, 10, D).to(HERE), torch.zeros(1).to(HERE)
    grad_m, _ = add_gated_backward(grad, m, gate, seeds, LAYOUT, drop)
    first, second = share.split([6, 4], dim=1)
    expected = torch.stack([first.sum(1), second.sum(1)], dim=1).flatten(0, 1)
    assert_same(grad_m, expected)


def test_a_dropped_path_drops_whole_rows():
    _, share, _ = add(16, Drop(0.0, 0.5))
    gone = share.eq(0).flatten(1).all(1)
    assert torch.allclose(share[~gone], torch.tensor(1.0).to(HERE))
    assert 2 < gone.sum() < 14


def layer_weights(shared: bool, gaussian: bool) -> LayerWeights:
    write_coordinate, unused = draw(6, D), draw(1)
    return LayerWeights(
        norm=unused,
        norm_bias=unused,
        gate=unused,
        write_proj=draw(D, WIDE),
        read_coordinate=write_coordinate if shared else draw(9, D),
        write_coordinate=write_coordinate,
        content=draw(48, D),
        spread=draw(3, D) if gaussian else None,  # no power of two
        spread_bias=draw(3) if gaussian else None,
        taps=None,
        mix=unused,
        bias=unused,
        output=draw(D, COLUMNS),
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("gaussian", [True, False])
def test_packed_weights_are_the_weights_and_what_needs_no_cast_is_not_copied(shared, gaussian):
    given = layer_weights(shared, gaussian)
    packed = pack(given, torch.float32)
    writes = [given.write_coordinate, given.content, *([given.spread] if gaussian else [])]
    assert torch.equal(packed.writes, torch.cat(writes))
    assert torch.equal(packed.reads, given.read_coordinate)
    assert packed.write_proj is given.write_proj
    assert packed.output is given.output
    assert shared or packed.reads is given.read_coordinate
    assert packed.writes.untyped_storage().nbytes() == packed.writes.nbytes


def test_a_matrix_that_needs_a_cast_or_lies_crosswise_is_copied_alone():
    given = layer_weights(shared=False, gaussian=True)
    given = given._replace(output=given.output.bfloat16(), write_proj=draw(WIDE, D).t())
    packed = pack(given, torch.float32)
    assert packed.reads is given.read_coordinate
    assert torch.equal(packed.output, given.output.float())
    assert torch.equal(packed.write_proj, given.write_proj)
    values = packed.writes.numel() + packed.output.numel() + packed.write_proj.numel()
    assert packed.writes.untyped_storage().nbytes() == 4 * values
    low = pack(given, torch.bfloat16)
    assert all(matrix.dtype == torch.bfloat16 for matrix in low)
    # The interpreter cuts digits off where a device rounds to the nearest.
    assert_same(low.write_proj.float(), given.write_proj, torch.bfloat16)


@pytest.mark.parametrize(("shared", "gaussian"), [(True, True), (False, False)])
def test_what_weights_receive_is_copied_and_summed_over_any_number_of_rows(shared, gaussian):
    given = layer_weights(shared, gaussian)
    rows = given.head_rows
    products = Packed(
        write_proj=draw(D, WIDE),
        reads=draw(len(given.read_coordinate), D),
        writes=draw(sum(rows), D),
        output=draw(D, COLUMNS),
    )
    shares = ((300, 2, D), (2100, sum(rows)), (4200,))
    by_norm, raw_writes, by_gate = (draw(*shape).abs() for shape in shares)
    found = gather(products, rows, shared, by_norm, raw_writes, by_gate, torch.float32)
    at, content, spread = products.writes.split(list(rows))
    weight, bias = by_norm.double().sum(0)
    expected = {
        "norm": weight,
        "norm_bias": bias,
        "gate": by_gate.double().sum(0, keepdim=True),
        "write_proj": products.write_proj,
        "read_coordinate": None if shared else products.reads,
        "write_coordinate": at + products.reads if shared else at,
        "content": content,
        "spread": spread if gaussian else None,
        "spread_bias": raw_writes[:, -3:].double().sum(0) if gaussian else None,
        "output": products.output,
    }
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        if right is None:
            assert found[name] is None
        else:
            assert_same_rms(name, found[name], right, torch.float32)


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
        weights.pack_kernel[(1,)](*[some] * 7, **large, AT=1, CONTENT=1)
    else:
        weights.gather_kernel[(1,)](
            *[some] * 8, 1, 1, 1,
            **large, WRITES=2, SPREAD_PADDED=1, SHARED=True, TILE=16, TILE_COLUMNS=16,
        )  # fmt: skip
    first = some.data_ptr() + 4 * FAR
    assert stored_by_a_far_program == list(range(first, first + 4 * BLOCK, 4))
