"""Rows of any tables, the rules that turn them into events, and what is said about bad rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import duckdb

from bert4rec.data.columns import Role
from bert4rec.data.database import Relation, Workspace, connect, count, fetch_row, first_line, union
from bert4rec.data.filters import Dropped, Filters
from bert4rec.data.interactions import Interactions, OnProgress, names_of
from bert4rec.data.table_file import SourceTable, line_of_row, readable
from bert4rec.data.table_sql import FILE_BITS, ROLES, ColumnKind, is_one_relation, parquet_rows, text_relation

IDS: tuple[Role, ...] = ("user", "item")
REMEDY = "correct them, or leave such rows out with on_bad_rows='skip' (--on-bad-rows skip)"
ISO = "an integer (s, ms, us or ns, as in most rows), a decimal number or an ISO date"


class PrepareWorkers(Protocol):
    """Runs tasks side by side, as those of a cluster do."""

    n_workers: int

    def map(self, task: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The results in the order of the arguments."""
        ...


@dataclass(frozen=True)
class PrepareJob:
    """One preparation: what to read, how to filter it, and where to work."""

    interactions: Interactions
    filters: Filters
    for_training: bool
    key: str  # a hash of all that decides the result
    connection: duckdb.DuckDBPyConnection
    space: Workspace
    workers: PrepareWorkers | None  # None: this process
    say: OnProgress

    @property
    def finished(self) -> Path:
        """The folder for the files of the result."""
        return self.space.folder / "finished"

    def map(self, task: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """The results of a task in the workspace, for each of the arguments."""
        with_space = [(self.space, *each) for each in arguments]
        return self.workers.map(task, with_space) if self.workers else [task(*each) for each in with_space]


@dataclass(frozen=True)
class EventRules:
    """SQL that turns rows into events, and that tells what makes a row bad."""

    kinds: dict[Role, ColumnKind]
    time: str
    rating: str
    problems: dict[Role, str]  # in the order in which they are reported
    are_all_good: bool = False  # known to have no problem, so that none is looked for

    def events(self, rows: Relation) -> str:
        """The query of the good rows, with times and ratings as numbers."""
        where = "" if self.are_all_good else f" WHERE NOT ({' OR '.join(self.problems.values())})"
        return f'SELECT "user", item, {self.time} AS "time", {self.rating} AS rating, row FROM {rows}{where}'

    def bad_rows(self, rows: Relation) -> str:
        """The query of the bad rows, with all values as text."""
        problems = self.problems.values()
        cases = " ".join(f"WHEN {is_bad} THEN {n}" for n, is_bad in enumerate(problems, 1))
        texts = ", ".join(f'CAST("{role}" AS VARCHAR) AS "{role}"' for role in ROLES)
        return f"SELECT row, CASE {cases} END AS problem, {texts} FROM {rows} WHERE {' OR '.join(problems)}"


def event_rules(kinds: dict[Role, ColumnKind], time: str | None, needs_rating: bool) -> EventRules:
    problems: dict[Role, str] = {}
    for role in IDS:
        is_integer = kinds.get(role) == "integer"
        problems[role] = f'"{role}" IS NULL' if is_integer else f"coalesce(\"{role}\", '') = ''"
    if time is not None:
        problems["time"] = f"({time}) IS NULL"
    rating = "NULL::DOUBLE"
    if needs_rating:
        rating = "TRY_CAST(rating AS DOUBLE)"
        problems["rating"] = f"NOT coalesce(isfinite({rating}), false)"
    return EventRules(kinds, time or "0::BIGINT", rating, problems)


def refuse_missing_ratings(job: PrepareJob) -> None:
    for table in job.interactions.tables:
        if job.filters.min_rating is not None and "rating" not in table.roles:
            raise ValueError(
                f"min_rating needs a rating column and {table.name} has none that can be "
                f"recognised among {', '.join(table.columns)}: name it with rating=… (--rating)"
            )


def copy_as_text(job: PrepareJob) -> tuple[Relation, int]:
    """All rows, with all values as text, from the tables `staged_…`; and the number of malformed lines."""
    connection, interactions = job.connection, job.interactions
    copies = []
    n_malformed = 0
    for number, table in enumerate(interactions.tables):
        job.say(f"reading {table.name}")
        columns = ", ".join(f'"{role}" VARCHAR' for role in ROLES)
        connection.execute(f"CREATE TABLE staged_{number} ({columns})")
        rejects = f"rejects_{number}"
        with readable(Path(table.name)):
            positions = [table.roles.get(role) for role in ROLES]
            relation = text_relation(table, positions, job.space.folder, rejects)
            connection.execute(f"INSERT INTO staged_{number} {relation}")
        n_lines = n_malformed_lines(connection, table, rejects)
        if n_lines and interactions.on_bad_rows == "error":
            _refuse_malformed_lines(connection, table, rejects, n_lines)
        n_malformed += n_lines
        copies.append(f"(SELECT *, rowid + {number << FILE_BITS} AS row FROM staged_{number})")
    return union(copies), n_malformed


@contextmanager
def naming_the_file(tables: Sequence[SourceTable]) -> Iterator[None]:
    """Makes an error about one of many Parquet files name it, whatever DuckDB reports."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise  # `prepare` reports it with the limit
    except duckdb.Error as error:
        for table in tables if is_one_relation(tables) else ():
            with connect() as connection, readable(Path(table.name)):
                values = ", ".join(f'"{role}"' for role in ROLES)
                count(connection, f"({parquet_rows([table])}) WHERE hash({values}) = 0")
        raise ValueError(f"{names_of(tables)} cannot be read: {first_line(error)}") from None


def refuse_bad_rows(job: PrepareJob, problems: Sequence[Role]) -> None:
    """Raise for the first row of `bad`."""
    found = job.connection.execute('SELECT row, problem, "user", item, "time", rating FROM bad ORDER BY row LIMIT 1')
    first = found.fetchone()
    if first is None:
        return
    row, number, *values = first
    problem = problems[number - 1]
    value = values[ROLES.index(problem)]
    n_same = count(job.connection, f"bad WHERE problem = {number}")
    table = job.interactions.tables[row >> FILE_BITS]
    line = line_of_row(table, row & ((1 << FILE_BITS) - 1))
    column = table.columns[table.roles[problem]]
    state = "not " + (ISO if problem == "time" else "a number")
    if value is None or not value.strip():
        state = "blank"
        if table.kind != "text" and problem in IDS:
            state += " or not a single value"
        if table.kind == "json lines":  # DuckDB reports broken lines no further
            state += ", or the line is not JSON in UTF-8 (encoding='latin-1' reads other text)"
    raise ValueError(
        f"{table.name}, row {line}: the {problem} (column {column!r}) is {value or ''!r}, which is "
        f"{state}; such rows in all: {n_same:,}; {REMEDY}"
    )


def bad_rows_dropped(connection: duckdb.DuckDBPyConnection, problems: Sequence[Role]) -> list[Dropped]:
    """One step per kind of problem; a user or item that is lost entirely counts once."""
    rows = dict(connection.execute("SELECT problem, count(*) FROM bad GROUP BY 1").fetchall())
    if not rows:
        return []
    lost: dict[str, dict[int, int]] = {}
    for role in IDS:
        lost[role] = dict(
            connection.execute(
                f'SELECT problem, count(*) FROM (SELECT "{role}", max(problem) AS problem FROM bad '
                f'WHERE "{role}" != \'\' AND "{role}" NOT IN (SELECT name FROM names_of_{role}) '
                "GROUP BY 1) GROUP BY 1"
            ).fetchall()
        )
    return [
        {
            "step": f"{'blank' if problem in IDS else 'unreadable'} {problem}",
            "rows": rows[n],
            "users": lost["user"].get(n, 0),
            "items": lost["item"].get(n, 0),
        }
        for n, problem in enumerate(problems, 1)
        if n in rows
    ]


def refuse_if_all_dropped(interactions: Interactions, n_rows: int, dropped: list[Dropped]) -> None:
    if sum(step["rows"] for step in dropped) == n_rows:
        raise ValueError(
            f"none of the {n_rows:,} rows of {interactions.name} can be used: "
            + ", ".join(f"{step['rows']:,} with {step['step']}" for step in dropped)
        )


def n_malformed_lines(connection: duckdb.DuckDBPyConnection, table: SourceTable, rejects: str) -> int:
    """How many lines of a text file DuckDB could not split into the columns."""
    if table.kind != "text":
        return 0
    return count(connection, f"(SELECT DISTINCT line FROM {rejects})")


def _refuse_malformed_lines(
    connection: duckdb.DuckDBPyConnection, table: SourceTable, rejects: str, n_lines: int
) -> None:
    line, text, message, kind = fetch_row(
        connection, f"SELECT line, csv_line, error_message, error_type FROM {rejects} ORDER BY line LIMIT 1"
    )
    remedy = REMEDY
    if kind == "INVALID ENCODING":
        message, remedy = "not UTF-8", "name the encoding, as in encoding='latin-1'"
    raise ValueError(
        f"{table.name}, line {line}: {text.strip()[:80]!r} is malformed ({message.rstrip('.')}); "
        f"such rows in all: {n_lines:,}; {remedy}"
    )
