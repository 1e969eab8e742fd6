"""The paper's recurrence: `memory_scan.py`, its equations in `reference.py`, its fast backends.

No code belongs here: the folders `torch` and `triton` would hide the libraries of the same names.
"""
