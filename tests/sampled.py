"""Parameters of which the default run takes a sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive_but(sample: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases as parameters; those outside the sample run with the exhaustive tests alone."""
    marks = {True: (), False: pytest.mark.exhaustive}
    unique = dict.fromkeys([*sample, *cases])
    return [pytest.param(case, marks=marks[case in sample], id=str(case)) for case in unique]
