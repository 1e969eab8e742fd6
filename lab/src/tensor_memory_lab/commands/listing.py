"""`tensor-memory list`: the recipes there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tensor_memory_lab.commands.arguments import describe
from tensor_memory_lab.recipes import EXPECTED, load_recipes


def list_command(arguments: Sequence[str]) -> int:
    """Print every recipe with what it is for and, where it says so, what it takes."""
    argparse.ArgumentParser(
        prog="tensor-memory list",
        description="The recipes that `tensor-memory run` and `sweep` take.",
    ).parse_args(arguments)
    recipes = load_recipes()
    width = max((len(name) for name in recipes), default=0)
    for name in sorted(recipes):
        first = (describe(recipes[name]).splitlines() or [""])[0]
        expected = f" ({EXPECTED[name]})" if name in EXPECTED else ""
        print(f"{name:<{width}}  {first}{expected}".rstrip())
    return 0
