"""SIGTERM under load: whatever the server accepted, a client got a whole answer to.

Requests are told apart by their id, which every answer carries and the access log names.
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
from under_load.questions import Questions

END_WITHIN = 10.0  # seconds
FIRST, LAST = 0.2, 1.2  # seconds of load before the signal


@dataclass
class End:
    n_accepted: int = 0  # by the server: questions in its access log
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
        return is_whole and self.exit_code == 0 and self.seconds < END_WITHIN


class Clients:
    """Half keep their connections, half open one for each question."""

    def __init__(self, served: Served, questions: Questions) -> None:
        self._served, self._questions = served, questions
        keeping = questions.questions
        closing = [each.closing() for each in questions.questions]
        self._next = {True: itertools.cycle(keeping), False: itertools.cycle(closing)}
        self.end = End()
        self.ids: Counter[str] = Counter()  # of received answers
        self.is_signalled = False

    async def run(self, is_kept: bool) -> None:
        async with Connection(self._served.port) as connection:
            while self._served.process.poll() is None:
                question = next(self._next[is_kept])
                try:
                    answer = await connection.ask(question.payload)
                except NothingAnswered as error:
                    self._on_nothing(error)
                    await asyncio.sleep(0.02)
                except BrokenAnswer as error:
                    self.end.n_cut += 1
                    self._note(str(error))
                else:
                    self.end.n_received += 1
                    self.ids[answer.header("x-request-id") or ""] += 1
                    if fault := self._questions.fault(question, answer)[0]:
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


async def end_under_load(
    served: Served, questions: Questions, *, n_connections: int, after: float
) -> End:
    """The server is sent SIGTERM `after` seconds of load, and has ended when this returns."""
    clients = Clients(served, questions)
    tasks = [asyncio.create_task(clients.run(i % 2 == 0)) for i in range(n_connections)]
    await asyncio.sleep(after)
    began = time.monotonic()
    clients.is_signalled = True
    served.process.send_signal(signal.SIGTERM)
    while served.process.poll() is None and time.monotonic() < began + 3 * END_WITHIN:
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
    accepted = Counter(
        str(line["request_id"])
        for line in requests
        if str(line["path"]).startswith("/v1/recommend")
    )
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


def end_often(
    folder: Path,
    questions: Questions,
    *,
    n_ends: int,
    n_connections: int,
    workers: Sequence[int] = (1,),
    seed: int = 0,
) -> Iterator[End]:
    """One server after another, with so many workers in turn, each ended at another moment."""
    moments = random.Random(seed)
    model = folder / "model"
    questions.versions[0].recommender.save(model)
    for number in range(n_ends):
        n_workers = workers[number % len(workers)]
        with serve(model, "--workers", str(n_workers)) as served:
            after = moments.uniform(FIRST, LAST)
            load = end_under_load(served, questions, n_connections=n_connections, after=after)
            end = asyncio.run(load)
        end.n_workers = n_workers
        yield end
