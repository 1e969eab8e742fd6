"""Values of configs that must be one of a few, or stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Iterable
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


def check_unread(
    config: Any, group: str, method: str, names: Iterable[str], usual: Any = None
) -> None:
    """Raise unless fields that a method sets itself or does not use have their defaults.

    They would change a run's name and label, and not its model. `group` is what the config is
    called on a command line: "model", "model.memory" or "model.place". `usual` has the defaults
    where they are not those of the config's class.
    """
    for name in names:
        value = getattr(config, name)
        default = getattr(type(config) if usual is None else usual, name)
        if value != default:
            raise ValueError(
                f"{group}.{name}: expected the default, {default}, for {method}, which does not "
                f"read it, got {value}; keep the default or take another method"
            )


@functools.cache
def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
