"""kill -9 while events are written: what was acknowledged is there after it, exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from served import N_ITEMS, Served, save_model, serve
from under_load.client import BrokenAnswer, Connection, NothingAnswered, ask_once, request

N_WRITERS = 6
N_EVENTS = 3  # of a request
N_REQUESTS = 100  # of a user: a history shows no more than 1,000 events
FEWEST, MOST = 100, 500  # acknowledged events before the kill
WRITTEN_WITHIN = 60.0  # seconds
BACK_WITHIN = 60.0  # seconds until a killed server answers again


@dataclass
class Written:
    """What one client sent for its users, in order."""

    requests: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)  # ids of events

    def next_events(self, prefix: str) -> list[dict[str, Any]]:
        user = f"{prefix}-{len(self.requests) - 1}"
        if not self.requests or len(self.requests[user]) == N_REQUESTS:
            user = f"{prefix}-{len(self.requests)}"
            self.requests[user] = []
        first = len(self.requests[user]) * N_EVENTS
        events = [
            {"user": user, "item": f"item-{n % N_ITEMS}", "time": float(n), "id": f"event-{n}"}
            for n in range(first, first + N_EVENTS)
        ]
        self.requests[user].append(events)
        return events


def name(event: dict[str, Any]) -> str:
    return f"{event['user']} {event['id']}"


@dataclass
class Kill:
    killed: str
    n_sent: int = 0
    n_acknowledged: int = 0
    n_lost: int = 0  # acknowledged, but not there after the kill
    n_repeated: int = 0  # there more than once
    n_torn: int = 0  # requests of which only a part is there
    n_unordered: int = 0  # histories that are not in the order of their times
    n_kept_unacknowledged: int = 0  # allowed: the kill came between the commit and the answer
    seconds_away: float = 0.0
    integrity: str = ""

    def as_facts(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_harmless(self) -> bool:
        n_wrong = self.n_lost + self.n_repeated + self.n_torn + self.n_unordered
        return n_wrong == 0 and self.integrity == "ok" and self.n_acknowledged > 0


async def _write(served: Served, prefix: str, written: Written) -> None:
    """Until the connection breaks, as a kill does."""
    async with Connection(served.port) as connection:
        while True:
            events = written.next_events(prefix)
            try:
                answer = await connection.ask(request("/v1/events", {"events": events}))
            except (NothingAnswered, BrokenAnswer):
                return
            assert (answer.status, answer.json["stored"]) == (200, N_EVENTS), answer
            written.acknowledged.update(map(name, events))


async def write_until_killed(served: Served, prefix: str, *, kills_main: bool, after: int) -> list[Written]:
    all_written = [Written() for _ in range(N_WRITERS)]
    tasks = [
        asyncio.create_task(_write(served, f"{prefix}-{number}", written)) for number, written in enumerate(all_written)
    ]
    async with asyncio.timeout(WRITTEN_WITHIN):
        while sum(len(written.acknowledged) for written in all_written) < after:
            await asyncio.sleep(0.005)
    victims = [served.process.pid] if kills_main else served.workers()
    workers = served.workers()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    if kills_main:  # a worker without the process above it ends by itself
        served.process.wait(10)
        await _until_gone(workers)
    await asyncio.gather(*tasks)
    return all_written


async def _until_gone(pids: list[int]) -> None:
    deadline = asyncio.get_running_loop().time() + 15
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert asyncio.get_running_loop().time() < deadline, f"workers {alive} outlive their parent"
        await asyncio.sleep(0.05)


async def _until_ready(served: Served) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() < began + BACK_WITHIN:
        with contextlib.suppress(NothingAnswered, BrokenAnswer):
            if (await ask_once(served.port, "/readyz")).status == 200:
                return round(loop.time() - began, 2)
        await asyncio.sleep(0.05)
    raise AssertionError(f"not ready again within {BACK_WITHIN:g} s of the kill")


async def examine(served: Served, all_written: list[Written], kill: Kill) -> None:
    """Read every history back, then send again what was not acknowledged, as a client would."""
    async with Connection(served.port) as connection:
        for written in all_written:
            kill.n_acknowledged += len(written.acknowledged)
            for user, requests in written.requests.items():
                kill.n_sent += len(requests) * N_EVENTS
                stored = await _history(connection, user)
                _compare(user, requests, stored, written.acknowledged, kill)
                for events in requests:
                    if name(events[0]) not in written.acknowledged:
                        again = await connection.ask(request("/v1/events", {"events": events}))
                        facts = again.json
                        assert facts["stored"] + facts["duplicates"] == N_EVENTS, again
                whole = [event["id"] for events in requests for event in events]
                found = [event["id"] for event in await _history(connection, user)]
                difference = sorted(set(whole) ^ set(found))[:10]
                assert found == whole, (kill, user, len(found), len(whole), difference)


async def _history(connection: Connection, user: str) -> list[dict[str, Any]]:
    answer = await connection.ask(request(f"/v1/users/{user}"))
    assert answer.status in (200, 404), answer
    events: list[dict[str, Any]] = answer.json["events"] if answer.status == 200 else []
    return events


def _compare(
    user: str, requests: list[list[dict[str, Any]]], stored: list[dict[str, Any]], acknowledged: set[str], kill: Kill
) -> None:
    found = [(event["id"], event["item"], event["time"]) for event in stored]
    kill.n_repeated += len(found) - len(set(found))
    kill.n_unordered += found != sorted(found, key=lambda each: each[2])
    for events in requests:
        present = [(each["id"], each["item"], each["time"]) in found for each in events]
        kill.n_torn += any(present) and not all(present)
        is_acknowledged = name(events[0]) in acknowledged
        kill.n_lost += is_acknowledged * present.count(False)
        kill.n_kept_unacknowledged += (not is_acknowledged) * present.count(True)


def kill_often(folder: Path, *, n_kills: int, workers: int = 1, seed: int = 0) -> Iterator[Kill]:
    """The workers, then the main process, in turn, at random moments, on one store."""
    moments = random.Random(seed)
    model, store = folder / "model", folder / "histories.db"
    save_model(model)
    options = ("--store", f"sqlite:{store}", "--workers", str(workers), "--no-access-log")
    left_behind: list[Written] | None = None  # by a main process that was killed
    n = 0
    while n < n_kills or left_behind is not None:
        with serve(model, *options) as served:
            if left_behind is not None:
                yield _examined("main", served, store, left_behind)
                left_behind = None
            if n < n_kills:
                yield _kill_workers(served, store, f"{n}", moments.randint(FEWEST, MOST))
                n += 1
            if n < n_kills:
                after = moments.randint(FEWEST, MOST)
                writing = write_until_killed(served, f"{n}", kills_main=True, after=after)
                left_behind = asyncio.run(writing)
                n += 1


def _kill_workers(served: Served, store: Path, prefix: str, after: int) -> Kill:
    written = asyncio.run(write_until_killed(served, prefix, kills_main=False, after=after))
    seconds = asyncio.run(_until_ready(served))
    kill = _examined("workers", served, store, written)
    kill.seconds_away = seconds
    return kill


def _examined(killed: str, served: Served, store: Path, written: list[Written]) -> Kill:
    kill = Kill(killed)
    asyncio.run(examine(served, written, kill))
    with contextlib.closing(sqlite3.connect(store)) as connection:
        kill.integrity = str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    return kill
