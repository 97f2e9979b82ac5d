"""DuckDB as this package uses it, and small tables as Parquet without a further dependency."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

Relation = str  # SQL for the name of a table, for a query in brackets, or for Parquet files


def connect(database: str = ":memory:") -> duckdb.DuckDBPyConnection:
    """DuckDB with its built-in formats only: it reads untrusted files and downloads no code."""
    off: dict[str, Any] = {"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    connection = duckdb.connect(database, config=off)
    connection.execute("SET enable_progress_bar = false")  # it would mix with our output
    connection.execute("SET TimeZone = 'UTC'")  # for dates without an offset
    return connection


def limit_memory(connection: duckdb.DuckDBPyConnection, folder: Path, memory_limit: str, threads: int | None) -> None:
    """Stay within `memory_limit`, and spill the rest to `folder`."""
    try:
        connection.execute(f"SET temp_directory = {quoted(folder / 'spill')}")
        connection.execute("PRAGMA disable_checkpoint_on_shutdown")  # the database is temporary
        connection.execute(f"SET memory_limit = {quoted(memory_limit)}")
        if threads is not None:
            connection.execute(f"SET threads = {int(threads)}")
    except duckdb.Error as error:
        raise ValueError(
            f"memory_limit={memory_limit!r}, threads={threads!r}: {first_line(error)}; write 512MB or 2GB"
        ) from None


def fetch_row(connection: duckdb.DuckDBPyConnection, query: str) -> tuple[Any, ...]:
    """The one row of a query that always has one."""
    row = connection.execute(query).fetchone()
    assert row is not None
    return row


def count(connection: duckdb.DuckDBPyConnection, relation: str) -> int:
    return int(fetch_row(connection, f"SELECT count(*) FROM {relation}")[0])


def first_line(error: Exception) -> str:
    """What an error says, without the query and the hints that DuckDB adds."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def quoted(value: str | Path) -> str:
    return "'" + str(value).replace("'", "''") + "'"


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def parquet(*paths: str | Path, options: str = "") -> str:
    """SQL for Parquet files as one relation; folders named `day=1` are not taken for columns."""
    files = ", ".join(map(quoted, paths))
    return f"read_parquet([{files}], hive_partitioning=false{options})"


def union(relations: Iterable[Relation]) -> Relation:
    """SQL for all rows of relations with the same columns."""
    return "(" + " UNION ALL ".join(f"SELECT * FROM {relation}" for relation in relations) + ")"


def copy_to_parquet(connection: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    connection.execute(f"COPY ({query}) TO {quoted(path)} (FORMAT parquet)")


@dataclass(frozen=True)
class Workspace:
    """Where tasks work: in the database of this process, or on machines that share a folder.

    There, each task has a database of its own, in memory as far as its limit allows. What it writes
    has a unique name, so a task that is repeated because its machine died finds nothing half done.
    """

    folder: Path
    memory_limit: str
    own: duckdb.DuckDBPyConnection | None  # None: a folder that all workers share

    @contextmanager
    def database(self) -> Iterator[duckdb.DuckDBPyConnection]:
        if self.own is not None:
            yield self.own
            return
        with tempfile.TemporaryDirectory(prefix="bert4rec-") as name, connect() as connection:
            limit_memory(connection, Path(name), self.memory_limit, threads=1)
            yield connection

    def new_path(self, name: str) -> Path:
        return self.folder / f"{name}-{uuid.uuid4().hex}"

    def save(self, connection: duckdb.DuckDBPyConnection, name: str, query: str) -> Relation:
        """The result of a query, for later tasks."""
        if self.own is not None:
            connection.execute(f"CREATE OR REPLACE TABLE {name} AS {query}")
            return name
        path = self.new_path(name)
        copy_to_parquet(connection, query, path)
        return parquet(path)

    def share(self, connection: duckdb.DuckDBPyConnection, table: str) -> Relation:
        """A table of the process that hands out the tasks, for all of them."""
        return table if self.own is not None else self.save(connection, table, f"SELECT * FROM {table}")


def write_parquet(path: Path, columns: dict[str, NDArray[Any] | Sequence[Any]]) -> None:
    """Columns of equal length as a Parquet file."""
    arrays = {name: as_column(values) for name, values in columns.items()}
    with connect() as connection:
        connection.register("columns", arrays)
        selected = ", ".join(map(identifier, arrays))
        copy_to_parquet(connection, f"SELECT {selected} FROM columns", path)


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """A small table as lists of Python values."""
    return {name: column.tolist() for name, column in read_columns(path).items()}


def read_columns(path: Path) -> dict[str, NDArray[Any]]:
    """A table as one array per column: a tuple per row would need far more memory.

    A column with gaps is an array of objects, with None in the gaps.
    """
    with connect() as connection:
        columns = connection.execute(f"SELECT * FROM {parquet(path)}").fetchnumpy()
    for name, column in columns.items():
        if isinstance(column, np.ma.MaskedArray):
            columns[name] = column.data.astype(object)
            columns[name][np.ma.getmaskarray(column)] = None
    return columns


def as_column(values: NDArray[Any] | Sequence[Any]) -> NDArray[Any]:
    """Values as DuckDB takes them in a dict of columns; None stays None."""
    if isinstance(values, np.ndarray):
        return values
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
