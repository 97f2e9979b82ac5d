"""From interactions to `Sequences` on disk, out of core: memory stays at about `memory_limit`.

The rows are read twice: to count the ids, and for the events, where users and items are codes. An
integer id is its own code, as joining all rows with all names would cost more than anything else
here; other ids are numbered. Then the events are filtered, sorted and written. On a cluster, workers
that share a storage read some of the files each, and filter and sort a range of the users each;
this process adds up what they count. The bytes of the result are the same.

What is under way is in a temporary folder next to the result. The result appears by a rename when
it is complete. It is found again by the hash of everything that went into it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import duckdb

from bert4rec.data import prepare_tasks as tasks
from bert4rec.data.columns import Role
from bert4rec.data.database import Relation, Workspace, connect, count, fetch_row, first_line, limit_memory, union
from bert4rec.data.filters import Dropped, Filters, describe_step
from bert4rec.data.interactions import Interactions, OnProgress
from bert4rec.data.prepare_tasks import FileGroup, Partition
from bert4rec.data.prepared_files import check_enough_is_left, create_arrays, number_ids, write_names_and_meta
from bert4rec.data.sequences import FORMAT_VERSION, Sequences, fingerprint_of
from bert4rec.data.staging import (
    IDS,
    EventRules,
    PrepareJob,
    PrepareWorkers,
    bad_rows_dropped,
    copy_as_text,
    event_rules,
    refuse_bad_rows,
    refuse_if_all_dropped,
    refuse_missing_ratings,
)
from bert4rec.data.table_sql import is_one_relation, kinds_of, parquet_rows
from bert4rec.data.times import TimeUnit, time_expression
from bert4rec.environment import Environment

FILES = {"meta.json", "tokens.npy", "offsets.npy", "times.npy", "items.parquet", "users.parquet"}
GROUPS_PER_WORKER = 4  # groups of files: no worker is idle for long while others finish
ROWS_PER_PARTITION = 5_000_000  # sorted together by a worker, about 200 MB
MAX_PARTITIONS = 1000  # files that a worker writes at the same time


def prepare(
    interactions: Interactions,
    filters: Filters = Filters(),  # noqa: B008 (frozen)
    *,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    memory_limit: str = "512MB",
    threads: int | None = None,
    for_training: bool = True,
    progress: OnProgress | None = None,
    workers: PrepareWorkers | None = None,
) -> Sequences:
    """Sequences in the directory `out`, or in a folder of `cache` named by their content.

    An intact result of the same bytes and the same settings is reused.
    Unless it is `for_training`, one action and one item are enough.
    `meta["dropped"]` of the result lists what each step dropped.
    `workers` may be those of a cluster, where each keeps to `memory_limit`.
    """
    say: OnProgress = progress or (lambda message: None)
    out = None if out is None else Path(out)
    parent = out.parent if out else Path(cache or Environment().prepared)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".preparing-") as name:
        folder = Path(name).resolve()
        map_tasks = workers.map if workers else None
        interactions = interactions.as_files(folder, say, map_tasks)
        if workers:
            _check_one_schema(interactions)
        key = _content_key(interactions.content(say, map_tasks), filters, for_training)
        target = out or parent / key[:32]
        if (prepared := _intact(target, key)) is not None:
            say(f"reused {target}, prepared before from the same data")
            return prepared
        if out is not None:  # a folder of the cache is always ours
            _refuse_to_overwrite(out)
        connection = connect(str(folder / "work.duckdb"))
        try:
            limit_memory(connection, folder, memory_limit, threads)
            space = Workspace(folder, memory_limit, None if workers else connection)
            job = PrepareJob(interactions, filters, for_training, key, connection, space, workers, say)
            job.finished.mkdir()
            _fill(job)
        except duckdb.OutOfMemoryException as error:
            raise ValueError(
                f"memory_limit={memory_limit} is too small for this data: raise it ({first_line(error)})"
            ) from None
        finally:
            connection.close()
        if target.exists():  # prepared from other data, or damaged: out of the way, then deleted
            target.rename(folder / "replaced")
        job.finished.rename(target)
    return Sequences.load(target)


def _fill(job: PrepareJob) -> None:
    """Write all files of the prepared data set."""
    refuse_missing_ratings(job)
    files, n_malformed = _groups_of_files(job)
    rules, time_unit, n_rows = _look(job, files, n_malformed)
    rules = _count_ids(job, files, rules)
    dropped = bad_rows_dropped(job.connection, list(rules.problems))
    if n_malformed:
        dropped.insert(0, {"step": "malformed line", "rows": n_malformed, "users": 0, "items": 0})
    refuse_if_all_dropped(job.interactions, n_rows + n_malformed, dropped)
    for step in dropped:
        job.say(describe_step(step))
    read = _totals(job.connection)
    partitions, dropped_by_filters = _filter(job, _partition(job, files, rules, _bounds(job, read)))
    left = _totals(job.connection)
    check_enough_is_left(job, read, left, dropped + dropped_by_filters)
    id_types = number_ids(job.connection)
    job.say("sorting by user and time, and writing the sequences")
    create_arrays(job, time_unit)
    numbers = {table: job.space.share(job.connection, table) for table in ("rows_of_user", "tokens")}
    n_written = job.map(tasks.write_partition, [(each, numbers, job.finished, time_unit) for each in partitions])
    assert sum(n_written) == left["rows"]
    write_names_and_meta(job, id_types, dropped + dropped_by_filters)


def _check_one_schema(interactions: Interactions) -> None:
    """Refuse, before any work, tables that workers cannot read file by file."""
    first = interactions.tables[0]
    for table in interactions.tables:
        if not is_one_relation([first, table]):
            is_plain = is_one_relation([table])
            wrong = f"has other columns or types than {first.name}" if is_plain else "is not a plain Parquet file"
            raise ValueError(
                f"{table.name} {wrong}: workers of a cluster read Parquet files of one schema only, "
                "so write the tables as such, or leave out --launcher ray"
            )


def _groups_of_files(job: PrepareJob) -> tuple[list[FileGroup], int]:
    """The tables in groups that a task reads, and the number of malformed lines.

    Parquet files of one schema are read where they are, as copying a hundred million rows costs
    more than reading their columns twice.
    """
    tables = job.interactions.tables
    if not is_one_relation(tables):
        rows, n_malformed = copy_as_text(job)
        return [FileGroup(tables, rows)], n_malformed
    job.say(f"reading {job.interactions.name}" + (f" with {job.workers.n_workers} workers" if job.workers else ""))
    n = min(len(tables), job.workers.n_workers * GROUPS_PER_WORKER) if job.workers else 1
    bounds = [len(tables) * i // n for i in range(n + 1)]
    return [
        FileGroup(tables[start:end], f"({parquet_rows(tables[start:end], start)})")
        for start, end in itertools.pairwise(bounds)
    ], 0


def _look(job: PrepareJob, files: Sequence[FileGroup], n_malformed: int) -> tuple[EventRules, TimeUnit | None, int]:
    """How to read a row, as all rows together decide; the time unit; the number of rows."""
    interactions = job.interactions
    kinds = kinds_of(interactions.tables[0]) if is_one_relation(interactions.tables) else {}
    kind = kinds.get("time", "text") if "time" in interactions.tables[0].roles else None
    looks = job.map(tasks.look, [(each, kind) for each in files])
    n_rows = sum(n for n, _ in looks)
    if n_rows == 0:
        what = "no usable row" if n_malformed else "a header and no rows"
        raise ValueError(f"{interactions.name} has {what}: nothing to learn from")
    time, unit = None, None
    if kind is not None:
        time, unit = time_expression(reduce(operator.add, (facts for _, facts in looks)), kind, interactions)
    return event_rules(kinds, time, job.filters.min_rating is not None), unit, n_rows


def _count_ids(job: PrepareJob, files: Sequence[FileGroup], rules: EventRules) -> EventRules:
    """Create `bad`, and the counts and the names of the codes of all users and items.

    Returns the rules, which may leave out their conditions if there is no bad row.
    """
    connection = job.connection
    job.say("counting users and items")
    found = job.map(tasks.count_ids, [(each, rules) for each in files])
    connection.execute(f"CREATE VIEW bad AS SELECT * FROM {union(bad for bad, _ in found)}")
    if job.interactions.on_bad_rows == "error":
        refuse_bad_rows(job, list(rules.problems))
    for role in IDS:
        _add_up(connection, role, [counts[role] for _, counts in found])
        if rules.kinds.get(role) == "integer":
            names = f"SELECT code, CAST(code AS VARCHAR) AS name FROM {role}_counts"
            connection.execute(f"CREATE VIEW names_of_{role} AS {names}")
            continue
        # Of many workers each writes a range of codes: in the order of names it is few ranges of rows.
        order = "ORDER BY code" if job.workers else ""
        connection.execute(
            f"CREATE TABLE names_of_{role} AS SELECT (row_number() OVER ({order}) - 1)::INTEGER AS code, "
            f"code AS name, n AS n_read FROM {role}_counts"
        )
        connection.execute(f"CREATE OR REPLACE VIEW {role}_counts AS SELECT code, n_read AS n FROM names_of_{role}")
    return replace(rules, are_all_good=count(connection, "bad") == 0)


def _bounds(job: PrepareJob, read: dict[str, int]) -> list[int]:
    """Where to cut the codes of users into ranges of about the same number of rows; here, nowhere."""
    if job.workers is None:
        return []
    n_workers = job.workers.n_workers
    if read["users"] < n_workers:
        raise ValueError(
            f"there are {n_workers} workers and only {read['users']} users in "
            f"{job.interactions.name}: use fewer workers (--workers), or leave out --launcher ray"
        )
    n_partitions = min(max(n_workers, read["rows"] // ROWS_PER_PARTITION), MAX_PARTITIONS)
    rows = job.connection.execute(
        "SELECT min(code) FROM (SELECT code, "
        f"(sum(n) OVER (ORDER BY code) - n) * {n_partitions} // (SELECT sum(n) FROM user_counts) "
        "AS part FROM user_counts) GROUP BY part ORDER BY part"
    ).fetchall()
    return [row[0] for row in rows[1:]]


def _partition(job: PrepareJob, files: Sequence[FileGroup], rules: EventRules, bounds: list[int]) -> list[Partition]:
    """The events, with codes for ids, in ranges of users."""
    job.say("partitioning the rows by user" if bounds else "numbering users and items")
    text_ids = [role for role in IDS if rules.kinds.get(role) != "integer"]
    codes = {role: job.space.share(job.connection, f"names_of_{role}") for role in text_ids}
    written = job.map(tasks.partition_events, [(each, rules, codes, bounds) for each in files])
    for number in range(len(job.interactions.tables)):
        job.connection.execute(f"DROP TABLE IF EXISTS staged_{number}")
    users = ["true"]
    if bounds:
        between = [f"code >= {first} AND code < {end}" for first, end in itertools.pairwise(bounds)]
        users = [f"code < {bounds[0]}", *between, f"code >= {bounds[-1]}"]
    by_range = zip(*written, strict=True)
    return [Partition(union(filter(None, events)), each) for events, each in zip(by_range, users, strict=True)]


def _filter(job: PrepareJob, partitions: list[Partition]) -> tuple[list[Partition], list[Dropped]]:
    """The partitions after all filters, and what each filter dropped."""
    dropped: list[Dropped] = []
    for name, value in job.filters.active().items():
        before = after = _totals(job.connection)
        while True:
            n_rows = after["rows"]
            for each in ("min_item_actions", "min_user_actions") if name == "k_core" else (name,):
                partitions = _keep(job, partitions, each, value)
            after = _totals(job.connection)
            if name != "k_core" or after["rows"] == n_rows:
                break
        step = name if value is True else f"{name}={value:g}"
        dropped.append({"step": step, **{what: before[what] - after[what] for what in before}})
        job.say(describe_step(dropped[-1]))
    return partitions, dropped


def _keep(job: PrepareJob, partitions: list[Partition], name: str, value: float) -> list[Partition]:
    counts = {role: job.space.share(job.connection, f"{role}_counts") for role in IDS}
    kept = job.map(tasks.keep, [(each, name, value, counts) for each in partitions])
    for role in IDS:
        _add_up(job.connection, role, [counts[role] for _, counts in kept])
    return [partition for partition, _ in kept]


def _add_up(connection: duckdb.DuckDBPyConnection, role: Role, counts: Sequence[Relation]) -> None:
    """Create the view of the counts of all users, or items, from those of the tasks."""
    if len(counts) > 1:
        total = f"SELECT code, sum(n)::BIGINT AS n FROM {union(counts)} GROUP BY 1"
        connection.execute(f"CREATE OR REPLACE TABLE all_{role}s AS {total}")
        counts = [f"all_{role}s"]
    connection.execute(f"CREATE OR REPLACE VIEW {role}_counts AS SELECT code, n FROM {counts[0]}")


def _totals(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    rows, users, items = fetch_row(
        connection, "SELECT coalesce(sum(n), 0)::BIGINT, count(*), (SELECT count(*) FROM item_counts) FROM user_counts"
    )
    return {"rows": rows, "users": users, "items": items}


def _content_key(content: dict[str, Any], filters: Filters, for_training: bool) -> str:
    """A hash of all that decides the result, and whether it was checked for training."""
    content = {
        "format": FORMAT_VERSION,
        "interactions": content,
        "filters": filters.as_dict(),
        "for_training": for_training,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _intact(directory: Path, key: str) -> Sequences | None:
    """The prepared data in `directory`, if it has this key and is undamaged."""
    try:
        sequences = Sequences.load(directory)
        if sequences.meta.get("content_key") != key:
            return None
        found = fingerprint_of(sequences.tokens, sequences.offsets, sequences.vocabulary.ids)
        n_times = sequences.n_interactions if sequences.times is None else len(sequences.times)
    except (ValueError, OSError, EOFError, LookupError, TypeError, AssertionError, duckdb.Error):
        return None
    is_whole = (directory / "users.parquet").is_file() and n_times == sequences.n_interactions
    return sequences if is_whole and found == sequences.meta["fingerprint"] else None


def _refuse_to_overwrite(target: Path) -> None:
    if target.is_file():
        raise ValueError(f"{target} is a file: name a directory for the prepared data")
    found = {path.name for path in target.iterdir()} if target.is_dir() else set()
    try:
        content = json.loads((target / "meta.json").read_text(encoding="utf-8"))
        is_ours = found <= FILES and "content_key" in dict(content)
    except (OSError, ValueError, TypeError):
        is_ours = False
    if found and not is_ours:
        raise ValueError(f"{target} holds other files than prepared data: name an empty or a new directory")
