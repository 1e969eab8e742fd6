"""The tables and figures of the documentation, declared in lab/tables.toml (see its head)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from tensor_memory_lab.records.store import frame, parts, read_records
from tensor_memory_lab.records.table import (
    NOTHING,
    Frame,
    caption,
    check_columns,
    column,
    markdown,
    select,
    table,
)

REGION = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
"""A place in a page that a table is written into."""

RUNS = {"study", "where", "except", "each", "like"}
LAID_OUT = {"rows", "only", "across", "sort", "titles", "names"}
TABLE = LAID_OUT | {"columns", "caption", "less"}
DRAWN = {"x", "y", "by", "panels", "x_title", "y_title", "names", "even"}


class Evidence:
    """Declarations, and the studies that they are made from, each read once."""

    def __init__(self, declarations: Path, results: Path) -> None:
        if not declarations.is_file():
            raise FileNotFoundError(
                f"{declarations}: no such file; expected the declarations of tables. Run this in a "
                "clone of the repository, or name pages, --tables FILE and --results FOLDER"
            )
        try:
            self.declared = tomllib.loads(declarations.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{declarations}: expected TOML ({error}); mend it there") from error
        self.file, self.results = declarations, results
        self._studies: dict[tuple[str, str], Frame] = {}

    def table(self, name: str) -> str:
        """A declared table as Markdown, with where its numbers come from below it."""
        spec = self._spec("table", name, RUNS | TABLE)
        columns = [column(one) for one in _columns(spec)]
        runs = self._runs(name, spec)
        # Columns without values are left out; one that no record has is a mistake.
        own = [value for one in columns if not one.study for value in one.values]
        check_columns(runs, [value for value in own if value != "seeds"])
        lent: dict[str, list[Frame]] = {}
        others = {one.study: self._study(one.study) for one in columns if one.study}
        options = {key: spec[key] for key in LAID_OUT & spec.keys()}
        lines = table(runs, columns, **options, others=others, lent=lent)
        filled = {key for line in lines for key, text in line.items() if text != NOTHING}
        lines = [{key: text for key, text in line.items() if key in filled} for line in lines]
        below = f"\n{caption(runs, lent)}\n" if spec.get("caption", True) else ""
        return markdown(lines) + below

    def figures(self, folder: Path) -> Iterator[Path]:
        """Draw every declared figure on white and on dark; the files."""
        from tensor_memory_lab.records.figure import figure  # matplotlib takes seconds

        for name in self.declared.get("figure", {}):
            spec = self._spec("figure", name, RUNS | DRAWN)
            options = {key: spec[key] for key in DRAWN & spec.keys()}
            runs = self._runs(name, spec)
            yield figure(runs, folder / f"{name}-light.png", **options, theme="light")
            yield figure(runs, folder / f"{name}-dark.png", **options, theme="dark")

    def fill(self, page: str, where: str) -> str:
        """A page's text with its tables written anew; a region of no declared table is an error."""
        opened = re.findall(r"<!-- table: (\S+) -->", page)
        if len(opened) != len(REGION.findall(page)):
            raise ValueError(
                f"{where}: expected <!-- /table --> on a line of its own after each of the tables "
                f"{', '.join(opened)}, got fewer"
            )
        return REGION.sub(lambda m: f"{m[1]}\n{self.table(m[2])}\n{m[4]}", page)

    def _spec(self, kind: str, name: str, known: set[str]) -> dict[str, Any]:
        declared = self.declared.get(kind, {})
        if name not in declared:
            raise ValueError(
                f"{kind} {name!r}: expected one that {self.file} declares, which are "
                f"{', '.join(declared)}"
            )
        spec = declared[name]
        if "like" in spec:
            spec = self._spec(kind, spec["like"], known) | spec
        if unknown := sorted(spec.keys() - known):
            raise ValueError(
                f"{self.file}, {kind} {name!r}: unknown {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known))}"
            )
        if missing := {"study", "columns" if kind == "table" else "y"} - spec.keys():
            raise ValueError(
                f"{self.file}, {kind} {name!r}: expected {' and '.join(sorted(missing))} in it, or "
                "in one that it is `like`"
            )
        return spec

    def _runs(self, name: str, spec: Mapping[str, Any]) -> Frame:
        runs = select(self._study(spec["study"], spec.get("each", "")), spec.get("where", {}))
        for column_name, value in spec.get("except", {}).items():
            runs = runs.drop(select(runs, {column_name: value}).index)
        if runs.empty:
            raise ValueError(
                f"{self.file}, {name!r}: expected records in {self.results / spec['study']}.jsonl "
                f"that agree with {spec.get('where')}, found none"
            )
        return runs

    def _study(self, name: str, each: str = "") -> Frame:
        if (name, each) not in self._studies:
            records = read_records([self.results / f"{name}.jsonl"])
            if each:
                records = [part for record in records for part in parts(record, each)]
            self._studies[name, each] = frame(records)
        return self._studies[name, each]


def _columns(spec: Mapping[str, Any]) -> list[Any]:
    if "less" not in spec:
        return spec["columns"]
    declared = [{"value": one} if isinstance(one, str) else one for one in spec["columns"]]
    columns = []
    for one, method in product(declared, spec["less"]):
        told = [one["title"]] if "title" in one else []
        told += [f"less {method}"] if len(spec["less"]) > 1 or not told else []
        columns.append(one | {"less": method, "title": ", ".join(told)})
    return columns
