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


def out_of_core(
    connection: duckdb.DuckDBPyConnection, folder: Path, memory_limit: str, threads: int | None
) -> None:
    """Keep to `memory_limit`, and put what does not fit into `folder`."""
    try:
        connection.execute(f"SET temp_directory = {quoted(folder / 'spill')}")
        connection.execute("PRAGMA disable_checkpoint_on_shutdown")  # it is thrown away
        connection.execute(f"SET memory_limit = {quoted(memory_limit)}")
        if threads is not None:
            connection.execute(f"SET threads = {int(threads)}")
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"memory_limit={memory_limit!r}, threads={threads!r}: {reason}; write 512MB or 2GB"
        ) from None


def count(connection: duckdb.DuckDBPyConnection, relation: str) -> int:
    found = connection.execute(f"SELECT count(*) FROM {relation}").fetchone()
    assert found is not None
    return int(found[0])


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
    """A small table as lists of Python values."""
    return {name: column.tolist() for name, column in read_columns(path).items()}


def read_columns(path: Path) -> dict[str, NDArray[Any]]:
    """A table as arrays, column by column: tuples of millions of rows would need far more memory.

    A column with gaps is an array of objects, with None in the gaps.
    """
    with connect() as connection:
        columns = connection.execute(f"SELECT * FROM read_parquet({quoted(path)})").fetchnumpy()
    return {name: _with_gaps(column) for name, column in columns.items()}


def _with_gaps(column: NDArray[Any]) -> NDArray[Any]:
    if not isinstance(column, np.ma.MaskedArray):
        return column
    values = column.data.astype(object)
    values[np.ma.getmaskarray(column)] = None
    return values


def as_column(values: NDArray[Any] | Sequence[Any]) -> NDArray[Any]:
    """Values as DuckDB takes them in a dict of columns; None stays None."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
