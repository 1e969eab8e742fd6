"""The user's own modules are found where a command is called, and only when one is named."""

import importlib
import sys

import pytest

from tensor_memory_lab.recipes import find_recipe


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_models.py").write_text("import my_parts\nmake = my_parts.make\n")
    (tmp_path / "my_parts.py").write_text("def make():\n    return 1\n")
    yield
    for name in ("my_models", "my_parts"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_a_module_that_is_named_is_found_with_its_neighbours_and_once(tmp_path):
    assert find_recipe("my_models:make")() == 1
    assert find_recipe("my_parts:make")() == 1
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_a_recipe_of_the_package_leaves_the_path_alone(tmp_path):
    before = list(sys.path)
    find_recipe("binding")
    assert sys.path == before
