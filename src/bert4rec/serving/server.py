"""Run the app on granian: checks before the start, worker processes, signals, draining.

SIGTERM or SIGINT: for `drain` seconds each worker keeps answering, but closes every connection with
its response and fails /readyz, so that clients and load balancers move on without losing a request.
Then it stops listening, finishes the requests it has accepted, and exits. SIGHUP: each worker loads
the model that is on disk now. A worker that dies is replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from granian.constants import HTTPModes, Interfaces, Loops
from granian.http import HTTP1Settings
from granian.server import Server

from bert4rec.durable import verify_manifest
from bert4rec.serving.http.access import ApiKeys
from bert4rec.serving.json_logs import log_config
from bert4rec.serving.serve_settings import ServeSettings
from bert4rec.serving.store import check_store_url

BACKLOG = 1024
MAX_CONNECTIONS = 8192  # per worker, idle ones included: a small limit would let anybody block it
END_WITHIN = 8  # seconds, then a worker is killed
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
PR_SET_PDEATHSIG = 1


def check_before_start(settings: ServeSettings) -> None:
    """Raise a ValueError for what is wrong before any worker starts, without loading torch."""
    for directory in settings.models:
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory: train a model there first")
        verify_manifest(directory)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "model" not in config:
            raise ValueError(f"{directory / 'config.json'} does not describe a model")
    keys = ApiKeys.load(settings.keys)
    if not settings.is_local and not keys:
        raise ValueError(
            f"--host {settings.host} can be reached by others, so it needs API keys: write a file "
            "with a line `read KEY` and a line `admin KEY` and pass it with --keys, or set "
            "BERT4REC_READ_KEY and BERT4REC_ADMIN_KEY"
        )
    check_store_url(settings.store_url)
    _check_address(settings.host, settings.port)


def _check_address(host: str, port: int) -> None:
    """Is the port free? The workers share it, so the server itself would not notice."""
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} is in use: stop the program that listens there, or choose "
            raise ValueError(reason + "another --port") from None
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


def serve(settings: ServeSettings, *, on_ready: Callable[[], None] | None = None) -> None:
    """Serve until a signal ends it. `on_ready` is called when the first worker is ready."""
    address = socket.getaddrinfo(settings.host, None, type=socket.SOCK_STREAM)[0][4][0]
    server = Server(
        "bert4rec",
        address=str(address),  # granian takes no host names
        port=settings.port,
        interface=Interfaces.ASGI,
        workers=settings.workers,
        http=HTTPModes.http1,  # when granian has to guess, a silent connection has no time limit
        loop=Loops.uvloop,
        backlog=BACKLOG,
        backpressure=MAX_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=int(settings.header_within * 1000)),
        websockets=False,
        log_dictconfig=log_config(),
        respawn_failed_workers=False,  # until one was ready: a broken start is not repeated
        workers_kill_timeout=END_WITHIN,
    )

    was_ready = False

    def signal_workers(number: signal.Signals) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it has just exited
                    os.kill(child.pid, number)

    def on_end(*_: object) -> None:
        server.respawn_failed_workers = False
        signal_workers(signal.SIGUSR2)
        threading.Timer(settings.drain, server.signal_handler_interrupt).start()

    def on_reload(*_: object) -> None:
        if was_ready:  # a worker that is starting looks for a newer model when it has loaded
            signal_workers(signal.SIGHUP)

    def on_worker_ready(*_: object) -> None:
        nonlocal was_ready
        if not was_ready:
            was_ready = server.respawn_failed_workers = True
            if on_ready is not None:
                on_ready()

    @server.on_startup
    def set_signal_handlers() -> None:  # after granian has set its own
        signal.signal(signal.SIGTERM, on_end)
        signal.signal(signal.SIGINT, on_end)
        signal.signal(signal.SIGHUP, on_reload)
        signal.signal(signal.SIGUSR1, on_worker_ready)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # inherited by a new worker

    with tempfile.TemporaryDirectory(prefix="bert4rec-metrics-") as folder:
        if settings.workers > 1:  # they count in files of one folder, which the Prometheus client adds up
            os.environ[METRICS_FOLDER] = folder
        server.serve(target_loader=partial(_load_app, settings, os.getpid()), wrap_loader=False)


def _load_app(settings: ServeSettings, main_pid: int) -> Any:
    """Runs in a worker process: torch is imported here, never before a fork."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # the main process's handlers are not for a worker
    for number in (signal.SIGHUP, signal.SIGUSR2):  # until the service handles them: the default
        signal.signal(number, signal.SIG_IGN)  # would end a worker that is still starting
    os.setpgid(0, 0)  # Ctrl-C reaches the main process only, which lets the workers drain
    if sys.platform == "linux":  # no worker outlives the main process
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    from bert4rec.serving.http.app import make_app

    return make_app(settings, main_pid)
