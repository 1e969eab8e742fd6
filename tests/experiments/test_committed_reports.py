"""The reports in docs are those of the committed runs, and the pages beside them quote them."""

import re
from pathlib import Path

import pytest

from tensor_memory.experiments.results.records import read_results
from tensor_memory.experiments.results.report import write_report

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("name", "title"), [("diagnostics", "Diagnostics, measured")], ids=["diagnostics"]
)
def test_a_committed_report_is_made_from_the_committed_runs(name, title, tmp_path):
    made = write_report(read_results([ROOT / "results" / name]), tmp_path, title=title)
    folder = DOCS / "reports" / name
    assert (folder / "report.md").read_text(encoding="utf-8") == made
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in folder.glob("*.png")}


@pytest.mark.parametrize(
    ("page", "heading", "least"),
    [("docs/diagnostics.md", "## Measured so far", 14), ("README.md", "## Does it help?", 11)],
)
def test_what_a_page_quotes_of_the_diagnostics_stands_in_their_report(page, heading, least):
    text = (ROOT / page).read_text(encoding="utf-8")
    quoted = text.partition(heading)[2].partition("\n## ")[0]
    report = (DOCS / "reports" / "diagnostics" / "report.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d+\.\d ± \d+\.\d %", quoted)
    assert len(numbers) >= least
    assert [number for number in numbers if number not in report] == []
