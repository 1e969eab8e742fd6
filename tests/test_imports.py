"""What importing the package loads, and who inside it may import whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = "tensor_memory"

LAYERS = (  # from the ground up; a module may import from its own line and from those above it
    ("config",),
    ("files", "progress", "interruption", "wording"),
    ("state",),
    ("ops",),
    ("chunking", "weights"),
    ("module",),
    ("residual",),
    ("attachment", "checkpoint", "leaks"),
    ("inspect",),
    ("",),  # the package itself, which exports the public names of all above
    ("provenance",),
    ("experiments.tasks",),
    ("experiments.models",),
    ("experiments.run_config",),
    ("experiments.results",),
    ("experiments.train",),
    ("experiments.recipes",),
    ("experiments.commands",),
    ("bench",),
    ("cli", "__main__", "doctor"),
)
BARE = ("experiments",)  # packages that only hold others and import nothing


def layer_of(module: str) -> int | None:
    """The line of LAYERS that a module stands on; None where it stands on none."""
    inside = module.removeprefix(PACKAGE).removeprefix(".")
    for rank, names in enumerate(LAYERS):
        if any(inside == name or (name and inside.startswith(f"{name}.")) for name in names):
            return rank
    return 0 if inside in BARE else None


def imported(module: str, is_package: bool, tree: ast.AST) -> Iterator[str]:
    """Full names that a module imports anywhere, in functions too, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: None if is_package else -1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant))


def violations(source: Path) -> list[str]:
    paths = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        paths[".".join(parts).removesuffix(".__init__")] = path
    found = []
    for module, path in paths.items():
        rank = layer_of(module)
        if rank is None:
            found.append(f"{module} stands in no layer; add it to LAYERS")
            continue
        for name in imported(module, path.name == "__init__.py", ast.parse(path.read_text())):
            if name.split(".")[0] != PACKAGE:
                continue
            target = name if name in paths else name.rpartition(".")[0] or name
            target_rank = layer_of(target)
            if target_rank is None or target_rank > rank:
                found.append(f"{module} imports {target}, which stands above it")
    return found


def test_imports_go_one_way():
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("path", "code", "complaint"),
    [
        ("config.py", "from tensor_memory.state import MemoryState", "config imports .*state"),
        ("config.py", "from tensor_memory import state", "config imports .*state"),
        ("config.py", "import tensor_memory.module", "config imports .*module"),
        ("config.py", "from .state import MemoryState", "config imports .*state"),
        ("config.py", "from . import state", "config imports .*state"),
        ("config.py", "def late():\n    from tensor_memory import module", "config imports .*mod"),
        ("config.py", "import importlib\nimportlib.import_module('tensor_memory.cli')", "cli"),
        ("module.py", "from tensor_memory import TensorMemory", "module imports tensor_memory,"),
        ("module.py", "import tensor_memory", "module imports tensor_memory,"),
        ("ops/__init__.py", "from ..module import x", "ops imports tensor_memory.module"),
        ("ops/fast.py", "from ..chunking import assign", "ops.fast imports .*chunking"),
        ("experiments/train.py", "from .recipes import all", "train imports .*recipes"),
        ("experiments/tasks/a.py", "from ..models import b", "tasks.a imports .*models"),
        ("helpers.py", "", "helpers stands in no layer"),
    ],
)
def test_a_violation_is_found(tmp_path, path, code, complaint):
    for honest in ("__init__", "config", "state", "module", "chunking", "cli", "bench/stream"):
        file = tmp_path / PACKAGE / f"{honest}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for package in ("models", "recipes"):
        (tmp_path / PACKAGE / "experiments" / package).mkdir(parents=True)
        (tmp_path / PACKAGE / "experiments" / package / "__init__.py").touch()
    assert violations(tmp_path) == []
    planted = tmp_path / PACKAGE / path
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_text(code)
    assert len(violations(tmp_path)) == 1
    with pytest.raises(AssertionError, match=complaint):
        assert "; ".join(violations(tmp_path)) == ""


def test_honest_imports_are_left_alone(tmp_path):
    (tmp_path / PACKAGE / "ops").mkdir(parents=True)
    honest = {
        "__init__": "from tensor_memory.module import TensorMemory",
        "config": "import torch\nfrom torch import Tensor",
        "module": "from tensor_memory import ops\nfrom tensor_memory.ops import scan",
        "ops/__init__": "from tensor_memory.ops import fast\nfrom .fast import scan",
        "ops/fast": "from tensor_memory.config import MemoryConfig\nfrom ..config import x",
        "cli": "import tensor_memory\nfrom tensor_memory import __version__",
    }
    for name, code in honest.items():
        (tmp_path / PACKAGE / f"{name}.py").write_text(code)
    assert violations(tmp_path) == []


def third_parties(code: str) -> set[str]:
    """Top-level packages outside the standard library that a fresh process loads for `code`."""
    listing = "import sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{listing}"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = set(result.stdout.split()) - set(sys.stdlib_module_names)
    return {name for name in names if not name.startswith("_")}


def test_importing_the_package_loads_torch_and_safetensors_alone():
    loaded = third_parties("import tensor_memory")
    heavy = {"accelerate", "matplotlib", "plotly", "rich", "transformers", "triton", "tyro"}
    assert not loaded & heavy
    assert loaded <= third_parties("import torch") | {"tensor_memory", "safetensors"}


def test_the_watch_on_imports_notices_one():
    assert "hypothesis" in third_parties("import hypothesis")


def test_every_exported_name_exists_and_is_documented():
    import tensor_memory

    assert tensor_memory.__all__ == sorted(tensor_memory.__all__)
    for name in tensor_memory.__all__:
        assert getattr(tensor_memory, name).__doc__, name
