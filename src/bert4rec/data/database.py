"""DuckDB as this package uses it, and small tables as Parquet without a further dependency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray


def connect(database: str = ":memory:") -> duckdb.DuckDBPyConnection:
    """DuckDB as it may read strangers' files: with its built-in formats, fetching no code."""
    off: dict[str, Any] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(database, config=off)
    connection.execute("SET enable_progress_bar = false")  # it would go into the program's output
    connection.execute("SET TimeZone = 'UTC'")  # for dates without an offset
    return connection


def quoted(value: str | Path) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def write_parquet(path: Path, columns: dict[str, NDArray[Any] | Sequence[Any]]) -> None:
    """Columns of equal length as a Parquet file, without a dependency beyond DuckDB."""
    arrays = {name: as_column(values) for name, values in columns.items()}
    selected = ", ".join(map(identifier, arrays))
    with connect() as connection:
        connection.register("columns", arrays)
        connection.execute(
            f"COPY (SELECT {selected} FROM columns) TO {quoted(path)} (FORMAT parquet)"
        )


def read_parquet(path: Path) -> dict[str, list[Any]]:
    with connect() as connection:
        relation = connection.execute(f"SELECT * FROM read_parquet({quoted(path)})")
        names = [column[0] for column in relation.description]
        rows = relation.fetchall()
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def as_column(values: NDArray[Any] | Sequence[Any]) -> NDArray[Any]:
    """Values as DuckDB takes them in a dict of columns; None stays None."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
