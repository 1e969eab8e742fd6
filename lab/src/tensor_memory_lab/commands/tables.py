"""`tensor-memory-lab tables PAGE …`: write the tables of the documentation from records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tensor_memory_lab.files import make_folder, write_text
from tensor_memory_lab.records.evidence import REGION, Evidence


def tables_command(argv: Sequence[str]) -> int:
    """Fill the tables of pages; with --check 1 where a page is not what the records give."""
    options = _parser().parse_args(argv)
    evidence = Evidence(options.tables, options.results)
    stale = []
    for page in options.pages or pages_with_tables(Path()):
        text = page.read_text(encoding="utf-8")
        filled = evidence.fill(text, str(page))
        pairs = list(zip(REGION.finditer(text), REGION.finditer(filled), strict=True))
        changed = [before[2] for before, after in pairs if before[3] != after[3]]
        if not options.check:
            if changed:
                write_text(page, filled)
            print(f"{page}: {len(pairs)} tables, {len(changed)} of them changed")
        stale += [f"{page}: the table {name} is not what the records give" for name in changed]
    if options.figures is not None:
        make_folder(options.figures, "figures")
        for path in evidence.figures(options.figures):
            print(path)
    if options.check and stale:
        for line in stale:
            print(line, file=sys.stderr)
        print("write them anew: tensor-memory-lab tables PAGE ...", file=sys.stderr)
        return 1
    return 0


def pages_with_tables(root: Path) -> list[Path]:
    """The README and the pages below docs that have tables."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    there = [page for page in pages if page.is_file()]
    return [page for page in there if REGION.search(page.read_text(encoding="utf-8"))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensor-memory-lab tables",
        description="Write the tables between <!-- table: NAME --> and <!-- /table --> of pages "
        "from the records of runs, as lab/tables.toml declares them.",
    )
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files (all that have tables)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a table is stale"
    )
    either.add_argument("--figures", type=Path, help="folder to draw the declared figures into")
    parser.add_argument("--tables", type=Path, default=Path("lab/tables.toml"), help="declarations")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of studies")
    return parser
