"""Models are replaced, by good and by broken ones, while every answer is checked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from served import Served
from under_load.asking import Asking
from under_load.broken_models import BROKEN, make_broken
from under_load.model_place import (
    ModelPlace,
    lines_of,
    reload_by_call,
    reload_by_signal,
    until_logged,
)
from under_load.questions import Questions

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

    def add(self, asking: Asking) -> None:
        self.n_answers += asking.n_answers
        for version, n in asking.by_version.items():
            self.by_version[version] = self.by_version.get(version, 0) + n
        self.n_faults += asking.n_faults
        self.faults += asking.faults

    def as_facts(self) -> dict[str, Any]:
        return dict(vars(self))


async def reload_under_load(
    served: Served,
    place: ModelPlace,
    questions: Questions,
    now: str,
    *,
    n_answers: int,
    n_connections: int,
    ways: Sequence[tuple[str, str]],
    progress: Progress,
) -> Outcome:
    """A reload by each of `ways`: how the directory changes, how the server is told.

    Spread evenly over `n_answers`. Version `now` is being served. Once the server says that it took
    a model, every later question must be answered by that one.
    """
    outcome = Outcome()
    asking = Asking(served.port, questions, {now})
    names = list(questions.by_name)
    following = itertools.cycle(names[names.index(now) + 1 :] + names[: names.index(now) + 1])
    async with asking.over(n_connections):
        for number, (change, told) in enumerate(ways, 1):
            await asking.until(n_answers * number // (len(ways) + 1))
            version = questions.by_name[next(following)]
            asking.allowed = asking.allowed | {version.version}
            n_loaded = len(lines_of(served, "model loaded"))
            put = place.switch if change == "switch" else place.overwrite
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
            asking.allowed = {version.version}
            outcome.n_reloads += 1
            progress(f"reload {number} of {len(ways)}, by {change} and {told}")
        await asking.until(n_answers)
    outcome.add(asking)
    return outcome


async def refuse_under_load(
    served: Served,
    place: ModelPlace,
    questions: Questions,
    now: str,
    *,
    broken: Sequence[tuple[str, str]],
    n_connections: int,
    progress: Progress,
    n_between: int = 20,
) -> Outcome:
    """Each of `broken` (what is wrong, how the server is told) is refused, and `now` answers on.

    At the end a good model is put in place and taken.
    """
    outcome = Outcome()
    asking = Asking(served.port, questions, {now})
    async with asking.over(n_connections):
        for number, (way, told) in enumerate(broken, 1):
            n_refused = len(lines_of(served, "model refused"))
            directory = place.new_directory()
            await asyncio.to_thread(make_broken, directory, way, 100 + number)
            place.switch_to(directory)
            if told == BY_CALL:
                answer = await reload_by_call(served)
                assert (answer.status, answer.json["error"]["code"]) == (409, "model_refused"), (
                    f"{way}: {answer}"
                )
            elif told == BY_SIGNAL:
                await reload_by_signal(served)
            await until_logged(served, "model refused", n_refused + 1)
            await asking.until(asking.n_answers + n_between)
            outcome.n_refused += 1
            progress(f"broken model {number} of {len(broken)} refused: {way}, by {told}")
        good = next(name for name in questions.by_name if name != now)
        asking.allowed = {now, good}
        n_loaded = len(lines_of(served, "model loaded"))
        await asyncio.to_thread(place.switch, questions.by_name[good].recommender)
        if BY_WATCH in [told for _, told in broken]:
            await until_logged(served, "model loaded", n_loaded + 1)
        else:
            assert (await reload_by_call(served)).status == 200
        asking.allowed = {good}
        await asking.until(asking.n_answers + n_between)
    assert asking.by_version[good], "the good model after the broken ones was not taken"
    outcome.add(asking)
    return outcome


def broken_ways(n: int, told: Sequence[str]) -> list[tuple[str, str]]:
    """`n` kinds of broken models, told in turn; a watcher waits for models without a version."""
    kinds = [way for way in BROKEN if BY_WATCH not in told or way not in WITHOUT_VERSION]
    return list(itertools.islice(zip(kinds, itertools.cycle(told), strict=False), n))
