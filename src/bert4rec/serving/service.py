"""What the routes ask: models, histories and a queue, put together for one worker."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from bert4rec.allocator import keep_freed_memory
from bert4rec.recommender import Recommendations
from bert4rec.serving.batching import Batcher, Overloaded, TooLate
from bert4rec.serving.lane import Lane
from bert4rec.serving.metrics import Metrics
from bert4rec.serving.problems import Problem
from bert4rec.serving.room import Room
from bert4rec.serving.served_model import ServedModel
from bert4rec.serving.settings import ServeSettings
from bert4rec.serving.shelf import Change, ModelRefused, Shelf
from bert4rec.serving.store import Store, open_store

log = logging.getLogger("bert4rec.serving")

T = TypeVar("T")
SLOW_WAITING, SLOW_WITHIN = 8, 10.0
SEARCHES_WAITING = 64
GC_THRESHOLDS = 100_000, 20, 50  # a request makes hundreds of objects, and hardly ever a cycle
SWITCH_INTERVAL = 0.0005  # seconds that a slow question may hold Python's lock, instead of 5 ms


@dataclass(frozen=True)
class Wanted:
    served: ServedModel  # the version that was served when the request came
    history: Sequence[str | int]
    k: int
    exclude_seen: bool
    allow: Sequence[str | int] | None
    block: Sequence[str | int] | None


class Service:
    def __init__(self, settings: ServeSettings, main_pid: int | None) -> None:
        self.settings, self._main_pid = settings, main_pid
        self.metrics = Metrics()
        directories = [settings.model, *settings.compare]
        self.shelf = Shelf(directories, self.metrics.on_models, settings.retrieval)
        self.batcher: Batcher[Wanted, Recommendations] = Batcher(
            self._answer,
            settings.max_batch,
            settings.max_waiting,
            settings.answer_within,
            self.metrics.on_batch,
        )
        self.explaining = Lane(SLOW_WAITING, SLOW_WITHIN)
        self.searching = Lane(SEARCHES_WAITING, settings.answer_within)
        self.room = Room()
        self.is_draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self.store: Store

    async def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        keep_freed_memory()
        torch.set_num_threads(self.settings.threads)
        self.shelf.load()
        self.store = await open_store(self.settings.store)
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGHUP, self._on_hangup), (signal.SIGUSR2, self.drain)):
            loop.add_signal_handler(number, handler)
        if self.shelf.has_news():  # a new model and its signal came while this one was loaded
            await self._reload_quietly()
        if self.settings.watch:
            self._tasks.append(loop.create_task(self._watch()))
        gc.collect()
        gc.freeze()  # what is there now stays, and need not be walked through again and again
        gc.set_threshold(*GC_THRESHOLDS)
        log.info("ready", extra={"models": {n: m.version for n, m in self.shelf.now.items()}})

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.explaining.close()
        self.searching.close()
        await self.store.close()

    def drain(self) -> None:
        self.is_draining = True

    def model(self, name: str | None) -> ServedModel:
        found = self.shelf.get(name)
        if found is None:
            raise Problem(404, "unknown_model", "No such model; GET /v1/model lists them.")
        return found

    async def recommend(self, wanted: Sequence[Wanted]) -> list[Recommendations]:
        with queue_problems():
            return await self.batcher.ask(wanted)

    def take_room(self, n_items: int) -> None:
        with queue_problems():
            self.room.take(n_items)

    async def explain(self, make: Callable[[], T]) -> T:
        with queue_problems():
            return await self.explaining.run(make)

    async def search(self, make: Callable[[], T]) -> T:
        with queue_problems():
            return await self.searching.run(make)

    def refusal(self, n_asking: int) -> Problem | None:
        """Asked before a body is read, so that refusing costs next to nothing.

        `n_asking` requests are under way: those whose bodies are still read do not wait in the
        queue yet, but they will.
        """
        if n_asking > self.settings.max_waiting:
            return refusal_of(1)
        error = self.batcher.refusal()
        return None if error is None else refusal_of(math.ceil(error.retry_after))

    async def reload(self) -> list[Change]:
        """Of this worker, and then of the others, by way of the process above them."""
        try:
            changes = await self.shelf.reload()
        except ModelRefused:
            self.metrics.reloads.labels("refused").inc()
            raise
        if any(change.is_new for change in changes):
            self.metrics.reloads.labels("loaded").inc()
        return changes

    def tell_main(self, number: signal.Signals) -> None:
        if self._main_pid is not None:
            os.kill(self._main_pid, number)

    def _answer(self, wanted: list[Wanted]) -> list[Recommendations]:
        made: dict[int, Recommendations] = {}
        for served in {each.served for each in wanted}:
            places = [place for place, each in enumerate(wanted) if each.served is served]
            asked = [
                served.recommender.question(w.history, w.k, w.exclude_seen, w.allow, w.block)
                for w in (wanted[place] for place in places)
            ]
            made |= zip(places, served.recommender.answer(asked), strict=True)
        return [made[place] for place in range(len(wanted))]

    def _on_hangup(self) -> None:
        task = asyncio.get_running_loop().create_task(self._reload_quietly())
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self.settings.watch_every)
            if await asyncio.to_thread(self.shelf.has_news):
                await self._reload_quietly()

    async def _reload_quietly(self) -> None:
        try:
            await self.reload()
        except ModelRefused:
            pass  # logged, and the old one answers on
        except Exception:
            log.exception("reload failed")  # watching goes on


@contextlib.contextmanager
def queue_problems() -> Iterator[None]:
    try:
        yield
    except Overloaded as error:
        raise overloaded(math.ceil(error.retry_after)) from None
    except TooLate:
        raise Problem(
            503,
            "too_late",
            "The answer would have come too late. Try again.",
            headers={"retry-after": "1"},
        ) from None


def overloaded(seconds: int) -> Problem:
    return Problem(
        503,
        "overloaded",
        "Too many requests are waiting. Try again after the time in Retry-After.",
        headers={"retry-after": str(seconds)},
    )


refusal_of = functools.cache(overloaded)  # sent, not raised: in overload thousands a second
