"""The command line: one subcommand per job, each a function of its arguments.

tensor-memory doctor
tensor-memory leak-check package.module:factory
tensor-memory bench ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import tensor_memory
from tensor_memory.doctor import run_doctor
from tensor_memory.leak_check import run_leak_check

MISTAKES = (ValueError, TypeError, FileNotFoundError, ImportError)
"""What a user can cause and repair: told without a traceback, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status. What the user got wrong is told on stderr, status 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # it has options of its own, --help among them
        return _guarded(lambda: _bench(arguments[1:]))
    options = _parser().parse_args(arguments)
    return _guarded(lambda: options.run(options))


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

    commands.add_parser("bench", help="timings behind a correctness check", add_help=False)
    return parser


def _bench(arguments: list[str]) -> int:
    from tensor_memory.bench import main as run_bench

    return run_bench(arguments)


def _guarded(run: Callable[[], int]) -> int:
    try:
        return run()
    except MISTAKES as error:
        print(f"tensor-memory: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
