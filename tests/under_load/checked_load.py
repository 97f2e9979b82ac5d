"""Load on a server: requests without a pause over several connections, each response checked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator

from under_load.client import BrokenAnswer, Connection, NothingAnswered
from under_load.known_requests import KnownRequest, KnownRequests

FAULTS_KEPT = 10
ANSWERED_WITHIN = 600.0  # seconds; the long form sends 70,000 requests


class CheckedLoad:
    """`allowed` are the model versions that may answer now; whoever replaces models sets them."""

    def __init__(self, port: int, known: KnownRequests, allowed: set[str]) -> None:
        self._port, self._known, self.allowed = port, known, allowed
        self._next = itertools.cycle(known.requests)
        self.is_over = False
        self.n_answers = 0
        self.by_version: Counter[str] = Counter()
        self.n_faults = 0
        self.faults: list[str] = []  # the first ones

    @contextlib.asynccontextmanager
    async def over(self, n_connections: int) -> AsyncIterator[None]:
        """Send requests meanwhile; at the end every one is answered."""
        tasks = [asyncio.create_task(self._send()) for _ in range(n_connections)]
        try:
            yield
        finally:
            self.is_over = True
            await asyncio.gather(*tasks)

    async def until(self, n_answers: int) -> None:
        async with asyncio.timeout(ANSWERED_WITHIN):
            while self.n_answers < n_answers:
                await asyncio.sleep(0.005)

    async def _send(self) -> None:
        async with Connection(self._port) as connection:
            while not self.is_over:
                sent = next(self._next)
                allowed = self.allowed
                try:
                    answer = await connection.ask(sent.payload)
                except (NothingAnswered, BrokenAnswer) as error:
                    self._note(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.1)
                    continue
                fault, version = self._known.fault(sent, answer)
                if fault is None and version not in allowed | self.allowed:
                    fault = f"answered by {version} when only {allowed} should be"
                if fault is not None:
                    self._note(f"{_line(sent)}: {fault}")
                if version is not None:
                    self.by_version[version] += 1
                self.n_answers += 1

    def _note(self, fault: str) -> None:
        self.n_faults += 1
        if len(self.faults) < FAULTS_KEPT:
            self.faults.append(fault)


def _line(sent: KnownRequest) -> str:
    return sent.payload.split(b"\r\n", 1)[0].decode()
