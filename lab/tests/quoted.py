"""Where tests find the pages whose numbers they hold to records, and the records."""

import functools
from pathlib import Path

from tensor_memory_lab.records import read_results

ROOT = Path(__file__).parents[2]


def words_of(page):
    """Its text with single blanks, so that a quoted sentence may be broken anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@functools.cache
def records_of(*folders):
    """The committed records of a folder of results; read once, not to be changed."""
    return read_results([ROOT.joinpath("results", *folders)])
