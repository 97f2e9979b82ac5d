"""Read all rows into a DuckDB database on disk, and refuse or drop those that cannot be used.

The result is the view `events(user, item, time, rating, row)` that the filters work on: times are
integers, users and items are codes. An integer id is its own code, as joining all rows with all
names would cost more than anything else here; other ids are numbered. `names_of_user` and
`names_of_item` map codes to raw ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb

from bert4rec.data.columns import Role
from bert4rec.data.database import connect, count, fetch_row, first_line
from bert4rec.data.filters import Dropped, Events, Filters, LocalEvents, count_events
from bert4rec.data.interactions import Interactions, OnProgress, names_of
from bert4rec.data.table_file import SourceTable, line_of_row, readable
from bert4rec.data.table_sql import FILE_BITS, ROLES, ColumnKind, is_one_relation, kinds_of, parquet_rows, text_relation
from bert4rec.data.times import TimeUnit, time_expression, time_facts

IDS: tuple[Role, ...] = ("user", "item")
REMEDY = "correct them, or leave such rows out with on_bad_rows='skip' (--on-bad-rows skip)"
ISO = "an integer (s, ms, us or ns, as in most rows), a decimal number or an ISO date"


@dataclass(frozen=True)
class PrepareJob:
    """One preparation: what to read, how to filter it, and where to work."""

    interactions: Interactions
    filters: Filters
    for_training: bool
    key: str  # a hash of all that decides the result
    connection: duckdb.DuckDBPyConnection
    memory_limit: str
    folder: Path  # for temporary files
    say: OnProgress

    @property
    def finished(self) -> Path:
        """The folder for the files of the result."""
        return self.folder / "finished"

    @property
    def needs_rating(self) -> bool:
        return self.filters.min_rating is not None


@dataclass(frozen=True)
class Staged:
    """All usable rows, and what is known about them."""

    events: Events
    time_unit: TimeUnit | None  # None: no times, rows are in order
    dropped: list[Dropped]


@dataclass(frozen=True)
class EventRules:
    """SQL that turns a row of `rows` into an event, and that tells what makes a row bad."""

    kinds: dict[Role, ColumnKind]
    time: str
    rating: str
    problems: dict[Role, str]  # in the order in which they are reported

    @property
    def good_rows(self) -> str:
        return self.select_rows(f"WHERE NOT ({' OR '.join(self.problems.values())})")

    def select_rows(self, where: str) -> str:
        """The query of the rows, with times and ratings as numbers."""
        return f'SELECT "user", item, {self.time} AS "time", {self.rating} AS rating, row FROM rows {where}'

    @property
    def bad_rows(self) -> str:
        """The query of the table `bad`, with all values as text."""
        problems = self.problems.values()
        cases = " ".join(f"WHEN {is_bad} THEN {n}" for n, is_bad in enumerate(problems, 1))
        texts = ", ".join(f'CAST("{role}" AS VARCHAR) AS "{role}"' for role in ROLES)
        return f"SELECT row, CASE {cases} END AS problem, {texts} FROM rows WHERE {' OR '.join(problems)}"


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


def stage(job: PrepareJob) -> Staged:
    """Read all rows on this machine."""
    refuse_missing_ratings(job)
    connection, interactions, tables = job.connection, job.interactions, job.interactions.tables
    kinds: dict[Role, ColumnKind] = {}
    n_malformed = 0
    if is_one_relation(tables):
        kinds = kinds_of(tables[0])
        job.say(f"reading {interactions.name}")
        first_rows = first_rows_of_files(tables)
        with naming_the_file(tables):
            connection.execute(f"CREATE VIEW rows AS {parquet_rows(tables)}")
    else:
        first_rows, n_malformed = _copy_as_text(job)
    with naming_the_file(tables):
        n_rows = count(connection, "rows")
        if n_rows == 0:
            what = "no usable row" if n_malformed else "a header and no rows"
            raise ValueError(f"{interactions.name} has {what}: nothing to learn from")
        unit: TimeUnit | None = None
        time: str | None = None
        if "time" in tables[0].roles:
            kind = kinds.get("time", "text")
            time, unit = time_expression(time_facts(connection, kind), kind, interactions)
        rules = event_rules(kinds, time, job.needs_rating)
        connection.execute(f"CREATE TABLE bad AS {rules.bad_rows}")
        if interactions.on_bad_rows == "error":
            refuse_bad_rows(connection, interactions, list(rules.problems), first_rows)
        job.say("numbering users and items")
        _make_events(connection, rules)
    dropped = bad_rows_dropped(connection, list(rules.problems))
    if n_malformed:
        dropped.insert(0, {"step": "malformed line", "rows": n_malformed, "users": 0, "items": 0})
    refuse_if_all_dropped(interactions, n_rows + n_malformed, dropped)
    return Staged(LocalEvents(connection), unit, dropped)


def first_rows_of_files(tables: Sequence[SourceTable]) -> list[int]:
    return [number << FILE_BITS for number in range(len(tables))]


def refuse_missing_ratings(job: PrepareJob) -> None:
    for table in job.interactions.tables:
        if job.needs_rating and "rating" not in table.roles:
            raise ValueError(
                f"min_rating needs a rating column and {table.name} has none that can be "
                f"recognised among {', '.join(table.columns)}: name it with rating=… (--rating)"
            )


def _copy_as_text(job: PrepareJob) -> tuple[list[int], int]:
    """Create `rows` over a copy of all values as text.

    Returns the first row of each table, and the number of malformed lines.
    """
    columns = ", ".join(f'"{role}" VARCHAR' for role in ROLES)
    connection = job.connection
    connection.execute(f"CREATE TABLE staged ({columns})")
    first_rows = []
    n_malformed = 0
    for number, table in enumerate(job.interactions.tables):
        job.say(f"reading {table.name}")
        first_rows.append(count(connection, "staged"))
        with readable(Path(table.name)):
            positions = [table.roles.get(role) for role in ROLES]
            relation = text_relation(table, positions, job.folder, f"rejects_{number}")
            connection.execute(f"INSERT INTO staged {relation}")
        n_lines = n_malformed_lines(connection, table, f"rejects_{number}")
        if n_lines and job.interactions.on_bad_rows == "error":
            _refuse_malformed_lines(connection, table, f"rejects_{number}", n_lines)
        n_malformed += n_lines
    connection.execute("CREATE VIEW rows AS SELECT *, rowid AS row FROM staged")
    return first_rows, n_malformed


def _make_events(connection: duckdb.DuckDBPyConnection, rules: EventRules) -> None:
    """Create the view `events`, its counts, and the names of all codes."""
    good = rules.good_rows if count(connection, "bad") else rules.select_rows("")
    connection.execute(f"CREATE VIEW good AS {good}")
    codes = {role: f'g."{role}"' for role in IDS}
    joins = ""
    for role in IDS:
        if rules.kinds.get(role) == "integer":
            continue
        connection.execute(
            f"CREATE TABLE names_of_{role} AS SELECT (row_number() OVER () - 1)::INTEGER AS code, "
            f'name FROM (SELECT DISTINCT "{role}" AS name FROM good)'
        )
        codes[role] = f"{role}s.code"
        joins += f' JOIN names_of_{role} {role}s ON g."{role}" = {role}s.name'
    events = f'SELECT {codes["user"]} AS "user", {codes["item"]} AS item, g."time", g.rating, g.row FROM good g{joins}'
    if joins:
        connection.execute(f"CREATE TABLE all_events AS {events}")
        connection.execute("DROP TABLE IF EXISTS staged")
        events = "SELECT * FROM all_events"
    connection.execute(f"CREATE VIEW events AS {events}")
    count_events(connection)
    for role in IDS:
        if rules.kinds.get(role) == "integer":
            name_codes_by_themselves(connection, role)


def name_codes_by_themselves(connection: duckdb.DuckDBPyConnection, role: Role) -> None:
    connection.execute(f"CREATE VIEW names_of_{role} AS SELECT code, CAST(code AS VARCHAR) AS name FROM {role}_counts")


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


def refuse_bad_rows(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    problems: Sequence[Role],
    first_rows: Sequence[int],
) -> None:
    """Raise for the first row of the table `bad`; table n begins at `first_rows[n]`."""
    first = connection.execute(
        'SELECT row, problem, "user", item, "time", rating FROM bad ORDER BY row LIMIT 1'
    ).fetchone()
    if first is None:
        return
    row, problem = first[0], problems[first[1] - 1]
    value = first[2 + ROLES.index(problem)]
    n_same = count(connection, f"bad WHERE problem = {first[1]}")
    at = max(n for n, start in enumerate(first_rows) if start <= row)
    table = interactions.tables[at]
    line = line_of_row(table, row - first_rows[at])
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
