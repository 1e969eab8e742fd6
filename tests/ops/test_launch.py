"""Launches and layouts of the fused scan, with a device that is only pretended."""

import inspect
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from scans import HERE

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory
from tensor_memory.ops import why_not

if why_not("triton", HERE) is not None:
    pytest.skip(f"triton: {why_not('triton', HERE)}", allow_module_level=True)

from tensor_memory.ops import launch
from tensor_memory.ops.launch import Alike, BoundKernel, bind
from tensor_memory.ops.scan.triton import plan
from tensor_memory.ops.scan.triton.plan import Shape, layout

SMS = 132


class Before:
    """Compiled code as Triton 3.4 to 3.6 call it; notes how it was called."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.calls.append((gridX, gridY, gridZ, stream, function, *args))


class Since(Before):
    """As Triton 3.7 to 3.9 do."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function,
        kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, *args,
    ):  # fmt: skip
        hooks = (launch_metadata, launch_enter_hook, launch_exit_hook)
        super().__call__(gridX, gridY, gridZ, stream, function, kernel_metadata, *hooks, *args)


class Other(Before):
    """As no version known here does."""

    def __call__(self, stream, function, *args):
        raise AssertionError("called in a way that was guessed")


class FakeKernel:
    """A kernel of two pointers, a number and a constant; notes who was launched, and how."""

    arg_names = ("x", "y", "count", "C")
    attributes = ("run", "function", "packed_metadata")

    def __init__(self, version=Before):
        self.version = version
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **settings):
            self.compiled.append((grid, arguments, settings))
            code = {
                "run": self.version(self.ran), "function": "code", "packed_metadata": "metadata"
            }  # fmt: skip
            return SimpleNamespace(**{name: code[name] for name in self.attributes})

        return compile_and_run


@pytest.fixture
def kernel(monkeypatch) -> FakeKernel:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # the CPU's
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    return FakeKernel()


@pytest.mark.parametrize("version", [Before, Since])
def test_a_second_launch_goes_straight_to_the_compiled_code(version, kernel):
    kernel.version = version
    launch = BoundKernel(kernel, {"C": 16, "num_warps": 4})
    x, y = torch.zeros(8), torch.zeros(8)
    launch((3, 2), (x, y), (5,))
    assert kernel.compiled == [((3, 2), (x, y, 5), {"C": 16, "num_warps": 4})]
    launch((7,), (y, x), (6,))
    assert len(kernel.compiled) == 1
    hooks = (None, None, None)
    assert kernel.ran == [
        (7, 1, 1, "stream", "code", "metadata", *hooks, y.data_ptr(), x.data_ptr(), 6, 16)
    ]


@pytest.mark.parametrize("missing", ["how it is called", *FakeKernel.attributes, "the stream"])
def test_where_triton_is_not_as_known_every_launch_is_an_ordinary_one(missing, kernel, monkeypatch):
    if missing == "how it is called":
        kernel.version = Other
    elif missing == "the stream":
        monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    else:
        kernel.attributes = tuple(name for name in kernel.attributes if name != missing)
    launch, x = BoundKernel(kernel, {"C": 16}), torch.zeros(8)
    for _ in range(3):
        launch((1,), (x, x), (5,))
    assert kernel.compiled == [((1,), (x, x, 5), {"C": 16})] * 3
    assert kernel.ran == []


def test_a_launch_happens_on_the_device_of_its_tensors(kernel, monkeypatch):
    current, entered = ["another"], []

    class Device:
        def __init__(self, index):
            entered.append(index)

        def __enter__(self):
            current.append(-1)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    launch, x = BoundKernel(kernel, {"C": 16}), torch.zeros(8)
    launch((1,), (x, x), (5,))
    launch((1,), (x[1:], x), (5,))  # at an odd address
    assert entered == [-1, -1]
    assert len(kernel.compiled) == 2
    assert current == ["another"]


def test_no_kernel_is_compiled_for_the_value_of_a_number(monkeypatch):
    """Triton would compile 1 and multiples of 16 apart; a launch by address does not ask."""
    launched = {}

    def note(self, grid, tensors, numbers=()):
        first = len(tensors)
        names = self.kernel.arg_names[first : first + len(numbers)]
        launched[self.kernel.fn.__name__] = (self.kernel.fn, dict(zip(names, numbers, strict=True)))
        self.kernel[grid](*tensors, *numbers, **self.settings)

    monkeypatch.setattr(BoundKernel, "__call__", note)
    config = MemoryConfig(channels=16, grid=(2,), chunk_size=2, backend="triton")
    layer = MemoryResidual(TensorMemory(8, config)).to(HERE)
    x = torch.randn(1, 5, 8, device=HERE, requires_grad=True)
    (layer(x[:, :4])[0].sum() + layer(x)[0].sum()).backward()
    with torch.no_grad():
        _, state = layer(x[:, :1])
        layer(x[:, :1], state)
        layer(x)
    assert {"forward_kernel", "backward_kernel", "sums_kernel", "token_kernel"} <= set(launched)
    for name, (function, numbers) in launched.items():
        assert all(type(number) in (int, float) for number in numbers.values()), name
        listed = re.search(r"do_not_specialize=\[(.*?)\]", inspect.getsource(function), re.DOTALL)
        unspecialised = "" if listed is None else listed[1]
        for argument, number in numbers.items():
            assert isinstance(number, float) or f'"{argument}"' in unspecialised, (name, argument)


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
    launch, y = BoundKernel(kernel, {"C": 16}), torch.zeros(8)
    launch((1,), (torch.zeros(8), y), (5,))
    launch((1,), (x, y), (count,))
    assert len(kernel.compiled) == 2
    assert kernel.ran == []


