"""The tasks of a preparation on a cluster: each works on a few files or on one range of users.

A task reads and writes files in a folder that all workers share, and has a database of its own, in
memory as far as its limit allows. Whatever it writes has a unique name, so a task that is repeated
because its machine died finds nothing half done.
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

from bert4rec.data.columns import Role
from bert4rec.data.database import connect, copy_to_parquet, count, identifier, limit_memory, parquet, quoted
from bert4rec.data.filters import count_events
from bert4rec.data.prepared_files import SORTED, write_sorted
from bert4rec.data.staging import IDS, EventRules, naming_the_file
from bert4rec.data.table_file import SourceTable
from bert4rec.data.table_sql import ColumnKind, parquet_rows
from bert4rec.data.times import TimeFacts, TimeUnit, time_facts


@dataclass(frozen=True)
class Workspace:
    """Where a task works: the folder that all workers share, and its own limits."""

    shared: Path
    memory_limit: str
    threads: int = 1

    def new_path(self, what: str) -> Path:
        return self.shared / f"{what}-{uuid.uuid4().hex}"

    @contextmanager
    def database(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with tempfile.TemporaryDirectory(prefix="bert4rec-") as name, connect() as connection:
            limit_memory(connection, Path(name), self.memory_limit, self.threads)
            yield connection


@dataclass(frozen=True)
class FileGroup:
    """Consecutive Parquet files of one schema."""

    tables: tuple[SourceTable, ...]
    first: int  # the number of the first one among all


@dataclass(frozen=True)
class Partition:
    """The events of a range of users, as Parquet files, and the counts of its users and items."""

    events: tuple[str, ...]
    counts: dict[Role, Path]
    n_rows: int


def look(space: Workspace, files: FileGroup, kind: ColumnKind | None) -> tuple[int, TimeFacts | None]:
    """The number of rows, and what their times look like."""
    if not space.shared.is_dir():
        raise ValueError(
            f"a worker does not see {space.shared}: prepare into a folder (--out, or "
            "BERT4REC_CACHE) on storage that all machines of the cluster share"
        )
    with _rows(space, files) as connection:
        return count(connection, "rows"), None if kind is None else time_facts(connection, kind)


def count_ids(space: Workspace, files: FileGroup, rules: EventRules) -> dict[str, Path]:
    """Files with the ids of the usable rows and their counts, and with the bad rows."""
    found: dict[str, Path] = {"bad": space.new_path("bad")}
    with _rows(space, files) as connection:
        copy_to_parquet(connection, rules.bad_rows, found["bad"])
        n_bad = count(connection, parquet(found["bad"]))
        good = rules.good_rows if n_bad else rules.select_rows("")
        for role in IDS:
            found[role] = space.new_path(f"{role}s")
            query = f'SELECT "{role}" AS id, count(*) AS n FROM ({good}) GROUP BY 1'
            copy_to_parquet(connection, query, found[role])
    return found


def partition_events(
    space: Workspace, files: FileGroup, rules: EventRules, codes: dict[Role, Path], bounds: Sequence[int]
) -> list[str | None]:
    """The events of these files: per range of users, a pattern of Parquet files, or None.

    `codes` has the files of the codes of those ids that are not their own code.
    """
    columns, joins = {}, ""
    for role in IDS:
        columns[role] = f'g."{role}"'
        if role in codes:
            columns[role] = f"{role}s.code"
            joins += f' JOIN {parquet(codes[role])} {role}s ON g."{role}" = {role}s.name'
    events = (
        f'SELECT {columns["user"]} AS "user", {columns["item"]} AS item, g."time", g.rating, '
        f"g.row FROM ({rules.good_rows}) g{joins}"
    )
    part = _range_of(identifier("user"), bounds)
    folder = space.new_path("events")
    with _rows(space, files) as connection:
        connection.execute(
            f"COPY (SELECT *, {part} AS part FROM ({events})) TO {quoted(folder)} (FORMAT parquet, PARTITION_BY (part))"
        )
    paths = [folder / f"part={part}" for part in range(len(bounds) + 1)]
    return [f"{path}/*.parquet" if path.is_dir() else None for path in paths]


def count_partition(space: Workspace, events: tuple[str, ...]) -> Partition:
    with space.database() as connection:
        _view_events(connection, events)
        return _counted(space, connection, events)


def keep(space: Workspace, partition: Partition, kept: str, item_counts: Path) -> Partition:
    """The partition after a filter; see `filters.Events`."""
    with space.database() as connection:
        _view_events(connection, partition.events)
        for role, path in (("user", partition.counts["user"]), ("item", item_counts)):
            connection.execute(f"CREATE VIEW {role}_counts AS SELECT * FROM {parquet(path)}")
        path = space.new_path("kept")
        copy_to_parquet(connection, kept, path)
        connection.execute("DROP VIEW user_counts; DROP VIEW item_counts")
        _view_events(connection, (str(path),))
        return _counted(space, connection, (str(path),))


def write_partition(
    space: Workspace, partition: Partition, numbers: dict[str, Path], finished: Path, time_unit: TimeUnit | None
) -> int:
    """Write the partition's ranges of tokens.npy and times.npy; return the number of rows.

    `numbers` has the files of `tokens` and `rows_of_user`.
    """
    if partition.n_rows == 0:
        return 0
    with space.database() as connection:
        _view_events(connection, partition.events)
        for table, path in numbers.items():
            connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {parquet(path)}")
        connection.execute(f"CREATE TABLE sorted AS {SORTED}")
        rows = connection.execute(
            "SELECT row FROM rows_of_user WHERE code IN "
            f"(SELECT code FROM {parquet(partition.counts['user'])}) ORDER BY row"
        ).fetchnumpy()["row"]
        offsets = np.load(finished / "offsets.npy", mmap_mode="r")
        # Usually one run of users. If the filters leave only integer ids, the order changes.
        n_written = 0
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            place = int(offsets[run[0]])
            end = n_written + int(offsets[run[-1] + 1]) - place
            write_sorted(connection, finished, time_unit, range(n_written, end), to=place)
            n_written = end
        assert n_written == partition.n_rows
    return n_written


@contextmanager
def _rows(space: Workspace, files: FileGroup) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database with the view `rows` of these files."""
    with naming_the_file(files.tables), space.database() as connection:
        connection.execute(f"CREATE VIEW rows AS {parquet_rows(files.tables, files.first)}")
        yield connection


def _view_events(connection: duckdb.DuckDBPyConnection, events: Sequence[str]) -> None:
    connection.execute(
        f'CREATE OR REPLACE VIEW events AS SELECT "user", item, "time", rating, row FROM {parquet(*events)}'
    )


def _counted(space: Workspace, connection: duckdb.DuckDBPyConnection, events: tuple[str, ...]) -> Partition:
    count_events(connection)
    counts = {role: space.new_path(f"{role}_counts") for role in IDS}
    for role, path in counts.items():
        copy_to_parquet(connection, f"SELECT * FROM {role}_counts", path)
    return Partition(events, counts, count(connection, "events"))


def _range_of(column: str, bounds: Sequence[int], first: int = 0) -> str:
    """SQL for the number of ascending `bounds` that are at most the column, by bisection."""
    if not bounds:
        return str(first)
    middle = len(bounds) // 2
    below = _range_of(column, bounds[:middle], first)
    above = _range_of(column, bounds[middle + 1 :], first + middle + 1)
    return f"CASE WHEN {column} < {bounds[middle]} THEN {below} ELSE {above} END"
