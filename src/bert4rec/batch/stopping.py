"""Ctrl-C and SIGTERM while users are scored: stop at once, cleanly; what is whole is kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Asked to stop; the parts so far are kept, and the same call goes on from there."""


@contextlib.contextmanager
def stopped_by_signals(*, at_once: bool) -> Iterator[Callable[[], None]]:
    """The first signal raises `Stopped`; further ones must not disturb the cleaning up.

    `at_once` is for who only waits. Who computes calls what is yielded where it can stop: an
    exception out of nowhere, in the middle of a query, would come back as an error of the database.
    """
    received: list[int] = []

    def stop_if_asked() -> None:
        if received:
            raise Stopped

    if threading.current_thread() is not threading.main_thread():
        yield stop_if_asked  # signals are the main thread's: whoever runs us looks after them
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        if at_once:
            raise Stopped

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield stop_if_asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
