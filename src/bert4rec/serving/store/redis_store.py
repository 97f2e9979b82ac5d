"""Histories in Redis, for a service on many machines.

All keys begin with a prefix, so that a Redis server can be shared:

    PREFIX:history:USER    sorted set, by time, then arrival
    PREFIX:ids:USER        hash, event id → time|item, to recognize an event that is sent again
    PREFIX:users           sorted set of users by the time of their last event
    PREFIX:names           the same users, all with score 0: in the order of their names
    PREFIX:arrivals        how many events have ever arrived, to number them

An add is one script: all or nothing, also for several users. Its keys may be on any node, so this
needs one primary server (with replicas if you like), not Redis Cluster. How durable an acknowledged
event is depends on the server: set `appendonly yes` and `appendfsync always` for the same as with
SQLite, and `maxmemory-policy noeviction`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, urlencode

from bert4rec.serving.store import (
    FEW_USERS,
    SHOWN_EVENTS,
    STORED_EVENTS,
    URL_FORMS,
    AddResult,
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
ANSWER_SECONDS = 5.0  # thousands of events take a while on a busy server
N_CONNECTIONS = 64
PAGE = 2000  # users per call, so that Redis is never blocked for long

# Lua scripts. Redis runs a script alone: all or nothing. Those that read return one JSON text, as
# the client parses a long reply slowly and would block the event loop meanwhile.

# ARGV: how many events to store per user, the users as JSON, and the events: the user's number from 1,
# id ('' or '+' and the id), is the time given, time, kind, item.
# A member of a history is arrival (16 digits), kind (i or s), length of the id (8), id, item.
ADD = """
local n_stored, users, events = tonumber(ARGV[1]), cjson.decode(ARGV[2]), cjson.decode(ARGV[3])
local fresh, seen = {}, {}
for _, event in ipairs(events) do
  local user, id, has_time, moment, _, item = unpack(event)
  local known = false
  if id ~= '' then
    local key, content = user .. id, moment .. '|' .. item
    known = seen[key] or redis.call('HGET', KEYS[3 + 2 * user], id)
    if known and known ~= content then
      local known_item = string.sub(known, string.find(known, '|', 1, true) + 1)
      if has_time or known_item ~= item then return {-1, 0} end
    end
    seen[key] = known or content
  end
  if not known then fresh[#fresh + 1] = event end
end
local arrival = redis.call('INCRBY', KEYS[1], #fresh) - #fresh
local latest = {}
for n, event in ipairs(fresh) do
  local user, id, _, moment, kind, item = unpack(event)
  local member = string.format('%016.0f', arrival + n) .. kind .. string.format('%08d', #id) .. id .. item
  redis.call('ZADD', KEYS[2 + 2 * user], moment, member)
  if id ~= '' then redis.call('HSET', KEYS[3 + 2 * user], id, moment .. '|' .. item) end
  if not latest[user] or tonumber(moment) > tonumber(latest[user]) then latest[user] = moment end
end
for user, moment in pairs(latest) do
  redis.call('ZADD', KEYS[2], 'GT', moment, users[user])
  redis.call('ZADD', KEYS[3], 0, users[user])
  local history = KEYS[2 + 2 * user]
  local n_old = redis.call('ZCARD', history) - n_stored
  if n_old > 0 then
    for _, member in ipairs(redis.call('ZRANGE', history, 0, n_old - 1)) do
      local n_id = tonumber(string.sub(member, 18, 25))
      if n_id > 0 then redis.call('HDEL', KEYS[3 + 2 * user], string.sub(member, 26, 25 + n_id)) end
    end
    redis.call('ZREMRANGEBYRANK', history, 0, n_old - 1)
  end
end
return {#fresh, #events - #fresh}
"""

# ARGV: how many. Returns members and their times, the oldest first.
HISTORY = "return cjson.encode(redis.call('ZRANGE', KEYS[1], -ARGV[1], -1, 'WITHSCORES'))"

# ARGV: from and to, in the order of names. Returns users and their times.
USERS_BETWEEN = """
local names, found = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[1], ARGV[2]), {}
for n, name in ipairs(names) do
  found[2 * n - 1], found[2 * n] = name, redis.call('ZSCORE', KEYS[2], name)
end
return cjson.encode(found)
"""

# ARGV: from and to, in the order of time, and a prefix. Returns how many users it looked at, and
# those with the prefix, with their times.
NEWEST_USERS = """
local page = redis.call('ZREVRANGE', KEYS[1], ARGV[1], ARGV[2], 'WITHSCORES')
local found, prefix = {}, ARGV[3]
for n = 1, #page, 2 do
  if string.sub(page[n], 1, #prefix) == prefix then
    found[#found + 1], found[#found + 2] = page[n], page[n + 1]
  end
end
return cjson.encode({#page / 2, found})
"""


class RedisStore:
    """See `HistoryStore`."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis, self._prefix = redis, prefix
        self._users, self._names = self._key("users"), self._key("names")
        self._add = redis.register_script(ADD)
        self._read_history = redis.register_script(HISTORY)
        self._users_between = redis.register_script(USERS_BETWEEN)
        self._newest_users = redis.register_script(NEWEST_USERS)

    @classmethod
    def open(cls, url: str) -> Self:
        try:
            from redis.asyncio import BlockingConnectionPool, Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError:
            raise ValueError("a store in Redis needs the redis library: pip install 'bert4rec[serve]'") from None
        check_text("the store's URL", url)
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
                retry=Retry(NoBackoff(), 0),  # an add whose reply was lost may have happened
            )
            make: Callable[[], object] = pool.make_connection
            make()  # does not connect yet, but refuses unknown settings
        except (ValueError, TypeError, AttributeError):  # their messages may contain the password
            raise ValueError(
                "this URL of a store in Redis cannot be used: write / # ? @ in a password as "
                f"%2F %23 %3F %40, leave out unknown settings, and write {URL_FORMS}"
            ) from None
        return cls(Redis(connection_pool=pool), prefix)

    async def add(self, events: Sequence[Event]) -> AddResult:
        for event in events:
            check_event(event)
        if not events:
            return AddResult(0, 0)
        now = time.time()
        numbers: dict[str, int] = {}
        rows = [
            (
                numbers.setdefault(event.user, len(numbers) + 1),
                "" if event.id is None else f"+{event.id}",
                event.time is not None,
                repr((now if event.time is None else float(event.time)) + 0.0),  # so that -0.0 is 0.0
                "i" if type(event.item) is int else "s",
                str(event.item),
            )
            for event in events
        ]
        keys = [self._key("arrivals"), self._users, self._names]
        for user in numbers:
            keys += (self._history(user), self._ids(user))
        with _as_unavailable():
            args = (STORED_EVENTS, json.dumps(list(numbers)), json.dumps(rows))
            n_stored, n_duplicates = await self._add(keys=keys, args=args)
        if n_stored < 0:
            raise conflict()
        return AddResult(n_stored, n_duplicates)

    async def history(self, user: str) -> list[Event]:
        key = self._history(check_text("user", user))
        with _as_unavailable():
            rows = _pairs(json.loads(await self._read_history(keys=[key], args=[SHOWN_EVENTS])))
        return [_event(user, member.encode(), moment) for member, moment in rows]

    async def users(self, prefix: str, limit: int) -> list[StoredUser]:
        first = check_text("prefix", prefix).encode()
        bounds = [b"[" + first, b"(" + first + b"\xff"]  # no UTF-8 holds this byte
        with _as_unavailable():
            if await self._redis.zlexcount(self._names, *bounds) <= FEW_USERS:
                keys = [self._names, self._users]
                found = _pairs(json.loads(await self._users_between(keys=keys, args=bounds)))
                found.sort(key=lambda each: (each[1], each[0]), reverse=True)
            else:
                found = await self._newest_with(first, limit)
            async with self._redis.pipeline(transaction=False) as pipeline:
                for user, _ in found[:limit]:
                    pipeline.zcard(self._history(user))
                counts = await pipeline.execute()
        return [
            StoredUser(user, min(count, SHOWN_EVENTS), moment)
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
            n_looked_at, some = json.loads(await self._newest_users(keys=[self._users], args=args))
            found += _pairs(some)
            if len(found) >= limit or n_looked_at < PAGE:
                break
        return found


def _pairs(flat: list[str]) -> list[tuple[str, float]]:
    """Alternating texts and numbers; Lua gives an empty list as an empty object."""
    return [(flat[n], float(flat[n + 1])) for n in range(0, len(flat), 2)]


def _event(user: str, member: bytes, moment: float) -> Event:
    start = 25 + int(member[17:25])
    item = member[start:].decode()
    event_id = member[26:start].decode() if start > 25 else None  # without its plus sign
    return Event(user, int(item) if member[16:17] == b"i" else item, float(moment), event_id)


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    """Whatever fails in Redis or on the way to it, the caller can only try again later."""
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        raise StoreUnavailable(f"Redis does not respond: {reason}") from None
