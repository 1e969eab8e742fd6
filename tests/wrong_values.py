"""Values that are wrong almost everywhere, and what is right after all for an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_memory import (
    MemoryConfig,
    MemoryState,
    PlaceConfig,
    PlaceMemory,
    PlaceState,
    TensorMemory,
)

CHUNKS = MemoryConfig(channels=2, grid=(3, 2), chunk_size=3)
PLACES = PlaceConfig(channels=2, grid=(3, 2), heads=2)
DIM, ROWS, TOKENS = 3, 2, 5


def plain_values() -> list[Any]:
    """Anything but tensors."""
    numbers = [0, 1, -1, 2, 3, 7, 10**30, -(10**30), 10**400, 0.0, 1.0, 0.5, -0.5, 2.5, 1e30, 1e-30]
    numbers += [math.inf, -math.inf, math.nan, 1j, Fraction(1, 2), Decimal("1.5")]
    numbers += [np.int64(3), np.float32(0.5), np.bool_(True)]
    words = ["", "a", "chunk", "auto", "cpu", "meta", "nowhere", "cuda:-1", "3", b"", b"ab", "\0"]
    lists: list[Any] = [(), [], {}, set(), frozenset(), (1,), (2,), (2, 3), [2, 3, 4], (2,) * 5]
    lists += [(2.5, 3), ("a",), [None], [[1, 2], [3]], {"a": 1}, {1: 2}, range(3), range(0)]
    lists += [np.zeros(2), np.zeros((2, 5)), np.array("a"), [True, False], (math.nan, 1.0)]
    things = [None, True, False, ..., slice(3), object(), object, len, math, Exception("x")]
    things += [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.float8_e4m3fn]
    things += [torch.complex64, torch.device("cpu"), torch.device("meta"), torch.strided]
    things += [torch.Size([2, 3]), torch.Generator(), nn.Linear(2, 2), nn.Identity(), nn.Module]
    things += [MemoryConfig, CHUNKS, PLACES, MemoryConfig(), TensorMemory(DIM, CHUNKS)]
    things += [PlaceMemory(DIM, PLACES), MemoryState.zeros(CHUNKS, DIM, ROWS)]
    things += [MemoryState.zeros(CHUNKS, DIM, 3), MemoryState.zeros(MemoryConfig(), DIM, ROWS)]
    things += [PlaceState.zeros(PLACES, ROWS), PlaceState.zeros(PlaceConfig(), ROWS)]
    return [*numbers, *words, *lists, *things]


def tensors() -> list[Tensor]:
    """Shapes that almost fit, in every type, on two devices, in several layouts."""
    shapes = [(), (0,), (1,), (2,), (5,), (2, 3), (2, 5), (1, 5), (5, 2), (2, 4), (0, 5), (2, 0)]
    shapes += [(2, 5, 3), (1, 5, 3), (2, 5, 4), (5, 2, 3), (2, 5, 2), (2, 5, 3, 1), (2, 3, 3, 2)]
    shapes += [(2, 2, 3, 2), (2, 2, 3, 2, 2), (2, 5, 2, 2), (2, 1, 1, 1, 1, 1, 1, 1)]
    found = [torch.zeros(shape) for shape in shapes]
    for shape in ((), (2,), (2, 5), (2, 5, 3), (2, 2, 3, 2), (2, 2, 3, 2, 2), (2, 3, 3)):
        like = torch.zeros(shape)
        types = (torch.float64, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)
        found += [like.to(dtype) for dtype in types]
        found += [like.to(torch.complex64), like.to("meta"), like.to("meta", torch.bool)]
        if shape:
            found += [like.to_sparse(), like.bool().to_sparse()]
    found += [torch.full((2,), 7), torch.full((2,), -1), torch.full((2, 5, 3), math.nan)]
    found += [torch.tensor([0, 5]), torch.tensor([0, 9]), torch.tensor([0, 4, 2, 5])]
    found += [torch.zeros(shape).bool() for shape in ((2, 4), (5,), (2, 5, 1), (1, 5))]
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    found.append(torch.nested.nested_tensor(rows, layout=torch.jagged))
    return found


def is_int(least: float = -math.inf, most: float = math.inf) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and least <= v <= most


def is_number(least: float = -1e6, most: float = 1e6) -> Callable[[Any], bool]:
    def fits(v: Any) -> bool:
        return isinstance(v, int | float) and not isinstance(v, bool) and least <= v <= most

    return fits


def is_one_of(*allowed: str) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, str) and v in allowed


def is_bool(v: Any) -> bool:
    return isinstance(v, bool)


def is_type(*allowed: torch.dtype) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, torch.dtype) and v in allowed


is_float_type = is_type(torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_device(v: Any) -> bool:
    index = type(v) is int and torch.backends.cuda.is_built()  # a GPU's, if there is one
    return index or isinstance(v, torch.device) or (isinstance(v, str) and v in ("cpu", "meta"))


def is_grid(v: Any) -> bool:
    if not isinstance(v, list | tuple | range) or not 1 <= len(v) <= 4:
        return False
    return all(is_int(2)(size) for size in v)


def is_tensor(*shapes: tuple[int, ...], dtype: Any = torch.float32) -> Callable[[Any], bool]:
    """Dense, on the CPU, of a type and one of these shapes; -1 stands for any size."""

    def fits(v: Any) -> bool:
        if not isinstance(v, Tensor) or v.is_nested or v.layout != torch.strided or v.is_meta:
            return False
        types = dtype if isinstance(dtype, tuple) else (dtype,)
        return v.dtype in types and any(
            len(shape) == v.ndim
            and all(s in (-1, size) for s, size in zip(shape, v.shape, strict=True))
            for shape in shapes
        )

    return fits


def is_none(v: Any) -> bool:
    return v is None


def either(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: any(kind(v) for kind in kinds)


def never(v: Any) -> bool:
    return False
