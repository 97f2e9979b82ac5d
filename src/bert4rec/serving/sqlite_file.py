"""The SQLite file of a store: its tables, and opening it without harm to the file of another.

Write-ahead logging, so that readers never wait for the writer; a flush to the disk with every
commit; `secure_delete`, which overwrites what is erased.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

APPLICATION = 0x42345248  # "B4RH", in the header of the file: this is ours
SCHEMA_VERSION = 1
SMALL = 2**25  # bytes: a file that is written anew in a fraction of a second
BUSY_SECONDS = 5.0  # how long to wait for a writer in another process

# Items are text with a flag, as an integer of JSON may be longer than one of SQLite. The key of
# `events` puts a history in one place on the disk, in the order in which it is read.
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
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    for pragma in ("synchronous = FULL", "secure_delete = ON", f"journal_size_limit = {2**26}"):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def leave_no_trace(connection: sqlite3.Connection, *, however_large: bool = False) -> None:
    """Remove the remains of what was erased from the file and its log.

    `secure_delete` overwrites a row where it stands. Where SQLite had moved it earlier, to balance
    its trees, a copy may stay in an unused part of a page (we found one for 2 % of users). Only
    writing the file anew removes those; for a large one that is left to `histories compact`.
    """
    size = _pragma(connection, "page_count") * _pragma(connection, "page_size")
    if however_large or size <= SMALL:
        connection.execute("VACUUM")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def compact(path: Path) -> None:
    """Write the file anew, without unused space. Writers wait meanwhile, readers do not."""
    prepare_file(path, may_create=False)
    connection = connect(path)
    try:
        leave_no_trace(connection, however_large=True)
    except sqlite3.OperationalError as error:
        raise ValueError(f"the store {path} cannot be written anew: {error}") from None
    finally:
        connection.close()


def prepare_file(path: Path, *, may_create: bool) -> None:
    """A file of ours, in the right version and mode. A file of others is left as it is."""
    if not path.exists():
        if not may_create:
            raise ValueError(f"there is no store {path}: check the name, or fill one first")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for the store: make it first")
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # histories are nobody else's
    elif not path.is_file():
        raise ValueError(f"the store {path} is not a file: name one")
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        if _is_empty(connection):
            connection.execute("BEGIN IMMEDIATE")  # of several workers, one makes the tables
            if _is_empty(connection):
                for statement in SCHEMA.split(";"):
                    connection.execute(statement)
            connection.execute("COMMIT")
        if _pragma(connection, "application_id") != APPLICATION:
            raise ValueError(f"{path} is a database of another program: name another file")
        version = _pragma(connection, "user_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the store {path} has version {version}, this program reads {SCHEMA_VERSION}: "
                "use the bert4rec that wrote it, or name another file"
            )
        _use_write_ahead_log(connection)
        connection.execute("SELECT user, n_events FROM users LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path} is not a store of histories, or it is damaged ({error}): restore it from a "
            "backup, or name another file"
        ) from None
    finally:
        connection.close()


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT 1 FROM sqlite_schema").fetchall()


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for a lock here, so that we do when several workers start at once."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up:
                raise
            time.sleep(0.01)
