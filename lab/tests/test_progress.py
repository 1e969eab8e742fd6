"""Progress is a bar for people and a few lines for logs."""

import io
import time

import pytest

from tensor_memory_lab.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def work(file, total=1000):
    with progress("counting", total, unit="sheep", file=file) as advance:
        for done in range(total):
            advance(1, note=f"saw {done + 1}")
    return file.getvalue()


def test_a_log_gets_ten_lines_however_small_the_steps():
    lines = work(io.StringIO()).splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("counting: 100 of 1,000 sheep, 10 %, ")
    assert lines[-1].startswith("counting: 1,000 of 1,000 sheep, 100 %, ")
    assert lines[-1].endswith(", saw 1000")


@pytest.mark.parametrize(("width", "shown"), [(120, 3), (70, 2), (40, 1)])
def test_a_terminal_gets_a_bar_with_what_it_has_room_for(monkeypatch, width, shown):
    monkeypatch.setenv("COLUMNS", str(width))
    text = work(Terminal())
    assert [words in text for words in ("1000/1000", "saw 1000", "counting")] == [
        number < shown for number in range(3)
    ]
    assert "100 %" not in text


def test_a_log_gets_a_line_now_and_then_while_nothing_advances(monkeypatch):
    monkeypatch.setattr("tensor_memory_lab.progress.LINE_EVERY", 0.01)
    file = io.StringIO()
    with progress("counting", 1000, file=file) as advance:
        advance(10, note="slowly")
        while file.getvalue().count("slowly\n") < 2:
            time.sleep(0.01)
    lines = file.getvalue().splitlines()
    assert lines[-1].startswith("counting: 10 of 1,000 steps, 1 %, ")
    assert lines[-1].endswith(", slowly")


def test_a_note_stays_until_the_next_one():
    file = io.StringIO()
    with progress("counting", 20, file=file) as advance:
        advance(2, note="first")
        advance(2)
    assert file.getvalue().splitlines()[1].endswith(", first")


def test_an_error_inside_passes_through():
    with pytest.raises(KeyError, match="mine"), progress("counting", 2, file=Terminal()):
        raise KeyError("mine")
