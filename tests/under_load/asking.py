"""Questions without a pause over several connections, every answer checked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

from under_load.client import BrokenAnswer, Connection, NothingAnswered
from under_load.questions import Question, Questions

FAULTS_KEPT = 10


class Asking:
    """Until `is_over`. `allowed` are the versions that may answer now: told by who swaps models."""

    def __init__(self, port: int, questions: Questions, allowed: set[str]) -> None:
        self._port, self._questions, self.allowed = port, questions, allowed
        self._next = itertools.cycle(questions.questions)
        self.is_over = False
        self.n_answers = 0
        self.by_version: Counter[str] = Counter()
        self.n_faults = 0
        self.faults: list[str] = []  # the first ones

    @contextlib.asynccontextmanager
    async def over(self, n_connections: int) -> AsyncIterator[None]:
        """Asking goes on inside; at the end every question is answered."""
        tasks = [asyncio.create_task(self._ask()) for _ in range(n_connections)]
        try:
            yield
        finally:
            self.is_over = True
            await asyncio.gather(*tasks)

    async def until(self, n_answers: int) -> None:
        while self.n_answers < n_answers:
            await asyncio.sleep(0.005)

    async def _ask(self) -> None:
        async with Connection(self._port) as connection:
            while not self.is_over:
                question = next(self._next)
                allowed = self.allowed
                try:
                    answer = await connection.ask(question.payload)
                except (NothingAnswered, BrokenAnswer) as error:
                    self._note(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)
                    continue
                fault, version = self._questions.fault(question, answer)
                if fault is None and version not in allowed | self.allowed:
                    fault = f"answered by {version} when only {allowed} should"
                if fault is not None:
                    self._note(f"{_line(question)}: {fault}")
                if version is not None:
                    self.by_version[version] += 1
                self.n_answers += 1

    def _note(self, fault: str) -> None:
        self.n_faults += 1
        if len(self.faults) < FAULTS_KEPT:
            self.faults.append(fault)


def _line(question: Question) -> str:
    return question.payload.split(b"\r\n", 1)[0].decode()
