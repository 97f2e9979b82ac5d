"""The metrics at /metrics, summed over all workers."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ServiceMetrics:
    """With a registry of its own, so that two apps in one process do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = functools.partial(Counter, registry=self.registry)
        gauge = functools.partial(Gauge, registry=self.registry)
        histogram = functools.partial(Histogram, registry=self.registry)
        self.requests = counter("bert4rec_requests_total", "Requests answered.", ("method", "route", "status"))
        self.seconds = histogram(
            "bert4rec_request_seconds",
            "From the request's head to the last byte of the response.",
            ("route",),
            buckets=SECONDS,
        )
        self.batch = histogram(
            "bert4rec_batch_size", "Histories per batch of the model.", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
        )
        self.model_seconds = histogram("bert4rec_model_seconds", "Time of the model per batch.", buckets=SECONDS)
        self.waiting = gauge(
            "bert4rec_waiting", "Histories in the queue after the last batch.", multiprocess_mode="livesum"
        )
        self.model = gauge(
            "bert4rec_model_info",
            "1 for each model and version that is served.",
            ("model", "version", "kind"),
            multiprocess_mode="livemax",
        )
        self.reloads = counter("bert4rec_reloads_total", "Models loaded or refused.", ("result",))
        # Finding the right counter takes longer than counting.
        self._count_of = functools.cache(lambda *labels: self.requests.labels(*labels))
        self._seconds_of = functools.cache(lambda route: self.seconds.labels(route))
        self._infos: set[tuple[str, str, str]] = set()

    def on_response(self, method: str, route: str, status: int, seconds: float | None) -> None:
        """Refusals have no time: thousands of instant ones would hide how long responses take."""
        self._count_of(method, route, str(status)).inc()
        if seconds is not None:
            self._seconds_of(route).observe(seconds)

    def on_batch(self, n: int, seconds: float, n_waiting: int) -> None:
        self.waiting.set(n_waiting)
        self.batch.observe(n)
        self.model_seconds.observe(seconds)

    def on_models(self, infos: set[tuple[str, str, str]]) -> None:
        """(name, version, kind) of each model that is served from now on."""
        for old in self._infos - infos:
            self.model.labels(*old).set(0)
        for info in infos:
            self.model.labels(*info).set(1)
        self._infos |= infos

    def text(self) -> bytes:
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if folder is None:
            return generate_latest(self.registry)
        _forget_ended_workers(Path(folder))
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def _forget_ended_workers(folder: Path) -> None:
    """The queue and the models of a worker that was replaced are gone."""
    for path in folder.glob("gauge_live*_*.db"):
        try:
            os.kill(int(path.stem.rsplit("_", 1)[1]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
