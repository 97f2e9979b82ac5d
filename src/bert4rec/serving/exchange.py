"""One answer on its way out: extra headers, pieces small enough to wait between, and deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from bert4rec.serving.problems import Problem
from bert4rec.serving.slow_readers import TooSlowToRead

PIECE = 2**16  # bytes; granian takes a whole body at once and holds it, but waits between pieces
MIN_RATE = 2**18  # bytes a second that a client has to take on average

Message = MutableMapping[str, Any]


class Exchange:
    """Stands in for `send`, and knows how far the answer is."""

    __slots__ = (
        "_began",
        "_headers",
        "_send",
        "_within",
        "has_started",
        "is_complete",
        "is_too_slow",
        "n_bytes",
        "status",
    )

    def __init__(
        self,
        send: Callable[[Message], Awaitable[None]],
        headers: list[tuple[bytes, bytes]],
        within: float,
    ) -> None:
        self._send = send
        self._headers = headers
        self._within = within
        self._began = 0.0
        self.has_started = False
        self.is_complete = False
        self.is_too_slow = False
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
        else:  # the path of a file, which the server sends by itself
            await self._send(message)
            self.is_complete = True

    async def refuse(self, problem: Problem) -> None:
        self.status = problem.status_code
        self.has_started = True
        headers = [*problem.raw_headers, *self._headers]
        await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self._send_body(problem.body, False)

    async def _send_body(self, body: bytes, has_more: bool) -> None:
        if len(body) <= PIECE and not has_more:  # never waits: no deadline needed
            self.n_bytes += len(body)
            await self._send({"type": "http.response.body", "body": body})
            self.is_complete = True
            return
        self._began = self._began or time.monotonic()
        for start in range(0, len(body), PIECE):
            await self._send_piece(body[start : start + PIECE])
        if not has_more:
            await self._send({"type": "http.response.body", "body": b""})
            self.is_complete = True

    async def _send_piece(self, piece: bytes) -> None:
        self.n_bytes += len(piece)
        end = self._began + self._within + self.n_bytes / MIN_RATE
        try:
            async with asyncio.timeout(min(self._within, end - time.monotonic())):
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        except TimeoutError:
            self.is_too_slow = True
            raise TooSlowToRead from None
