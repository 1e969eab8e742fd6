"""Modules of the user's own, in the folder where a command is called."""

from __future__ import annotations

import os
import sys


def find_modules_here() -> None:
    """Let imports find the current folder: under `python -m` they do, in a command they do not.

    To be called only where the user has named a module: it comes first, as there, and stays, since
    the module may import its neighbours late and a sweep's workers import it again.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
