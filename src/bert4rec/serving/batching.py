"""Questions that arrive while the model is busy are answered together, at the next turn.

A lone question does not wait: the model takes whatever is there as soon as it is free. What waits
is bounded, and a question that could not be answered in time is refused at once, not after a
timeout, so that an overloaded service spends its time on answers.

The model computes on the event loop's own thread. On another it would fight with the loop for
Python's lock at each of its hundred small operations. More cores are used by more workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Overloaded(Exception):
    """Too much waits already; `retry_after` seconds from now it should have gone."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too many requests are waiting")
        self.retry_after = retry_after


class TooLate(Exception):
    """The deadline passed while the question waited."""


@dataclass(eq=False)
class Waiting(Generic[Asked, Answer]):
    asked: Sequence[Asked]
    deadline: float
    future: asyncio.Future[list[Answer]]
    answers: list[Answer] = field(default_factory=list)  # of the first of them


@dataclass
class Batcher(Generic[Asked, Answer]):
    """`answer` is called with up to `max_batch` questions at a time, between turns of the loop.

    A request of more questions is answered in parts, and others get their turn in between.
    """

    answer: Callable[[list[Asked]], list[Answer]]
    max_batch: int
    max_waiting: int
    answer_within: float
    on_batch: Callable[[int, float, int], None] = lambda n, seconds, n_waiting: None

    n_waiting: int = 0
    _queue: deque[Waiting[Asked, Answer]] = field(default_factory=deque)
    _seconds_each: float = 0.001  # by experience, for the time that a new question will wait
    _has_a_turn: bool = False

    def refusal(self) -> Overloaded | None:
        """Why one more request would not be taken now; cheap, for before a body is read."""
        n = self.n_waiting
        is_too_long = (n + 1) * self._seconds_each > self.answer_within
        if n >= self.max_waiting or (n and is_too_long):  # a lone request is never refused
            return Overloaded(max(1.0, n * self._seconds_each))
        return None

    async def ask(self, asked: Sequence[Asked]) -> list[Answer]:
        if refusal := self.refusal():
            raise refusal
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Answer]] = loop.create_future()
        self._queue.append(Waiting(asked, time.monotonic() + self.answer_within, future))
        self.n_waiting += len(asked)
        self._give_a_turn(loop)
        return await future

    def _give_a_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """After what the loop has to do already: requests that have arrived join the batch."""
        if not self._has_a_turn:
            self._has_a_turn = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._has_a_turn = False
        started = time.monotonic()
        parts = self._take(started)
        asked = [question for _, part in parts for question in part]
        if asked:
            try:
                answers = self.answer(asked)
            except Exception as error:  # goes to everybody who waits for it
                for each, part in parts:
                    self.n_waiting -= len(each.asked) - len(each.answers) - len(part)
                    each.future.set_exception(error)
            else:
                self._deliver(parts, answers)
            seconds = time.monotonic() - started
            self._seconds_each += 0.1 * (seconds / len(asked) - self._seconds_each)
            self.on_batch(len(asked), seconds, self.n_waiting)
        if self._queue:
            self._give_a_turn(loop)

    def _take(self, now: float) -> list[tuple[Waiting[Asked, Answer], Sequence[Asked]]]:
        """The oldest requests, as much of each as fits; what nobody waits for falls out."""
        parts: list[tuple[Waiting[Asked, Answer], Sequence[Asked]]] = []
        n_left = self.max_batch
        while self._queue and n_left:
            each = self._queue.popleft()
            rest = each.asked[len(each.answers) :]
            is_late = each.deadline < now and not each.answers  # what was begun is finished
            if is_late and not each.future.done():
                each.future.set_exception(TooLate())
            if each.future.done():  # or the client went away
                self.n_waiting -= len(rest)
                continue
            part = rest[:n_left]
            parts.append((each, part))
            n_left -= len(part)
            self.n_waiting -= len(part)
        return parts

    def _deliver(
        self,
        parts: list[tuple[Waiting[Asked, Answer], Sequence[Asked]]],
        answers: list[Answer],
    ) -> None:
        first = 0
        for each, part in parts:
            each.answers += answers[first : first + len(part)]
            first += len(part)
            if len(each.answers) == len(each.asked):
                each.future.set_result(each.answers)
            else:
                self._queue.append(each)  # behind those who wait already
