"""The tensors of a recurrence by name: how they are checked and prepared, for every recurrence.

A recurrence takes a named tuple of tensors, None for those left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of tokens."""


def checked_device(method: str, device: Any) -> torch.device:
    """The device that an argument names."""
    if isinstance(device, torch.device):
        return device
    if not isinstance(device, str | int) or isinstance(device, bool):
        raise TypeError(
            f"{method}: expected a device, got {device!r:.80}; write it as 'cpu' or 'cuda:0'"
        )
    try:
        return torch.device(device)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{method}: expected a device that torch knows, got {device!r:.80}; "
            "write it as 'cpu' or 'cuda:0'"
        ) from error


def checked_float(method: str, dtype: Any) -> torch.dtype:
    """A type that tokens can have."""
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(
            f"{method}: expected the tokens' float type, got {dtype!r:.80}; pass torch.float16, "
            "bfloat16, float32 or float64, the type of the embedded tokens"
        )
    return dtype


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def require_tensors(
    function: str, tensors: Mapping[str, Any], letters: Mapping[str, str], optional: Iterable[str]
) -> None:
    """Raise unless all are dense tensors, or None where they are optional."""
    for name, tensor in tensors.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor) or not is_dense(tensor):
            got = "a sparse or nested one" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"{function}: expected {name} as a tensor of shape {letters[name]}, got {got}; "
                "convert it with torch.as_tensor()"
            )


def check_tensors(
    function: str,
    tensors: Mapping[str, Tensor | None],
    shapes: Mapping[str, tuple[str, Sequence[int]]],
    *,
    masks: Iterable[str],
    beside: tuple[str, ...],
) -> None:
    """Raise unless all tensors have the shapes, the types and the device that go together.

    Args:
        function: the public function, named in the errors.
        tensors: by name; None is not checked.
        shapes: the shape of each in letters, such as "(B, 2C)", and in numbers.
        masks: names of the tensors that must be bool; the others must be floats.
        beside: names of the tensors that decide the numbers; the first decides the device.
    """
    first = tensors[beside[0]]
    assert first is not None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        letters, expected = shapes[name]
        if tensor.shape != expected:
            others = " and ".join(f"{n} {tuple(tensors[n].shape)}" for n in beside)  # type: ignore
            raise ValueError(
                f"{function}: expected {name} of shape {letters} = {tuple(expected)} to go with "
                f"{others}, got {tuple(tensor.shape)}; the letters stand for the same size in all"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{function}: expected {name} on {first.device} like {beside[0]}, "
                f"got {tensor.device}; move it with .to()"
            )
        if name in masks:
            if tensor.dtype != torch.bool:
                raise TypeError(
                    f"{function}: expected {name} of type bool, got {tensor.dtype}; "
                    "convert it with .bool()"
                )
        elif not tensor.is_floating_point():
            raise TypeError(
                f"{function}: expected {name} of a float type, got {tensor.dtype}; "
                "convert it with .float()"
            )


def common_dtype(tensors: Iterable[Tensor | None]) -> torch.dtype:
    """The type to compute in: that of the widest float tensor, at least float32."""
    types = {t.dtype for t in tensors if t is not None and t.is_floating_point()}
    return functools.reduce(torch.promote_types, types, torch.float32)


def prepared(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """The tensor contiguous, and in this type where it holds floats.

    Asking first is faster than a call of `.to()` that has nothing to do.
    """
    if tensor is None:
        return None
    if tensor.dtype != dtype and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def products_dtype(x: Tensor) -> torch.dtype:
    """The type in which a matrix product of x runs here: autocast's, or x's own."""
    device = x.device  # asking for it takes time
    return torch.get_autocast_dtype(device.type) if is_autocast(device) else x.dtype


def is_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device. The meta device, which computes nothing, has none."""
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)
