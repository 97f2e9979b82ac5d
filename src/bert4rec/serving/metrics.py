"""What Prometheus reads at /metrics; over all workers when there are several."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from bert4rec.serving.shelf import Shelf

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """Registered anew for every app, so that two in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "bert4rec_requests_total",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "bert4rec_request_seconds",
            "From the request's head to the answer's last byte handed over.",
            ("route",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.batch = Histogram(
            "bert4rec_batch_size",
            "Histories that the model read at once.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=self.registry,
        )
        self.model_seconds = Histogram(
            "bert4rec_model_seconds",
            "Time of the model for a batch.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "bert4rec_waiting",
            "Histories that waited after the last batch.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.model = Gauge(
            "bert4rec_model_info",
            "1 for each model and version that is served.",
            ("model", "version", "kind"),
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.reloads = Counter(
            "bert4rec_reloads_total",
            "Models that were loaded or refused.",
            ("result",),
            registry=self.registry,
        )
        # Finding the right counter takes longer than counting.
        self._count_of = functools.cache(lambda *labels: self.requests.labels(*labels))
        self._seconds_of = functools.cache(lambda route: self.seconds.labels(route))
        self._infos: set[tuple[str, str, str]] = set()

    def on_answer(self, method: str, route: str, status: int, seconds: float) -> None:
        self._count_of(method, route, str(status)).inc()
        self._seconds_of(route).observe(seconds)

    def on_refusal(self, method: str, route: str, status: int) -> None:
        """Without a time: thousands of nothing would hide how long answers take."""
        self._count_of(method, route, str(status)).inc()

    def on_batch(self, n: int, seconds: float, n_waiting: int) -> None:
        self.waiting.set(n_waiting)
        self.batch.observe(n)
        self.model_seconds.observe(seconds)

    def on_models(self, shelf: Shelf) -> None:
        infos = {(name, model.version, model.kind) for name, model in shelf.now.items()}
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
    """What a worker that was replaced said of its queue and its models is no longer so."""
    for path in folder.glob("gauge_live*_*.db"):
        try:
            os.kill(int(path.stem.rsplit("_", 1)[1]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
