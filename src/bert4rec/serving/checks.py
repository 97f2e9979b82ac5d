"""What can be said to be wrong before any worker starts, and without loading torch."""

from __future__ import annotations

import errno
import json
import socket

from bert4rec.durable import verify_manifest
from bert4rec.serving.keys import Keys
from bert4rec.serving.settings import ServeSettings
from bert4rec.serving.store import check_store_url


def check_before_start(settings: ServeSettings) -> None:
    for directory in (settings.model, *settings.compare):
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory: train a model there first")
        verify_manifest(directory)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "model" not in config:
            raise ValueError(f"{directory / 'config.json'} does not describe a model")
    keys = Keys.load(settings.keys)
    if not settings.is_local and not keys:
        raise ValueError(
            f"--host {settings.host} can be reached by others, so it needs API keys: write a file "
            "with a line `read KEY` and a line `admin KEY` and pass it with --keys, or set "
            "BERT4REC_READ_KEY and BERT4REC_ADMIN_KEY"
        )
    check_store_url(settings.store)
    _check_address(settings.host, settings.port)


def _check_address(host: str, port: int) -> None:
    """Processes of the server may share a port, so a stranger there would go unnoticed."""
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"the port {port} is in use: end what listens there, or take another --port"
        else:
            reason = f"cannot listen at {host}, port {port}: {error.strerror}"
        raise ValueError(reason) from None
