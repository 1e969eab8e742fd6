"""The site builds without a warning and without a network, and what its pages show is true."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensor_memory

ROOT = Path(__file__).parents[1]
HOME = "https://github.com/tensor-memory/tensor-memory"
RAW = "https://raw.githubusercontent.com/tensor-memory/tensor-memory"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


@pytest.mark.parametrize("name", [name for name in NAMES if ">>>" in (ROOT / name).read_text()])
def test_the_examples_of_a_page_run(name):
    # Without bf16 a page's autocast would turn oneDNN off for what follows, and change last bits.
    torch.backends.mkldnn.enabled = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0


def file_of(target: str, page: Path) -> Path | None:
    """The file of this repository that a link names; None where it leads elsewhere."""
    address = re.fullmatch(rf"(?:{HOME}/(?:blob|tree)|{RAW})/main/(.*)", target)
    if address:
        return ROOT / address.group(1)
    return None if "://" in target else page.parent / target


@pytest.mark.parametrize("name", NAMES)
def test_links_and_pictures_of_a_page_exist(name):
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    targets += re.findall(r"(?:src|srcset|href)=\"([^\"#]+)", text)
    files = {target: file_of(target, ROOT / name) for target in targets}
    assert [target for target, file in files.items() if file and not file.exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_make_targets_of_a_page_exist(name):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE)
    assert set(named) <= set(targets)


@pytest.fixture(scope="module")
def help_of() -> dict[str, str]:
    """What each command line says of itself."""
    modules = {"tensor-memory": "tensor_memory.cli", "tensor-memory-lab": "tensor_memory_lab.cli"}
    return {
        command: subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True
        ).stdout
        for command, module in modules.items()
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])
def test_the_commands_of_a_page_exist(name, help_of):
    text = (ROOT / name).read_text()
    for command, word in re.findall(r"(?:^|`)(tensor-memory(?:-lab)?) ([a-z][a-z-]+)", text, re.M):
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", help_of[command]), f"{command} {word}"


def test_every_public_name_is_in_the_reference():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = re.findall(r"^::: tensor_memory\.(\w+)$", pages, re.MULTILINE)
    assert sorted(documented) == sorted(tensor_memory.__all__)
    index = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert set(re.findall(r"\[tensor_memory\.(\w+)\]", index)) == set(tensor_memory.__all__)


def test_the_tests_that_the_contributing_page_names_exist():
    sources = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "lab" / "tests").rglob("test_*.py")]
    text = "".join(path.read_text() for path in sources)
    named = re.findall(r"`(test_\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    assert [test for test in named if f"def {test}(" not in text] == []


def test_the_tree_in_the_contributing_page_is_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = re.search(r"## The tree\n+```\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    folders, paths = [], []
    for line in lines:
        level = (len(line) - len(line.lstrip())) // 2  # two spaces of indent are one level
        folders[level:] = [line.split()[0]]
        paths.append("".join(folders))
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_site_builds_without_warnings_and_asks_for_nothing_from_a_network(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    loaded = (
        r"<(?:script|img|source|iframe)[^>]* src(?:set)?=\"?https?:|<link[^>]*\.css[^>]*https?:"
    )
    assert [page.name for page in pages if re.search(loaded, page.read_text())] == []
    assert (tmp_path / "site" / "search" / "search_index.js").exists()
