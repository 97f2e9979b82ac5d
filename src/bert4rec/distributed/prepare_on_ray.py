"""Prepare data with many workers that share a storage: the same bytes as on one machine.

Two passes over the files, each worker reading some of them: the first counts the ids, the second
partitions the events by ranges of users. Then each partition is filtered, sorted and written to its
place in the same arrays. Between the passes this process adds up what the workers counted and
numbers the ids, with the code of one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import duckdb

from bert4rec.data.columns import Role
from bert4rec.data.database import copy_to_parquet, parquet
from bert4rec.data.filters import totals
from bert4rec.data.interactions import Interactions, OnProgress
from bert4rec.data.prepared_files import id_order, id_type
from bert4rec.data.staging import (
    IDS,
    EventRules,
    PrepareJob,
    Staged,
    bad_rows_dropped,
    event_rules,
    first_rows_of_files,
    name_codes_by_themselves,
    refuse_bad_rows,
    refuse_if_all_dropped,
    refuse_missing_ratings,
)
from bert4rec.data.table_file import SourceTable
from bert4rec.data.table_sql import ColumnKind, is_one_relation, kinds_of
from bert4rec.data.times import TimeUnit, sum_facts, time_expression
from bert4rec.distributed import prepare_tasks as tasks
from bert4rec.distributed.prepare_tasks import FileGroup, Partition, Workspace

GROUPS_PER_WORKER = 4  # groups of files: no worker is idle for long while others finish
ROWS_PER_PARTITION = 5_000_000  # sorted together, about 200 MB
MAX_PARTITIONS = 1000  # files that a worker writes at the same time


class PrepareWorkers(Protocol):
    """Runs tasks: on a cluster, or in this process."""

    n_workers: int

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results in the order of the arguments."""
        ...


class RayWorkers:
    """Tasks on the connected Ray cluster, at most `n_workers` at a time."""

    def __init__(self, n_workers: int) -> None:
        self.n_workers = n_workers

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        import ray
        from ray.exceptions import RayTaskError

        # Ray repeats a task whose machine died, but not one that raised an error.
        remote = ray.remote(num_cpus=1, max_retries=3)(task)
        order: list[Any] = []
        running: list[Any] = []
        try:
            for each in arguments:
                if len(running) == self.n_workers:
                    done, running = ray.wait(running)
                    ray.get(done)  # raises the error of a failed task now
                order.append(remote.remote(*each))
                running.append(order[-1])
            return list(ray.get(order))
        except RayTaskError as error:
            # Not ray.cancel: on a task that ends just then it has aborted the whole driver.
            ray.wait(running, num_returns=len(running))
            # Our own errors, and the one that `prepare` expects, without the worker's traceback.
            if isinstance(error.cause, ValueError | duckdb.OutOfMemoryException):
                raise error.cause from None
            raise


