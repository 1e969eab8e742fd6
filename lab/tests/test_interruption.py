"""A time limit's signal ends long work as Ctrl-C does, and only while that work goes on."""

import os
import signal
import threading

import pytest

from tensor_memory_lab.interruption import terminated_as_interrupted


def test_a_termination_interrupts_and_the_handler_of_before_comes_back():
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert told == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, before)


def test_in_another_thread_nothing_is_changed():
    seen = []

    def work():
        with terminated_as_interrupted():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
