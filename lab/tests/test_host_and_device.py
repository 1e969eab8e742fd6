"""Steps and measures make nothing on the host and ask the device nothing.

A CUDA graph holds a whole step or measurement only then. No GPU is needed to see it: a number made
into a tensor, or a tensor into a number, goes through a function of torch that can be watched.
"""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tensor_memory import MemoryConfig
from tensor_memory_lab.models.image import ImageModelConfig
from tensor_memory_lab.models.language import LanguageMethod, LanguageModelConfig
from tensor_memory_lab.models.toy import ToyModelConfig
from tensor_memory_lab.models.video import VideoModelConfig
from tensor_memory_lab.tasks.binding import BindingConfig
from tensor_memory_lab.tasks.masked_images import MaskedImagesConfig
from tensor_memory_lab.tasks.video import VideoTaskConfig
from tiny_text import text_task

MEMORY = MemoryConfig(channels=4, grid=(3, 3, 3), chunk_size=4)
PASSAGES = (
    torch.tensor,
    torch.as_tensor,
    torch.from_numpy,
    torch.nonzero,
    torch.masked_select,
    torch.unique,
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.masked_select,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
)
"""What waits for a GPU, or sends it something from memory that is not pinned."""


class Watched(TorchFunctionMode):
    """Notes by name what passes between host and device."""

    def __init__(self):
        super().__init__()
        self.passages = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        by_mask = func is Tensor.__getitem__ and _is_mask(args[1])
        if func in PASSAGES or by_mask:
            self.passages.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _is_mask(index):
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def passages(task, config):
    """What a step and a measurement hand from host to device or back."""
    batch, model = task.batch("train", 0, 2), config.build(task).train()
    _, carry = model(batch)
    with Watched() as watched:
        outputs, _ = model(batch, carry) if task.carries else model(batch)
        task.loss(outputs, batch).backward()
        task.measure(outputs, batch)
    return watched.passages


@pytest.fixture(scope="module")
def vision_data():
    pytest.importorskip("av", reason="images and clips are written with av")
    import vision_data

    return vision_data


@pytest.fixture(scope="module")
def birds(tmp_path_factory, vision_data):
    return MaskedImagesConfig(**vision_data.tiny_birds(tmp_path_factory.mktemp("birds"))).build(0)


@pytest.fixture(scope="module")
def actions(tmp_path_factory, vision_data):
    folder, classes = tmp_path_factory.mktemp("actions"), vision_data.CLASSES[:2]
    return VideoTaskConfig(**vision_data.tiny_actions(folder, 4, classes=classes)).build(0)


def text(**options):
    return text_task(torch.arange(400, dtype=torch.int32) % 9, 9, length=12, **options)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("method", get_args(LanguageMethod))
def test_text_never_waits_for_the_host(method, carried):
    future = method == "tensor-depth"
    if future and carried:
        pytest.skip("what sees the future is never carried")
    model = LanguageModelConfig(
        method=method, dim=16, heads=2, layers=2, window=4, memory=MEMORY, slots=2, cache=3,
        segment=6 if carried else None, non_causal=future,
        positions="rotary" if method == "window+" else "learned",
    )  # fmt: skip
    assert passages(text(carried=carried, leak=future), model) == []


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_text_is_sent_without_waiting(split, carried):
    task = text(carried=carried)
    with Sendings() as sendings:
        task.batch(split, 1, 2)
    assert sendings.sent > 0
    assert sendings.waited == 0


def in_scopes(*methods):
    """Every method in one scope, and a memory in both: to the others they are the same."""
    cases = [(method, "layer") for method in methods] + [("spatial", "depth")]
    return pytest.mark.parametrize(("method", "scope"), cases)


@in_scopes("base", "local", "registers", "spatial", "wide")
def test_masked_images_never_wait_for_the_host(birds, method, scope):
    model = ImageModelConfig(
        dim=16, heads=2, layers=3, decoder_dim=8, decoder_heads=2, memory=MEMORY
    )
    assert passages(birds, replace(model, method=method, scope=scope)) == []


@in_scopes("joint", "frames", "registers", "spatial", "wide")
def test_clips_never_wait_for_the_host(actions, method, scope):
    model = VideoModelConfig(dim=16, heads=2, layers=2, memory=MEMORY)
    assert passages(actions, replace(model, method=method, scope=scope)) == []


def test_drawn_tasks_never_wait_for_the_host():
    model = ToyModelConfig(method="tensor", dim=16, heads=2, layers=1, memory=MEMORY)
    assert passages(BindingConfig(writes=4).build(0), model) == []


def test_passages_are_noticed():
    x = torch.arange(4)
    with Watched() as watched:
        torch.tensor(5)
        torch.full((), 5)
        x[x > 2]
        x[torch.tensor([0, 1])]
        assert x[0] == 0
    assert watched.passages == ["tensor", "__getitem__", "tensor", "__bool__"]


class Sendings(TorchFunctionMode):
    """Notes what is sent to a device such that the host waits for it."""

    def __init__(self):
        super().__init__()
        self.waited, self.sent = 0, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.to and any(isinstance(x, torch.device) for x in (*args, kwargs)):
            self.sent += 1
            self.waited += not kwargs.get("non_blocking", False)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", ["birds", "actions"])
def test_training_batches_are_sent_without_waiting(name, request):
    task = request.getfixturevalue(name)
    with Sendings() as sendings:
        task.batch("train", 3, 2)
    assert sendings.sent > 0
    assert sendings.waited == 0
