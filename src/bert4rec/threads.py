"""Threads that share the cores: several small computations beat one that is split up.

torch splits each operation over all cores and waits for the slowest of them, hundreds of times per
step. Two threads that each compute a microbatch of their own on one core never wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

import torch

Given = TypeVar("Given")
Made = TypeVar("Made")

MOST_WORKERS = 8  # with more of them, they would wait for Python's global lock


def default_workers() -> int:
    """One thread per core that torch may use, within limits."""
    return min(torch.get_num_threads(), MOST_WORKERS)


class WorkerThreads:
    """A fixed number of threads; each uses its share of the cores that torch would use."""

    def __init__(self, n: int | None = None) -> None:
        n_cores = torch.get_num_threads()
        self.n = default_workers() if n is None else n
        self._pool = ThreadPoolExecutor(
            self.n, "bert4rec", initializer=_use_cores, initargs=(max(1, n_cores // self.n), n_cores)
        )

    def map(self, function: Callable[[Given], Made], given: Iterable[Given]) -> list[Made]:
        """All results in order; the first error is raised after all have ended."""
        futures = [self._pool.submit(function, each) for each in given]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def stream(
        self, function: Callable[[Given], Made], given: Iterable[Given], ahead: int | None = None
    ) -> Iterator[Made]:
        """Results in order; up to `ahead` of them are computed before they are needed."""
        waiting: deque[Future[Made]] = deque()
        for each in given:
            waiting.append(self._pool.submit(function, each))
            if len(waiting) > (self.n if ahead is None else ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)


_LOCK = threading.Lock()


def _use_cores(n: int, n_default: int) -> None:
    """Set this thread's cores; torch would also take the number as the default of new threads."""
    with _LOCK:
        torch.get_num_threads()  # a new thread takes the default at its first use of torch
        torch.set_num_threads(n)
        _restore_default(n_default)


def _restore_default(n_default: int) -> None:
    thread = threading.Thread(target=torch.set_num_threads, args=(n_default,))
    thread.start()
    thread.join()
