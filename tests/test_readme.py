"""The README is short, its commands exist, and its first snippet learns what it says."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_readme_has_fewer_than_900_words():
    assert len(README.split()) < 900


def test_links_and_pictures_are_absolute_so_that_they_work_on_a_package_index():
    targets = re.findall(r"\]\(([^)\s]+)", README) + re.findall(r"src=\"([^\"]+)", README)
    assert len(targets) > 5
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
