"""Does a model look ahead? `find_leak` finds out, `LeakReport` says what it found."""

from tensor_memory.leaks.find import find_leak
from tensor_memory.leaks.report import CutReport, LeakReport

__all__ = ["CutReport", "LeakReport", "find_leak"]
