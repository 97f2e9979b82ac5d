"""One response on its way out: its headers, chunks, deadlines, and clients that do not read it.

Found by trying granian 2.8.7: a cancelled or failed response does not close its connection while
bytes of it wait for the client, and small pipelined responses wait without the app ever noticing.
granian keeps its sockets to itself, so they are found among the open files of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from starlette.types import Message, Send

CHUNK = 2**16  # bytes; granian takes a whole body at once and keeps it, but waits between chunks
MIN_RATE = 2**18  # bytes per second that a client has to read on average
OPEN_FILES = Path("/dev/fd")

# A refusal has no content to protect and must be cheap: it gets only these.
MINIMAL_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]

_OURS_ONLY = b"img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_POLICY = b"default-src 'none'; script-src 'self'; style-src 'self'; " + _OURS_ONLY
DOCS_POLICY = b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; " + _OURS_ONLY
DATA_POLICY = b"default-src 'none'; frame-ancestors 'none'"

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@functools.cache
def security_headers(route: str) -> list[tuple[bytes, bytes]]:
    """Headers of every response of a route. Browsers may cache pages, but must revalidate them."""
    is_page = route in ("/", "/web/*")
    is_docs = route in ("/docs", "/docs/*")
    policy = PAGE_POLICY if is_page else DOCS_POLICY if is_docs else DATA_POLICY
    return [
        (b"content-security-policy", policy),
        (b"cache-control", b"no-cache" if is_page or is_docs else b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
    ]


class ClientTooSlow(Exception):
    """The client does not read its response. (Frameworks take an OSError for a lost client.)"""


class ResponseSender:
    """Wraps ASGI's `send`, and knows how far the response is."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], within: float) -> None:
        self._send = send
        self._headers = headers
        self._within = within
        self._began = 0.0
        self.has_started = False
        self.is_complete = False
        self.n_bytes = 0
        self.status = 500

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self.status = message["status"]
            self.has_started = True
            await self._send({**message, "headers": [*message["headers"], *self._headers]})
        elif kind == "http.response.body":
            await self._send_body(message.get("body", b""), message.get("more_body", False))
        else:  # the path of a file, which granian sends by itself
            await self._send(message)
            self.is_complete = True

    async def _send_body(self, body: bytes, has_more: bool) -> None:
        if len(body) <= CHUNK and not has_more:  # never waits: no deadline needed
            self.n_bytes += len(body)
            await self._send({"type": "http.response.body", "body": body})
            self.is_complete = True
            return
        self._began = self._began or time.monotonic()
        for start in range(0, len(body), CHUNK):
            await self._send_chunk(body[start : start + CHUNK])
        if not has_more:
            await self._send({"type": "http.response.body", "body": b""})
            self.is_complete = True

    async def _send_chunk(self, chunk: bytes) -> None:
        self.n_bytes += len(chunk)
        end = self._began + self._within + self.n_bytes / MIN_RATE
        try:
            async with asyncio.timeout(min(self._within, end - time.monotonic())):
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        except TimeoutError:
            raise ClientTooSlow from None


def set_unread_timeout(seconds: float) -> None:
    """Let the kernel reset connections whose client reads nothing for so long (Linux only).

    The option is set on listening sockets; connections accepted later inherit it.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    for each in _sockets():
        with contextlib.suppress(OSError):
            if option is not None and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                each.setsockopt(socket.IPPROTO_TCP, option, int(seconds * 1000))


def reset_connection(host: str, port: int) -> None:
    """Close the connection to this client now, discarding what is not sent yet."""
    for each in _sockets():
        with contextlib.suppress(OSError):
            if each.getpeername()[:2] == (host, port):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                each.shutdown(socket.SHUT_RDWR)
                return


def _sockets() -> Iterator[socket.socket]:
    """Duplicates, so that a descriptor closed and reused meanwhile is never touched.

    Of sockets only. Closing a duplicate of any other file would drop all locks of this process on
    it: SQLite would lose writes when another process opens its file.
    """
    try:
        numbers = [int(path.name) for path in OPEN_FILES.iterdir()]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as each:
                    yield each