def test_launches_alike_find_their_code_without_asking_for_types(kernel):
    launch, x, y = BoundKernel(kernel, {"C": 16}), torch.zeros(8), torch.zeros(8)
    for _ in range(3):
        with Alike((x,), torch.bfloat16):
            launch((3, 2), (x, y), (5,))
    assert len(kernel.compiled) == 1
    straight = (3, 2, 1, "stream", "code", "metadata", None, None, None)
    assert kernel.ran == [(*straight, x.data_ptr(), y.data_ptr(), 5, 16)] * 2
    low = x.half()
    with Alike((low,), torch.bfloat16):
        launch((3, 2), (low, y), (5,))
    with pytest.raises(KeyError), Alike((x,), torch.bfloat16):
        raise KeyError
    launch((3, 2), (x.double(), y), (5,))  # outside every launch asks
    assert len(kernel.compiled) == 3


def test_an_inner_alike_has_its_own_code_and_leaves_the_outer_one_as_it_was(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    launch = BoundKernel(kernel, {"C": 16})
    with Alike((x,)):
        launch((1,), (x, y), (5,))
        with Alike((x[1:],)):  # an odd address: every launch asks
            launch((1,), (x.double(), y), (5,))
        assert len(kernel.compiled) == 2
        launch((1,), (x, y), (5,))
    assert len(kernel.compiled) == 2
    assert len(kernel.ran) == 1


def test_what_is_unusual_is_alike_to_nothing(kernel, monkeypatch):
    x = torch.zeros(8)
    assert Alike((x, x), "a choice").kind is not None
    assert Alike((x, x[1:])).kind is None
    assert Alike((x,), None).kind is None
    assert Alike((torch.empty(1, device="meta").expand(2**31),)).kind is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        assert Alike((x,)).kind is None
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    assert Alike((x,)).kind is None


def test_threads_that_ask_at_once_get_numbers_of_their_own():
    x, found = torch.zeros(8), []

    class Choice:
        def __hash__(self):  # while a thread asks, another one does
            if not found:
                found.append(Alike((x,), "another").kind)
            return 0

    assert Alike((x,), Choice()).kind != found[0]


def test_the_same_constants_give_the_same_launch(kernel):
    assert bind(kernel, C=16) is bind(kernel, C=16)
    assert bind(kernel, C=16) is not bind(kernel, C=32)


def shape(B: int, C: int, grid: tuple[int, ...], products: torch.dtype) -> Shape:
    device = torch.device("cuda", 0)
    return Shape(device, B, 4, 1, 1, C, grid, True, True, False, False, products, True)


def test_what_no_kernel_serves_is_refused_with_its_reason():
    def reason(*state: int, dtype: torch.dtype = torch.float32) -> str | None:
        return plan.why_not(state, HERE, dtype)

    assert reason(1, 16, 16, 16, 16) is None
    assert reason(1, 128, 4) is None
    assert reason(1, 16, 16, 16, 17) == "it serves up to 4096 voxels, got 4352"
    assert reason(1, 129, 4) == "it serves up to 128 channels, got 129"
    assert reason(1, 16, 2, 2, 2, 2) == "it serves 1 to 3 grid axes, got 4"
    wide = "it computes in float32 or bfloat16, got torch.float64"
    assert reason(1, 16, 4, dtype=torch.float64) == wide
    for C in (8, 24):
        read = plan.why_not_read(torch.empty(1, C, 4, device=HERE))
        assert read == f"it reads a power of two of channels, at least 16, got {C}"


@pytest.mark.parametrize("C", [16, 32, 64, 128])
@pytest.mark.parametrize("grid", [(3,), (6, 6, 6), (8, 8, 8), (16, 16, 16)])
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float32])
def test_programs_that_wait_for_each_other_are_resident_and_own_every_voxel(
    C, grid, products, monkeypatch
):
    properties = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(plan, "INTERPRETED", False)
    tables = (plan.FORWARD_SHARE, plan.BACKWARD_SHARE)
    for B, share in itertools.product((1, 5, 16, 32, 33, 64, 128, 300), tables):
        asked = shape(B, C, grid, products)
        rows = layout(asked, share)
        constants, warps = rows.constants, rows.options["num_warps"]
        assert constants["PARTS"] == rows.parts
        assert rows.parts * constants["TILES"] * constants["BLOCK_V"] >= asked.V
        assert constants["BLOCK_V"] * C // (32 * warps) <= 32  # values a thread holds
        if rows.parts > 1:
            assert rows.options["launch_cooperative_grid"]
            together = -(-B * rows.parts // SMS)
            assert 255 * 32 * warps * together <= 65536  # registers of a multiprocessor
