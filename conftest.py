"""What every test runs under: one thread per worker, no deadlines, a known seed."""

import functools
import gc
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

collect_ignore_glob = [
    "conftest.py", "*/conftest.py",  # one name for several modules, no doctests
    "*/compile_kernels.py",  # a program that imports triton
]  # fmt: skip

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores Ctrl-C for what it runs in the background, and processes that tests start
    # and interrupt would inherit that; a handler they do not.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it hands tests to the workers, which wait until it has imported all it imports
    import torch
    from hypothesis import HealthCheck, settings

    if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported
    torch.set_num_threads(1)  # the suite runs on several workers; more threads only contend
    settings.register_profile(
        "suite",
        deadline=None,  # a shared machine makes timing a coin toss
        derandomize=True,
        database=None,
        max_examples=10 if "not exhaustive" in config.option.markexpr else 30,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("suite")  # tests that need more take a multiple of its examples


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random state, and multiplies with the same library."""
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would note for three devices where it was called from, in a millisecond
        torch.default_generator.manual_seed(0)
    # On a CPU without bf16, the first product in bf16 turns oneDNN off for all that follow.
    torch.backends.mkldnn.enabled = True
    return 0


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN on a CPU, so that what nobody has written shows."""
    import torch

    on_cpu = not torch.cuda.is_available()  # cuBLAS would want settings of its own
    torch.use_deterministic_algorithms(on_cpu)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert not on_cpu or torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


frozen_modules = 0


def pytest_collection_finish() -> None:
    quicken_interpreter()
    freeze_imports()


def pytest_runtest_teardown() -> None:
    if len(sys.modules) > frozen_modules + 100:  # a compiler was imported, or a host
        freeze_imports()


def freeze_imports() -> None:
    """No collection of garbage looks through what was imported: every run of a test begins one."""
    global frozen_modules
    gc.collect()
    gc.freeze()
    frozen_modules = len(sys.modules)


def quicken_interpreter() -> None:
    """Let Triton's interpreter prepare its language once per launch, not at every call in a kernel.

    Each function that a kernel calls goes through all members of the language again, and each
    value through a table of types built anew. Nor let it check every sum of places for 32 bits:
    these scans count to little, and a test of its own looks at the addresses of a large one.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    used = {"_patch_attr", "_patch_builtin", "_patch_lang", "_LangPatchScope", "_get_np_dtype"}
    if not used | {"interpreter_builder"} <= vars(interpreter).keys():
        return  # a version of Triton that goes about it in another way
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    language, is_builtin = interpreter.tl, interpreter.tl.core.is_builtin
    patch_attr, patch_language = interpreter._patch_attr, interpreter._patch_lang
    find_type, types = interpreter._get_np_dtype, {}

    def numpy_type(kind: Any) -> object:
        name = kind.scalar.name
        if name not in types:
            types[name] = find_type(kind.scalar)
        return types[name]

    @functools.cache
    def builtins(package: object) -> list[str]:  # at first sight, before any of them is replaced
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: object, *how: object) -> None:
        for name in builtins(package):
            member = getattr(package, name)
            if is_builtin(member):
                patch_attr(package, name, member, *how)

    @functools.cache
    def languages(function: Callable[..., object]) -> list[Any]:
        values = function.__globals__.values()
        return [value for value in values if value is language or value is language.core]

    def patch_once(function: Callable[..., object]) -> object:
        if any(is_builtin(found.load) for found in languages(function)):
            return patch_language(function)
        return interpreter._LangPatchScope()  # the launch that this call is part of has done it

    interpreter._get_np_dtype = numpy_type
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_once
    quicken_types(interpreter)


def quicken_types(interpreter: Any) -> None:
    """Let the interpreter work out each shape once: for every value, it takes most of its time."""
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    broadcast = semantic.broadcast_impl_value
    of_types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    of_values: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        if sizes not in of_types:
            make_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def init_value(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_values:
            make_value(self, handle, type)
            of_values[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_values[sizes]

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = (value.type.shape if value.type.is_block() else None for value in (lhs, rhs))
        return (lhs, rhs) if one is other else broadcast(self, lhs, rhs)

    core.block_type.__init__ = init_type
    core.tensor.__init__ = init_value
    semantic.broadcast_impl_value = broadcast_once


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extensions complain of what is left when the interpreter ends


@pytest.hookimpl(tryfirst=True)  # before exhaustive tests are taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    sample_crosses(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and none is available here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def sample_crosses(items: list[pytest.Item]) -> None:
    """Of a cross of parameters, leave cases that show every value once; the others are exhaustive.

    Cases that show the most new values are taken first: of 9 x 3 values, 9 cases.
    """
    crosses: dict[str, list[pytest.Item]] = {}
    for item in items:
        marked = map(item.get_closest_marker, ("exhaustive", "gpu", "whole_cross"))
        if hasattr(item, "callspec") and not any(marked):
            crosses.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in crosses.values():
        values = [set(enumerate(case.callspec._idlist)) for case in cases]  # pyright: ignore
        shown: set[tuple[int, str]] = set()
        left = set(range(len(cases)))
        for new in range(len(values[0]), 0, -1):
            for n, case in enumerate(values):
                if len(case - shown) >= new:
                    shown |= case
                    left.discard(n)
        for n in left:
            cases[n].add_marker(pytest.mark.exhaustive)
