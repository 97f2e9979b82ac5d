"""The one way to be interrupted: Ctrl-C or SIGTERM sets a flag, which the work looks at."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came; everything so far is saved, and the same call resumes from there."""


class StopRequest:
    """`is_stopped()` is true after Ctrl-C or SIGTERM; `count` says how often they came."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bool:
        return self.count > 0

    __bool__ = __call__

    def raise_if_stopped(self) -> None:
        if self.count:
            raise Interrupted


@contextlib.contextmanager
def stop_requested(*, n_counted: int = 1) -> Iterator[StopRequest]:
    """Count Ctrl-C and SIGTERM instead of dying of them; the handlers of before come back.

    After `n_counted` of them one more of the same kind ends the program at once, by a
    KeyboardInterrupt. Until then nothing is raised out of nowhere: an exception in the middle of a
    query would come back as an error of the database. Signals belong to the main thread, so in
    another thread this does nothing: whoever runs the thread handles them.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def receive(number: int, frame: FrameType | None) -> None:
        request.count += 1
        if request.count >= n_counted:
            signal.signal(number, signal.default_int_handler)

    before = {each: signal.signal(each, receive) for each in SIGNALS}
    try:
        yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
