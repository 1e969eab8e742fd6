"""The command line: one subcommand per job, each a function of its arguments.

tensor-memory doctor
tensor-memory leak-check package.module:factory
tensor-memory inspect RECORDING
"""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import tensor_memory
from tensor_memory.doctor import run_doctor
from tensor_memory.inspect.command import add_options, run_inspect
from tensor_memory.leaks.command import run_leak_check

MISTAKES = (ValueError, TypeError, OSError, ImportError)
"""What a user can cause and repair: told without a traceback, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status. What the user got wrong is told on stderr, status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # σ is no reason to end, in ASCII it is \u03c3
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    return guarded(lambda: options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory", description="A fixed-size, recurrent, spatial memory."
    )
    parser.add_argument("--version", action="version", version=tensor_memory.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="command")

    doctor = commands.add_parser(
        "doctor",
        help="versions, devices, and which backends can serve here",
        description="Show versions and devices, and check every backend that can serve here "
        "against the reference. Exit status 1 where one disagrees.",
    )
    doctor.set_defaults(run=lambda options: run_doctor())

    leak = commands.add_parser(
        "leak-check",
        help="does a model look ahead?",
        description="Run find_leak on a model of yours. Exit status 1 where it leaks, 0 where it "
        "does not, 2 where that could not be shown (a crash, a model that ignores its input).",
    )
    leak.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns the model, or (model, example); "
        "the current folder is on the path",
    )
    leak.add_argument("--batch", type=int, default=2, help="rows of the example (default 2)")
    leak.add_argument("--length", type=int, default=32, help="its tokens (default 32)")
    leak.add_argument("--vocab-size", type=int, help="draw ids below this as the example")
    leak.add_argument("--dim", type=int, help="draw embeddings of this width as the example")
    leak.add_argument("--seed", type=int, default=0, help="of the example and of the changes")
    leak.set_defaults(run=run_leak_check)

    inspect = commands.add_parser(
        "inspect",
        help="look inside a memory: a table, figures, a page for a browser",
        description="Show what a recording of a memory holds, draw its figures, and write a page "
        "that opens in a browser from disk.",
    )
    add_options(inspect)
    inspect.set_defaults(run=run_inspect)
    return parser


def guarded(run: Callable[[], int]) -> int:
    """Run a command; what the user got wrong is told without a traceback, exit status 2."""
    try:
        status = run()
        sys.stdout.flush()  # a reader that has gone shows here, and not as Python ends
        return status
    except MISTAKES as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            return 141  # what a shell makes of SIGPIPE
        if not _is_told(error):
            traceback.print_exception(error)
        print(f"tensor-memory: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tensor-memory: interrupted", file=sys.stderr)
        return 130


def _is_told(error: BaseException) -> bool:
    """Whether a message is enough: it was raised here, or says what is with a file or a module.

    What Python or a library says of code of the user's own says nothing without its place.
    """
    if isinstance(error, OSError | ImportError):
        return True
    *_, last = traceback.extract_tb(error.__traceback__)
    ours = Path(last.filename).is_relative_to(Path(tensor_memory.__file__).parent)
    return ours and (last.line or "").startswith("raise")


def _reader_has_gone() -> bool:
    """Whether nobody reads stdout any more, as after `| head`; what is left then goes nowhere."""
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # no file of the system, as under a test
        return False
    asked = select.poll()
    asked.register(stdout, 0)  # errors are told unasked
    gone = any(event & select.POLLERR for _, event in asked.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return gone


if __name__ == "__main__":
    sys.exit(main())
