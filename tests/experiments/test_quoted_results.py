"""Numbers that the README quotes of the diagnostics stand in the tables made from their records."""

import re
from pathlib import Path

from tensor_memory.experiments.results import diagnostics_page, read_results

ROOT = Path(__file__).parents[2]


def test_what_the_readme_says_of_the_diagnostics_was_measured():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = text.partition("## Does it help?")[2].partition("\n## ")[0]
    records = read_results([ROOT / "results" / "diagnostics"])
    tables = "\n".join(diagnostics_page.blocks(records).values())
    numbers = re.findall(r"\d+\.\d ± \d+\.\d %", quoted)
    assert len(numbers) >= 11
    assert [number for number in numbers if number not in tables] == []
