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
# Today is 1.8e9 s, 1.8e12 ms, 1.8e15 us, 1.8e18 ns: sizes from, sizes below, factor to integers.
UNITS = ((0.0, 1e11, 10**6), (1e11, 1e14, 1000), (1e14, 1e17, 1), (1e17, 1e19, 1))
NANOSECONDS_FROM = UNITS[-1][0]
MAX_RATING = 100
STAGED_ROLES: tuple[Role, ...] = ("user", "item", "time", "rating")

REMEDY = "correct them, or leave such rows out with on_bad_rows='skip' (--on-bad-rows skip)"
ISO = "an integer (s, ms, us or ns, as in most rows), a decimal number or an ISO date"


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
        n_lines = n_malformed_lines(connection, table, f"rejects_{number}")
        if n_lines and interactions.on_bad_rows == "error":
            _refuse_malformed_lines(connection, table, f"rejects_{number}", n_lines)
        n_malformed += n_lines
    n_rows = _count(connection, "staged")
    if n_rows == 0:
        what = "no usable row" if n_malformed else "a header and no rows"
        raise ValueError(f"{interactions.name} has {what}: nothing to learn from")

    has_time = "time" in interactions.tables[0].roles
    time, unit = _time_expression(connection, interactions) if has_time else ("0::BIGINT", None)
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
            f"skip={file.skip}, compression='none', "
            f"delim={quoted(file.delimiter)}, quote={quoted(file.quote)}, "
            f"escape={quoted(file.quote)}, store_rejects=true, rejects_limit=0, "
            f"rejects_table={quoted(rejects)}, rejects_scan={quoted(rejects + '_scan')})"
        )
        cells = names
    elif file.kind == "parquet":
        source = f"read_parquet({path})"
        cells = [
            _parquet_text(identifier(name), is_id=at in table.id_positions)
            for at, name in enumerate(file.columns)
        ]
    else:
        is_lines = file.kind == "json lines"
        types = ", ".join(
            f"{quoted(file.columns[at])}: '{'JSON' if at in table.id_positions else 'VARCHAR'}'"
            for at in positions
            if at is not None
        )
        # A line that is not JSON becomes a row of NULLs, and so a bad row with its number.
        source = (
            f"read_json({path}, format='{'newline_delimited' if is_lines else 'array'}', "
            f"records=true, columns={{{types}}}, ignore_errors={is_lines}, "
            "compression='none')"
        )
        cells = [
            _json_id(identifier(name)) if at in table.id_positions else identifier(name)
            for at, name in enumerate(file.columns)
        ]
    chosen = ["NULL" if at is None else cells[at] for at in positions]
    return f"SELECT {', '.join(chosen)} FROM {source}"


def _json_id(column: str) -> str:
    """2.0 is the id 2, as everywhere; objects and lists are no ids."""
    return (
        f"CASE json_type({column}) WHEN 'OBJECT' THEN NULL WHEN 'ARRAY' THEN NULL "
        f"WHEN 'DOUBLE' THEN regexp_replace({column} ->> '$', '\\.0+$', '') "
        f"ELSE {column} ->> '$' END"
    )


def _parquet_text(column: str, *, is_id: bool) -> str:
    """Integers with gaps arrive as floats: 3.0 is the id 3, and NaN is blank."""
    nested = f"WHEN regexp_matches(typeof({column}), '^(STRUCT|MAP|UNION)|\\]$') THEN NULL "
    return (
        f"CASE {nested if is_id else ''}"
        f"WHEN typeof({column}) NOT IN ('DOUBLE', 'FLOAT') THEN CAST({column} AS VARCHAR) "
        f"WHEN isnan(TRY_CAST({column} AS DOUBLE)) THEN NULL "
        f"WHEN TRY_CAST({column} AS DOUBLE) = trunc(TRY_CAST({column} AS DOUBLE)) "
        f"THEN coalesce(CAST(TRY_CAST({column} AS BIGINT) AS VARCHAR), CAST({column} AS VARCHAR)) "
        f"ELSE CAST({column} AS VARCHAR) END"
    )


