"""Run the app on granian: worker processes that are restarted if they die, signals, draining.

SIGTERM and SIGINT: every worker first answers on for `drain` seconds, closing each connection with
its answer and failing /readyz, so that clients and load balancers go elsewhere without losing a
request; then it stops to listen, finishes what it has, and ends. SIGHUP: every worker takes the
model that is on disk now.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from granian.constants import HTTPModes, Interfaces, Loops
from granian.http import HTTP1Settings
from granian.server import Server

from bert4rec.serving.logs import log_config
from bert4rec.serving.settings import ServeSettings

BACKLOG = 1024
MAX_CONNECTIONS = 8192  # of a worker; idle ones count, so few would let anybody lock others out
END_WITHIN = 8  # seconds, then a worker is killed
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
PR_SET_PDEATHSIG = 1


def serve(settings: ServeSettings, *, on_ready: Callable[[], None] | None = None) -> None:
    """Until a signal ends it. `on_ready` is called when the first worker answers."""
    server = Server(
        "bert4rec",
        address=address_of(settings.host),
        port=settings.port,
        interface=Interfaces.ASGI,
        workers=settings.workers,
        http=HTTPModes.http1,  # when it has to guess, a silent connection has no time limit
        loop=Loops.uvloop,
        backlog=BACKLOG,
        backpressure=MAX_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=int(settings.header_within * 1000)),
        websockets=False,
        log_dictconfig=log_config(),
        respawn_failed_workers=False,  # until one was ready: a broken start is not tried again
        workers_kill_timeout=END_WITHIN,
    )

    was_ready = False

    def tell_workers(number: signal.Signals) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(child.pid, number)

    def on_end(*_: object) -> None:
        server.respawn_failed_workers = False
        tell_workers(signal.SIGUSR2)
        threading.Timer(settings.drain, server.signal_handler_interrupt).start()

    def on_reload(*_: object) -> None:
        if was_ready:  # one that starts looks for news itself when it has loaded
            tell_workers(signal.SIGHUP)

    def on_worker_ready(*_: object) -> None:
        nonlocal was_ready
        if not was_ready:
            was_ready = server.respawn_failed_workers = True
            if on_ready is not None:
                on_ready()

    @server.on_startup
    def take_signals() -> None:  # granian has set its own before
        signal.signal(signal.SIGTERM, on_end)
        signal.signal(signal.SIGINT, on_end)
        signal.signal(signal.SIGHUP, on_reload)
        signal.signal(signal.SIGUSR1, on_worker_ready)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # what a new worker starts with

    with _shared_metrics(settings.workers):
        server.serve(target_loader=partial(_load_app, settings, os.getpid()), wrap_loader=False)


def address_of(host: str) -> str:
    """As numbers, which is all that the server takes."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _load_app(settings: ServeSettings, main_pid: int) -> Any:
    """In a worker process: only now is torch imported, never above a fork."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # what the main process does is not for a worker
    for number in (signal.SIGHUP, signal.SIGUSR2):  # until the service takes them: by default
        signal.signal(number, signal.SIG_IGN)  # they would end a worker that is still starting
    os.setpgid(0, 0)  # Ctrl-C reaches the main process alone, which lets the workers drain
    if sys.platform == "linux":  # no worker outlives the process that would restart and end it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    from bert4rec.serving.app import make_app

    return make_app(settings, main_pid)


@contextlib.contextmanager
def _shared_metrics(n_workers: int) -> Iterator[None]:
    """Several workers count into files of one folder, which the client library adds up."""
    if n_workers == 1:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="bert4rec-metrics-") as folder:
        os.environ[METRICS_FOLDER] = folder
        yield
