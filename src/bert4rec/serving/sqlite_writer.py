"""The one thread that writes to a SQLite file: jobs that wait for each other share a commit.

A commit costs a flush to the disk, hundreds of times what an event costs. So all jobs that came in
during one commit go into the next one together; each has its own savepoint and fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from bert4rec.serving.sqlite_file import leave_no_trace
from bert4rec.serving.store import StoreUnavailable

GROUP = 256  # jobs in one commit: keeps the lock short for the writers of other processes
MAX_WAITING = 10_000  # jobs; beyond it the disk is hopelessly behind, and saying so is kinder

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


@dataclass(eq=False)
class _Job:
    work: Work[Any]
    erases: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def deliver(self) -> None:
        if self.future.done():  # the caller gave up waiting; what it asked for is done all the same
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Writer:
    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A daemon: a process that ends without close() is not held up, and loses nothing that
        # it was told is stored.
        self._thread = threading.Thread(target=self._write, name="histories", daemon=True)
        self._thread.start()

    async def run(self, work: Work[T], *, erases: bool = False) -> T:
        """What `work` returns, once it is on the disk."""
        if self._jobs.qsize() >= MAX_WAITING:
            raise StoreUnavailable(f"more than {MAX_WAITING:,} writes wait for {self._name}")
        loop = asyncio.get_running_loop()
        job = _Job(work, erases, loop, loop.create_future())
        self._jobs.put(job)
        result: T = await job.future
        return result

    async def close(self) -> None:
        """Do what is waiting, then stop."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _write(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._jobs.get()]
            while len(waiting) < GROUP and not self._jobs.empty():
                waiting.append(self._jobs.get())
            is_open = None not in waiting
            if group := [job for job in waiting if job is not None]:
                self._commit(group)
                for job in group:
                    if not job.loop.is_closed():
                        job.loop.call_soon_threadsafe(job.deliver)
        self._connection.close()

    def _commit(self, group: list[_Job]) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in group:
                self._do(job)
            connection.execute("COMMIT")
        except sqlite3.Error as error:  # locked for too long, disk full, damaged
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                connection.execute("ROLLBACK")
            for job in group:
                job.error = StoreUnavailable(f"{self._name} cannot be written: {error}")
            return
        if any(job.erases for job in group):
            with contextlib.suppress(sqlite3.Error):  # erased all the same, only less thoroughly
                leave_no_trace(connection)

    def _do(self, job: _Job) -> None:
        self._connection.execute("SAVEPOINT job")
        try:
            job.result = job.work(self._connection)
        except sqlite3.Error:
            raise
        except Exception as error:
            job.error = error
            self._connection.execute("ROLLBACK TO job")
        self._connection.execute("RELEASE job")
