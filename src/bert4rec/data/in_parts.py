"""Preparing by many workers that share a storage: the same bytes as on one machine.

Two passes over the files, each worker reading some of them: the first counts the ids, the second
deals the events out to ranges of users. Then each range is filtered, sorted and written into its
place in the same arrays. Between the passes this process adds up what the workers counted and
numbers the ids, by the rules and the code of one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import duckdb

from bert4rec.data import part_tasks
from bert4rec.data.bad_rows import bad_rows_dropped, nothing_usable, refuse_bad_rows
from bert4rec.data.columns import Role
from bert4rec.data.database import quoted
from bert4rec.data.filters import Filters, describe_step, totals
from bert4rec.data.interactions import Interactions
from bert4rec.data.item_table import copy_to_parquet
from bert4rec.data.part_tasks import IDS, Desk, Files, Part
from bert4rec.data.relations import FILE_BITS, Kind, is_one_relation, kinds_of
from bert4rec.data.staging import Reading, reading_of, refuse_missing_ratings
from bert4rec.data.table import Table
from bert4rec.data.times import TimeUnit, merged, time_expression
from bert4rec.data.writing import (
    check_enough_is_left,
    create_arrays,
    id_order,
    id_type,
    number_ids,
    write_names_and_meta,
)

GROUPS_PER_WORKER = 4  # of files, so that no worker is idle for long while others finish
ROWS_PER_PART = 5_000_000  # sorted together, some 200 MB
MOST_PARTS = 1000  # files that a worker writes at the same time


class Workers(Protocol):
    """Who computes the tasks: processes here, or machines of a cluster."""

    n_workers: int

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results in the order of the arguments."""
        ...


def check_can_be_shared(interactions: Interactions) -> None:
    """A ValueError, before any work, about tables that workers cannot read piece by piece."""
    for table in interactions.tables:
        if not is_one_relation([table]):
            raise ValueError(
                f"{table.name} is not a plain Parquet file: workers of a cluster read Parquet "
                "files only, so write it as Parquet, or leave out --launcher ray"
            )
    for table in interactions.tables:
        if not is_one_relation([interactions.tables[0], table]):
            raise ValueError(
                f"{table.name} has other columns or types than {interactions.tables[0].name}: "
                "workers of a cluster need files of one shape, so write them alike, or leave out "
                "--launcher ray"
            )


