"""The README is short, its first snippet learns, and its numbers are those of the evidence."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readme_has_fewer_than_900_words():
    assert len(README.split()) < 900


def test_links_and_pictures_are_absolute_so_that_they_work_on_a_package_index():
    targets = re.findall(r"\]\(([^)\s]+)", README) + re.findall(r"src(?:set)?=\"([^\"]+)", README)
    assert len(targets) > 5
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_first_snippet_learns_in_seconds(capsys):
    exec(SNIPPETS[0], {})
    shown = re.findall(r"(\d+) (\d+)% right", capsys.readouterr().out)
    right = [int(share) for _, share in shown]
    assert right[0] < 25  # chance is one in ten
    assert right[-1] > 90
    told = re.search(re.escape(SNIPPETS[0]) + r"```\n\n```\n(.*?)```", README, re.DOTALL).group(1)
    assert [line.split()[0] for line in told.splitlines()] == [step for step, _ in shown]


def test_the_other_snippets_use_names_that_exist():
    import tensor_memory

    called = set(re.findall(r"\b(\w+)\(", "".join(SNIPPETS[1:])))
    named = {name for name in called if name in dir(tensor_memory)}
    assert {"MemoryResidual", "TensorMemory", "attach", "detach", "find_leak", "record"} <= named


def test_the_numbers_of_a_table_are_in_the_evidence():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "evidence").glob("*.md"))
    known = set(re.findall(r"\d+\.\d+", pages))
    rows = [line for line in README.splitlines() if line.startswith("|")]
    numbers = re.findall(r"\d+\.\d+", "".join(rows))
    assert len(numbers) > 20
    assert [number for number in numbers if number not in known] == []
