"""Rows that cannot be used: found, refused with the line of the first, or left out and counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb

from bert4rec.data.columns import Role
from bert4rec.data.database import count
from bert4rec.data.interactions import Interactions
from bert4rec.data.relations import ROLES, Kind
from bert4rec.data.table import Table
from bert4rec.data.table_file import line_of_row

Dropped = dict[str, Any]  # {"step", "rows", "users", "items"}

REMEDY = "correct them, or leave such rows out with on_bad_rows='skip' (--on-bad-rows skip)"
ISO = "an integer (s, ms, us or ns, as in most rows), a decimal number or an ISO date"


def problems_of(kinds: dict[Role, Kind], time: str | None, rating: str | None) -> dict[Role, str]:
    """What makes a row of `rows` bad, as SQL, in the order in which it is told."""
    problems: dict[Role, str] = {}
    for role in ("user", "item"):
        is_integer = kinds.get(role) == "integer"
        problems[role] = f'"{role}" IS NULL' if is_integer else f"coalesce(\"{role}\", '') = ''"
    if time is not None:
        problems["time"] = f"({time}) IS NULL"
    if rating is not None:
        problems["rating"] = f"NOT coalesce(isfinite({rating}), false)"
    return problems


def bad_rows(problems: dict[Role, str]) -> str:
    """The query of the table `bad`, with all values as text."""
    cases = " ".join(f"WHEN {is_bad} THEN {n}" for n, is_bad in enumerate(problems.values(), 1))
    texts = ", ".join(f'CAST("{role}" AS VARCHAR) AS "{role}"' for role in ROLES)
    return (
        f"SELECT row, CASE {cases} END AS problem, {texts} "
        f"FROM rows WHERE {' OR '.join(problems.values())}"
    )


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


def bad_rows_dropped(
    connection: duckdb.DuckDBPyConnection, problems: Sequence[Role]
) -> list[Dropped]:
    """One step a kind of problem; a user or item that is lost altogether counts once."""
    rows = dict(connection.execute("SELECT problem, count(*) FROM bad GROUP BY 1").fetchall())
    if not rows:
        return []
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


def n_malformed_lines(connection: duckdb.DuckDBPyConnection, table: Table, rejects: str) -> int:
    """How many lines of a text DuckDB could not split into the columns."""
    if table.source.kind != "text":
        return 0
    return count(connection, f"(SELECT DISTINCT line FROM {rejects})")


def refuse_malformed_lines(
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


def nothing_usable(interactions: Interactions, n_rows: int, dropped: list[Dropped]) -> ValueError:
    return ValueError(
        f"none of the {n_rows:,} rows of {interactions.name} can be used: "
        + ", ".join(f"{step['rows']:,} with {step['step']}" for step in dropped)
    )
