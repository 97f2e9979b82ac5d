"""Questions that wait are answered together, in order, within bounds."""

import asyncio
import time

import pytest

from bert4rec.serving.request_queues import BatchingQueue, Overloaded, TooLate


class Doubler:
    """Answers 2 x, after a while."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds
        self.batches: list[list[int]] = []

    def __call__(self, asked: list[int]) -> list[int]:
        time.sleep(self.seconds)
        self.batches.append(asked)
        if -1 in asked:
            raise ValueError("cannot double -1")
        return [2 * each for each in asked]


def batcher(doubler: Doubler, **changed: float) -> BatchingQueue[int, int]:
    settings = {"max_batch": 4, "max_waiting": 8, "answer_within": 5.0} | changed
    return BatchingQueue(doubler, **settings)  # type: ignore[arg-type]


def ask(queue: BatchingQueue[int, int], *requests: list[int]) -> list[list[int] | BaseException]:
    """All at the same moment."""

    async def together() -> list[list[int] | BaseException]:
        return await asyncio.gather(*map(queue.submit, requests), return_exceptions=True)

    return asyncio.run(together())


def test_what_waits_is_answered_together_each_with_its_own() -> None:
    doubler = Doubler()
    assert ask(batcher(doubler), *([n] for n in range(7))) == [[2 * n] for n in range(7)]
    assert doubler.batches == [[0, 1, 2, 3], [4, 5, 6]]


def test_requests_that_arrive_during_a_batch_share_the_next_one() -> None:
    doubler = Doubler(seconds=0.02)

    async def arrive() -> None:
        queue = batcher(doubler)
        loop = asyncio.get_running_loop()
        first = loop.create_task(queue.submit([0]))
        await asyncio.sleep(0)
        # While the model computes, a server's threads hand over what has arrived.
        await loop.run_in_executor(None, time.sleep, 0.005)
        rest = [loop.create_task(queue.submit([n])) for n in (1, 2, 3)]
        await asyncio.gather(first, *rest)

    asyncio.run(arrive())
    assert doubler.batches == [[0], [1, 2, 3]]


def test_a_large_request_is_answered_in_parts_and_others_in_between() -> None:
    doubler = Doubler()
    queue = batcher(doubler, max_waiting=20)
    large, small, other = list(range(10)), [20, 21, 22], [30]
    assert ask(queue, large, small, other) == [
        [2 * n for n in each] for each in (large, small, other)
    ]
    assert doubler.batches == [[0, 1, 2, 3], [20, 21, 22, 30], [4, 5, 6, 7], [8, 9]]
    assert queue.n_waiting == 0


def test_what_was_begun_is_finished_however_long_it_takes() -> None:
    queue = batcher(Doubler(seconds=0.03), max_batch=2, answer_within=0.05)
    assert ask(queue, list(range(8))) == [[2 * n for n in range(8)]]


def test_an_error_in_a_part_ends_the_whole_request() -> None:
    doubler = Doubler()
    queue = batcher(doubler, max_waiting=20)
    failed, fine = ask(queue, [0, 1, 2, 3, -1, 5, 6, 7, 8, 9], [30])
    assert isinstance(failed, ValueError)
    assert isinstance(fine, list | ValueError)
    assert queue.n_waiting == 0
    assert ask(queue, [1]) == [[2]]


def test_too_much_is_refused_at_once_and_later_taken_again() -> None:
    queue = batcher(Doubler())
    *answers, refused = ask(queue, *([n] for n in range(9)))
    assert answers == [[2 * n] for n in range(8)]
    assert isinstance(refused, Overloaded)
    assert int(refused.headers["retry-after"]) >= 1
    assert queue.n_waiting == 0
    assert ask(queue, [9]) == [[18]]


def test_a_request_larger_than_the_queue_is_taken_while_there_is_room() -> None:
    taken, refused = ask(batcher(Doubler(), max_waiting=2), [1, 2, 3], [4])
    assert taken == [2, 4, 6]
    assert isinstance(refused, Overloaded)


def test_what_would_take_too_long_is_refused_by_experience() -> None:
    queue = batcher(Doubler(seconds=0.05), max_batch=1, max_waiting=1000, answer_within=0.3)
    for n in range(20):  # experience
        ask(queue, [n])
    answers = ask(queue, *([n] for n in range(30)))
    refused = [each for each in answers if isinstance(each, Overloaded)]
    assert len(refused) >= 20
    assert not [each for each in answers if isinstance(each, TooLate)]


def test_a_question_whose_time_is_over_is_not_computed() -> None:
    doubler = Doubler(seconds=0.1)
    first, *late = ask(batcher(doubler, max_batch=1, answer_within=0.05), [1], [2], [3])
    assert first == [2]
    assert all(isinstance(each, TooLate) for each in late)
    assert doubler.batches == [[1]]


def test_a_question_that_nobody_waits_for_is_not_computed() -> None:
    doubler = Doubler()

    async def give_up() -> None:
        queue = batcher(doubler)
        task = asyncio.get_running_loop().create_task(queue.submit([1]))
        other = asyncio.get_running_loop().create_task(queue.submit([2]))
        asyncio.get_running_loop().call_soon(task.cancel)
        assert await other == [4]
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert doubler.batches in ([[2]], [[1, 2]])


def test_an_error_reaches_those_who_asked_and_nobody_else() -> None:
    queue = batcher(Doubler(), max_batch=1)
    failed, fine = ask(queue, [-1], [3])
    assert isinstance(failed, ValueError)
    assert fine == [6]
    assert ask(queue, [4]) == [[8]]
