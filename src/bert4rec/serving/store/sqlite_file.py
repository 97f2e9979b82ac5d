"""The SQLite file of a store: its tables, opening it (only if it is ours), and compacting it.

Write-ahead logging, so that readers never wait for the writer. Each commit is flushed to disk
before its events are acknowledged. `secure_delete` overwrites what is erased.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from bert4rec.serving.store import StoreUnavailable

APPLICATION = 0x42345248  # "B4RH", in the file's header: this is ours
SCHEMA_VERSION = 1
SMALL = 2**25  # bytes: a file of this size is rewritten in a fraction of a second
BUSY_SECONDS = 5.0  # how long to wait for a writer in another process

# Items are text with a flag, as a JSON integer may be longer than SQLite's. The primary key of
# `events` keeps a history in one place on disk, in the order in which it is read.
SCHEMA = f"""
CREATE TABLE users (
    user_no INTEGER PRIMARY KEY, user TEXT NOT NULL, n_events INTEGER NOT NULL,
    n_arrived INTEGER NOT NULL, last_time REAL NOT NULL
);
CREATE UNIQUE INDEX users_by_name ON users (user);
CREATE INDEX users_by_time ON users (last_time, user);
CREATE TABLE events (
    user_no INTEGER NOT NULL, time REAL NOT NULL, arrival INTEGER NOT NULL,
    item TEXT NOT NULL, item_is_int INTEGER NOT NULL, id TEXT,
    PRIMARY KEY (user_no, time, arrival)
) WITHOUT ROWID;
CREATE UNIQUE INDEX events_by_id ON events (user_no, id) WHERE id IS NOT NULL;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {SCHEMA_VERSION};
"""


def connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for pragma in ("synchronous = FULL", "secure_delete = ON", f"journal_size_limit = {2**26}"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def remove_traces(connection: sqlite3.Connection, *, however_large: bool = False) -> None:
    """Remove what is left of erased rows in the file and its log.

    `secure_delete` overwrites a row in its place. If SQLite moved it earlier, to balance its trees,
    a copy may remain in an unused part of a page (for 2 % of users in a test). Only rewriting the
    file removes those; for a large file this is left to `histories compact`.
    """
    size = _pragma(connection, "page_count") * _pragma(connection, "page_size")
    if however_large or size <= SMALL:
        connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def compact(path: Path) -> None:
    """Rewrite the file without unused space. Writers wait meanwhile, readers do not."""
    try:
        prepare_file(path, may_create=False)
        with contextlib.closing(connect(path)) as connection:
            remove_traces(connection, however_large=True)
    except (sqlite3.OperationalError, StoreUnavailable) as error:
        raise ValueError(f"the store {path} cannot be rewritten: {error}") from None


def prepare_file(path: Path, *, may_create: bool) -> None:
    """Create or check the file. A file of another program is left as it is."""
    if not path.exists():
        if not may_create:
            raise ValueError(f"there is no store {path}: check the name, or create one first")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for the store: create it first")
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # readable by its owner only
    elif not path.is_file():
        raise ValueError(f"the store {path} is not a file: choose a file")
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        if _is_empty(connection):
            connection.execute("BEGIN IMMEDIATE")  # of several workers, one creates the tables
            if _is_empty(connection):
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
            connection.execute("COMMIT")
        if _pragma(connection, "application_id") != APPLICATION:
            raise ValueError(f"{path} is a database of another program: choose another file")
        version = _pragma(connection, "user_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the store {path} has version {version}, this program reads {SCHEMA_VERSION}: "
                "use the bert4rec that wrote it, or choose another file"
            )
        _use_write_ahead_log(connection)
        connection.execute("SELECT user, n_events FROM users LIMIT 1").fetchall()
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise StoreUnavailable(f"another process holds the store {path}") from None
        raise ValueError(f"the store {path} cannot be opened: {error}") from None
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path} is not a store of histories, or it is damaged ({error}): restore it from a "
            "backup, or choose another file"
        ) from None
    finally:
        connection.close()


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT 1 FROM sqlite_schema").fetchall()


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for a lock here, so we do, for workers that start at the same time."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.01)
