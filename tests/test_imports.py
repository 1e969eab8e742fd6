"""Who may import whom, what importing the package loads, and that each rule notices a violation.

The library never imports the lab. The lab, its studies and the examples use public names of the
library alone. No circle of imports, also none that runs through functions or type annotations.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tensor_memory

ROOT = Path(__file__).parents[1]
LIBRARY, LAB = ROOT / "src", ROOT / "lab" / "src"
USERS = (LAB, ROOT / "lab" / "studies", ROOT / "lab" / "examples", ROOT / "examples")
PUBLIC = {*tensor_memory.__all__, "__file__", "__version__"}


def modules_in(source: Path) -> dict[str, Path]:
    """The Python files below a folder by the name they are imported under."""
    names = {}
    for path in sorted(source.rglob("*.py")):
        dotted = ".".join(path.relative_to(source).with_suffix("").parts)
        names[dotted.removesuffix(".__init__")] = path
    return names


tree_of = functools.cache(ast.parse)  # several rules look through the same text


def name_of(called: ast.expr) -> str:
    """The last part of what is called."""
    return getattr(called, "attr", getattr(called, "id", ""))


def imports_of(module: str, path: Path) -> Iterator[tuple[str, str | None]]:
    """(module, name) for `from module import name`, (module, None) for `import module`.

    Anywhere in the file: in functions and for types too; relative ones resolved.
    """
    for node in ast.walk(tree_of(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if path.name == "__init__.py" else -1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((origin, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and name_of(node.func).endswith("import_module"):
            yield from ((a.value, None) for a in node.args[:1] if isinstance(a, ast.Constant))


def attributes_of(package: str, path: Path) -> Iterator[str]:
    """What a file takes from a package that it has imported by `import package`."""
    tree = tree_of(path.read_text(encoding="utf-8"))
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == package
    }
    for node in ast.walk(tree) if aliases else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            yield node.attr


def private_imports(source: Path) -> list[str]:
    """Names of the library that are not public, imported by files below a folder."""
    found = []
    for module, path in modules_in(source).items():
        for origin, name in imports_of(module, path):
            public = name in PUBLIC or name is None
            if origin.split(".")[0] == "tensor_memory" and not (
                origin == "tensor_memory" and public
            ):
                found.append(f"{module} imports {name or origin} from {origin}")
        for name in attributes_of("tensor_memory", path):
            if name not in PUBLIC:
                found.append(f"{module} uses tensor_memory.{name}")
    return found


def imports_of_the_lab(source: Path) -> list[str]:
    return [
        f"{module} imports {origin}"
        for module, path in modules_in(source).items()
        for origin, _ in imports_of(module, path)
        if origin.split(".")[0] == "tensor_memory_lab"
    ]


def circle_in(source: Path) -> list[str]:
    """The modules of one circle of imports below a folder, empty where there is none."""
    paths = modules_in(source)
    graph = {module: set() for module in paths}
    for module, path in paths.items():
        for origin, name in imports_of(module, path):
            target = f"{origin}.{name}"
            graph[module].add(target if target in paths else origin)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("source", USERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_lab_and_the_examples_use_public_names_alone(source):
    assert private_imports(source) == []


def test_the_library_never_imports_the_lab():
    assert imports_of_the_lab(LIBRARY) == []


@pytest.mark.parametrize(
    "source", [LIBRARY, LAB], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_there_is_no_circle_of_imports(source):
    assert circle_in(source) == []


def plant(source: Path, files: dict[str, str]) -> Path:
    for name, code in files.items():
        path = source / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    return source


@pytest.mark.parametrize(
    "code",
    [
        "from tensor_memory.config import MemoryConfig",
        "from tensor_memory import config",
        "from tensor_memory import TensorMemory, ops",
        "import tensor_memory.state",
        "import tensor_memory.state as state",
        "def late():\n    from tensor_memory.cli import main",
        "import importlib\nimportlib.import_module('tensor_memory.ops')",
        "import tensor_memory\ntensor_memory.config.MemoryConfig()",
        "import tensor_memory as tm\ntm.ops.scan",
    ],
)
def test_a_private_import_is_found(code, tmp_path):
    assert len(private_imports(plant(tmp_path, {"tensor_memory_lab/run": code}))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from tensor_memory import MemoryConfig, attach",
        "from tensor_memory import __version__",
        "import tensor_memory\ntensor_memory.attach, tensor_memory.__version__",
        "from tensor_memory_lab.tasks import binding",
    ],
)
def test_a_public_import_is_left_alone(code, tmp_path):
    assert private_imports(plant(tmp_path, {"tensor_memory_lab/run": code})) == []


@pytest.mark.parametrize(
    "code",
    [
        "import tensor_memory_lab",
        "def late():\n    from tensor_memory_lab.models import stack",
    ],
)
def test_an_import_of_the_lab_is_found(code, tmp_path):
    planted = plant(tmp_path, {"tensor_memory/config": code, "tensor_memory/state": ""})
    assert len(imports_of_the_lab(planted)) == 1


@pytest.mark.parametrize(
    "back",
    [
        "from p import b",
        "from . import b",
        "from .b import x",
        "import p.b",
        "def late():\n    from p.b import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import X",
    ],
)
def test_a_circle_is_found(back, tmp_path):
    honest = {"p/__init__": "", "p/a": "", "p/b": "from p.c import y", "p/c": "from p import a"}
    assert circle_in(plant(tmp_path, honest)) == []
    assert set(circle_in(plant(tmp_path, {"p/a": back}))) == {"p.a", "p.b", "p.c"}


def test_a_circle_through_a_package_is_found(tmp_path):
    files = {"p/__init__": "from p.a import x", "p/a": "from p import y"}
    assert set(circle_in(plant(tmp_path, files))) == {"p", "p.a"}


FIRST_STEP = """
memory = TensorMemory(8, MemoryConfig(channels=4, grid=(3, 3), chunk_size=2))
memory(torch.randn(2, 4, 8))[0].sum().backward()
"""


def test_what_is_loaded_by_the_package_its_names_and_a_first_step_of_training():
    steps = ("import tensor_memory", "import torch", "from tensor_memory import *", FIRST_STEP)
    lists = (f"{step}\nprint(*sys.modules)" for step in ("import sys", *steps))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lists)],
        capture_output=True,
        text=True,
        check=True,
    )
    listed = [set(line.split()) for line in result.stdout.splitlines()]
    python, start, with_torch, names, _ = (third_parties(modules) for modules in listed)
    assert start - python == {"tensor_memory"}  # a system's Python may come with a package
    assert "torch" in with_torch
    assert names <= with_torch | {"safetensors"}
    assert "torch._dynamo" not in listed[-1]  # the compiler takes seconds to load


def third_parties(modules: set[str]) -> set[str]:
    """The packages of these modules that are not of the standard library."""
    names = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    return {name for name in names if not name.startswith("_")}


def test_every_public_name_exists_is_documented_and_listed_for_type_checkers():
    assert tensor_memory.__all__ == sorted(tensor_memory.__all__)
    for name in tensor_memory.__all__:
        assert getattr(tensor_memory, name).__doc__, name
        assert name in dir(tensor_memory)
    path = Path(tensor_memory.__file__)
    typed = {name: origin for origin, name in imports_of("tensor_memory", path)}
    homes = {name: f"tensor_memory.{home}" for name, home in tensor_memory._MODULES.items()}
    assert sorted(homes) == tensor_memory.__all__
    assert {name: typed[name] for name in homes} == homes


def test_no_module_takes_the_place_of_a_public_name():
    modules = {name.split(".")[1] for name in modules_in(LIBRARY) if "." in name}
    assert not modules & {*tensor_memory.__all__}


def test_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(AttributeError, match="module 'tensor_memory' has no attribute 'nothing'"):
        tensor_memory.nothing  # noqa: B018
