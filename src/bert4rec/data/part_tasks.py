"""What one worker does of a preparation that is spread over many: a few files, or a few users.

Every task reads and writes files in a folder that all workers share, and works in a database of its
own, in memory as far as its limit allows. What a task writes has a name of its own, so one that is
started again because its machine died finds nothing half done.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np

from bert4rec.data.bad_rows import bad_rows
from bert4rec.data.columns import Role
from bert4rec.data.database import connect, count, identifier, out_of_core, quoted
from bert4rec.data.filters import count_events
from bert4rec.data.item_table import copy_to_parquet
from bert4rec.data.relations import Kind, parquet_rows
from bert4rec.data.staging import Reading, good_rows, naming_the_file
from bert4rec.data.table import Table
from bert4rec.data.times import TimeFacts, TimeUnit, time_facts
from bert4rec.data.writing import SORTED, write_sorted

IDS: tuple[Role, ...] = ("user", "item")


@dataclass(frozen=True)
class Desk:
    """Where a task works: the folder that all share, and its own limits."""

    shared: Path
    memory_limit: str
    threads: int = 1

    def new_path(self, what: str) -> Path:
        return self.shared / f"{what}-{uuid.uuid4().hex}"

    @contextmanager
    def database(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with tempfile.TemporaryDirectory(prefix="bert4rec-") as name, connect() as connection:
            out_of_core(connection, Path(name), self.memory_limit, self.threads)
            yield connection


@dataclass(frozen=True)
class Files:
    """Some of the Parquet files, which follow each other."""

    tables: tuple[Table, ...]
    first: int  # the number of the first one among all


@dataclass(frozen=True)
class Part:
    """The events of a range of users, as Parquet files, and how many each user and item has."""

    events: tuple[str, ...]
    counts: dict[str, Path]
    n_rows: int
    n_users: int


def look(desk: Desk, files: Files, kind: Kind | None) -> tuple[int, TimeFacts | None]:
    """The number of rows, and what their times look like."""
    if not desk.shared.is_dir():
        raise ValueError(
            f"a worker does not see {desk.shared}: prepare into a folder (--out, or "
            "BERT4REC_CACHE) on storage that all machines of the cluster share"
        )
    with naming_the_file(files.tables), desk.database() as connection:
        _read(connection, files)
        return count(connection, "rows"), None if kind is None else time_facts(connection, kind)


def count_ids(desk: Desk, files: Files, reading: Reading) -> dict[str, Path]:
    """Files with the ids of the usable rows and their counts, and with the rows that are bad."""
    found = {role: desk.new_path(f"{role}s") for role in IDS} | {"bad": desk.new_path("bad")}
    with naming_the_file(files.tables), desk.database() as connection:
        _read(connection, files)
        copy_to_parquet(connection, bad_rows(reading.problems), found["bad"])
        n_bad = count(connection, f"read_parquet({quoted(found['bad'])})")
        connection.execute(f"CREATE VIEW good AS {good_rows(reading, n_bad)}")
        for role in IDS:
            query = f'SELECT "{role}" AS id, count(*) AS n FROM good GROUP BY 1'
            copy_to_parquet(connection, query, found[role])
    return {str(what): path for what, path in found.items()}


def scatter(
    desk: Desk, files: Files, reading: Reading, codes: dict[Role, Path], bounds: Sequence[int]
) -> list[str | None]:
    """The events of these files, a pattern of Parquet files for each range of users.

    `codes` has the files of the codes of those ids that are not their own.
    """
    columns, joins = {}, ""
    for role in IDS:
        columns[role] = f'g."{role}"'
        if role in codes:
            columns[role] = f"{role}s.code"
            names = f"read_parquet({quoted(codes[role])})"
            joins += f' JOIN {names} {role}s ON g."{role}" = {role}s.name'
    folder = desk.new_path("scattered")
    with naming_the_file(files.tables), desk.database() as connection:
        _read(connection, files)
        events = (
            f'SELECT {columns["user"]} AS "user", {columns["item"]} AS item, g."time", g.rating, '
            f"g.row FROM ({good_rows(reading, n_bad=1)}) g{joins}"
        )
        part = _range_of(identifier("user"), bounds)
        connection.execute(
            f"COPY (SELECT *, {part} AS part FROM ({events})) "
            f"TO {quoted(folder)} (FORMAT parquet, PARTITION_BY (part))"
        )
    paths = [folder / f"part={part}" for part in range(len(bounds) + 1)]
    return [f"{path}/*.parquet" if path.is_dir() else None for path in paths]


def count_part(desk: Desk, events: tuple[str, ...]) -> Part:
    with desk.database() as connection:
        _view_events(connection, events)
        return _counted(desk, connection, events)


def keep(desk: Desk, part: Part, kept: str, item_counts: Path) -> Part:
    """The part after a filter; see `filters.Events`."""
    with desk.database() as connection:
        _view_events(connection, part.events)
        for role, path in (("user", part.counts["user"]), ("item", item_counts)):
            connection.execute(
                f"CREATE VIEW {role}_counts AS SELECT * FROM read_parquet({quoted(path)})"
            )
        path = desk.new_path("kept")
        copy_to_parquet(connection, kept, path)
        connection.execute("DROP VIEW user_counts; DROP VIEW item_counts")
        _view_events(connection, (str(path),))
        return _counted(desk, connection, (str(path),))


def write_part(
    desk: Desk, part: Part, numbers: dict[str, Path], finished: Path, time_unit: TimeUnit | None
) -> int:
    """The part's ranges of tokens.npy and times.npy; how many rows it wrote.

    `numbers` has the files of `tokens` and `rows_of_user`.
    """
    if part.n_rows == 0:
        return 0
    with desk.database() as connection:
        _view_events(connection, part.events)
        for table, path in numbers.items():
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet({quoted(path)})")
        connection.execute(f"CREATE TABLE sorted AS {SORTED}")
        rows = connection.execute(
            "SELECT row FROM rows_of_user WHERE code IN "
            f"(SELECT code FROM read_parquet({quoted(part.counts['user'])})) ORDER BY row"
        ).fetchnumpy()["row"]
        offsets = np.load(finished / "offsets.npy", mmap_mode="r")
        # Mostly one run of users. Filters that leave only numbers as ids change the order.
        ends = np.append(np.flatnonzero(np.diff(rows) != 1) + 1, len(rows))
        first_row = 0
        for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
            place = int(offsets[rows[start]])
            n_rows = int(offsets[rows[end - 1] + 1]) - place
            write_sorted(connection, finished, time_unit, first_row, n_rows, to=place)
            first_row += n_rows
        assert first_row == part.n_rows
    return first_row


def _read(connection: duckdb.DuckDBPyConnection, files: Files) -> None:
    connection.execute(f"CREATE VIEW rows AS {parquet_rows(files.tables, files.first)}")


def _view_events(connection: duckdb.DuckDBPyConnection, events: Sequence[str]) -> None:
    paths = ", ".join(map(quoted, events))
    connection.execute(
        'CREATE OR REPLACE VIEW events AS SELECT "user", item, "time", rating, row '
        f"FROM read_parquet([{paths}], hive_partitioning=false)"
    )


def _counted(desk: Desk, connection: duckdb.DuckDBPyConnection, events: tuple[str, ...]) -> Part:
    count_events(connection)
    counts = {}
    for role in IDS:
        counts[str(role)] = desk.new_path(f"{role}_counts")
        copy_to_parquet(connection, f"SELECT * FROM {role}_counts", counts[role])
    return Part(events, counts, count(connection, "events"), count(connection, "user_counts"))


def _range_of(column: str, bounds: Sequence[int], first: int = 0) -> str:
    """SQL for how many of the ascending `bounds` are at most the column, by halving."""
    if not bounds:
        return str(first)
    middle = len(bounds) // 2
    below = _range_of(column, bounds[:middle], first)
    above = _range_of(column, bounds[middle + 1 :], first + middle + 1)
    return f"CASE WHEN {column} < {bounds[middle]} THEN {below} ELSE {above} END"
