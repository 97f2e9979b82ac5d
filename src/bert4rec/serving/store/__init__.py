"""Stored histories of users: the interface, and `open_store`, which chooses SQLite or Redis by URL.

Users are identified by their text (`id_text`: 5 and "5" are one user); items keep their type.
Everything is async and called from one event loop, which it never blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

SHOWN_EVENTS = 1000  # newest events in a user's history: as many as a request may have
# Newest events that are stored per user. More than are shown, so that an event which is delivered
# again late (a queue that replays a day) is still recognized by its id.
STORED_EVENTS = 10 * SHOWN_EVENTS
# If a prefix matches more users than this, the newest are found by walking through all users in
# order of time; otherwise by sorting the matches. Either way a search reads a few thousand.
FEW_USERS = 1000

URL_FORMS = "sqlite:PATH, redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://SOCKET?db=DB"


class EventConflict(ValueError):
    """The user already has an event with this id, but another item or time."""


class StoreUnavailable(RuntimeError):
    """The store does not respond now; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class Event:
    """A user did something with an item. `id`, unique per user, makes it safe to send it again.

    `time` is in seconds since 1970. Without it, the time of arrival is stored, and the event equals
    any stored event with its id and item: a client without a clock can send it again, too.
    """

    user: str
    item: str | int
    time: float | None = None
    id: str | None = None


@dataclass(frozen=True)
class AddResult:
    stored: int
    duplicates: int  # stored before, or twice in this call


@dataclass(frozen=True)
class StoredUser:
    user: str
    n_events: int  # the length of the history
    last_time: float


class HistoryStore(Protocol):
    async def add(self, events: Sequence[Event]) -> AddResult:
        """Store all or none, each event id once per user; durable when this returns."""

    async def history(self, user: str) -> list[Event]:
        """The newest `SHOWN_EVENTS` by time, then arrival; the oldest first."""

    async def users(self, prefix: str, limit: int) -> list[StoredUser]:
        """Users whose id begins with `prefix`, the last active first."""

    async def erase(self, user: str) -> int:
        """Delete everything about a user, event ids too; returns the number of events."""

    async def ping(self) -> None:
        """Raise StoreUnavailable if the store does not respond."""

    async def close(self) -> None:
        """Finish pending calls, then close files and connections."""


async def open_store(url: str, *, may_create: bool = True) -> HistoryStore:
    """The store at `url`. With `may_create`, a missing SQLite file is created."""
    check_store_url(url)
    if url.startswith("sqlite:"):
        from bert4rec.serving.store.sqlite_store import SQLiteStore

        return await SQLiteStore.open(url.removeprefix("sqlite:"), may_create=may_create)
    from bert4rec.serving.store.redis_store import RedisStore

    return RedisStore.open(url)


def check_store_url(url: str) -> None:
    """Raise a ValueError for an unknown kind, before any worker starts."""
    if not url.startswith(("sqlite:", "redis:", "rediss:", "unix:")):
        kind = url.partition(":")[0][:20]
        raise ValueError(f"the store begins with {kind!r}, an unknown kind: write {URL_FORMS}")


def check_text(name: str, text: str) -> str:
    """`text`, if it can be encoded as UTF-8; a lone surrogate cannot."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}: pass a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} contains half a character (a lone surrogate): correct the text") from None
    return text


def check_event(event: Event) -> None:
    """Refuse what no store can keep, before anything is written."""
    check_text("user", event.user)
    if type(event.item) is not int:
        check_text("item", event.item)  # type: ignore[arg-type]
    if event.id is not None:
        check_text("event id", event.id)
    if event.time is not None and not math.isfinite(event.time):
        raise ValueError(f"the time of an event is {event.time}: use seconds since 1970")


def conflict() -> EventConflict:
    """Without the id: ids are clients' text, and the message may go to a log or a page."""
    return EventConflict("this user has an event with this id, but another item or time: give a new event a new id")
