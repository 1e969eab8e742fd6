"""What the documents show is run, and what they name exists."""

import doctest
import json
import re
from pathlib import Path

import pytest

from tensor_memory_lab import bench

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


@pytest.mark.parametrize("name", [name for name in NAMES if ">>>" in (ROOT / name).read_text()])
def test_the_examples_of_a_document_run(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_links_of_a_document_lead_somewhere(name):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / name).read_text())
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (ROOT / name).parent.joinpath(target).exists()]
    assert missing == []


def tree_of(text):
    """The paths an annotated tree names; two spaces of indent are one level."""
    lines = re.search(r"## The tree\n+```\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    folders, paths = [], []
    for line in lines:
        level = (len(line) - len(line.lstrip())) // 2
        folders[level:] = [line.split()[0]]
        paths.append("".join(folders))
    return paths


def test_the_tree_in_the_readme_is_the_tree():
    paths = tree_of((ROOT / "README.md").read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert {f"src/tensor_memory/{name}" for name in ("config.py", "module.py", "ops/")} < set(paths)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_of_a_document_exist(name):
    text = (ROOT / name).read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE):
        assert target in targets
    for command in re.findall(r"tensor[-_]memory[. ]bench ([a-z-]+)", text):
        assert command in bench.COMMANDS


@pytest.mark.parametrize("name", NAMES)
def test_the_tests_a_document_names_exist(name):
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / name).read_text())
    assert [test for test in named if f"def {test}(" not in sources] == []


def test_the_streams_numbers_in_the_readme_are_the_committed_ones():
    record = json.loads((ROOT / "results" / "bench" / "stream-cpu.json").read_text())
    text, result = " ".join((ROOT / "README.md").read_text().split()), record["result"]
    assert record["dirty"] is False
    assert f"commit `{record['commit'][:7]}`" in text
    assert f"{result['tokens']:,} tokens at {result['tokens_per_second']:,.0f} tokens" in text
    assert result["state_bytes_first"] == result["state_bytes_last"]
    assert f"the state {result['state_bytes_last']:,} bytes" in text
    assert f"at most {result['growth'] / 2**20:.1f} MiB above" in text


def test_the_demos_numbers_in_the_readme_are_the_committed_ones():
    text = " ".join((ROOT / "README.md").read_text().split())
    files = sorted((ROOT / "results" / "demo").glob("streaming-seed-*.json"))
    records = [json.loads(path.read_text()) for path in files]
    assert [record["seed"] for record in records] == [0, 1, 2]
    for model in ("without memory", "with memory"):
        results = [record["result"][model] for record in records]
        shares = " / ".join(f"{result['accuracy']:.1%}".rstrip("%") for result in results)
        assert f"{shares} %" in text
        for result in results:
            assert result["bytes_first"] == result["bytes_last"]
            assert f"{result['bytes_last']:,} B" in text


def test_the_devices_numbers_in_the_readme_are_the_committed_ones():
    text = " ".join((ROOT / "README.md").read_text().split())
    folder = ROOT / "results" / "bench"
    scan = json.loads((folder / "scan-nvidia-h200.json").read_text())
    assert f"commit `{scan['commit'][:7]}`" in text
    for name, kind, published in (
        ("language", "forward", "20.6 ms"),
        ("language", "forward_backward", "62.5 ms"),
        ("video", "forward_backward", "53.8 ms"),
    ):
        shape = scan["result"]["shapes"][name]
        assert shape["agreement"]["passed"]
        assert f"| {published} | **{shape['ms'][kind]['graph']['median']:.2f} ms** |" in text
    step = json.loads((folder / "train-step-nvidia-h200.json").read_text())
    row = step["result"]["models"]["language"]
    assert f"**{row['graph']['ratio']:.2f} ×** as a CUDA graph, {row['ratio']:.2f} ×" in text
