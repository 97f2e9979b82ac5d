"""Requests that wait are computed together, in order, within bounds. No real time passes here."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from bert4rec.serving.request_queues import BatchingQueue, Overloaded, ResponseBudget, TooLate


class Doubler:
    """Computes 2 x, and moves its own clock on by `seconds` per batch."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.batches: list[list[int]] = []
        self.during_first: Callable[[], None] = lambda: None

    def __call__(self, batch: list[int]) -> list[int]:
        if not self.batches:
            self.during_first()
        self.now += self.seconds
        self.batches.append(batch)
        if -1 in batch:
            raise ValueError("cannot double -1")
        return [2 * each for each in batch]

    def clock(self) -> float:
        return self.now


def make_queue(doubler: Doubler, **changed: float) -> BatchingQueue[int, int]:
    settings = {"max_batch": 4, "max_waiting": 8, "answer_within": 5.0} | changed
    return BatchingQueue(doubler, clock=doubler.clock, **settings)  # type: ignore[arg-type]


def submit(queue: BatchingQueue[int, int], *requests: list[int]) -> list[list[int] | BaseException]:
    """All at the same moment."""

    async def together() -> list[list[int] | BaseException]:
        return await asyncio.gather(*map(queue.submit, requests), return_exceptions=True)

    return asyncio.run(together())


def test_waiting_requests_are_computed_together_and_each_gets_its_own_result() -> None:
    doubler = Doubler()
    assert submit(make_queue(doubler), *([n] for n in range(7))) == [[2 * n] for n in range(7)]
    assert doubler.batches == [[0, 1, 2, 3], [4, 5, 6]]


def test_requests_that_arrive_during_a_batch_share_the_next_one() -> None:
    doubler = Doubler()

    async def arrive() -> None:
        queue = make_queue(doubler)
        tasks = []

        def add_three() -> None:  # as the server's threads do while the model computes
            tasks.extend(asyncio.ensure_future(queue.submit([n])) for n in (1, 2, 3))

        doubler.during_first = add_three
        assert await queue.submit([0]) == [0]
        assert await asyncio.gather(*tasks) == [[2], [4], [6]]

    asyncio.run(arrive())
    assert doubler.batches == [[0], [1, 2, 3]]


def test_a_large_request_is_computed_in_parts_with_others_in_between() -> None:
    doubler = Doubler()
    queue = make_queue(doubler, max_waiting=20)
    large, small, other = list(range(10)), [20, 21, 22], [30]
    assert submit(queue, large, small, other) == [[2 * n for n in each] for each in (large, small, other)]
    assert doubler.batches == [[0, 1, 2, 3], [20, 21, 22, 30], [4, 5, 6, 7], [8, 9]]
    assert queue.n_waiting == 0


def test_what_has_begun_is_finished_however_long_it_takes() -> None:
    queue = make_queue(Doubler(seconds=3), max_batch=2)
    assert submit(queue, list(range(8))) == [[2 * n for n in range(8)]]


def test_an_error_in_a_part_ends_the_whole_request() -> None:
    queue = make_queue(Doubler(), max_waiting=20)
    failed, fine = submit(queue, [0, 1, 2, 3, -1, 5, 6, 7, 8, 9], [30])
    assert isinstance(failed, ValueError)
    assert isinstance(fine, list | ValueError)
    assert queue.n_waiting == 0
    assert submit(queue, [1]) == [[2]]


def test_a_full_queue_refuses_at_once_and_accepts_again_later() -> None:
    queue = make_queue(Doubler())
    *results, refused = submit(queue, *([n] for n in range(9)))
    assert results == [[2 * n] for n in range(8)]
    assert isinstance(refused, Overloaded)
    assert (refused.status_code, refused.headers) == (503, {"retry-after": "1"})
    assert queue.n_waiting == 0
    assert submit(queue, [9]) == [[18]]


def test_a_request_larger_than_the_queue_is_accepted_if_the_queue_is_empty() -> None:
    accepted, refused = submit(make_queue(Doubler(), max_waiting=2), [1, 2, 3], [4])
    assert accepted == [2, 4, 6]
    assert isinstance(refused, Overloaded)


def test_a_request_that_would_take_too_long_is_refused_by_experience() -> None:
    queue = make_queue(Doubler(seconds=1), max_batch=1, max_waiting=1000, answer_within=6)
    for n in range(40):  # experience: about one second each
        submit(queue, [n])
    results = submit(queue, *([n] for n in range(30)))
    assert [isinstance(each, Overloaded) for each in results] == [False] * 6 + [True] * 24
    assert not [each for each in results if isinstance(each, TooLate)]
    assert {each.headers["retry-after"] for each in results[6:]} == {"6"}  # type: ignore[union-attr]


def test_a_request_whose_deadline_has_passed_is_not_computed() -> None:
    doubler = Doubler(seconds=10)
    first, *late = submit(make_queue(doubler, max_batch=1), [1], [2], [3])
    assert first == [2]
    assert all(isinstance(each, TooLate) for each in late)
    assert doubler.batches == [[1]]


def test_a_request_that_nobody_waits_for_is_not_computed() -> None:
    doubler = Doubler()

    async def give_up() -> None:
        queue = make_queue(doubler, max_batch=1)
        tasks = [asyncio.ensure_future(queue.submit([n])) for n in (0, 1, 2)]
        doubler.during_first = lambda: (tasks[1].cancel(), None)[1]
        assert await tasks[2] == [4]
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]

    asyncio.run(give_up())
    assert doubler.batches == [[0], [2]]


def test_an_error_reaches_those_in_its_batch_and_nobody_else() -> None:
    queue = make_queue(Doubler(), max_batch=1)
    failed, fine = submit(queue, [-1], [3])
    assert isinstance(failed, ValueError)
    assert fine == [6]
    assert submit(queue, [4]) == [[8]]


def test_unsent_large_responses_are_bounded() -> None:
    budget = ResponseBudget()
    with contextlib.ExitStack() as unsent:
        for _ in range(3):
            unsent.enter_context(budget.share(250_000))
        with pytest.raises(ConnectionError), budget.share(250_000):
            raise ConnectionError  # not sent: its share is free again
        unsent.enter_context(budget.share(250_000))
        with pytest.raises(Overloaded), budget.share(1):
            pass
    with budget.share(1_000_000):
        pass
