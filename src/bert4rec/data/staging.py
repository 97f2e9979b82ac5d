"""Read the tables into a DuckDB database on disk, and turn away the rows that cannot be used.

Every value is staged as text in file order; then times become integers, ids become codes, and the
table `events(user, item, time, rating, row)` is what the filters work on. `names_of_user` and
`names_of_item` say which raw id has which code. Ties in time are told apart by `row`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import duckdb

from bert4rec.data.columns import Role
from bert4rec.data.database import identifier, quoted
from bert4rec.data.interactions import Interactions, Table
from bert4rec.data.table_file import TableFile, line_of_row, readable, unpack

Dropped = dict[str, Any]  # {"step", "rows", "users", "items"}
TimeUnit = Literal["us", "ns"]
STAGED_ROLES: tuple[Role, ...] = ("user", "item", "time", "rating")

REMEDY = "correct them, or leave such rows out with on_bad_rows='skip' (--on-bad-rows skip)"
ISO = "an integer (s, ms, us or ns), a decimal number or an ISO date"


@dataclass(frozen=True)
class Staged:
    """What is known about `events` once all is read."""

    time_unit: TimeUnit | None  # None: no times, rows are in order
    dropped: list[Dropped]


def stage(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    folder: Path,
    *,
    needs_rating: bool,
    progress: Callable[[str], None],
) -> Staged:
    connection.execute(
        'CREATE TABLE staged ("user" VARCHAR, item VARCHAR, "time" VARCHAR, rating VARCHAR)'
    )
    first_rows = []  # the row at which each table begins
    n_malformed = 0
    for number, table in enumerate(interactions.tables):
        if needs_rating and "rating" not in table.roles:
            raise ValueError(
                f"min_rating needs a rating column and {table.name} has none that can be "
                f"recognised among {', '.join(table.columns)}: name it with rating=… (--rating)"
            )
        progress(f"reading {table.name}")
        first_rows.append(_count(connection, "staged"))
        with readable(Path(table.name)):
            positions = [table.roles.get(role) for role in STAGED_ROLES]
            relation = text_relation(table, positions, folder, f"rejects_{number}")
            connection.execute(f"INSERT INTO staged {relation}")
        n_malformed += _malformed_lines(connection, table, number, interactions.on_bad_rows)
    n_rows = _count(connection, "staged")
    if n_rows == 0:
        what = "no usable row" if n_malformed else "a header and no rows"
        raise ValueError(f"{interactions.name} has {what}: nothing to learn from")

    has_time = "time" in interactions.tables[0].roles
    time, unit = _time_expression(connection) if has_time else ("0::BIGINT", None)
    rating = "TRY_CAST(rating AS DOUBLE)" if needs_rating else "NULL::DOUBLE"
    problems: dict[Role, str] = {
        "user": "coalesce(\"user\", '') = ''",
        "item": "coalesce(item, '') = ''",
    }
    if has_time:
        problems["time"] = f"({time}) IS NULL"
    if needs_rating:
        problems["rating"] = f"NOT coalesce(isfinite({rating}), false)"
    cases = " ".join(f"WHEN {is_bad} THEN {n}" for n, is_bad in enumerate(problems.values(), 1))
    connection.execute(
        f"CREATE TABLE bad AS SELECT rowid AS row, CASE {cases} END AS problem, * "
        f"FROM staged WHERE {' OR '.join(problems.values())}"
    )
    if interactions.on_bad_rows == "error":
        _refuse_bad_rows(connection, interactions, list(problems), first_rows)
    good = (
        "staged WHERE rowid NOT IN (SELECT row FROM bad)" if _count(connection, "bad") else "staged"
    )

    progress("numbering users and items")
    for role in ("user", "item"):
        connection.execute(
            f"CREATE TABLE names_of_{role} AS SELECT name, (row_number() OVER () - 1)::INTEGER AS "
            f'code FROM (SELECT DISTINCT "{role}" AS name FROM {good})'
        )
    connection.execute(
        'CREATE TABLE events AS SELECT u.code AS "user", i.code AS item, s."time", s.rating, s.row '
        f'FROM (SELECT "user", item, {time} AS "time", {rating} AS rating, rowid AS row '
        f"FROM {good}) s "
        'JOIN names_of_user u ON s."user" = u.name JOIN names_of_item i ON s.item = i.name'
    )
    dropped = _bad_rows_dropped(connection, list(problems))
    if n_malformed:
        dropped.insert(0, {"step": "malformed line", "rows": n_malformed, "users": 0, "items": 0})
    connection.execute("DROP TABLE staged; DROP TABLE bad")
    if _count(connection, "events") == 0:
        raise ValueError(
            f"none of the {n_rows + n_malformed:,} rows of {interactions.name} can be used: "
            + ", ".join(f"{step['rows']:,} with {step['step']}" for step in dropped)
        )
    return Staged(unit, dropped)


def text_relation(table: Table, positions: Sequence[int | None], folder: Path, rejects: str) -> str:
    """SQL that reads the columns at `positions` as text, in file order; NULL for None."""
    file = table.source
    assert isinstance(file, TableFile)
    path = quoted(unpack(file, folder))
    names = [f"c{i}" for i in range(len(file.columns))]
    if file.kind == "text":
        types = ", ".join(f"'{name}': 'VARCHAR'" for name in names)
        source = (
            f"read_csv({path}, auto_detect=false, columns={{{types}}}, header={file.has_header}, "
            f"delim={quoted(file.delimiter)}, quote={quoted(file.quote)}, "
            f"escape={quoted(file.quote)}, store_rejects=true, rejects_limit=0, "
            f"rejects_table={quoted(rejects)}, rejects_scan={quoted(rejects + '_scan')})"
        )
        cells = names
    elif file.kind == "parquet":
        source = f"read_parquet({path})"
        cells = [_parquet_text(name) for name in file.columns]
    else:
        is_lines = file.kind == "json lines"
        types = ", ".join(
            f"{quoted(file.columns[at])}: 'VARCHAR'" for at in positions if at is not None
        )
        # A line that is not JSON becomes a row of NULLs, and so a bad row with its number.
        source = (
            f"read_json({path}, format='{'newline_delimited' if is_lines else 'array'}', "
            f"records=true, columns={{{types}}}, ignore_errors={is_lines})"
        )
        cells = [identifier(name) for name in file.columns]
    chosen = ["NULL" if at is None else cells[at] for at in positions]
    return f"SELECT {', '.join(chosen)} FROM {source}"


def _parquet_text(name: str) -> str:
    """Integers with gaps arrive as floats: 3.0 is the id 3, and NaN is blank."""
    column = identifier(name)
    return (
        f"CASE WHEN typeof({column}) NOT IN ('DOUBLE', 'FLOAT') THEN CAST({column} AS VARCHAR) "
        f"WHEN isnan(TRY_CAST({column} AS DOUBLE)) THEN NULL "
        f"WHEN TRY_CAST({column} AS DOUBLE) = trunc(TRY_CAST({column} AS DOUBLE)) "
        f"THEN coalesce(CAST(TRY_CAST({column} AS BIGINT) AS VARCHAR), CAST({column} AS VARCHAR)) "
        f"ELSE CAST({column} AS VARCHAR) END"
    )


def _time_expression(connection: duckdb.DuckDBPyConnection) -> tuple[str, TimeUnit]:
    """SQL for the time of a staged row as an integer, NULL if unreadable, and its unit.

    The unit of numbers is told by the largest: today is 1.8e9 s, 1.8e12 ms, 1.8e15 us, 1.8e18 ns.
    Nanoseconds are kept, as rounding them could make ties; all else becomes microseconds.
    """
    number = 'TRY_CAST("time" AS DOUBLE)'
    date = 'TRY_CAST("time" AS TIMESTAMPTZ)'
    found = connection.execute(
        f"SELECT count(*) FILTER (isfinite({number})), count(*) FILTER (isfinite({date})), "
        f"max(abs({number})) FILTER (abs({number}) < 9.2e18) FROM staged"  # what int64 holds
    ).fetchone()
    assert found is not None
    n_numbers, n_dates, largest = found
    if n_dates > n_numbers:
        return f"CASE WHEN isfinite({date}) THEN epoch_us({date}) END", "us"
    factor = next((f for limit, f in ((1e11, 10**6), (1e14, 1000)) if (largest or 0) < limit), 1)
    unit: TimeUnit = "ns" if (largest or 0) >= 1e17 else "us"
    # Integers are not sent through floats, which would round nanoseconds.
    return (
        "CASE WHEN regexp_full_match(\"time\", '[-+]?[0-9]{1,19}') "
        f'THEN TRY_CAST("time" AS BIGINT) * {factor} '
        f"WHEN isfinite({number}) THEN TRY_CAST(round({number} * {factor}) AS BIGINT) END"
    ), unit


def _malformed_lines(
    connection: duckdb.DuckDBPyConnection, table: Table, number: int, on_bad_rows: str
) -> int:
    """How many lines DuckDB could not split into the columns; an error unless they are skipped."""
    if table.source.kind != "text":
        return 0
    found = connection.execute(
        f"SELECT count(DISTINCT line), min(line), arg_min(csv_line, line), "
        f"arg_min(error_message, line), arg_min(error_type, line) FROM rejects_{number}"
    ).fetchone()
    assert found is not None
    n_lines, line, text, message, kind = found
    if n_lines and on_bad_rows == "error":
        remedy = REMEDY
        if kind == "INVALID ENCODING":
            message, remedy = "not UTF-8", "name the encoding, as in encoding='latin-1'"
        raise ValueError(
            f"{table.name}, line {line}: {text[:80]!r} is malformed ({message.rstrip('.')}); "
            f"such rows in all: {n_lines:,}; {remedy}"
        )
    return int(n_lines)


def _refuse_bad_rows(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    problems: list[Role],
    first_rows: list[int],
) -> None:
    first = connection.execute(
        'SELECT row, problem, "user", item, "time", rating FROM bad ORDER BY row LIMIT 1'
    ).fetchone()
    if first is None:
        return
    row, problem = first[0], problems[first[1] - 1]
    value = first[2 + STAGED_ROLES.index(problem)]
    n_same = _count(connection, f"bad WHERE problem = {first[1]}")
    at = max(n for n, start in enumerate(first_rows) if start <= row)
    table = interactions.tables[at]
    line = line_of_row(table.source, row - first_rows[at])
    column = table.columns[table.roles[problem]]
    state = (
        "blank"
        if value is None or not value.strip()
        else "not " + (ISO if problem == "time" else "a number")
    )
    raise ValueError(
        f"{table.name}, row {line}: the {problem} (column {column!r}) is {value or ''!r}, which is "
        f"{state}; such rows in all: {n_same:,}; {REMEDY}"
    )


def _bad_rows_dropped(connection: duckdb.DuckDBPyConnection, problems: list[Role]) -> list[Dropped]:
    """One step a kind of problem; a user or item that is lost altogether counts once."""
    rows = dict(connection.execute("SELECT problem, count(*) FROM bad GROUP BY 1").fetchall())
    lost: dict[str, dict[int, int]] = {}
    for role in ("user", "item"):
        lost[role] = dict(
            connection.execute(
                f'SELECT problem, count(*) FROM (SELECT "{role}", max(problem) AS problem FROM bad '
                f'WHERE "{role}" != \'\' AND "{role}" NOT IN (SELECT name FROM names_of_{role}) '
                "GROUP BY 1) GROUP BY 1"
            ).fetchall()
        )
    return [
        {
            "step": f"{'blank' if problem in ('user', 'item') else 'unreadable'} {problem}",
            "rows": rows[n],
            "users": lost["user"].get(n, 0),
            "items": lost["item"].get(n, 0),
        }
        for n, problem in enumerate(problems, 1)
        if n in rows
    ]


def _count(connection: duckdb.DuckDBPyConnection, relation: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM {relation}").fetchone()
    assert found is not None
    return int(found[0])