class ClusterEngine:
    """Workers that read, filter and sort, each within the memory limit of the job."""

    def __init__(self, workers: PrepareWorkers) -> None:
        self.workers = workers

    def as_files(self, interactions: Interactions, folder: Path, say: OnProgress) -> Interactions:
        interactions = interactions.as_files(folder, say, self.workers.map)
        _check_one_schema(interactions)
        return interactions

    def content(self, interactions: Interactions, say: OnProgress) -> dict[str, Any]:
        return interactions.content(say, self.workers.map)

    def stage(self, job: PrepareJob) -> Staged:
        interactions, n_workers = job.interactions, self.workers.n_workers
        refuse_missing_ratings(job)
        space = Workspace(job.folder, job.memory_limit)
        files = _groups(interactions.tables, n_workers * GROUPS_PER_WORKER)

        job.say(f"reading {interactions.name} with {n_workers} workers")
        rules, time_unit, n_rows = self._look(job, space, files)
        job.say("counting users and items")
        found = self.workers.map(tasks.count_ids, [(space, each, rules) for each in files])
        _merge_ids(job.connection, found, rules.kinds)
        problems = list(rules.problems)
        if interactions.on_bad_rows == "error":
            first_rows = first_rows_of_files(interactions.tables)
            refuse_bad_rows(job.connection, interactions, problems, first_rows)
        dropped = bad_rows_dropped(job.connection, problems)
        refuse_if_all_dropped(interactions, n_rows, dropped)
        read = totals(job.connection)
        if read["users"] < n_workers:
            raise ValueError(
                f"there are {n_workers} workers and only {read['users']} users in "
                f"{interactions.name}: use fewer workers (--workers), or leave out --launcher ray"
            )

        job.say("partitioning the rows by user")
        codes = _write_codes(job.connection, space, rules.kinds)
        n_partitions = min(max(n_workers, read["rows"] // ROWS_PER_PARTITION), MAX_PARTITIONS)
        bounds = _bounds(job.connection, n_partitions)
        written = self.workers.map(tasks.partition_events, [(space, each, rules, codes, bounds) for each in files])
        by_range = [tuple(path for path in paths if path) for paths in zip(*written, strict=True)]
        partitions = self.workers.map(tasks.count_partition, [(space, paths) for paths in by_range if paths])
        events = PartitionedEvents(job.connection, space, self.workers, partitions)
        return Staged(events, time_unit, dropped)

    def _look(
        self, job: PrepareJob, space: Workspace, files: Sequence[FileGroup]
    ) -> tuple[EventRules, TimeUnit | None, int]:
        """How to read a row, as all rows together decide; the time unit; the number of rows."""
        interactions = job.interactions
        kinds = kinds_of(interactions.tables[0])
        has_time = "time" in interactions.tables[0].roles
        kind = kinds.get("time", "text") if has_time else None
        looks = self.workers.map(tasks.look, [(space, each, kind) for each in files])
        n_rows = sum(n for n, _ in looks)
        if n_rows == 0:
            raise ValueError(f"{interactions.name} has a header and no rows: nothing to learn from")
        time, unit = None, None
        if kind is not None:
            time, unit = time_expression(sum_facts(facts for _, facts in looks), kind, interactions)
        return event_rules(kinds, time, job.needs_rating), unit, n_rows

    def write_arrays(self, job: PrepareJob, staged: Staged) -> None:
        events = staged.events
        assert isinstance(events, PartitionedEvents)
        numbers = {table: events.space.new_path(table) for table in ("tokens", "rows_of_user")}
        for table, path in numbers.items():
            copy_to_parquet(job.connection, f"SELECT * FROM {table}", path)
        arguments = [
            (events.space, partition, numbers, job.finished, staged.time_unit) for partition in events.partitions
        ]
        n_written = sum(self.workers.map(tasks.write_partition, arguments))
        assert n_written == events.totals()["rows"]


class PartitionedEvents:
    """The events in partitions; their counts are added up in this process."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        space: Workspace,
        workers: PrepareWorkers,
        partitions: list[Partition],
    ) -> None:
        self._connection, self._workers = connection, workers
        self.space, self.partitions = space, partitions

    def totals(self) -> dict[str, int]:
        return totals(self._connection)

    def keep(self, kept: str) -> None:
        item_counts = self.space.new_path("all_item_counts")
        copy_to_parquet(self._connection, "SELECT * FROM item_counts", item_counts)
        arguments = [(self.space, each, kept, item_counts) for each in self.partitions]
        self.partitions = self._workers.map(tasks.keep, arguments)
        for role in IDS:
            paths = [partition.counts[role] for partition in self.partitions]
            _create_counts(self._connection, role, "code", paths)


def _check_one_schema(interactions: Interactions) -> None:
    """Refuse, before any work, tables that workers cannot read file by file."""
    for table in interactions.tables:
        if not is_one_relation([table]):
            raise ValueError(
                f"{table.name} is not a plain Parquet file: workers of a cluster read Parquet "
                "files only, so write it as Parquet, or leave out --launcher ray"
            )
    first = interactions.tables[0]
    for table in interactions.tables:
        if not is_one_relation([first, table]):
            raise ValueError(
                f"{table.name} has other columns or types than {first.name}: workers of a cluster "
                "need files of one schema, so write them alike, or leave out --launcher ray"
            )


def _groups(tables: Sequence[SourceTable], n_groups: int) -> list[FileGroup]:
    n = min(len(tables), n_groups)
    bounds = [len(tables) * i // n for i in range(n + 1)]
    return [FileGroup(tuple(tables[start:end]), start) for start, end in itertools.pairwise(bounds)]


def _merge_ids(
    connection: duckdb.DuckDBPyConnection, found: list[dict[str, Path]], kinds: dict[Role, ColumnKind]
) -> None:
    """Create the tables of counts and names, and `bad`. Codes of users follow their ids."""
    bad = parquet(*(each["bad"] for each in found))
    connection.execute(f"CREATE TABLE bad AS SELECT * FROM {bad}")
    for role in IDS:
        paths = [each[role] for each in found]
        if kinds.get(role) == "integer":
            _create_counts(connection, role, "id", paths)
            name_codes_by_themselves(connection, role)
            continue
        connection.execute(
            f"CREATE TEMP TABLE named AS SELECT id AS name, sum(n)::BIGINT AS n FROM {parquet(*paths)} GROUP BY 1"
        )
        order = id_order(id_type(connection, "named"))
        connection.execute(
            f"CREATE TABLE names_of_{role} AS SELECT "
            f"(row_number() OVER (ORDER BY {order}) - 1)::INTEGER AS code, name FROM named"
        )
        connection.execute(f"CREATE TABLE {role}_counts AS SELECT code, n FROM named JOIN names_of_{role} USING (name)")
        connection.execute("DROP TABLE named")


def _create_counts(connection: duckdb.DuckDBPyConnection, role: Role, code: str, paths: Iterable[Path]) -> None:
    connection.execute(
        f"CREATE OR REPLACE TABLE {role}_counts AS SELECT {code} AS code, sum(n)::BIGINT AS n "
        f"FROM {parquet(*paths)} GROUP BY 1"
    )


def _write_codes(
    connection: duckdb.DuckDBPyConnection, space: Workspace, kinds: dict[Role, ColumnKind]
) -> dict[Role, Path]:
    codes: dict[Role, Path] = {}
    for role in IDS:
        if kinds.get(role) != "integer":
            codes[role] = space.new_path(f"codes_of_{role}")
            copy_to_parquet(connection, f"SELECT code, name FROM names_of_{role}", codes[role])
    return codes


def _bounds(connection: duckdb.DuckDBPyConnection, n_partitions: int) -> list[int]:
    """Where to cut the codes of users into ranges of about the same number of rows."""
    rows = connection.execute(
        "SELECT min(code) FROM (SELECT code, "
        f"(sum(n) OVER (ORDER BY code) - n) * {n_partitions} // (SELECT sum(n) FROM user_counts) "
        "AS part FROM user_counts) GROUP BY part ORDER BY part"
    ).fetchall()
    return [row[0] for row in rows[1:]]
