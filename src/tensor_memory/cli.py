"""The command line. Each command is imported when it runs, so that help is shown at once.

tensor-memory doctor
tensor-memory leak-check package.module:factory
tensor-memory inspect RECORDING
tensor-memory watch RECORDING
"""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import tensor_memory

MISTAKES = (ValueError, TypeError, OSError, ImportError)
"""What a user can cause and repair: told without a traceback, exit status 2."""

FIGURES = (
    "slices",
    "projection",
    "mask",
    "trajectories",
    "gates",
    "occupancy",
    "saturation",
    "use",
    "state-norm",
)
"""What --only may name, written out here because the module that draws them loads torch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status. What the user got wrong is told on stderr, status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # σ is no reason to end, in ASCII it is \u03c3
        sys.stdout.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments or ["--help"])
    return guarded(lambda: _run(options))


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
    doctor.set_defaults(run="doctor:run_doctor")

    leak_check = commands.add_parser(
        "leak-check",
        help="does a model look ahead?",
        description="Run find_leak on a model of yours. Exit status 1 where it leaks, 0 where it "
        "does not, 2 where that could not be shown (a crash, a model that ignores its input).",
    )
    _add_leak_check_options(leak_check)
    leak_check.set_defaults(run="leaks.command:run_leak_check")

    inspect = commands.add_parser(
        "inspect",
        help="look inside a memory: a table, figures, a page for a browser",
        description="Show what a recording of a memory holds, draw its figures, and write a page "
        "that opens in a browser from disk.",
    )
    _add_inspect_options(inspect)
    inspect.set_defaults(run="inspect.command:run_inspect")

    watch = commands.add_parser(
        "watch",
        help="follow a recording in a browser while it is made",
        description="Serve a page on this machine alone that follows the file of "
        "record(model, live=FILE). Its address has a random token.",
    )
    watch.add_argument(
        "recording",
        type=Path,
        metavar="RECORDING",
        help="the file that record(live=...) writes; it may not exist yet",
    )
    watch.add_argument(
        "--port", type=_port, default=0, help="of the page (default: any that is free)"
    )
    watch.set_defaults(run="inspect.watch:run_watch")
    return parser


def _run(options: argparse.Namespace) -> int:
    module, _, function = options.run.partition(":")
    return getattr(import_module(f"tensor_memory.{module}"), function)(options)


def _add_leak_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "factory",
        metavar="package.module:factory",
        help="a function without arguments that returns the model, or (model, example); "
        "the current folder is on the path",
    )
    parser.add_argument("--batch", type=int, default=2, help="rows of the example (default 2)")
    parser.add_argument("--length", type=int, default=32, help="its tokens (default 32)")
    parser.add_argument("--vocab-size", type=int, help="draw ids below this as the example")
    parser.add_argument("--dim", type=int, help="draw embeddings of this width as the example")
    parser.add_argument("--seed", type=int, default=0, help="of the example and of the changes")


def _add_inspect_options(parser: argparse.ArgumentParser) -> None:
    """Those that were not given are None."""
    parser.add_argument(
        "recording", type=Path, metavar="RECORDING", help="a file that recording.save() wrote"
    )
    figures = parser.add_argument_group("figures")
    figures.add_argument("--figures", type=Path, metavar="FOLDER", help="draw every figure there")
    figures.add_argument(
        "--only",
        action="append",
        choices=FIGURES,
        metavar="NAME",
        help=f"draw this figure alone, or several by several --only: {', '.join(FIGURES)}",
    )
    figures.add_argument("--row", type=int, help="the row they show (default 0)")
    figures.add_argument(
        "--layer", action="append", help="number or name of a layer to draw (default: all)"
    )
    figures.add_argument(
        "--chunks", type=_chunks, metavar="START:STOP", help="chunks to draw (default: all)"
    )
    figures.add_argument("--theme", choices=["light", "dark", "both"], help="default light")
    page = parser.add_argument_group("page for a browser")
    page.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    page.add_argument(
        "--rows", type=_positive, metavar="N", help="show the first so many rows (default: all)"
    )
    page.add_argument(
        "--every", type=_positive, metavar="N", help="show one recorded chunk in N (default 1)"
    )
    page.add_argument(
        "--limit-mb", type=float, metavar="MB", help="refuse a larger page (default 32)"
    )


def _chunks(text: str) -> slice:
    start, colon, stop = text.partition(":")
    if not colon or not all(part == "" or part.lstrip("-").isdecimal() for part in (start, stop)):
        raise argparse.ArgumentTypeError(f"expected START:STOP, such as 0:12, got {text!r}")
    return slice(*(int(part) if part else None for part in (start, stop)))


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


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
