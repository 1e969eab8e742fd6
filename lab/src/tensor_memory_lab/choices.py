"""Values of configs that must be one of a few."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args, get_origin, get_type_hints


def check_choices(config: Any, group: str = "") -> None:
    """Raise unless every field of a dataclass that is a `Literal` has one of its values.

    `group` is what the config is called on a command line: "task", "model" or "optimizer".
    """
    for name, choices in _choices(type(config)).items():
        value = getattr(config, name)
        if value not in choices:
            where = f"{group}.{name}" if group else name
            expected = ", ".join(map(str, choices))
            raise ValueError(f"{where}: expected one of {expected}, got {value!r}")


@functools.cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
