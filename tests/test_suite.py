"""The rule by which `make test` leaves cases out loses no value of any parameter."""

import runpy
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

sample_crosses = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["sample_crosses"]


class Case:
    def __init__(self, *values):
        self.nodeid, self.marks = f"test.py::test_it[{'-'.join(values)}]", []
        self.callspec = SimpleNamespace(_idlist=values)

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


def test_a_sampled_cross_shows_every_value_and_a_list_is_left_whole():
    cross = [Case(*values) for values in product("abcdefghi", "xyz")]
    several = [Case(name) for name in "abc"]
    for case in several:
        case.nodeid = "test.py::test_other[…]"
    sample_crosses(cross + several)
    shown = [case.callspec._idlist for case in cross if not case.marks]
    assert len(shown) == 9
    assert {value for values in shown for value in values} == set("abcdefghixyz")
    assert not any(case.marks for case in several)


def test_a_cross_that_is_marked_whole_is_left_whole():
    cross = [Case(*values) for values in product("ab", "xy")]
    for case in cross:
        case.add_marker(pytest.mark.whole_cross)
    sample_crosses(cross)
    assert not any(case.get_closest_marker("exhaustive") for case in cross)
