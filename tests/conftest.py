"""What every test runs under: one thread per worker, no deadlines, a known seed."""

import gc
import importlib.util
import os
import signal

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
    max_examples=25,
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
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extensions complain of what is left when the interpreter ends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and none is available here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
