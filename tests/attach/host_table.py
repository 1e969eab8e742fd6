"""The table of host families in the guide, written by running the suite.

python tests/attach/host_table.py           runs every check on every family, writes the table
python tests/attach/host_table.py --check   the same, and fails where the guide says otherwise
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from families import CHECKS, FAMILIES, Family

SUITE = Path(__file__).with_name("test_families.py")
GUIDE = SUITE.parents[2] / "docs/guide/hosts.md"
BEGIN, END = "<!-- hosts -->\n", "<!-- /hosts -->"
YES, REFUSED, OWN_FAULT, WRONG, NOT_ASKED = "yes", "refused", "host", "**wrong**", ""


def table(outcomes: Mapping[tuple[str, str], str]) -> str:
    """One row per family, one column per check."""
    head = ["family", "blocks", *CHECKS.values()]
    rows = [
        [
            family.name,
            f"`{family.row}.*{family.part}`",
            *(outcomes.get((family.name, check), NOT_ASKED) for check in CHECKS),
        ]
        for family in FAMILIES.values()
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def expected_table() -> str:
    """The table where every test of the suite passes."""
    return table({(f.name, c): _passed(f, c) for f in FAMILIES.values() for c in f.checks})


def guide_table() -> str:
    """The table in the guide."""
    return GUIDE.read_text().partition(BEGIN)[2].partition(END)[0]


def _passed(family: Family, check: str) -> str:
    if check == "found" and family.asks:
        return "with " + ", ".join(f"`{name}=`" for name in family.attach)
    if check in family.own_fault:
        return OWN_FAULT
    return REFUSED if check in family.refused else YES


class Outcomes:
    """A plugin of pytest that keeps how every test of the suite ended."""

    def __init__(self) -> None:
        self.ended: dict[tuple[str, str], str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test is over."""
        _, _, case = report.nodeid.partition("test_family[")
        name, _, check = case.removesuffix("]").rpartition("-")
        if name and (report.failed or report.when == "call"):
            self.ended[name, check] = WRONG if report.failed else _passed(FAMILIES[name], check)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; write the table, or compare it. Exit status 1 where a check fails."""
    parser = argparse.ArgumentParser(
        description="Run every check on every host family, and write the table in the guide."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where the guide says otherwise"
    )
    options = parser.parse_args(arguments)
    outcomes = Outcomes()
    suite = ["-q", "-m", "exhaustive or not exhaustive", "-k", "test_family", str(SUITE)]
    suite += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # families were imported here
    status = int(pytest.main(suite, plugins=[outcomes]))
    made = table(outcomes.ended)
    if options.check:
        return status or int(made != guide_table())
    text = GUIDE.read_text()
    before, rest = text.split(BEGIN)
    written = GUIDE.with_suffix(".tmp")
    written.write_text(before + BEGIN + made + END + rest.partition(END)[2])
    os.replace(written, GUIDE)
    return status


if __name__ == "__main__":
    sys.exit(main())
