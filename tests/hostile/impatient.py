"""A real server with limits of time so short that a test can wait for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from served import Served, free_port

from bert4rec.serving.serve_settings import ServeSettings

RUN = """
import sys
from bert4rec.serving.server import serve
from bert4rec.serving.serve_settings import ServeSettings
serve(ServeSettings.model_validate_json(sys.argv[1]))
"""


@contextlib.contextmanager
def impatient(model: Path, environment: dict[str, str], seconds: float) -> Iterator[Served]:
    settings = ServeSettings(
        model=model,
        port=free_port(),
        store=f"sqlite:{model.parent / 'histories.db'}",
        header_within=seconds,
        body_within=seconds,
        send_within=seconds,
    )
    log = model.parent / f"impatient-{settings.port}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, settings.model_dump_json()],
            stderr=file,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            start_new_session=True,
        )
    served = Served(f"http://127.0.0.1:{settings.port}", settings.port, process, log)
    try:
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{served.url}/readyz", trust_env=False).status_code == 200:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
