"""How values, measures and methods are written in tables, figures and on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

PERCENT = ("accuracy", "top1", "top5")
"""Measures that are parts of a whole and shown in percent."""

METHODS = (
    "base", "joint", "frames", "base-sln", "wide", "local", "wide-local", "linear", "linear-local",
    "conv-local", "attention", "full", "window", "window+", "gla", "deltanet", "gated-deltanet",
    "kda", "mamba2", "rwkv7", "xl", "registers", "slots", "slots-matched", "recurrent-slots",
    "tensor", "tensor-open", "tensor-long", "spatial", "tensor-local", "tensor-xl", "tensor-depth",
    "place", "place-delta", "place-given", "place-given-delta", "place-offset", "place-local",
)  # fmt: skip
"""The order of methods in tables and figures; others come after."""

FUTURE = "sees the future"
"""What stands beside the name of a method that is not causal."""


def measure_text(value: float | None, name: str = "") -> str:
    """A measure with as many digits as it can bear; "diverged" where it is not a number.

    >>> measure_text(0.94812, "accuracy"), measure_text(0.94812), measure_text(100.071)
    ('94.8 %', '0.9481', '100.07')
    >>> measure_text(None)
    'diverged'
    """
    if value is None or not math.isfinite(value):
        return "diverged"
    if is_percent(name):
        return f"{100 * value:.1f} %"
    return f"{value:.{decimals(value)}f}"


def split_text(measures: Mapping[str, float | None], name: str) -> str:
    """A measure of a split; "not measured" where the split had no case of it.

    >>> split_text({"psnr": None, "loss": 0.5}, "psnr"), split_text({"psnr": None}, "psnr")
    ('not measured', 'diverged')
    """
    if not_measured(measures, name):
        return "not measured"
    return measure_text(measures.get(name), name)


def not_measured(measures: Mapping[str, float | None], name: str) -> bool:
    """Whether a split had no case of a measure: it has no value, and the loss is a number."""
    value, loss = measures.get(name), measures.get("loss")
    return (value is None or math.isnan(value)) and loss is not None and math.isfinite(loss)


def is_percent(name: str) -> bool:
    """Whether a measure, or a column of it, is shown in percent.

    >>> is_percent("accuracy"), is_percent("off.test.accuracy_far"), is_percent("test.accuracy@16")
    (True, True, True)
    """
    return re.split("[_@]", name.rpartition(".")[2])[0] in PERCENT


def decimals(value: float) -> int:
    """How many decimals a number of this size is shown with."""
    return 4 if abs(value) < 2 else 3 if abs(value) < 10 else 2


def bound_name(record: Mapping[str, Any]) -> str:
    """What the best that can be scored is called.

    >>> bound_name({"higher_is_better": True}), bound_name({"higher_is_better": False})
    ('ceiling', 'floor')
    """
    return "ceiling" if record.get("higher_is_better", True) else "floor"


def bytes_text(count: float) -> str:
    """Bytes in the largest unit that leaves at least one of it.

    >>> bytes_text(0), bytes_text(768), bytes_text(27648), bytes_text(3 * 2**20)
    ('0 B', '768 B', '27.0 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    power = next((n for n in (1, 2) if count < 1024 ** (n + 1)), 3)
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB"


def value_text(value: Any) -> str:
    """A config's value: tuples as 8×8×8, floats short.

    >>> [value_text(value) for value in ((8, 8, 8), 0.0003, None, True, 1000)]
    ['8×8×8', '0.0003', 'none', 'yes', '1000']
    """
    if isinstance(value, tuple | list):
        return "×".join(value_text(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def field_text(name: str, value: Any) -> str:
    """The value of a field: layers as a sum, since 0×1 would read as a size.

    >>> field_text("model.memory_layers", (0, 1)), field_text("model.memory.grid", (4, 4))
    ('0+1', '4×4')
    """
    if "layers" in name and isinstance(value, tuple | list):
        return "+".join(map(str, value))
    return value_text(value)


def variant_text(variant: Mapping[str, Any]) -> str:
    """How a method departs from the recipe's.

    >>> variant_text({"model.memory.grid": [4, 4], "model.memory_layers": [0, 1]})
    'grid=4×4, memory_layers=0+1'
    """
    return ", ".join(f"{short_name(n)}={field_text(n, value)}" for n, value in variant.items())


def label_text(record: Mapping[str, Any]) -> str:
    """A method with what tells it from the recipe's own.

    >>> label_text({"method": "tensor", "variant": {"model.memory.forget_bias": 5.0}})
    'tensor (forget_bias=5)'
    """
    parts = [variant_text(record.get("variant", {}))]
    parts += [FUTURE] if record.get("labels", {}).get("non_causal") else []
    told = ", ".join(part for part in parts if part)
    return f"{record.get('method', '')} ({told})" if told else record.get("method", "")


def short_name(field: str) -> str:
    """The last part of a field's name.

    >>> short_name("model.memory.grid")
    'grid'
    """
    return field.rpartition(".")[2]


def order_key(text: str) -> tuple[int, float, str]:
    """Sorts numbers as numbers and methods as `METHODS` has them; the rest stays as it comes."""
    try:
        return (0, float(text), "")
    except ValueError:
        method = text.partition(" (")[0]
        return (1, METHODS.index(method), text) if method in METHODS else (2, 0, "")
