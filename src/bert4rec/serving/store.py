"""What a store of users' histories must do, and `open_store`, which finds the right one by its url.

Users are known by their text (`id_text`: 5 and "5" are one user), items come back with the type
that they came with. Everything is async and called from one event loop; nothing blocks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

KEPT = 1000  # events of a user that a history shows: as many as a request may bring
# Events of a user that are stored, the newest ones. More than are shown, so that an event which is
# delivered again late (a queue that replays a day) is still recognised by its id.
REMEMBERED = 10 * KEPT
# Where a prefix fits more users than this, the newest are found by walking through all users in
# order of time; where it fits fewer, by sorting these. Either way a search reads a few thousand.
FEW_USERS = 1000

URL_FORMS = "sqlite:PATH, redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix://SOCKET?db=DB"


class EventConflict(ValueError):
    """A user has an event of this id already, with another item or at another time."""


class StoreUnavailable(RuntimeError):
    """The store cannot answer now; the same call may succeed later."""


@dataclass(frozen=True, slots=True)
class Event:
    """A user did something with an item. `id`, unique within the user, makes sending it again safe.

    Seconds since 1970. Without a time an event happens when it arrives, and equals any event of its
    id and item, so that a client without a clock can send it again, too. A history has all times.
    """

    user: str
    item: str | int
    time: float | None = None
    id: str | None = None


@dataclass(frozen=True)
class Added:
    stored: int
    duplicates: int  # events that were there before, or twice in this call


@dataclass(frozen=True)
class StoredUser:
    user: str
    n_events: int  # the length of the history
    last_time: float


class Store(Protocol):
    """All that the service asks of a place for histories."""

    async def add(self, events: Sequence[Event]) -> Added:
        """All of them or none; kept for good when this returns; each event id once a user."""

    async def history(self, user: str) -> list[Event]:
        """The newest `KEPT` events by time, then arrival; the oldest first."""

    async def users(self, prefix: str, limit: int) -> list[StoredUser]:
        """Users whose id begins with `prefix`, the last active first."""

    async def erase(self, user: str) -> int:
        """Forget everything about a user, event ids too; how many events that were."""

    async def ping(self) -> None:
        """Raise StoreUnavailable if the store cannot answer."""

    async def close(self) -> None:
        """Finish what was asked for, then let go of files and connections."""


async def open_store(url: str, *, may_create: bool = True) -> Store:
    """The store at `url`. A SQLite file that is not there is made, unless it may not be."""
    check_store_url(url)
    if url.startswith("sqlite:"):
        from bert4rec.serving.sqlite_store import SQLiteStore

        return await SQLiteStore.open(url.removeprefix("sqlite:"), may_create=may_create)
    from bert4rec.serving.redis_store import RedisStore

    return RedisStore.open(url)


def check_store_url(url: str) -> None:
    """Is it of a known kind? Known before any worker starts."""
    if not url.startswith(("sqlite:", "redis:", "rediss:", "unix:")):
        kind = url.partition(":")[0][:20]
        raise ValueError(f"the store begins with {kind!r}, which is no kind: write {URL_FORMS}")


def check_text(name: str, text: str) -> str:
    """Text that can be written as UTF-8; a lone surrogate cannot."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is of type {type(text).__name__}: make it a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f"{name} holds half of a character (a lone surrogate): correct the text"
        ) from None
    return text


def check_event(event: Event) -> None:
    """What no store can keep is refused before any of it is written."""
    check_text("user", event.user)
    if type(event.item) is not int:
        check_text("item", event.item)  # type: ignore[arg-type]
    if event.id is not None:
        check_text("event id", event.id)
    if event.time is not None and not math.isfinite(event.time):
        raise ValueError(f"the time of an event is {event.time}: use seconds since 1970")


def conflict() -> EventConflict:
    """It names no id: ids are the clients' text, and the message may go to a log or a page."""
    return EventConflict(
        "an event of this id is stored for this user with another item or time: "
        "give a new event a new id"
    )
