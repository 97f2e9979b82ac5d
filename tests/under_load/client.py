"""A small, fast HTTP/1.1 client on asyncio streams that tells apart how a connection can end.

A connection that is refused, or closed before a byte of an answer, is another thing than one that
ends within an answer: on the first the server accepted nothing, and sending it again is safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

ANSWER_WITHIN = 30.0  # seconds; a server that takes longer hangs


class NothingAnswered(Exception):
    """The connection was refused or closed before any byte of an answer came."""

    def __init__(self, message: str, *, was_connected: bool) -> None:
        super().__init__(message)
        self.was_connected = was_connected


class BrokenAnswer(Exception):
    """The connection ended, or nothing more came, in the middle of an answer."""


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes  # status line and headers, names as sent
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            found, _, value = line.partition(b":")
            if found.strip().lower() == name.encode():
                return value.strip().decode("latin-1")
        return None


def request(path: str, content: object = None, *, method: str | None = None, closes: bool = False) -> bytes:
    """The bytes of a request: POST with JSON when there is `content`, otherwise GET."""
    body = b"" if content is None else json.dumps(content).encode()
    lines = [f"{method or ('GET' if content is None else 'POST')} {path} HTTP/1.1"]
    lines.append("host: 127.0.0.1")
    if content is not None:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    if closes:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    """Opened by the first request, and again by the one after an end. For use by one task."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def ask(self, payload: bytes) -> Answer:
        """One whole answer; after any error the connection is closed."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                return await self._ask(payload)
        except TimeoutError:
            raise BrokenAnswer(f"no whole answer within {ANSWER_WITHIN:g} s") from None

    async def close(self) -> None:
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _ask(self, payload: bytes) -> Answer:
        is_whole = False
        try:
            if self._writer is None:
                self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            assert self._reader is not None
            assert self._writer is not None
            self._writer.write(payload)
            answer = await _read(self._reader)
            is_whole = (answer.header("connection") or "").lower() != "close"
            return answer
        except OSError as error:  # refused, or reset with nothing to read
            raise NothingAnswered(str(error), was_connected=self._writer is not None) from None
        finally:
            if not is_whole:
                await self.close()


async def _read(reader: asyncio.StreamReader) -> Answer:
    try:
        first = await reader.readexactly(1)
    except asyncio.IncompleteReadError:
        raise NothingAnswered("closed before an answer", was_connected=True) from None
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        place = lowered.find(b"\r\ncontent-length:")
        if place < 0:
            raise BrokenAnswer(f"an answer without content-length: {head[:200]!r}")
        length = int(lowered[place + 17 : lowered.index(b"\r\n", place + 17)])
        body = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, OSError) as error:
        raise BrokenAnswer(f"the connection ended within an answer: {error}") from None
    return Answer(int(head[9:12]), head, body)


async def ask_once(port: int, path: str, content: object = None) -> Answer:
    async with Connection(port) as connection:
        return await connection.ask(request(path, content, closes=True))
