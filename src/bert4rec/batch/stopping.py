"""Ctrl-C and SIGTERM while users are scored: stop at once, cleanly; what is whole is kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Asked to stop; the parts so far are kept, and the same call goes on from there."""


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """The first signal raises `Stopped`; further ones must not disturb the cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are for the main thread, and whoever runs us in another looks after them
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
