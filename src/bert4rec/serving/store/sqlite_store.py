"""Histories in one SQLite file, for a service on one machine; its workers may share the file."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from bert4rec.serving.store import (
    FEW_USERS,
    SHOWN_EVENTS,
    STORED_EVENTS,
    AddResult,
    Event,
    StoredUser,
    StoreUnavailable,
    check_event,
    check_text,
    conflict,
)
from bert4rec.serving.store.sqlite_file import connect, prepare_file, remove_traces

MAX_WRITES = 256  # per commit: keeps the lock short for the writers of other processes
MAX_WAITING = 10_000  # writes; beyond it the disk is hopelessly behind

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]
_Row = tuple[float, str, bool, str | None]  # time, item, item_is_int, id


@dataclass(eq=False)
class _Write:
    work: Work[Any]
    erases: bool
    is_done: bool = False
    result: Any = None
    error: Exception | None = None


class SQLiteStore:
    """See `HistoryStore`. One thread writes, one reads."""

    def __init__(self, path: Path) -> None:
        self._name = f"the store {path}"
        self._is_closed = False
        self._reading, self._writing = connect(path), connect(path)
        self._reading.execute("PRAGMA query_only = ON")
        self._reader = ThreadPoolExecutor(1, "histories-reader")
        self._writer = ThreadPoolExecutor(1, "histories-writer")
        self._waiting: deque[_Write] = deque()

    @classmethod
    async def open(cls, path: str, *, may_create: bool = True) -> Self:
        if not path or path == ":memory:" or (path[:2] == "//" and path[:3] != "///"):
            raise ValueError(f"the store sqlite:{path} has no file name: write sqlite:PATH")
        check_text("the path of the store", path)
        file = Path(path).expanduser()
        await asyncio.to_thread(prepare_file, file, may_create=may_create)
        return cls(file)

    async def add(self, events: Sequence[Event]) -> AddResult:
        for event in events:
            check_event(event)
        return await self._write(lambda connection: _add(connection, events))

    async def erase(self, user: str) -> int:
        check_text("user", user)
        return await self._write(lambda connection: _erase(connection, user), erases=True)

    async def history(self, user: str) -> list[Event]:
        check_text("user", user)
        return await self._read(lambda connection: _history(connection, user))

    async def users(self, prefix: str, limit: int) -> list[StoredUser]:
        check_text("prefix", prefix)
        return await self._read(lambda connection: _users(connection, prefix, limit))

    async def ping(self) -> None:
        await self._read(lambda connection: connection.execute("SELECT 1 FROM users").fetchone())

    async def close(self) -> None:
        self._is_closed = True
        for thread, connection in ((self._writer, self._writing), (self._reader, self._reading)):
            await asyncio.to_thread(thread.shutdown)
            connection.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._name} is closed")

    async def _read(self, query: Work[T]) -> T:
        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, query, self._reading)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._name} cannot be read: {error}") from None

    async def _write(self, work: Work[T], *, erases: bool = False) -> T:
        """What `work` returns, once it is on disk."""
        self._check_open()
        if len(self._waiting) >= MAX_WAITING:
            raise StoreUnavailable(f"more than {MAX_WAITING:,} writes wait for {self._name}")
        write = _Write(work, erases)
        self._waiting.append(write)
        written = asyncio.get_running_loop().run_in_executor(self._writer, self._result_of, write)
        result: T = await asyncio.shield(written)  # a caller that gives up does not undo it
        return result

    def _result_of(self, write: _Write) -> Any:
        """On the writing thread: the first of the waiting writes commits them all."""
        if not write.is_done:
            self._commit([self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_WRITES))])
        if write.error is not None:
            raise write.error
        return write.result

    def _commit(self, writes: list[_Write]) -> None:
        """A commit costs a flush to disk, hundreds of times what an event costs: many share one.

        Each write has its own savepoint and fails alone.
        """
        connection = self._writing
        try:
            connection.execute("BEGIN IMMEDIATE")
            for write in writes:
                connection.execute("SAVEPOINT one_write")
                try:
                    write.result = write.work(connection)
                except sqlite3.Error:
                    raise
                except Exception as error:
                    write.error = error
                    connection.execute("ROLLBACK TO one_write")
                connection.execute("RELEASE one_write")
            connection.execute("COMMIT")
            if any(write.erases for write in writes):
                with contextlib.suppress(sqlite3.Error):  # the rows are erased, only copies may remain
                    remove_traces(connection)
        except sqlite3.Error as error:  # locked for too long, disk full, damaged
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                connection.execute("ROLLBACK")
            for write in writes:
                write.error = StoreUnavailable(f"{self._name} cannot be written: {error}")
        for write in writes:
            write.is_done = True


def _add(connection: sqlite3.Connection, events: Sequence[Event]) -> AddResult:
    now = time.time()
    n_stored = 0
    by_user: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_user[event.user].append(event)
    for user, user_events in by_user.items():
        if fresh := _without_duplicates(connection, user, user_events, now):
            _insert(connection, user, fresh)
            n_stored += len(fresh)
    return AddResult(n_stored, len(events) - n_stored)


def _insert(connection: sqlite3.Connection, user: str, fresh: Sequence[_Row]) -> None:
    connection.execute(
        "INSERT INTO users (user, n_events, n_arrived, last_time) VALUES (?, 0, 0, ?) "
        "ON CONFLICT (user) DO UPDATE SET last_time = max(last_time, excluded.last_time)",
        [user, max(moment for moment, *_ in fresh)],
    )
    sql = "SELECT user_no, n_events, n_arrived FROM users WHERE user = ?"
    user_no, n_events, n_arrived = connection.execute(sql, [user]).fetchone()
    connection.executemany(
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)",
        [(user_no, moment, arrival, *rest) for arrival, (moment, *rest) in enumerate(fresh, n_arrived)],
    )
    n_old = max(0, n_events + len(fresh) - STORED_EVENTS)
    if n_old:
        connection.execute(
            "DELETE FROM events WHERE user_no = ?1 AND (time, arrival) <= (SELECT time, arrival "
            "FROM events WHERE user_no = ?1 ORDER BY time, arrival LIMIT 1 OFFSET ?2)",
            [user_no, n_old - 1],
        )
    connection.execute(
        "UPDATE users SET n_events = ?, n_arrived = ? WHERE user_no = ?",
        [n_events + len(fresh) - n_old, n_arrived + len(fresh), user_no],
    )


def _without_duplicates(connection: sqlite3.Connection, user: str, events: Sequence[Event], now: float) -> list[_Row]:
    """The new ones of a user's events."""
    sql = "SELECT time, item FROM events WHERE user_no = (SELECT user_no FROM users WHERE user = ?) AND id = ?"
    fresh = []
    seen: dict[str, tuple[float, str]] = {}
    for event in events:
        item, moment = str(event.item), now if event.time is None else float(event.time)
        if event.id is not None:
            known = seen.get(event.id) or connection.execute(sql, [user, event.id]).fetchone()
            if known is not None:
                if known[1] != item or (event.time is not None and known[0] != moment):
                    raise conflict()
                continue
            seen[event.id] = (moment, item)
        fresh.append((moment, item, type(event.item) is int, event.id))
    return fresh


