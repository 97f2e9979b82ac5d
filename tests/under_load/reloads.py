"""Models are replaced, by good and by broken ones, while every response is checked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from served import Served
from under_load.broken_models import BROKEN, make_broken
from under_load.checked_load import CheckedLoad
from under_load.known_requests import KnownRequests
from under_load.model_link import ModelLink, lines_of, reload_by_call, reload_by_signal, until_logged

Progress = Callable[[str], None]
BY_CALL, BY_SIGNAL, BY_WATCH = "call", "signal", "watch"  # how a server is told
WITHOUT_VERSION = ("no manifest", "empty directory", "not a directory", "nothing there")


@dataclass
class Outcome:
    n_answers: int = 0
    n_reloads: int = 0
    n_refused: int = 0
    by_version: dict[str, int] = field(default_factory=dict)
    n_faults: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, load: CheckedLoad) -> None:
        self.n_answers += load.n_answers
        for version, n in load.by_version.items():
            self.by_version[version] = self.by_version.get(version, 0) + n
        self.n_faults += load.n_faults
        self.faults += load.faults

    def as_facts(self) -> dict[str, Any]:
        return dict(vars(self))


async def reload_under_load(
    served: Served,
    link: ModelLink,
    known: KnownRequests,
    now: str,
    *,
    n_answers: int,
    n_connections: int,
    ways: Sequence[tuple[str, str]],
    progress: Progress,
) -> Outcome:
    """A reload by each of `ways`: how the directory changes, how the server is told.

    Spread evenly over `n_answers`. Version `now` is being served. Once the server says that it took
    a model, every later request must be answered by that one.
    """
    outcome = Outcome()
    load = CheckedLoad(served.port, known, {now})
    names = list(known.by_name)
    following = itertools.cycle(names[names.index(now) + 1 :] + names[: names.index(now) + 1])
    async with load.over(n_connections):
        for number, (change, told) in enumerate(ways, 1):
            await load.until(n_answers * number // (len(ways) + 1))
            version = known.by_name[next(following)]
            load.allowed = load.allowed | {version.version}
            n_loaded = len(lines_of(served, "model loaded"))
            put = link.switch if change == "switch" else link.overwrite
            await asyncio.to_thread(put, version.recommender)
            if told == BY_CALL:
                answer = await reload_by_call(served)
                assert answer.status == 200, answer
                facts = [each for each in answer.json["models"] if each["name"] == "model"]
                assert facts == [{"name": "model", "version": version.version, "changed": True}]
            else:
                if told == BY_SIGNAL:
                    await reload_by_signal(served)
                lines = await until_logged(served, "model loaded", n_loaded + 1)
                assert lines[-1]["to"] == version.version
            load.allowed = {version.version}
            outcome.n_reloads += 1
            progress(f"reload {number} of {len(ways)}, by {change} and {told}")
        await load.until(n_answers)
    outcome.add(load)
    return outcome


async def refuse_under_load(
    served: Served,
    link: ModelLink,
    known: KnownRequests,
    now: str,
    *,
    broken: Sequence[tuple[str, str]],
    n_connections: int,
    progress: Progress,
    n_between: int = 20,
) -> Outcome:
    """Each of `broken` (what is wrong, how the server is told) is refused, and `now` answers on.

    At the end a good model is put in place and loaded.
    """
    outcome = Outcome()
    load = CheckedLoad(served.port, known, {now})
    async with load.over(n_connections):
        for number, (way, told) in enumerate(broken, 1):
            n_refused = len(lines_of(served, "model refused"))
            directory = link.new_directory()
            await asyncio.to_thread(make_broken, directory, way, 100 + number)
            link.switch_to(directory)
            if told == BY_CALL:
                answer = await reload_by_call(served)
                assert (answer.status, answer.json["error"]["code"]) == (409, "model_refused"), f"{way}: {answer}"
            elif told == BY_SIGNAL:
                await reload_by_signal(served)
            await until_logged(served, "model refused", n_refused + 1)
            await load.until(load.n_answers + n_between)
            outcome.n_refused += 1
            progress(f"broken model {number} of {len(broken)} refused: {way}, by {told}")
        good = next(name for name in known.by_name if name != now)
        load.allowed = {now, good}
        n_loaded = len(lines_of(served, "model loaded"))
        await asyncio.to_thread(link.switch, known.by_name[good].recommender)
        if BY_WATCH in [told for _, told in broken]:
            await until_logged(served, "model loaded", n_loaded + 1)
        else:
            assert (await reload_by_call(served)).status == 200
        load.allowed = {good}
        await load.until(load.n_answers + n_between)
    assert load.by_version[good], "the good model after the broken ones was not loaded"
    outcome.add(load)
    return outcome


def broken_ways(n: int, told: Sequence[str]) -> list[tuple[str, str]]:
    """`n` kinds of broken models, told in turn; a watcher waits for models without a version."""
    kinds = [way for way in BROKEN if BY_WATCH not in told or way not in WITHOUT_VERSION]
    return list(itertools.islice(zip(kinds, itertools.cycle(told), strict=False), n))
