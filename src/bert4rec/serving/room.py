"""A bound on large answers under way: who reads slowly keeps the whole answer in memory here."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bert4rec.serving.batching import Overloaded

MAX_ITEMS = 1_000_000  # recommended items under way, some hundred bytes each


class Room:
    def __init__(self) -> None:
        self._n_free = MAX_ITEMS

    def take(self, n: int) -> None:
        if n > self._n_free:
            raise Overloaded(1.0)
        self._n_free -= n

    def give_back(self, n: int) -> None:
        self._n_free += n


class HeldResponse(Response):
    """Gives its room back when it was sent, or could not be."""

    media_type = "application/json"

    def __init__(self, body: bytes, headers: dict[str, str], room: Room, n: int) -> None:
        super().__init__(body, headers=headers)
        self._room, self._n = room, n

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._room.give_back(self._n)
