"""Histories in one SQLite file, for a service on one machine; its workers may share the file."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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

MAX_JOBS = 256  # per commit: keeps the lock short for the writers of other processes
MAX_WAITING = 10_000  # jobs; beyond it the disk is hopelessly behind

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class SQLiteStore:
    """See `HistoryStore`. One thread writes, one reads."""

    def __init__(self, path: Path) -> None:
        self._name = f"the store {path}"
        self._is_closed = False
        self._reading = connect(path)
        self._reading.execute("PRAGMA query_only = ON")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="histories-reader")
        self._writer = _SQLiteWriter(connect(path), self._name)

    @classmethod
    async def open(cls, path: str, *, may_create: bool = True) -> Self:
        if not path or path == ":memory:" or (path[:2] == "//" and path[:3] != "///"):
            raise ValueError(f"the store sqlite:{path} has no file name: write sqlite:PATH")
        check_text("the path of the store", path)
        file = Path(path).expanduser()
        try:
            await asyncio.to_thread(prepare_file, file, may_create=may_create)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise StoreUnavailable(f"another process holds the store {file}") from None
            raise ValueError(f"the store {file} cannot be opened: {error}") from None
        return cls(file)

    async def add(self, events: Sequence[Event]) -> AddResult:
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

    async def _read(self, query: Work[T]) -> T:
        self._check_open()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reader, query, self._reading)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._name} cannot be read: {error}") from None


@dataclass(eq=False)
class _WriteJob:
    work: Work[Any]
    erases: bool
    future: Future[Any] = field(default_factory=Future)
    result: Any = None
    error: Exception | None = None


class _SQLiteWriter:
    """The one thread that writes: jobs that arrive during a commit share the next one.

    A commit costs a flush to disk, hundreds of times what an event costs. Each job has its own
    savepoint and fails alone.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name
        self._jobs: queue.SimpleQueue[_WriteJob | None] = queue.SimpleQueue()
        # A daemon: a process that exits without close() does not hang, and loses nothing that was
        # acknowledged.
        self._thread = threading.Thread(target=self._write, name="histories", daemon=True)
        self._thread.start()

    async def run(self, work: Work[T], *, erases: bool = False) -> T:
        """What `work` returns, once it is on disk."""
        if self._jobs.qsize() >= MAX_WAITING:
            raise StoreUnavailable(f"more than {MAX_WAITING:,} writes wait for {self._name}")
        job = _WriteJob(work, erases)
        job.future.set_running_or_notify_cancel()  # a caller that gives up does not undo it
        self._jobs.put(job)
        result: T = await asyncio.wrap_future(job.future)
        return result

    async def close(self) -> None:
        """Finish the waiting jobs, then stop."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _write(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._jobs.get()]
            while len(waiting) < MAX_JOBS and not self._jobs.empty():
                waiting.append(self._jobs.get())
            is_open = None not in waiting
            if jobs := [job for job in waiting if job is not None]:
                self._commit(jobs)
                for job in jobs:
                    if job.error is None:
                        job.future.set_result(job.result)
                    else:
                        job.future.set_exception(job.error)
        self._connection.close()

    def _commit(self, jobs: list[_WriteJob]) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                self._do(job)
            connection.execute("COMMIT")
        except sqlite3.Error as error:  # locked for too long, disk full, damaged
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                connection.execute("ROLLBACK")
            for job in jobs:
                job.error = StoreUnavailable(f"{self._name} cannot be written: {error}")
            return
        if any(job.erases for job in jobs):
            with contextlib.suppress(sqlite3.Error):  # the rows are erased, only copies may remain
                remove_traces(connection)

    def _do(self, job: _WriteJob) -> None:
        self._connection.execute("SAVEPOINT job")
        try:
            job.result = job.work(self._connection)
        except sqlite3.Error:
            raise
        except Exception as error:
            job.error = error
            self._connection.execute("ROLLBACK TO job")
        self._connection.execute("RELEASE job")


def _add(connection: sqlite3.Connection, events: Sequence[Event]) -> AddResult:
    now = time.time()
    n_stored = 0
    by_user: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_user[event.user].append(event)
    for user, user_events in by_user.items():
        row = connection.execute(
            "SELECT user_no, n_events, n_arrived, last_time FROM users WHERE user = ?", [user]
        ).fetchone()
        fresh = _without_duplicates(connection, row[0] if row else None, user_events, now)
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
            [(user_no, each[0], arrival, *each[1:]) for arrival, each in enumerate(fresh, n_arrived)],
        )
        n_events = _prune(connection, user_no, n_events + len(fresh))
        connection.execute(
            "UPDATE users SET n_events = ?, n_arrived = ?, last_time = ? WHERE user_no = ?",
            [n_events, n_arrived + len(fresh), latest, user_no],
        )
    return AddResult(n_stored, len(events) - n_stored)


def _without_duplicates(
    connection: sqlite3.Connection, user_no: int | None, events: Sequence[Event], now: float
) -> list[tuple[float, str, bool, str | None]]:
    """(time, item, item_is_int, id) of one user's new events."""
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
    n_old = n_events - STORED_EVENTS
    if n_old <= 0:
        return n_events
    connection.execute(
        "DELETE FROM events WHERE user_no = ?1 AND (time, arrival) <= (SELECT time, arrival "
        "FROM events WHERE user_no = ?1 ORDER BY time, arrival LIMIT 1 OFFSET ?2)",
        [user_no, n_old - 1],
    )
    return STORED_EVENTS


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
