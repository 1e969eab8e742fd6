"""Launches and layouts of the fused scan, with a device that is only pretended."""

from types import SimpleNamespace

import pytest
import torch
from scans import HERE

from tensor_memory.ops import why_not

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

from tensor_memory.ops import triton_launch, triton_plan
from tensor_memory.ops.triton_launch import Bound, bound
from tensor_memory.ops.triton_plan import Shape, layout

SMS = 132


class FakeKernel:
    """A kernel of two pointers, a number and a constant; notes who was launched, and how."""

    __name__ = "fake"
    arg_names = ("x", "y", "count", "C")

    def __init__(self):
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **settings):
            self.compiled.append((grid, arguments, settings))
            run = lambda *values: self.ran.append(values)  # noqa: E731
            return SimpleNamespace(run=run, function="code", packed_metadata="metadata")

        return compile_and_run


@pytest.fixture
def kernel(monkeypatch) -> FakeKernel:
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    return FakeKernel()


def test_a_second_launch_goes_straight_to_the_compiled_code(kernel):
    launch = Bound(kernel, {"C": 16, "num_warps": 4})
    x, y = torch.zeros(8), torch.zeros(8)
    launch((3, 2), (x, y), (5,))
    assert kernel.compiled == [((3, 2), (x, y, 5), {"C": 16, "num_warps": 4})]
    launch((7,), (y, x), (6,))
    assert len(kernel.compiled) == 1
    hooks = (None, None, None)
    assert kernel.ran == [
        (7, 1, 1, "stream", "code", "metadata", *hooks, y.data_ptr(), x.data_ptr(), 6, 16)
    ]


@pytest.mark.parametrize(
    ("x", "count"),
    [
        (torch.zeros(8, dtype=torch.bfloat16), 5),  # another type
        (torch.zeros(8)[1:], 5),  # an address that is no multiple of 16
        (torch.zeros(8), 2**31),  # an integer of 64 bits
    ],
    ids=["type", "alignment", "size"],
)
def test_arguments_that_need_other_code_do_not_run_what_is_compiled(kernel, x, count):
    launch, y = Bound(kernel, {"C": 16}), torch.zeros(8)
    launch((1,), (torch.zeros(8), y), (5,))
    launch((1,), (x, y), (count,))
    assert len(kernel.compiled) == 2
    assert kernel.ran == []


def test_the_same_constants_give_the_same_launch(kernel):
    assert bound(kernel, C=16) is bound(kernel, C=16)
    assert bound(kernel, C=16) is not bound(kernel, C=32)


def shape(B: int, C: int, grid: tuple[int, ...], products: torch.dtype) -> Shape:
    device = torch.device("cuda", 0)
    return Shape(device, B, 4, 1, 1, C, grid, True, True, False, False, products, True)


@pytest.mark.parametrize("B", [1, 5, 16, 32, 33, 64, 128, 300])
@pytest.mark.parametrize("C", [16, 32, 64, 128])
@pytest.mark.parametrize("grid", [(3,), (6, 6, 6), (8, 8, 8), (16, 16, 16)])
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
def test_programs_that_wait_for_each_other_are_resident_and_own_every_voxel(
    B, C, grid, products, monkeypatch
):
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(triton_plan, "INTERPRETED", False)
    asked = shape(B, C, grid, products)
    for share in (triton_plan.FORWARD_SHARE, triton_plan.BACKWARD_SHARE):
        rows = layout(asked, share)
        constants, warps = rows.constants, rows.options["num_warps"]
        assert constants["PARTS"] == rows.parts
        assert rows.parts * constants["TILES"] * constants["BLOCK_V"] >= asked.V
        assert constants["BLOCK_V"] * C // (32 * warps) <= 32  # values a thread holds
        if rows.parts > 1:
            assert rows.options["launch_cooperative_grid"]
            together = -(-B * rows.parts // SMS)
            assert 255 * 32 * warps * together <= 65536  # registers of a multiprocessor
