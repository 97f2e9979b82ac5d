"""Bounded queues: requests wait here for the model, and are refused when too many wait.

A request is refused at once, not after a timeout, so that an overloaded service spends its time on
responses.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from bert4rec.serving.http.problems import Problem

Request = TypeVar("Request")
Result = TypeVar("Result")


class Overloaded(Problem):
    """The queue is full; after `retry_after` seconds it should be empty again."""

    def __init__(self, retry_after: int = 1) -> None:
        message = "Too many requests are waiting. Try again after the time in Retry-After."
        headers = {"retry-after": str(retry_after)}
        super().__init__(503, "overloaded", message, headers=headers)


class TooLate(Problem):
    """The deadline passed while the request waited."""

    def __init__(self) -> None:
        message = "The response would have come too late. Try again."
        super().__init__(503, "too_late", message, headers={"retry-after": "1"})


@dataclass(eq=False, slots=True)
class WaitingPart(Generic[Request, Result]):
    """Histories of one HTTP request that wait together, and the results so far."""

    requests: Sequence[Request]
    deadline: float
    future: asyncio.Future[list[Result]]
    results: list[Result] = field(default_factory=list)


@dataclass
class BatchingQueue(Generic[Request, Result]):
    """Requests that arrive while the model is busy are computed together, in the next batch.

    A lone request does not wait: the model takes what is there as soon as it is free. An HTTP
    request of more than `max_batch` histories waits in parts, with others in between.

    `compute` runs on the event loop's own thread. On another thread it would compete with the loop
    for Python's lock at each of its hundred small operations. Workers are the way to more cores.
    """

    compute: Callable[[list[Request]], list[Result]]
    max_batch: int
    max_waiting: int
    answer_within: float
    on_batch: Callable[[int, float, int], None] = lambda n, seconds, n_waiting: None
    clock: Callable[[], float] = time.monotonic

    n_waiting: int = 0
    _queue: deque[tuple[WaitingPart[Request, Result], Request]] = field(default_factory=deque)
    _seconds_each: float = 0.001  # moving average, to estimate how long a new request will wait
    _is_scheduled: bool = False

    def retry_after(self) -> int | None:
        """Seconds to wait, if a request would be refused now. Cheap: for before a body is read."""
        n = self.n_waiting
        is_too_long = (n + 1) * self._seconds_each > self.answer_within
        if n >= self.max_waiting or (n and is_too_long):  # a lone request is never refused
            return math.ceil(max(1.0, n * self._seconds_each))
        return None

    async def submit(self, requests: Sequence[Request]) -> list[Result]:
        if seconds := self.retry_after():
            raise Overloaded(seconds)
        loop = asyncio.get_running_loop()
        deadline = self.clock() + self.answer_within
        results: list[Result] = []
        n_later = len(requests)  # counted as waiting, but behind those who come in between
        self.n_waiting += n_later
        try:
            while n_later:
                part = WaitingPart(requests[-n_later:][: self.max_batch], deadline, loop.create_future())
                n_later -= len(part.requests)
                self._queue.extend((part, request) for request in part.requests)
                self._schedule(loop)
                results += await part.future
                deadline = math.inf  # what has begun is finished
        finally:
            self.n_waiting -= n_later
        return results

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run after what the loop has to do already, so that arrived requests join the batch."""
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._run_batch, loop)

    def _run_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        started = self.clock()
        batch = self._take(started)
        if batch:
            try:
                results = self.compute([request for _, request in batch])
                for (part, _), result in zip(batch, results, strict=True):
                    part.results.append(result)
                    if len(part.results) == len(part.requests):
                        part.future.set_result(part.results)
            except Exception as error:  # everybody in the batch gets it
                for part, _ in batch:
                    if not part.future.done():
                        part.future.set_exception(error)
            seconds = self.clock() - started
            self._seconds_each += 0.1 * (seconds / len(batch) - self._seconds_each)
            self.on_batch(len(batch), seconds, self.n_waiting)
        if self._queue:
            self._schedule(loop)

    def _take(self, now: float) -> list[tuple[WaitingPart[Request, Result], Request]]:
        """The oldest that wait; late and abandoned ones are dropped."""
        batch: list[tuple[WaitingPart[Request, Result], Request]] = []
        while self._queue and len(batch) < self.max_batch:
            part, request = self._queue.popleft()
            self.n_waiting -= 1
            if not part.future.done():  # nor has the client gone
                if part.deadline < now and not part.results:
                    part.future.set_exception(TooLate())
                else:
                    batch.append((part, request))
        return batch


class ThreadQueue:
    """One thread for slow work (explanations, title search), so that recommending goes on."""

    def __init__(self, max_waiting: int, answer_within: float) -> None:
        self._max_waiting, self._answer_within = max_waiting, answer_within
        self._n_waiting = 0
        self._pool = ThreadPoolExecutor(1, "slow", initializer=torch.set_num_threads, initargs=(1,))

    async def run(self, work: Callable[[], Result]) -> Result:
        if self._n_waiting >= self._max_waiting:
            raise Overloaded
        self._n_waiting += 1
        try:
            async with asyncio.timeout(self._answer_within):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            raise TooLate from None
        finally:
            self._n_waiting -= 1

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class ResponseBudget:
    """A bound on unsent large responses: a client that reads slowly keeps one in memory here."""

    MAX_ITEMS = 1_000_000  # recommended items, some hundred bytes each

    def __init__(self) -> None:
        self._n_free = self.MAX_ITEMS

    @contextlib.contextmanager
    def share(self, n: int) -> Iterator[None]:
        """Room for `n` items until the response was sent, or could not be."""
        if n > self._n_free:
            raise Overloaded
        self._n_free -= n
        try:
            yield
        finally:
            self._n_free += n
