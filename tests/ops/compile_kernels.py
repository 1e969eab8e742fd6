"""A program that compiles kernels for a GPU that is not there: compile_kernels.py RESULTS [all]

Triton's interpreter takes much that its compiler refuses. Here layers and scans run on a CPU, and
each launch compiles its kernel for Hopper in place of running it. A few calls reach every statement
of every kernel, and Triton's front end alone sees them; with `all` these and others, of sizes as
they are used, go through to machine code. RESULTS is a JSON file.

It is a program of its own, because the interpreter replaces kernels as they are imported.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import code_generator, compiler

from tensor_memory import (
    MemoryConfig,
    MemoryResidual,
    PlaceConfig,
    PlaceMemory,
    TensorMemory,
    memory_scan,
    ops,
)
from tensor_memory.ops import launch
from tensor_memory.ops.places.place_scan import place_inputs, run_places
from tensor_memory.ops.scan import layer as scan_layer
from tensor_memory.ops.scan import triton as scan_backend
from tensor_memory.ops.scan.triton import plan
from tensor_memory.ops.scan.triton.forward_scan import read

HOPPER, DEVICE, MULTIPROCESSORS = GPUTarget("cuda", 90, 32), torch.device("cuda"), 132


class Driver:
    """What Triton asks of a device before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


class NoCache:
    """Compiled code is forgotten: printing and writing it takes longer than a small kernel."""

    def get_group(self, name: str) -> None:
        return None

    def put(self, data: Any, name: str, binary: bool = True) -> str:
        return name

    def put_group(self, name: str, group: Any) -> None:
        pass


def pretend_hopper() -> dict[int, tuple[Any, str]]:
    """Tensors of the CPU are taken, layouts are those of a GPU, and launches compile alone."""
    triton.runtime.driver.set_active(Driver())
    modules()
    os.environ["TRITON_INTERPRET"] = "1"  # so that a CPU is served; all kernels are imported
    serves, shape_of = plan.why_not, plan.Shape.of
    for module in (plan, scan_backend, scan_layer):
        module.why_not = lambda state, device, dtype: serves(state, DEVICE, dtype)
    plan.Shape.of = lambda *of: shape_of(*of)._replace(device=DEVICE)
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.cuda.get_device_properties = lambda device: properties
    torch._C._cuda_getDevice = lambda: 0  # which a PyTorch with CUDA would look for

    compiled, options = {}, {"sanitize_overflow": False}  # or each sum is made a second time

    def compile_only(self: Any, grid: Any, tensors: Any, numbers: Any = ()) -> None:
        code = self.kernel.warmup(*tensors, *numbers, grid=grid, **self.settings, **options)
        compiled[id(code)] = code, f"{self.kernel.module}.{self.kernel.__name__} {self.settings}"

    launch.BoundKernel.__call__ = compile_only
    return compiled


def stop_behind_the_front_end() -> None:
    compiler.get_cache_key = lambda *of, **by: ""  # hashes all of Triton
    compiler.get_cache_manager = lambda key: NoCache()
    compiler.CompiledKernel = lambda *of: SimpleNamespace()
    CUDABackend.add_stages = lambda self, stages, *of: stages.update(ttir=lambda module, _: module)


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(ops.__path__, ops.__name__ + ".")
    return [importlib.import_module(module.name) for module in found]


def statements() -> Iterator[tuple[str, int, str]]:
    """File, line and text of every statement of every kernel that a compiler should see."""
    for module in modules():
        source = inspect.getsource(module)
        lines = source.splitlines()
        for function in ast.parse(source).body:
            decorators = map(ast.unparse, getattr(function, "decorator_list", ()))
            if not any(name.startswith("triton.jit") for name in decorators):
                continue
            for statement in walk(function.body[ast.get_docstring(function) is not None :]):
                yield module.__file__, statement.lineno, lines[statement.lineno - 1].strip()


