"""Numbers that prose quotes of the diagnostics stand in the tables made from their records."""

import re
from pathlib import Path

import pytest

from tensor_memory.experiments.results import diagnostics_page, read_results

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "heading", "least"),
    [("docs/diagnostics.md", "## Measured so far", 14), ("README.md", "## Does it help?", 11)],
)
def test_what_a_page_quotes_of_the_diagnostics_was_measured(page, heading, least):
    text = (ROOT / page).read_text(encoding="utf-8")
    quoted = text.partition(heading)[2].partition("\n## ")[0]
    records = read_results([ROOT / "results" / "diagnostics"])
    tables = "\n".join(diagnostics_page.blocks(records).values())
    numbers = re.findall(r"\d+\.\d ± \d+\.\d %", quoted)
    assert len(numbers) >= least
    assert [number for number in numbers if number not in tables] == []
