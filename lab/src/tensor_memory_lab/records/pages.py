"""Pages of the documentation whose tables and figures are made from the records of runs.

What stands between `<!-- NAME -->` and `<!-- /NAME -->` of a page is replaced; a place that has no
records stays as it is, and says that nothing was measured where it is empty.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tensor_memory_lab.files import write_text
from tensor_memory_lab.records.wording import listing

FIGURES = "images"
"""Folder of the figures, beside the page."""

NOT_MEASURED = "Not measured yet."
"""What an empty place is given, so that no heading stands over nothing."""

_EMPTY = re.compile(r"(<!-- (\S+) -->\n)\s*(<!-- /\2 -->)")


def fill(page: str, texts: Mapping[str, str]) -> str:
    """The page with its marked places filled; a text without a place is an error.

    >>> fill("<!-- a -->\\n<!-- /a -->", {})
    '<!-- a -->\\nNot measured yet.\\n<!-- /a -->'

    >>> fill("<!-- a --><!-- /a -->", {"a": "1"})
    Traceback (most recent call last):
    ValueError: page: expected <!-- a --> and <!-- /a --> on lines of their own, found none
    """
    for name, text in texts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not place.search(page):
            raise ValueError(
                f"page: expected <!-- {name} --> and <!-- /{name} --> on lines of their own, "
                "found none"
            )
        page = place.sub(lambda match, text=text: f"{match[1]}\n{text}\n{match[2]}", page)
    return _EMPTY.sub(rf"\1{NOT_MEASURED}\n\3", page)


def fill_page(
    argv: Sequence[str] | None,
    blocks: Callable[[Path, Path], Mapping[str, str]],
    *,
    module: str,
    results: str,
) -> int:
    """The command of a page: `blocks(results, figures)` gives its texts and draws its figures.

    Args:
        argv: the folder of results and the page; None takes the command line's.
        blocks: texts by the name of their place.
        module: what is run with `python -m`.
        results: what the folder holds, for the help text.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description="Fill the tables and figures of a page from results.",
    )
    parser.add_argument("results", type=Path, help=f"folder with {results}")
    parser.add_argument("page", type=Path, help="Markdown file with marked places")
    options = parser.parse_args(argv)
    if not options.results.is_dir():
        parser.error(f"{options.results}: no such folder; expected one with {results}")
    if not options.page.is_file():
        parser.error(f"{options.page}: no such file; expected the page to fill")
    figures = options.page.parent / FIGURES
    try:
        figures.mkdir(parents=True, exist_ok=True)
        texts = blocks(options.results, figures)
        write_text(options.page, fill(options.page.read_text(encoding="utf-8"), texts))
    except (ValueError, OSError) as error:  # a broken record, or a folder that refuses
        parser.error(str(error))
    print(f"{options.page}: filled {listing(list(texts)) or 'nothing'}")
    return 0