def walk(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, also inside others, but for those of the interpreter alone."""
    for statement in body:
        if not isinstance(statement, ast.Pass):
            yield statement
        emulated = isinstance(statement, ast.If) and "emulated" in ast.unparse(statement.test)
        for part in ("orelse",) if emulated else ("body", "orelse"):
            yield from walk(getattr(statement, part, []))


def note_compiled_lines() -> set[tuple[str, int]]:
    """Files and lines as the front end visits them."""
    visited, visit = set(), code_generator.CodeGenerator.visit

    def noting(self: Any, node: Any) -> Any:
        if hasattr(node, "lineno"):  # Triton makes nodes without
            visited.add((self.file_name, self.begin_line + node.lineno))
        return visit(self, node)

    code_generator.CodeGenerator.visit = noting
    return visited


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, requires_grad=True)


def marks(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def layer(
    config: Any,
    *,
    low: bool = False,
    reset: bool = False,
    decode: bool = True,
    dtype: Any = torch.float32,
    **drop: float,
) -> None:
    """A layer forward and backward, and with `decode` token by token through two chunks."""
    placed, dim, N = isinstance(config, PlaceConfig), 10, 4
    kind = PlaceMemory if placed else TensorMemory
    made = MemoryResidual(kind(dim, replace(config, backend="triton")), **drop).to(dtype)
    more = {"reset": marks(2, N)} if reset else {}
    given = placed and config.places != "learned"
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        x, where = zeros(2, N, dim).to(dtype), torch.zeros(2, N, config.axes)
        out, state = made(x, **more, **({"where": where} if given else {}))
        (out.sum() + (state.values if placed else state.cell).sum()).backward()
        made.eval()
        state = None
        with torch.no_grad():
            for t in range(N if decode else 0):
                at = {"where": where[:, t : t + 1]} if given else {}
                _, state = made(x[:, t : t + 1], state, **at)


def scan(
    C: int = 16, grid: tuple[int, ...] = (4, 3, 2), *, B: int = 2, M: int = 2, low: bool = False,
    nearest: bool = False, pointwise: bool = False, masks: bool = False, ends: bool = True,
) -> None:  # fmt: skip
    """The paper's recurrence; `ends`: something arrives for the state after."""
    S, Q, n = 2, 2, len(grid)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        reads, _, cell = memory_scan(
            zeros(B, S, Q, n), zeros(B, S, M, n), None if nearest else zeros(B, S, M),
            zeros(B, S, M, C), None if pointwise else zeros(n, 2 * C, 3), zeros(4 * C, 2 * C),
            zeros(4 * C), zeros(B, C, *grid), zeros(B, C, *grid), backend="triton",
            writes=marks(B, S) if masks else None, resets=marks(B, S) if masks else None,
        )  # fmt: skip
    (reads.sum() + (cell.sum() if ends else 0)).backward()


def places(
    grid: tuple[int, ...], rule: str, *, N: int = 5, C: int = 4, gaussian: bool = False,
    resets: bool = False, wrap: bool = False, same: bool = False, low: bool = False,
    ends: bool = True,
) -> None:  # fmt: skip
    """The place memory's recurrence; `same`: reads have the places of writes."""
    B, H, n = 2, 2, len(grid)
    inputs = place_inputs(
        write_at=zeros(B, N, H, n), read_at=None if same else zeros(B, N, H, n),
        content=zeros(B, N, H, C), rate=zeros(B, N, H), log_keep=zeros(B, N, H),
        width=zeros(H) if gaussian else None, state=zeros(B, H, *grid, C), rule=rule,
        wrap=(wrap,) * n, resets=marks(B, N) if resets else None,
    )  # fmt: skip
    reads, after = run_places(inputs, "triton", torch.bfloat16 if low else torch.float32)
    (reads.sum() + (after.sum() if ends else 0)).backward()


def few_calls() -> None:
    """Every statement of every kernel at least once, and twice what is in a loop over heads."""
    paper = MemoryConfig(channels=16, grid=(2, 3, 4), chunk_size=2)
    layer(replace(paper, channels=64, read_heads=2, write_heads=2), dropout=0.1, drop_path=0.1)
    layer(replace(paper, reads="token", write="nearest"), low=True, decode=False)
    scan(32, (32, 32), B=34, M=1, pointwise=True, masks=True)  # two programs a row, four tiles
    read(torch.zeros(2, 3, 2, 2), torch.zeros(2, 16, 4, 4))
    place = PlaceConfig(heads=2, kernel="linear", share_places=False, places="offset")
    layer(place, dropout=0.1, drop_path=0.1)
    place = PlaceConfig(heads=2, rule="delta", grid=(2, 3, 2, 2), wrap=True, places="given")
    layer(place, low=True, reset=True)
    places((17, 16), "linear", resets=True, ends=False)
    places((17, 17), "linear", wrap=True, same=True, low=True)
    places((17, 16), "delta", resets=True)
    places((300,), "delta", same=True, low=True, ends=False)
    places((8, 8), "linear", N=32, C=16, gaussian=True, low=True)
    places((2, 2, 2, 2), "linear", resets=True, low=True)


def more_calls() -> None:
    """Sizes as they are used."""
    paper, place = MemoryConfig(chunk_size=2, read_heads=4, write_heads=4), PlaceConfig.recall()
    layer(replace(paper, reads="token"), dtype=torch.bfloat16)
    scan(64, (16, 16, 16), B=64, M=1, low=True, masks=True)
    scan(128, (4, 4))
    for rule in ("linear", "delta"):
        layer(replace(place, rule=rule), dtype=torch.bfloat16)
        layer(replace(place, rule=rule), reset=True)
        places((16, 16, 16), rule, C=64, low=True)
    places((8, 8), "linear", N=64, C=32, gaussian=True, low=True)


def resources(code: Any) -> dict[str, int]:
    """Registers per thread, bytes of the stack (spilled registers) and of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code.asm["cubin"])
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        said = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    found = {name: int(re.findall(rf"{name}:(\d+)", said)[-1]) for name in ("REG", "STACK")}
    return {"registers": found["REG"], "stack": found["STACK"], "shared": code.metadata.shared}


def main(results: str, extent: str = "few") -> None:
    assert not launch.INTERPRETED, "TRITON_INTERPRET is set: the interpreter has the kernels"
    gc.disable()  # a quarter of a second
    compiled, visited = pretend_hopper(), note_compiled_lines()
    if extent == "few":
        stop_behind_the_front_end()
    few_calls()
    if extent == "all":
        more_calls()
    found: dict[str, Any] = {"left_out": [], "kernels": []}
    for file, line, text in statements():
        if (file, line) not in visited:
            found["left_out"].append(f"{file}:{line}: {text}")
    if extent == "all":
        found["kernels"] = [{"name": name} | resources(code) for code, name in compiled.values()]
    Path(results).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