def contents(
    interactions: Interactions, workers: Workers, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """What each table holds, hashed by the workers."""
    say(f"hashing {interactions.name}")
    return workers.map(Table.content, [(table,) for table in interactions.tables])


def fill_in_parts(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    filters: Filters,
    folder: Path,
    finished: Path,
    key: str,
    for_training: bool,
    say: Callable[[str], None],
    workers: Workers,
    memory_limit: str,
) -> None:
    """All files of the prepared data set, in the folder `finished`."""
    needs_rating = filters.min_rating is not None
    refuse_missing_ratings(interactions, needs_rating)
    desk = Desk(folder.resolve(), memory_limit)
    kinds = kinds_of(interactions.tables[0])
    files = _groups(interactions.tables, workers.n_workers * GROUPS_PER_WORKER)

    say(f"reading {interactions.name} with {workers.n_workers} workers")
    reading, time_unit, n_rows = _look(desk, files, interactions, kinds, needs_rating, workers)
    say("counting users and items")
    found = workers.map(part_tasks.count_ids, [(desk, each, reading) for each in files])
    _merge_ids(connection, found, kinds)
    if interactions.on_bad_rows == "error":
        first_rows = [number << FILE_BITS for number in range(len(interactions.tables))]
        refuse_bad_rows(connection, interactions, list(reading.problems), first_rows)
    dropped = bad_rows_dropped(connection, list(reading.problems))
    for step in dropped:
        say(describe_step(step))
    if sum(step["rows"] for step in dropped) == n_rows:
        raise nothing_usable(interactions, n_rows, dropped)
    read = totals(connection)
    if read["users"] < workers.n_workers:
        raise ValueError(
            f"there are {workers.n_workers} workers and only {read['users']} users in "
            f"{interactions.name}: use fewer workers (--workers), or leave out --launcher ray"
        )

    say("dealing the rows out by users")
    codes = _write_codes(connection, desk, kinds)
    n_parts = min(max(workers.n_workers, read["rows"] // ROWS_PER_PART), MOST_PARTS)
    bounds = _bounds(connection, n_parts)
    dealt = workers.map(
        part_tasks.scatter, [(desk, each, reading, codes, bounds) for each in files]
    )
    of_parts = [tuple(path for path in paths if path) for paths in zip(*dealt, strict=True)]
    parts = workers.map(part_tasks.count_part, [(desk, paths) for paths in of_parts if paths])
    events = DealtEvents(connection, desk, workers, parts)
    dropped = dropped + filters.apply(events, say)
    check_enough_is_left(interactions, read, events.totals(), dropped, for_training)

    say("sorting by user and time, and writing the sequences")
    id_types = number_ids(connection)
    create_arrays(connection, finished, time_unit)
    numbers = {table: desk.new_path(table) for table in ("tokens", "rows_of_user")}
    for table, path in numbers.items():
        copy_to_parquet(connection, f"SELECT * FROM {table}", path)
    arguments = [(desk, part, numbers, finished.resolve(), time_unit) for part in events.parts]
    n_written = sum(workers.map(part_tasks.write_part, arguments))
    assert n_written == events.totals()["rows"]
    write_names_and_meta(
        connection, interactions, filters, id_types, dropped, key, folder, finished, say
    )


class DealtEvents:
    """The events in parts; their counts are added up in this process."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        desk: Desk,
        workers: Workers,
        parts: list[Part],
    ) -> None:
        self._connection, self._desk, self._workers = connection, desk, workers
        self.parts = parts

    def totals(self) -> dict[str, int]:
        return totals(self._connection)

    def keep(self, kept: str) -> None:
        item_counts = self._desk.new_path("all_item_counts")
        copy_to_parquet(self._connection, "SELECT * FROM item_counts", item_counts)
        arguments = [(self._desk, part, kept, item_counts) for part in self.parts]
        self.parts = self._workers.map(part_tasks.keep, arguments)
        for role in IDS:
            paths = [part.counts[role] for part in self.parts]
            _create_counts(self._connection, role, "code", paths)


def _groups(tables: Sequence[Table], n_groups: int) -> list[Files]:
    n = min(len(tables), n_groups)
    bounds = [len(tables) * i // n for i in range(n + 1)]
    return [Files(tuple(tables[start:end]), start) for start, end in itertools.pairwise(bounds)]


def _look(
    desk: Desk,
    files: Sequence[Files],
    interactions: Interactions,
    kinds: dict[Role, Kind],
    needs_rating: bool,
    workers: Workers,
) -> tuple[Reading, TimeUnit | None, int]:
    """How to read a row, as all rows together decide; the unit of the times; how many rows."""
    has_time = "time" in interactions.tables[0].roles
    kind = kinds.get("time", "text") if has_time else None
    looks = workers.map(part_tasks.look, [(desk, each, kind) for each in files])
    n_rows = sum(n for n, _ in looks)
    if n_rows == 0:
        raise ValueError(f"{interactions.name} has a header and no rows: nothing to learn from")
    time, unit = None, None
    if kind is not None:
        time, unit = time_expression(merged(facts for _, facts in looks), kind, interactions)
    return reading_of(kinds, time, needs_rating), unit, n_rows


def _merge_ids(
    connection: duckdb.DuckDBPyConnection, found: list[dict[str, Path]], kinds: dict[Role, Kind]
) -> None:
    """The tables of counts and names, and `bad`. Codes of users are in the order of their ids."""
    bad = ", ".join(quoted(each["bad"]) for each in found)
    connection.execute(f"CREATE TABLE bad AS SELECT * FROM read_parquet([{bad}])")
    for role in IDS:
        if kinds.get(role) == "integer":
            _create_counts(connection, role, "id", [each[role] for each in found])
            connection.execute(
                f"CREATE VIEW names_of_{role} AS "
                f"SELECT code, CAST(code AS VARCHAR) AS name FROM {role}_counts"
            )
            continue
        paths = ", ".join(quoted(each[role]) for each in found)
        connection.execute(
            "CREATE TEMP TABLE named AS SELECT id AS name, sum(n)::BIGINT AS n "
            f"FROM read_parquet([{paths}]) GROUP BY 1"
        )
        order = id_order(id_type(connection, "named"))
        connection.execute(
            f"CREATE TABLE names_of_{role} AS SELECT "
            f"(row_number() OVER (ORDER BY {order}) - 1)::INTEGER AS code, name FROM named"
        )
        connection.execute(
            f"CREATE TABLE {role}_counts AS SELECT code, n FROM named "
            f"JOIN names_of_{role} USING (name)"
        )
        connection.execute("DROP TABLE named")


def _create_counts(
    connection: duckdb.DuckDBPyConnection, role: Role, code: str, paths: Iterable[Path]
) -> None:
    counts = ", ".join(map(quoted, paths))
    connection.execute(
        f"CREATE OR REPLACE TABLE {role}_counts AS SELECT {code} AS code, sum(n)::BIGINT AS n "
        f"FROM read_parquet([{counts}]) GROUP BY 1"
    )


def _write_codes(
    connection: duckdb.DuckDBPyConnection, desk: Desk, kinds: dict[Role, Kind]
) -> dict[Role, Path]:
    codes: dict[Role, Path] = {}
    for role in IDS:
        if kinds.get(role) != "integer":
            codes[role] = desk.new_path(f"codes_of_{role}")
            copy_to_parquet(connection, f"SELECT code, name FROM names_of_{role}", codes[role])
    return codes


def _bounds(connection: duckdb.DuckDBPyConnection, n_parts: int) -> list[int]:
    """Where to cut the codes of users into `n_parts` ranges of about equally many rows."""
    rows = connection.execute(
        "SELECT min(code) FROM (SELECT code, "
        f"(sum(n) OVER (ORDER BY code) - n) * {n_parts} // (SELECT sum(n) FROM user_counts) "
        "AS part FROM user_counts) GROUP BY part ORDER BY part"
    ).fetchall()
    return [row[0] for row in rows[1:]]