def _time_expression(
    connection: duckdb.DuckDBPyConnection, interactions: Interactions
) -> tuple[str, TimeUnit]:
    """SQL for the time of a staged row as an integer, NULL if unreadable, and its unit.

    Nanoseconds are kept, as rounding them could make ties; all else becomes microseconds.
    """
    number = 'TRY_CAST("time" AS DOUBLE)'
    date = 'TRY_CAST("time" AS TIMESTAMPTZ)'
    finer = "regexp_extract(\"time\", '[.][0-9]{6}([0-9]{1,3})', 1)"  # digits below microseconds
    fits = f"FILTER (abs({number}) < 9.2e18)"  # what int64 holds
    found = connection.execute(
        f"SELECT count(*) FILTER (isfinite({number})), count(*) FILTER (isfinite({date})), "
        f"count(*) FILTER (isfinite({date}) AND {finer} != ''), "
        f"max(abs({number})) {fits}, approx_quantile(abs({number}), 0.5) {fits} FROM staged"
    ).fetchone()
    assert found is not None
    n_numbers, n_dates, n_finer, largest, median = found
    if n_dates > n_numbers:
        microseconds = f"CASE WHEN isfinite({date}) THEN epoch_us({date}) END"
        if not n_finer:
            return microseconds, "us"
        nanoseconds = f"TRY_CAST(rpad({finer}, 3, '0') AS BIGINT)"
        return (
            f"TRY_CAST(({microseconds})::HUGEINT * 1000 + coalesce({nanoseconds}, 0) AS BIGINT)"
        ), "ns"
    guessed = next((table for table in interactions.tables if table.is_time_guessed), None)
    if guessed is not None and largest is not None and largest <= MAX_RATING:
        column = guessed.columns[guessed.roles["time"]]
        raise ValueError(
            f"{guessed.name} has no header, and its {column} looks like a rating, not a time (it "
            f"is at most {largest:g}): pass rating={column!r} (--rating {column}) if it is one, "
            f"time={column!r} (--time {column}) otherwise"
        )
    return _number_expression(number, median or 0)


def _number_expression(number: str, median: float) -> tuple[str, TimeUnit]:
    """Times as numbers, in the unit of the median: one absurd time must not decide for all.

    A number that is read as another unit and is 100 times off the median is NULL, a bad row.
    """
    least, limit, factor = next(unit for unit in UNITS if median < unit[1])
    low, high = min(least, median / 100), max(limit, median * 100)
    # Integers are not sent through floats, which would round nanoseconds.
    return (
        f"CASE WHEN NOT abs({number}) BETWEEN {low} AND {high} THEN NULL "
        "WHEN regexp_full_match(\"time\", '[-+]?[0-9]{1,19}') "
        f'THEN TRY_CAST(TRY_CAST("time" AS HUGEINT) * {factor} AS BIGINT) '
        f"WHEN isfinite({number}) THEN TRY_CAST(round({number} * {factor}) AS BIGINT) END"
    ), "ns" if least == NANOSECONDS_FROM else "us"


def n_malformed_lines(connection: duckdb.DuckDBPyConnection, table: Table, rejects: str) -> int:
    """How many lines of a text DuckDB could not split into the columns."""
    if table.source.kind != "text":
        return 0
    return _count(connection, f"(SELECT DISTINCT line FROM {rejects})")


def _refuse_malformed_lines(
    connection: duckdb.DuckDBPyConnection, table: Table, rejects: str, n_lines: int
) -> None:
    first = connection.execute(
        f"SELECT line, csv_line, error_message, error_type FROM {rejects} ORDER BY line LIMIT 1"
    ).fetchone()
    assert first is not None
    line, text, message, kind = first
    remedy = REMEDY
    if kind == "INVALID ENCODING":
        message, remedy = "not UTF-8", "name the encoding, as in encoding='latin-1'"
    raise ValueError(
        f"{table.name}, line {line}: {text.strip()[:80]!r} is malformed ({message.rstrip('.')}); "
        f"such rows in all: {n_lines:,}; {remedy}"
    )


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
    state = "not " + (ISO if problem == "time" else "a number")
    if value is None or not value.strip():
        state = "blank"
        if table.source.kind != "text" and problem in ("user", "item"):
            state += " or not a single value"
        if table.source.kind == "json lines":  # DuckDB tells broken lines no further apart
            state += ", or the line is not JSON in UTF-8 (encoding='latin-1' reads other text)"
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
