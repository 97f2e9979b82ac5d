"""A real `bert4rec serve` in a process of its own, and small models for it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from pydantic import TypeAdapter

from bert4rec.config import load_config, resolve
from bert4rec.data.sequences import Vocabulary
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.recommender import Recommender
from bert4rec.serving.serve_settings import ServeSettings

N_ITEMS = 60


def save_model(
    directory: Path,
    *,
    seed: int = 0,
    n_items: int = N_ITEMS,
    titles: Sequence[str | None] | None = None,
    max_len: int = 50,
) -> Recommender:
    """An untrained BERT4Rec whose weights are spread enough to tell items and versions apart."""
    import torch

    config = resolve(load_config("default", None, ["model.dim=16", f"model.max_len={max_len}"]), n_items)
    torch.manual_seed(seed)
    model = BERT4Rec(n_items, config.model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    names = titles or [f"Title {token}" for token in range(n_items)]
    ids = [f"item-{token}" for token in range(n_items)]
    vocabulary = Vocabulary(ids, np.arange(n_items, 0, -1), names)
    about = {"data": {"fingerprint": "none"}, "created": "2026-01-01T00:00:00+00:00"}
    recommender = Recommender(model, vocabulary, config, about)
    recommender.save(directory)
    return recommender


@dataclass
class Served:
    url: str
    port: int
    process: subprocess.Popen[str]
    log: Path

    def client(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False)

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in children.split()]

    def log_lines(self) -> list[dict[str, object]]:
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def free_port() -> int:
    """A port that only a server of this process will take.

    Servers begin to listen seconds after this. By then the system may have given a port of its own
    range to somebody's connection, and another process of the tests may have found the same one
    free: each keeps to every n-th port below that range.
    """
    n_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.randrange(10_000 + number, 32_000, n_processes)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], bool], what: object = "", within: float = 120) -> None:
    """Until `condition` holds; `what` explains why it never did."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            found = what.read_text() if isinstance(what, Path) else what
            raise AssertionError(f"not within {within:g} s: {found}")
        time.sleep(0.01)


@contextlib.contextmanager
def serve(model: Path, *options: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """`bert4rec serve`: ready when this is entered; ended by SIGTERM when it is left."""
    port = free_port()
    words = ["from bert4rec.cli import main; main()", "serve", str(model), "--port", str(port)]
    with _running([*words, *options], port, model.parent, environment) as served:
        yield served


@contextlib.contextmanager
def serve_with(settings: ServeSettings, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """The same with settings that have no option, on `settings.port`."""
    program = (
        "import sys\n"
        "from bert4rec.serving.server import serve\n"
        "from bert4rec.serving.serve_settings import ServeSettings\n"
        "from pydantic import TypeAdapter\n"
        "serve(TypeAdapter(ServeSettings).validate_json(sys.argv[1]))"
    )
    words = [program, TypeAdapter(ServeSettings).dump_json(settings).decode()]
    with _running(words, settings.port, settings.model.parent, environment) as served:
        yield served


@contextlib.contextmanager
def _running(words: list[str], port: int, folder: Path, environment: dict[str, str] | None) -> Iterator[Served]:
    log = folder / f"serve-{port}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", *words],
            stderr=file,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            start_new_session=True,
        )
    served = Served(f"http://127.0.0.1:{port}", port, process, log)

    def is_ready() -> bool:
        assert process.poll() is None, f"the server did not start:\n{log.read_text()}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{served.url}/readyz", trust_env=False).status_code == 200
        return False

    try:
        wait_until(is_ready, log, within=120)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                for pid in (*served.workers(), process.pid):
                    os.kill(pid, signal.SIGKILL)
                process.wait(5)
