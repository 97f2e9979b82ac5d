"""Requests written byte by byte, as no client library would send them."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any

WITHIN = 15.0  # seconds; a server that takes longer hangs


@dataclass(frozen=True)
class Answer:
    status: int  # 0: closed without an answer
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def connect(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(WITHIN)
    sock.connect(("127.0.0.1", port))
    return sock


def head(method: str, target: str, *headers: str) -> bytes:
    lines = (f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", *headers)
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def post(path: str, body: bytes, *headers: str) -> bytes:
    kind = "Content-Type: application/json"
    return head("POST", path, kind, f"Content-Length: {len(body)}", *headers) + body


def chunked(path: str, *chunks: bytes) -> bytes:
    start = head("POST", path, "Content-Type: application/json", "Transfer-Encoding: chunked")
    return start + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (*chunks, b""))


def ask(port: int, request: bytes, *, then_ends: bool = False) -> Answer:
    """Send `request`, whatever it is, and read one answer. A hang is a TimeoutError."""
    with connect(port) as sock:
        # A server may answer and close before all is sent; then its answer is what counts.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(request)
            if then_ends:
                sock.shutdown(socket.SHUT_WR)
        return read_answer(sock)


def read_answer(sock: socket.socket) -> Answer:
    answer = http.client.HTTPResponse(sock)
    try:
        answer.begin()
        return Answer(answer.status, dict(answer.headers.items()), answer.read())
    except (http.client.HTTPException, ConnectionResetError):
        return Answer(0, {}, b"")
