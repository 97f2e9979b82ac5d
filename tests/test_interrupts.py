"""The one way to be interrupted: signals are counted, and nothing is raised out of nowhere."""

import os
import signal
import threading

import pytest

from bert4rec.interrupts import SIGNALS, Interrupted, stop_requested


def handlers() -> list[object]:
    return [signal.getsignal(each) for each in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_ends_the_program(number: signal.Signals) -> None:
    before = handlers()
    with stop_requested() as is_stopped:
        assert not is_stopped()
        is_stopped.raise_if_stopped()
        os.kill(os.getpid(), number)
        assert is_stopped()
        assert is_stopped
        with pytest.raises(Interrupted):
            is_stopped.raise_if_stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert handlers() == before


def test_it_counts_as_often_as_it_is_told_to() -> None:
    with stop_requested(n_counted=3) as is_stopped:
        for count in (1, 2, 3):
            os.kill(os.getpid(), signal.SIGINT)
            assert is_stopped.count == count
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_of_before_come_back_after_an_error() -> None:
    before = handlers()
    with pytest.raises(ZeroDivisionError), stop_requested():
        raise ZeroDivisionError
    assert handlers() == before


def test_outside_the_main_thread_it_does_nothing() -> None:
    before, found = handlers(), []

    def work() -> None:
        with stop_requested() as is_stopped:
            found.append((handlers() == before, is_stopped()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(True, False)]
