"""What the routes call: models, stored histories and queues, put together for one worker."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch

from bert4rec.cpu_tuning import keep_freed_memory
from bert4rec.recommender import RecommendationRequest, Recommendations
from bert4rec.serving.http.problems import Problem
from bert4rec.serving.model_registry import ModelRefused, ModelRegistry, ServedModel
from bert4rec.serving.prometheus_metrics import ServiceMetrics
from bert4rec.serving.request_queues import BatchingQueue, Overloaded, ResponseBudget, ThreadQueue
from bert4rec.serving.serve_settings import ServeSettings
from bert4rec.serving.store import HistoryStore, open_store

log = logging.getLogger("bert4rec.serving")

EXPLANATIONS_WAITING, EXPLAIN_WITHIN = 8, 10.0
SEARCHES_WAITING = 64
GC_THRESHOLDS = 100_000, 20, 50  # a request makes hundreds of objects, and hardly ever a cycle
SWITCH_INTERVAL = 0.0005  # seconds that a slow thread may hold Python's lock, instead of 5 ms


class Service:
    """One worker's models, store and queues, and what the signals do."""

    def __init__(self, settings: ServeSettings, main_pid: int | None) -> None:
        self.settings, self._main_pid = settings, main_pid
        self.metrics = ServiceMetrics()
        self.registry = ModelRegistry(settings.models, settings.retrieval)
        self._queue: BatchingQueue[tuple[ServedModel, RecommendationRequest], Recommendations]
        self._queue = BatchingQueue(
            recommend_by_model, settings.max_batch, settings.max_waiting, settings.answer_within, self.metrics.on_batch
        )
        self.explaining = ThreadQueue(EXPLANATIONS_WAITING, EXPLAIN_WITHIN)
        self.searching = ThreadQueue(SEARCHES_WAITING, settings.answer_within)
        self.budget = ResponseBudget()
        self.is_draining = False
        self._is_reload_asked = asyncio.Event()
        self.store: HistoryStore

    async def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL)
        keep_freed_memory()
        torch.set_num_threads(self.settings.threads)
        self.registry.load()
        self._count_models()
        self.store = await open_store(self.settings.store_url)
        loop = asyncio.get_running_loop()
        for number, handler in ((signal.SIGHUP, self._is_reload_asked.set), (signal.SIGUSR2, self.drain)):
            loop.add_signal_handler(number, handler)
        if self.registry.has_news():  # a new model and its signal came while this one loaded
            await self._reload_quietly()
        self._reloading = loop.create_task(self._reload_on_news())
        gc.collect()
        gc.freeze()  # what is there now stays: no need to traverse it in every collection
        gc.set_threshold(*GC_THRESHOLDS)
        log.info("ready", extra={"models": {n: m.version for n, m in self.registry.models.items()}})

    async def stop(self) -> None:
        self._reloading.cancel()
        self.explaining.close()
        self.searching.close()
        await self.store.close()

    def drain(self) -> None:
        self.is_draining = True

    def model(self, name: str | None) -> ServedModel:
        found = self.registry.models.get(self.registry.default if name is None else name)
        if found is None:
            raise Problem(404, "unknown_model", "No such model; GET /v1/model lists them.")
        return found

    async def recommend(self, served: ServedModel, requests: Sequence[RecommendationRequest]) -> list[Recommendations]:
        """All by the same version of a model."""
        return await self._queue.submit([(served, request) for request in requests])

    def refusal(self, n_active: int) -> Problem | None:
        """Called before a body is read, so that refusing costs next to nothing.

        `n_active` requests are in progress: those whose bodies are still being read are not in the
        queue yet, but will be.
        """
        is_full = n_active > self.settings.max_waiting
        seconds = 1 if is_full else self._queue.retry_after()
        return None if seconds is None else cached_overloaded(seconds)

    async def reload(self) -> list[tuple[ServedModel, bool]]:
        """Load what is new on disk, in this worker: each model, and is it new?"""
        try:
            models = await self.registry.reload()
        except ModelRefused:
            self.metrics.reloads.labels("refused").inc()
            raise
        if any(is_new for _, is_new in models):
            self._count_models()
            self.metrics.reloads.labels("loaded").inc()
        return models

    def _count_models(self) -> None:
        self.metrics.on_models({(name, m.version, m.kind) for name, m in self.registry.models.items()})

    def signal_main(self, number: signal.Signals) -> None:
        """Tell the main process what concerns all workers."""
        if self._main_pid is not None:
            os.kill(self._main_pid, number)

    async def _reload_on_news(self) -> None:
        """After SIGHUP and, if the settings say so, when something new is on disk."""
        while True:
            try:
                async with asyncio.timeout(self.settings.watch_every if self.settings.watch else None):
                    await self._is_reload_asked.wait()
            except TimeoutError:
                if not await asyncio.to_thread(self.registry.has_news):
                    continue
            self._is_reload_asked.clear()
            await self._reload_quietly()

    async def _reload_quietly(self) -> None:
        try:
            await self.reload()
        except ModelRefused:
            pass  # logged, and the old model is still served
        except Exception:
            log.exception("reload failed")  # keep watching


def recommend_by_model(requests: list[tuple[ServedModel, RecommendationRequest]]) -> list[Recommendations]:
    """One batch per model, the results in the order of the requests."""
    results: dict[int, Recommendations] = {}
    for served in {served for served, _ in requests}:
        places = [place for place, (model, _) in enumerate(requests) if model is served]
        made = served.recommender.answer_requests([requests[place][1] for place in places])
        results |= zip(places, made, strict=True)
    return [results[place] for place in range(len(requests))]


cached_overloaded = functools.cache(Overloaded)  # sent, not raised: thousands per second
