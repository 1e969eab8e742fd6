"""The lab's command line: one subcommand per job, each imported when it is asked for.

tensor-memory-lab list | run RECIPE ... | sweep RECIPE ... | report PATH ...
tensor-memory-lab generate RUN_FOLDER ... | positions RUN_FOLDER ... | bench ...
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from tensor_memory.cli import guarded

COMMANDS = {
    "list": ("the recipes there are", "commands.listing", "list_command"),
    "run": ("train one model by a recipe", "commands.run", "run_command"),
    "sweep": ("train a grid of models, several at once", "commands.sweep", "sweep_command"),
    "report": ("tables and plots of what runs have left", "commands.report", "report_command"),
    "generate": ("text from a trained language model", "commands.generate", "generate_command"),
    "positions": ("loss against position", "commands.positions", "positions_command"),
    "bench": ("timings behind a correctness check", "bench", "main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        for name, (purpose, _, _) in COMMANDS.items():
            print(f"tensor-memory-lab {name:<10} {purpose}")
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    _, module, function = COMMANDS[arguments[0]]
    command = getattr(importlib.import_module(f"tensor_memory_lab.{module}"), function)
    return guarded(lambda: command(arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
