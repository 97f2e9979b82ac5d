"""The tasks of a preparation: each works on a few files or on one range of users.

What a task reads and what it leaves behind are relations: SQL for the name of a table, a query or
Parquet files. So the same tasks work in the one database of this process and on many machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import numpy as np

from bert4rec.data.columns import Role
from bert4rec.data.database import Relation, Workspace, count, parquet, quoted
from bert4rec.data.filters import KEEP
from bert4rec.data.prepared_files import write_sorted
from bert4rec.data.staging import IDS, EventRules, naming_the_file
from bert4rec.data.table_file import SourceTable
from bert4rec.data.table_sql import ColumnKind
from bert4rec.data.times import TimeFacts, TimeUnit, time_facts


@dataclass(frozen=True)
class FileGroup:
    """Some of the tables, and their rows (user, item, time, rating, row)."""

    tables: tuple[SourceTable, ...]
    rows: Relation


@dataclass(frozen=True)
class Partition:
    """All events of a range of users."""

    events: Relation
    users: str  # SQL that is true for the codes of the users


def look(space: Workspace, files: FileGroup, time_kind: ColumnKind | None) -> tuple[int, TimeFacts | None]:
    """The number of rows, and what their times look like."""
    if not space.folder.is_dir():
        raise ValueError(
            f"a worker does not see {space.folder}: prepare into a folder (--out, or "
            "BERT4REC_CACHE) on storage that all machines of the cluster share"
        )
    with naming_the_file(files.tables), space.database() as connection:
        n_rows = count(connection, files.rows)
        return n_rows, None if time_kind is None else time_facts(connection, files.rows, time_kind)


def count_ids(space: Workspace, files: FileGroup, rules: EventRules) -> tuple[Relation, dict[Role, Relation]]:
    """The bad rows, and the ids of the good ones with their counts."""
    with naming_the_file(files.tables), space.database() as connection:
        bad = space.save(connection, "bad_rows", rules.bad_rows(files.rows))
        rules = replace(rules, are_all_good=count(connection, bad) == 0)
        return bad, _count_ids(space, connection, f"({rules.events(files.rows)})")


def partition_events(
    space: Workspace, files: FileGroup, rules: EventRules, codes: dict[Role, Relation], bounds: Sequence[int]
) -> list[Relation | None]:
    """The events of these files per range of users; None for a range without any.

    `codes` has the codes of those ids that are not their own code.
    """
    columns, joins = {}, ""
    for role in IDS:
        columns[role] = f'g."{role}"'
        if role in codes:
            columns[role] = f"{role}s.code"
            joins += f' JOIN {codes[role]} {role}s ON g."{role}" = {role}s.name'
    events = (
        f'SELECT {columns["user"]} AS "user", {columns["item"]} AS item, g."time", g.rating, g.row '
        f"FROM ({rules.events(files.rows)}) g{joins}"
    )
    if not bounds and not codes:
        return [f"({events})"]  # reading the files again costs less than a copy
    with naming_the_file(files.tables), space.database() as connection:
        if not bounds:
            return [space.save(connection, "events", events)]
        part = _range_of_user(bounds)
        folder = space.new_path("events")
        connection.execute(
            f"COPY (SELECT *, {part} AS part FROM ({events})) TO {quoted(folder)} (FORMAT parquet, PARTITION_BY (part))"
        )
    paths = [folder / f"part={part}" for part in range(len(bounds) + 1)]
    return [parquet(path / "*.parquet") if path.is_dir() else None for path in paths]


def keep(
    space: Workspace, partition: Partition, name: str, value: float, counts: dict[Role, Relation]
) -> tuple[Partition, dict[Role, Relation]]:
    """The partition after a filter, and its ids with their counts. `counts` has those before it."""
    users = f"(SELECT * FROM {counts['user']} WHERE {partition.users})"
    query = KEEP[name].format(value=value, events=partition.events, user_counts=users, item_counts=counts["item"])
    with space.database() as connection:
        events = space.save(connection, "events", query)
        return replace(partition, events=events), _count_ids(space, connection, events)


def write_partition(
    space: Workspace, partition: Partition, numbers: dict[str, Relation], finished: Path, time_unit: TimeUnit | None
) -> int:
    """Write the partition's ranges of tokens.npy and times.npy; return the number of rows.

    `numbers` has `rows_of_user` and `tokens`.
    """
    with space.database() as connection:
        connection.execute(
            f'CREATE TABLE sorted AS SELECT i.token, e."time" FROM {partition.events} e '
            f'JOIN {numbers["rows_of_user"]} u ON e."user" = u.code JOIN {numbers["tokens"]} i ON e.item = i.code '
            'ORDER BY u.row, e."time", e.row'
        )
        # Usually one run of users. If the filters leave only integer ids, the order changes.
        runs = connection.execute(
            "SELECT min(row), max(row) + 1 FROM (SELECT row, row - row_number() OVER (ORDER BY row) AS run "
            f"FROM {numbers['rows_of_user']} WHERE {partition.users}) GROUP BY run ORDER BY 1"
        ).fetchall()
        offsets = np.load(finished / "offsets.npy", mmap_mode="r")
        n_written = 0
        for first, end in runs:
            start, stop = int(offsets[first]), int(offsets[end])
            write_sorted(connection, finished, time_unit, range(n_written, n_written + stop - start), to=start)
            n_written += stop - start
    return n_written


def _count_ids(space: Workspace, connection: duckdb.DuckDBPyConnection, events: Relation) -> dict[Role, Relation]:
    found = {}
    for role in IDS:
        query = f'SELECT "{role}" AS code, count(*) AS n FROM {events} GROUP BY 1'
        found[role] = space.save(connection, f"{role}s_found", query)
    return found


def _range_of_user(bounds: Sequence[int], first: int = 0) -> str:
    """SQL for the number of ascending `bounds` that are at most the user, by bisection."""
    if not bounds:
        return str(first)
    middle = len(bounds) // 2
    below = _range_of_user(bounds[:middle], first)
    above = _range_of_user(bounds[middle + 1 :], first + middle + 1)
    return f'CASE WHEN "user" < {bounds[middle]} THEN {below} ELSE {above} END'
