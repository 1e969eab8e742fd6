"""The lab's command line: one subcommand per job, each imported when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PROGRAM = "tensor-memory-lab"

COMMANDS = {
    "list": ("the recipes there are", "commands.listing:list_command"),
    "run": ("train one model by a recipe", "commands.run:run_command"),
    "sweep": ("train a grid of models, here or on a cluster", "commands.sweep:sweep_command"),
    "report": ("tables and figures of what runs have left", "commands.report:report_command"),
    "tables": ("the tables of the documentation, from records", "commands.tables:tables_command"),
    "inspect": ("look inside a trained memory", "commands.inspect:inspect_command"),
    "generate": ("text from a trained language model", "commands.generate:generate_command"),
    "positions": ("loss against position in a text", "commands.positions:positions_command"),
    "bench": ("timings, each behind a check of correctness", "bench:main"),
}  # fmt: skip

MISTAKES = (ValueError, TypeError, OSError, ImportError)
"""What a user can cause and repair: told without a traceback, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):  # closed, as some schedulers start a command
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # an ASCII terminal gets \u03c3 for σ, no error
        sys.stdout.reconfigure(errors="backslashreplace")
    return guarded(lambda: _command(arguments))


def _command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {PROGRAM} COMMAND ...\n\ncommands, each with a --help of its own:\n")
        for name, (purpose, _) in COMMANDS.items():
            print(f"  {name:<10} {purpose}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"expected a command, got {name!r}; {hint}`{PROGRAM} --help` lists all")
    module, _, function = COMMANDS[name][1].partition(":")
    command = getattr(importlib.import_module(f"tensor_memory_lab.{module}"), function)
    if rest or name in ("list", "tables"):
        return command(rest)
    with suppress(SystemExit):
        command(["--help"])
    return 2  # nothing was done, and no script may take it for a success


def guarded(run: Callable[[], int]) -> int:
    """Run a command. A mistake of the user is told without a traceback, exit status 2."""
    try:
        status = run()
        sys.stdout.flush()  # a reader that has gone is noticed here, not while Python ends
        return status
    except MISTAKES as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            return 141  # what a shell reports for SIGPIPE
        if not _says_enough(error):
            traceback.print_exception(error)
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130


def _says_enough(error: BaseException) -> bool:
    """Whether the message is enough: this package or the library raised it, or it names a file or
    a module. What Python says about code of the user's own needs its place."""
    if isinstance(error, OSError | ImportError):
        return True
    *_, last = traceback.extract_tb(error.__traceback__)
    packages = {"tensor_memory", "tensor_memory_lab"}
    return not packages.isdisjoint(Path(last.filename).parts) and bool(
        (last.line or "").startswith("raise")
    )


def _reader_has_gone() -> bool:
    """Whether nobody reads stdout any more, as after `| head`. What is left then goes nowhere."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # stdout is no file of the system, as under a test
        return False
    asked = select.poll()
    asked.register(stdout, 0)  # errors are reported unasked
    gone = any(event & select.POLLERR for _, event in asked.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return gone


if __name__ == "__main__":
    sys.exit(main())
