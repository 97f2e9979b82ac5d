"""Histories in one SQLite file, for a service on one machine; its workers may share the file.

Write-ahead logging: readers never wait for the writer. Every commit is flushed to the disk before
an event is acknowledged. `secure_delete` overwrites what is erased.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

from bert4rec.serving.sqlite_file import connect, prepare_file
from bert4rec.serving.sqlite_writer import Writer
from bert4rec.serving.store import (
    FEW_USERS,
    KEPT,
    REMEMBERED,
    Added,
    Event,
    StoredUser,
    StoreUnavailable,
    check_event,
    check_text,
    conflict,
)

T = TypeVar("T")


class SQLiteStore:
    """See `Store`. One thread writes, one reads."""

    def __init__(self, path: Path) -> None:
        self._name = f"the store {path}"
        self._is_closed = False
        self._reading = connect(path)
        self._reading.execute("PRAGMA query_only = ON")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="histories-reader")
        self._writer = Writer(connect(path), self._name)

    @classmethod
    async def open(cls, path: str, *, may_create: bool = True) -> Self:
        if not path or path == ":memory:" or (path[:2] == "//" and path[:3] != "///"):
            raise ValueError(f"the store sqlite:{path} names no file: write sqlite:PATH")
        check_text("the path of the store", path)
        file = Path(path).expanduser()

        def make_ready() -> None:
            try:
                prepare_file(file, may_create=may_create)
            except sqlite3.OperationalError as error:
                if "locked" in str(error):
                    raise StoreUnavailable(f"another process holds the store {file}") from None
                raise ValueError(f"the store {file} cannot be opened: {error}") from None

        await asyncio.to_thread(make_ready)
        return cls(file)

    async def add(self, events: Sequence[Event]) -> Added:
        for event in events:
            check_event(event)
        self._check_open()
        return await self._writer.run(lambda connection: _add(connection, events))

    async def erase(self, user: str) -> int:
        check_text("user", user)
        self._check_open()
        return await self._writer.run(lambda connection: _erase(connection, user), erases=True)

    async def history(self, user: str) -> list[Event]:
        check_text("user", user)
        return await self._read(lambda connection: _history(connection, user))

    async def users(self, prefix: str, limit: int) -> list[StoredUser]:
        check_text("prefix", prefix)
        return await self._read(lambda connection: _users(connection, prefix, limit))

    async def ping(self) -> None:
        await self._read(lambda connection: connection.execute("SELECT 1 FROM users").fetchone())

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._writer.close()
        await asyncio.to_thread(self._reader.shutdown)
        self._reading.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._name} is closed")

    async def _read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        self._check_open()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reader, question, self._reading)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._name} cannot be read: {error}") from None


def _add(connection: sqlite3.Connection, events: Sequence[Event]) -> Added:
    now = time.time()
    n_stored = 0
    by_user: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_user[event.user].append(event)
    for user, its_events in by_user.items():
        row = connection.execute(
            "SELECT user_no, n_events, n_arrived, last_time FROM users WHERE user = ?", [user]
        ).fetchone()
        fresh = _without_duplicates(connection, row[0] if row else None, its_events, now)
        if not fresh:
            continue
        n_stored += len(fresh)
        latest = max(time for time, *_ in fresh)
        if row is None:
            sql = "INSERT INTO users (user, n_events, n_arrived, last_time) VALUES (?, 0, 0, ?)"
            user_no = connection.execute(sql, [user, latest]).lastrowid
            assert user_no is not None
            n_events, n_arrived = 0, 0
        else:
            user_no, n_events, n_arrived, last_time = row
            latest = max(latest, last_time)
        connection.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)",
            [
                (user_no, each[0], arrival, *each[1:])
                for arrival, each in enumerate(fresh, n_arrived)
            ],
        )
        n_events = _prune(connection, user_no, n_events + len(fresh))
        connection.execute(
            "UPDATE users SET n_events = ?, n_arrived = ?, last_time = ? WHERE user_no = ?",
            [n_events, n_arrived + len(fresh), latest, user_no],
        )
    return Added(n_stored, len(events) - n_stored)


def _without_duplicates(
    connection: sqlite3.Connection, user_no: int | None, events: Sequence[Event], now: float
) -> list[tuple[float, str, bool, str | None]]:
    """(time, item, item_is_int, id) of the events of one user that are new."""
    fresh = []
    seen: dict[str, tuple[float, str]] = {}
    for event in events:
        item, moment = str(event.item), now if event.time is None else float(event.time)
        if event.id is not None:
            known = seen.get(event.id)
            if known is None and user_no is not None:
                sql = "SELECT time, item FROM events WHERE user_no = ? AND id = ?"
                known = connection.execute(sql, [user_no, event.id]).fetchone()
            if known is not None:
                if known[1] != item or (event.time is not None and known[0] != moment):
                    raise conflict()
                continue
            seen[event.id] = (moment, item)
        fresh.append((moment, item, type(event.item) is int, event.id))
    return fresh


def _prune(connection: sqlite3.Connection, user_no: int, n_events: int) -> int:
    n_old = n_events - REMEMBERED
    if n_old <= 0:
        return n_events
    connection.execute(
        "DELETE FROM events WHERE user_no = ?1 AND (time, arrival) <= (SELECT time, arrival "
        "FROM events WHERE user_no = ?1 ORDER BY time, arrival LIMIT 1 OFFSET ?2)",
        [user_no, n_old - 1],
    )
    return REMEMBERED


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
        [user, KEPT],
    ).fetchall()
    return [
        Event(user, int(item) if is_int else item, moment, event_id)
        for item, is_int, moment, event_id in reversed(rows)
    ]


def _users(connection: sqlite3.Connection, prefix: str, limit: int) -> list[StoredUser]:
    """The plus signs keep SQLite from choosing the index that would read far too much."""
    end = _after_all_with(prefix)
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
    return [StoredUser(user, min(n_events, KEPT), last) for user, n_events, last in rows]


def _after_all_with(prefix: str) -> str | None:
    """The least text after all texts with this prefix, in the order of code points; None: none."""
    prefix = prefix.rstrip("\U0010ffff")
    if not prefix:
        return None
    following = ord(prefix[-1]) + 1
    return prefix[:-1] + chr(0xE000 if following == 0xD800 else following)
