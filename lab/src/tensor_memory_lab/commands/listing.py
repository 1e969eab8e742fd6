"""`tensor-memory-lab list`: the recipes there are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tensor_memory_lab.recipes import load_recipes
from tensor_memory_lab.terminal import print_table


def list_command(arguments: Sequence[str]) -> int:
    """Print every recipe with what it is for and what a run takes."""
    argparse.ArgumentParser(
        prog="tensor-memory-lab list",
        description="The recipes that `tensor-memory-lab run` and `sweep` take.",
    ).parse_args(arguments)
    print_table(
        [
            {"recipe": r.name, "what it trains": r.summary, "a run takes": r.expected}
            for r in load_recipes().values()
        ]
    )
    return 0
