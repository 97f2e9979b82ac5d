"""SIGTERM under load: for whatever the server accepted, a client got a whole response.

Requests are identified by their id, which is in every response and in the access log.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from served import Served, serve
from under_load.client import BrokenAnswer, Connection, NothingAnswered
from under_load.known_requests import KnownRequests

STOP_WITHIN = 60.0  # seconds
FEWEST, MOST = 50, 500  # responses before the signal


@dataclass
class Shutdown:
    n_accepted: int = 0  # by the server: requests in its access log
    n_received: int = 0  # whole and right answers that clients got
    n_lost: int = 0  # accepted, but no client got the answer
    n_cut: int = 0  # connections that ended within an answer
    n_refused: int = 0  # the server listened no more: nothing was sent
    n_closed: int = 0  # sent or on its way, but not accepted and nothing answered: safe to repeat
    seconds: float = 0.0  # from the signal to the end
    exit_code: int | None = None
    n_workers: int = 1
    n_faults: int = 0
    faults: list[str] = field(default_factory=list)

    def as_facts(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_clean(self) -> bool:
        n_wrong = self.n_faults + self.n_lost + self.n_cut
        is_whole = n_wrong == 0 and self.n_accepted == self.n_received > 0
        return is_whole and self.exit_code == 0


class Clients:
    """Half keep their connections, half open one per request."""

    def __init__(self, served: Served, known: KnownRequests) -> None:
        self._served, self._known = served, known
        keeping = known.requests
        closing = [each.closing() for each in known.requests]
        self._next = {True: itertools.cycle(keeping), False: itertools.cycle(closing)}
        self.end = Shutdown()
        self.ids: Counter[str] = Counter()  # of received answers
        self.is_signalled = False

    async def run(self, is_kept: bool) -> None:
        async with Connection(self._served.port) as connection:
            while self._served.process.poll() is None:
                sent = next(self._next[is_kept])
                try:
                    answer = await connection.ask(sent.payload)
                except NothingAnswered as error:
                    self._on_nothing(error)
                    await asyncio.sleep(0.02)
                except BrokenAnswer as error:
                    self.end.n_cut += 1
                    self._note(str(error))
                else:
                    self.end.n_received += 1
                    self.ids[answer.header("x-request-id") or ""] += 1
                    if fault := self._known.fault(sent, answer)[0]:
                        self._note(fault)

    def _on_nothing(self, error: NothingAnswered) -> None:
        if not self.is_signalled:
            self._note(f"before the signal: {error}")
        elif error.was_connected:
            self.end.n_closed += 1
        else:
            self.end.n_refused += 1

    def _note(self, fault: str) -> None:
        self.end.n_faults += 1
        self.end.faults.append(fault)


async def stop_under_load(served: Served, known: KnownRequests, *, n_connections: int, after: int) -> Shutdown:
    """The server gets SIGTERM `after` so many responses, and has exited when this returns."""
    clients = Clients(served, known)
    tasks = [asyncio.create_task(clients.run(i % 2 == 0)) for i in range(n_connections)]
    async with asyncio.timeout(STOP_WITHIN):
        while clients.end.n_received < after:
            await asyncio.sleep(0.005)
    began = time.monotonic()
    clients.is_signalled = True
    served.process.send_signal(signal.SIGTERM)
    while served.process.poll() is None and time.monotonic() < began + STOP_WITHIN:
        await asyncio.sleep(0.01)
    end = clients.end
    end.seconds = round(time.monotonic() - began, 2)
    end.exit_code = served.process.returncode
    assert end.exit_code is not None, f"still running {end.seconds} s after SIGTERM"
    await asyncio.gather(*tasks)
    _compare_with_log(served, clients)
    return end


def _compare_with_log(served: Served, clients: Clients) -> None:
    lines = served.log_lines()
    requests = [line for line in lines if line["logger"] == "bert4rec.access"]
    accepted = Counter(str(line["request_id"]) for line in requests if str(line["path"]).startswith("/v1/recommend"))
    end = clients.end
    end.n_accepted = accepted.total()
    end.n_lost = (accepted - clients.ids).total()
    if unknown := (clients.ids - accepted).total():
        clients.end.faults.append(f"{unknown} answers are not in the access log")
    ended = [line for line in lines if line.get("message") == "ended"]
    if not ended or any(line["accepted"] != line["answered"] for line in ended):
        end.faults.append(f"the server's own account: {ended}")
    elif sum(int(str(line["accepted"])) for line in ended) != len(requests):
        end.faults.append(f"the server's account {ended} is not the {len(requests)} in its log")
    end.n_faults = max(end.n_faults, len(end.faults))


def stop_often(
    folder: Path,
    known: KnownRequests,
    *,
    n_stops: int,
    n_connections: int,
    workers: Sequence[int] = (1,),
    seed: int = 0,
) -> Iterator[Shutdown]:
    """One server after another, with so many workers in turn, each stopped at another moment."""
    moments = random.Random(seed)
    model = folder / "model"
    known.versions[0].recommender.save(model)
    for number in range(n_stops):
        n_workers = workers[number % len(workers)]
        with serve(model, "--workers", str(n_workers)) as served:
            after = moments.randint(FEWEST, MOST)
            load = stop_under_load(served, known, n_connections=n_connections, after=after)
            end = asyncio.run(load)
        end.n_workers = n_workers
        yield end