def _erase(connection: sqlite3.Connection, user: str) -> int:
    row = connection.execute("SELECT user_no FROM users WHERE user = ?", [user]).fetchone()
    if row is None:
        return 0
    n_erased = connection.execute("DELETE FROM events WHERE user_no = ?", row).rowcount
    connection.execute("DELETE FROM users WHERE user_no = ?", row)
    return n_erased


def _history(connection: sqlite3.Connection, user: str) -> list[Event]:
    rows = connection.execute(
        "SELECT item, item_is_int, time, id FROM events "
        "WHERE user_no = (SELECT user_no FROM users WHERE user = ?) "
        "ORDER BY time DESC, arrival DESC LIMIT ?",
        [user, SHOWN_EVENTS],
    ).fetchall()
    return [
        Event(user, int(item) if is_int else item, moment, event_id)
        for item, is_int, moment, event_id in reversed(rows)
    ]


def _users(connection: sqlite3.Connection, prefix: str, limit: int) -> list[StoredUser]:
    """The plus signs keep SQLite from using the index that would read far too many rows."""
    end = _end_of_prefix(prefix)
    in_range, bounds = "{0} >= ?", [prefix]
    if end is not None:
        in_range, bounds = "{0} >= ? AND {0} < ?", [prefix, end]
    counted = f"SELECT count(*) FROM (SELECT 1 FROM users WHERE {in_range.format('user')} LIMIT ?)"
    n_fit = connection.execute(counted, [*bounds, FEW_USERS + 1]).fetchone()[0]
    plan = (
        f"{in_range.format('user')} ORDER BY +last_time DESC, +user DESC"
        if n_fit <= FEW_USERS
        else f"{in_range.format('+user')} ORDER BY last_time DESC, user DESC"
    )
    rows = connection.execute(
        f"SELECT user, n_events, last_time FROM users WHERE {plan} LIMIT ?", [*bounds, limit]
    ).fetchall()
    return [StoredUser(user, min(n_events, SHOWN_EVENTS), last) for user, n_events, last in rows]


def _end_of_prefix(prefix: str) -> str | None:
    """The least text after all that begin with `prefix`, by code points; None if there is none."""
    prefix = prefix.rstrip("\U0010ffff")
    if not prefix:
        return None
    following = ord(prefix[-1]) + 1
    return prefix[:-1] + chr(0xE000 if following == 0xD800 else following)
