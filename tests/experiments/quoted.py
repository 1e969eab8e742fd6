"""Where tests find the pages whose numbers they hold to records."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def words_of(page):
    """Its text with single blanks, so that a quoted sentence may be broken anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())
