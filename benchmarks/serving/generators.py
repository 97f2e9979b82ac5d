"""Load on a server: by wrk, or by the tests' own client where wrk is not installed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from under_load.client import BrokenAnswer, Connection, NothingAnswered, request

N_ITEMS = 3416  # of ML-1M
HISTORY = 50
SCRIPT = Path(__file__).with_name("recommend.lua")
WRK = shutil.which("wrk")


@dataclass(frozen=True)
class Measured:
    seconds: float
    n_ok: int
    n_overloaded: int  # 503
    n_other: int  # any other status
    n_broken: int  # no whole answer
    p50_ms: float
    p99_ms: float

    @property
    def sent_rate(self) -> float:
        return (self.n_ok + self.n_overloaded + self.n_other) / self.seconds

    @property
    def ok_rate(self) -> float:
        return self.n_ok / self.seconds


def load(port: int, *, connections: int, seconds: float, delay_ms: float = 0, manner: str = "") -> Measured:
    """Each connection sends a request, gets its response, waits `delay_ms` (x 0.5 to 1.5), repeats.

    wrk counts whole seconds. The manner "patient" (see recommend.lua) needs wrk.
    """
    if WRK is None:
        if manner:
            raise ValueError(f"the manner {manner!r} needs wrk: install it")
        return asyncio.run(by_client(port, connections, seconds, delay_ms)).measured
    words = [WRK, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "10s"]
    words += ["-s", str(SCRIPT), f"http://127.0.0.1:{port}", "--", f"{delay_ms:.0f}"]
    words += [manner] if manner else []
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


@dataclass(frozen=True)
class ClientLoad:
    measured: Measured
    times: list[tuple[float, float]]  # (moment, milliseconds) of each 200


async def by_client(port: int, connections: int, seconds: float, delay_ms: float = 0) -> ClientLoad:
    choice = random.Random(0)
    payloads = [
        request("/v1/recommend", {"history": [f"item-{choice.randrange(N_ITEMS)}" for _ in range(HISTORY)], "k": 10})
        for _ in range(256)
    ]
    times: list[tuple[float, float]] = []
    statuses: dict[int, int] = {}
    end = time.monotonic() + seconds

    async def ask() -> None:
        async with Connection(port) as connection:
            while (began := time.monotonic()) < end:
                try:
                    status = (await connection.ask(choice.choice(payloads))).status
                except (NothingAnswered, BrokenAnswer):
                    status = 0
                now = time.monotonic()
                statuses[status] = statuses.get(status, 0) + 1
                if status == 200:
                    times.append((now, (now - began) * 1000))
                if delay_ms:
                    await asyncio.sleep(delay_ms * choice.uniform(0.5, 1.5) / 1000)

    await asyncio.gather(*(ask() for _ in range(connections)))
    n_ok, n_overloaded = statuses.pop(200, 0), statuses.pop(503, 0)
    n_broken = statuses.pop(0, 0)
    took = [each for _, each in times]
    measured = Measured(
        seconds, n_ok, n_overloaded, sum(statuses.values()), n_broken, percentile(took, 50), percentile(took, 99)
    )
    return ClientLoad(measured, times)


def percentile(values: list[float], percent: float) -> float:
    if not values:
        return float("inf")
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]
