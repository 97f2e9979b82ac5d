"""Slow questions (why? which titles?) on a thread of their own, so that recommending goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from bert4rec.serving.batching import Overloaded, TooLate

Made = TypeVar("Made")


class Lane:
    def __init__(self, max_waiting: int, answer_within: float) -> None:
        self._max_waiting, self._answer_within = max_waiting, answer_within
        self._n_waiting = 0
        self._pool = ThreadPoolExecutor(1, "slow", initializer=torch.set_num_threads, initargs=(1,))

    async def run(self, make: Callable[[], Made]) -> Made:
        if self._n_waiting >= self._max_waiting:
            raise Overloaded(1.0)
        self._n_waiting += 1
        try:
            async with asyncio.timeout(self._answer_within):
                return await asyncio.get_running_loop().run_in_executor(self._pool, make)
        except TimeoutError:
            raise TooLate from None
        finally:
            self._n_waiting -= 1

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
