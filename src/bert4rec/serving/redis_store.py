"""Histories in Redis, for a service on many machines.

All keys begin with a prefix, so that a server can be shared:

    PREFIX:history:USER    sorted set, by time, then arrival
    PREFIX:ids:USER        hash, event id → time|item, to know an event that comes again
    PREFIX:users           sorted set of users by the time of their last event
    PREFIX:names           the same users, all with score 0: in the order of their names
    PREFIX:arrivals        how many events ever came, which numbers them

An add is one script, and Redis runs a script alone: all or nothing, also for several users. Its
keys lie anywhere, so that this needs one primary server (with replicas if you like), not Redis
Cluster. How durable an acknowledged event is, is a setting of the server: `appendonly yes` and
`appendfsync always` for as much as SQLite gives, and `maxmemory-policy noeviction`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, urlencode

from bert4rec.serving.redis_scripts import ADD, HISTORY, NEWEST, WITHIN
from bert4rec.serving.store import (
    FEW_USERS,
    KEPT,
    REMEMBERED,
    URL_FORMS,
    Added,
    Event,
    StoredUser,
    StoreUnavailable,
    check_event,
    check_text,
    conflict,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

DEFAULT_PREFIX = "bert4rec"
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # thousands of events at once take a while on a busy server
N_CONNECTIONS = 64
PAGE = 2000  # users looked at in one call, so that Redis is never held up for long


class RedisStore:
    """See `Store`."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        self._users, self._names = self._key("users"), self._key("names")
        self._add = redis.register_script(ADD)
        self._last_events = redis.register_script(HISTORY)
        self._within = redis.register_script(WITHIN)
        self._newest = redis.register_script(NEWEST)

    @classmethod
    def open(cls, url: str) -> Self:
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ValueError(
                "a store in Redis needs the redis library: pip install 'bert4rec[serve]'"
            ) from None
        check_text("the store's url", url)
        address, _, settings = url.partition("?")
        query = parse_qs(settings, keep_blank_values=True)
        prefix = query.pop("prefix", [DEFAULT_PREFIX])[-1]
        try:
            pool = BlockingConnectionPool.from_url(
                f"{address}?{urlencode(query, doseq=True)}",
                max_connections=N_CONNECTIONS,
                timeout=ANSWER_SECONDS,
                socket_timeout=ANSWER_SECONDS,
                socket_connect_timeout=CONNECT_SECONDS,
                retry=Retry(NoBackoff(), 0),  # an add whose answer was lost may have happened
            )
            make: Callable[[], object] = pool.make_connection
            make()  # connects to nothing yet, but refuses unknown settings
        except (ValueError, TypeError, AttributeError):  # whose words may hold the password
            raise ValueError(
                "the url of the store in Redis cannot be used: write / # ? @ in a password as "
                f"%2F %23 %3F %40, leave out unknown settings, and write {URL_FORMS}"
            ) from None
        return cls(Redis(connection_pool=pool), prefix)

    async def add(self, events: Sequence[Event]) -> Added:
        for event in events:
            check_event(event)
        if not events:
            return Added(0, 0)
        now = time.time()
        numbers: dict[str, int] = {}
        words: list[str] = []
        for event in events:
            number = numbers.setdefault(event.user, len(numbers))
            moment = now if event.time is None else float(event.time)
            words += (
                str(number),
                "" if event.id is None else f"+{event.id}",
                "0" if event.time is None else "1",
                repr(moment + 0.0),  # so that -0.0 is 0.0
                "i" if type(event.item) is int else "s",
                str(event.item),
            )
        keys = [self._key("arrivals"), self._users, self._names]
        for user in numbers:
            keys += (self._history(user), self._ids(user))
        with _as_unavailable():
            n_stored, n_duplicates = await self._add(
                keys=keys, args=[REMEMBERED, len(numbers), *numbers, *words]
            )
        if n_stored < 0:
            raise conflict()
        return Added(n_stored, n_duplicates)

    async def history(self, user: str) -> list[Event]:
        key = self._history(check_text("user", user))
        with _as_unavailable():
            rows = _pairs(json.loads(await self._last_events(keys=[key], args=[KEPT])))
        return [_event(user, member.encode(), moment) for member, moment in rows]

    async def users(self, prefix: str, limit: int) -> list[StoredUser]:
        first = check_text("prefix", prefix).encode()
        bounds = [b"[" + first, b"(" + first + b"\xff"]  # no UTF-8 holds this byte
        with _as_unavailable():
            if await self._redis.zlexcount(self._names, *bounds) <= FEW_USERS:
                keys = [self._names, self._users]
                found = _pairs(json.loads(await self._within(keys=keys, args=bounds)))
                found.sort(key=lambda each: (each[1], each[0]), reverse=True)
            else:
                found = await self._newest_with(first, limit)
            async with self._redis.pipeline(transaction=False) as pipeline:
                for user, _ in found[:limit]:
                    pipeline.zcard(self._history(user))
                counts = await pipeline.execute()
        return [
            StoredUser(user, min(count, KEPT), moment)
            for (user, moment), count in zip(found[:limit], counts, strict=True)
            if count  # not erased in between
        ]

    async def erase(self, user: str) -> int:
        check_text("user", user)
        history, ids = self._history(user), self._ids(user)
        with _as_unavailable():
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.zcard(history)
                pipeline.delete(history, ids)
                pipeline.zrem(self._users, user)
                pipeline.zrem(self._names, user)
                n_erased, *_ = await pipeline.execute()
        return int(n_erased)

    async def ping(self) -> None:
        with _as_unavailable():
            await self._redis.ping()

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)
        await self._redis.connection_pool.disconnect()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _history(self, user: str) -> str:
        return self._key(f"history:{user}")

    def _ids(self, user: str) -> str:
        return self._key(f"ids:{user}")

    async def _newest_with(self, prefix: bytes, limit: int) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        for start in itertools.count(0, PAGE):
            args: list[int | bytes] = [start, start + PAGE - 1, prefix]
            n_looked_at, some = json.loads(await self._newest(keys=[self._users], args=args))
            found += _pairs(some)
            if len(found) >= limit or n_looked_at < PAGE:
                break
        return found


def _pairs(flat: list[str]) -> list[tuple[str, float]]:
    """Text and number in turn; an empty list comes from Lua as an empty object."""
    return [(flat[n], float(flat[n + 1])) for n in range(0, len(flat), 2)]


def _event(user: str, member: bytes, moment: float) -> Event:
    start = 25 + int(member[17:25])
    item = member[start:].decode()
    event_id = member[26:start].decode() if start > 25 else None  # without its plus sign
    return Event(user, int(item) if member[16:17] == b"i" else item, float(moment), event_id)


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    """Whatever Redis or the way to it has, the caller can only try again later."""
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise StoreUnavailable(f"Redis does not answer: {reason}") from None
