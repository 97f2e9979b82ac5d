"""Read the tables into a DuckDB database on disk, and turn away the rows that cannot be used.

The result is the view `events(user, item, time, rating, row)` that the filters work on: times are
integers, users and items are codes. An integer id is its own code, as a join of all rows with all
names costs more than anything else here; other ids get a number. `names_of_user` and
`names_of_item` say which code has which raw id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import duckdb

from bert4rec.data.bad_rows import (
    Dropped,
    bad_rows,
    bad_rows_dropped,
    n_malformed_lines,
    nothing_usable,
    problems_of,
    refuse_bad_rows,
    refuse_malformed_lines,
)
from bert4rec.data.columns import Role
from bert4rec.data.database import connect, count
from bert4rec.data.filters import count_events
from bert4rec.data.interactions import Interactions
from bert4rec.data.relations import (
    FILE_BITS,
    ROLES,
    Kind,
    is_one_relation,
    kinds_of,
    parquet_rows,
    text_relation,
)
from bert4rec.data.table import Table, names_of
from bert4rec.data.table_file import readable
from bert4rec.data.times import TimeUnit, time_expression, time_facts

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Staged:
    """What is known about `events` once all is read."""

    time_unit: TimeUnit | None  # None: no times, rows are in order
    dropped: list[Dropped]


@dataclass(frozen=True)
class Reading:
    """How a row of `rows` becomes an event, and what makes it a bad one; all as SQL."""

    kinds: dict[Role, Kind]
    time: str
    rating: str
    problems: dict[Role, str]


def stage(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    folder: Path,
    *,
    needs_rating: bool,
    progress: Progress,
) -> Staged:
    refuse_missing_ratings(interactions, needs_rating)
    tables = interactions.tables
    kinds: dict[Role, Kind] = {}
    n_malformed = 0
    if is_one_relation(tables):
        kinds = kinds_of(tables[0])
        progress(f"reading {interactions.name}")
        first_rows = [number << FILE_BITS for number in range(len(tables))]
        with naming_the_file(tables):
            connection.execute(f"CREATE VIEW rows AS {parquet_rows(tables)}")
    else:
        first_rows, n_malformed = _copy_as_text(connection, interactions, folder, progress)
    with naming_the_file(tables):
        n_rows = count(connection, "rows")
        if n_rows == 0:
            what = "no usable row" if n_malformed else "a header and no rows"
            raise ValueError(f"{interactions.name} has {what}: nothing to learn from")
        unit: TimeUnit | None = None
        time = "0::BIGINT"
        if "time" in tables[0].roles:
            kind = kinds.get("time", "text")
            time, unit = time_expression(time_facts(connection, kind), kind, interactions)
        reading = reading_of(kinds, time if unit else None, needs_rating)
        connection.execute(f"CREATE TABLE bad AS {bad_rows(reading.problems)}")
        if interactions.on_bad_rows == "error":
            refuse_bad_rows(connection, interactions, list(reading.problems), first_rows)
        progress("numbering users and items")
        _make_events(connection, reading, n_bad=count(connection, "bad"))
    dropped = bad_rows_dropped(connection, list(reading.problems))
    if n_malformed:
        dropped.insert(0, {"step": "malformed line", "rows": n_malformed, "users": 0, "items": 0})
    if sum(step["rows"] for step in dropped) == n_rows + n_malformed:
        raise nothing_usable(interactions, n_rows + n_malformed, dropped)
    return Staged(unit, dropped)


def refuse_missing_ratings(interactions: Interactions, needs_rating: bool) -> None:
    for table in interactions.tables:
        if needs_rating and "rating" not in table.roles:
            raise ValueError(
                f"min_rating needs a rating column and {table.name} has none that can be "
                f"recognised among {', '.join(table.columns)}: name it with rating=… (--rating)"
            )


def reading_of(kinds: dict[Role, Kind], time: str | None, needs_rating: bool) -> Reading:
    rating = "TRY_CAST(rating AS DOUBLE)" if needs_rating else None
    problems = problems_of(kinds, time, rating)
    return Reading(kinds, time or "0::BIGINT", rating or "NULL::DOUBLE", problems)


def _copy_as_text(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    folder: Path,
    progress: Progress,
) -> tuple[list[int], int]:
    """`rows` over a copy of all values as text; where each table begins; malformed lines."""
    connection.execute(
        'CREATE TABLE staged ("user" VARCHAR, item VARCHAR, "time" VARCHAR, rating VARCHAR)'
    )
    first_rows = []
    n_malformed = 0
    for number, table in enumerate(interactions.tables):
        progress(f"reading {table.name}")
        first_rows.append(count(connection, "staged"))
        with readable(Path(table.name)):
            positions = [table.roles.get(role) for role in ROLES]
            relation = text_relation(table, positions, folder, f"rejects_{number}")
            connection.execute(f"INSERT INTO staged {relation}")
        n_lines = n_malformed_lines(connection, table, f"rejects_{number}")
        if n_lines and interactions.on_bad_rows == "error":
            refuse_malformed_lines(connection, table, f"rejects_{number}", n_lines)
        n_malformed += n_lines
    connection.execute("CREATE VIEW rows AS SELECT *, rowid AS row FROM staged")
    return first_rows, n_malformed


def good_rows(reading: Reading, n_bad: int) -> str:
    """The query of the rows that are not bad, with times and ratings as numbers."""
    are_good = f"WHERE NOT ({' OR '.join(reading.problems.values())})" if n_bad else ""
    return (
        f'SELECT "user", item, {reading.time} AS "time", {reading.rating} AS rating, row '
        f"FROM rows {are_good}"
    )


def _make_events(connection: duckdb.DuckDBPyConnection, reading: Reading, n_bad: int) -> None:
    """The view `events`, its counts, and the names of all codes."""
    connection.execute(f"CREATE VIEW good AS {good_rows(reading, n_bad)}")
    ids: tuple[Role, ...] = ("user", "item")
    codes = {role: f'g."{role}"' for role in ids}
    joins = ""
    for role in codes:
        if reading.kinds.get(role) == "integer":
            continue
        connection.execute(
            f"CREATE TABLE names_of_{role} AS SELECT (row_number() OVER () - 1)::INTEGER AS code, "
            f'name FROM (SELECT DISTINCT "{role}" AS name FROM good)'
        )
        codes[role] = f"{role}s.code"
        joins += f' JOIN names_of_{role} {role}s ON g."{role}" = {role}s.name'
    events = (
        f'SELECT {codes["user"]} AS "user", {codes["item"]} AS item, g."time", g.rating, g.row '
        f"FROM good g{joins}"
    )
    if joins:
        connection.execute(f"CREATE TABLE all_events AS {events}")
        connection.execute("DROP TABLE IF EXISTS staged")
        events = "SELECT * FROM all_events"
    connection.execute(f"CREATE VIEW events AS {events}")
    count_events(connection)
    for role in codes:
        if reading.kinds.get(role) == "integer":
            connection.execute(
                f"CREATE VIEW names_of_{role} AS "
                f"SELECT code, CAST(code AS VARCHAR) AS name FROM {role}_counts"
            )


@contextmanager
def naming_the_file(tables: Sequence[Table]) -> Iterator[None]:
    """An error about one of many Parquet files names it, whatever DuckDB says."""
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise  # it is told with the limit
    except duckdb.Error as error:
        for table in tables if is_one_relation(tables) else ():
            with connect() as connection, readable(Path(table.name)):
                values = ", ".join(f'"{role}"' for role in ROLES)
                connection.execute(
                    f"SELECT count(*) FROM ({parquet_rows([table])}) WHERE hash({values}) = 0"
                )
        reason = str(error).splitlines()[0]
        raise ValueError(f"{names_of(tables)} cannot be read: {reason}") from None
