"""What every test runs under: one thread per worker, no deadlines, a known seed."""

import functools
import gc
import importlib.util
import inspect
import os
import signal
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["conftest.py", "*/conftest.py"]  # one name for several modules, no doctests

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

torch.set_num_threads(1)  # the suite runs on several workers; more threads only contend

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores Ctrl-C for what it runs in the background, and processes that tests start
    # and interrupt would inherit that; a handler they do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "suite",
    deadline=None,  # a shared machine makes timing a coin toss
    derandomize=True,
    database=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
    return 0


def pytest_collection_finish() -> None:
    """No collection of garbage looks through what was imported: every run of a test begins one."""
    quicken_interpreter()
    gc.collect()
    gc.freeze()


def quicken_interpreter() -> None:
    """Let Triton's interpreter look for its builtins once, not at every call within a kernel.

    It goes through all members of the language each time; which of them are builtins does not
    change. Nor let it check every sum of places for 32 bits: these scans count to little, and a
    test of its own looks at the addresses of a large one.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if not {"_patch_attr", "_patch_builtin", "interpreter_builder"} <= vars(interpreter).keys():
        return  # a version of Triton that goes about it in another way
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    is_builtin, patch = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @functools.cache
    def builtins(package: object) -> list[str]:  # at first sight, before any of them is replaced
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, *how: object) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                patch(package, name, member, *how)

    interpreter._patch_builtin = patch_builtin


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extensions complain of what is left when the interpreter ends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and none is available here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
