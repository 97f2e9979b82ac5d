"""Tables in memory: pandas and polars frames, Arrow tables, lists of tuples.

Each becomes a Parquet file in the working folder, so that everything after it reads files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from bert4rec.data.database import connect, copy_to_parquet, first_line, write_parquet
from bert4rec.data.sequences import id_text

TUPLE_COLUMNS = ("user", "item", "time", "rating")


def frame_columns(frame: Any) -> tuple[str, ...]:
    """Column names of a frame, or of a list of tuples by their length."""
    if isinstance(frame, list | tuple):
        return TUPLE_COLUMNS[: _tuple_length(frame)]
    with _readable(frame):
        if hasattr(frame, "collect_schema"):  # polars, lazy or not
            names = frame.collect_schema().names()
        else:  # an Arrow table, or pandas
            names = getattr(frame, "column_names", getattr(frame, "columns", None))
    if names is None:
        raise ValueError(
            f"cannot read interactions from a {type(frame).__name__}: pass a path, a pandas or "
            "polars frame, or a list of (user, item[, time[, rating]]) tuples"
        )
    return tuple(map(str, names))


def write_frame(frame: Any, path: Path, ids: Collection[str] = ()) -> None:
    """Write a frame as Parquet; `ids` names its columns of ids."""
    if isinstance(frame, list | tuple):
        _write_tuples(frame, path)
        return
    with _readable(frame):
        if hasattr(frame, "sink_parquet"):  # a lazy polars frame
            frame.sink_parquet(path)
        elif hasattr(frame, "write_parquet"):  # polars' own writer: DuckDB would need pyarrow
            frame.write_parquet(path)
        else:
            if hasattr(frame, "dtypes"):  # pandas
                frame = _plain_pandas(frame, ids)
            with connect() as connection:
                # A sample of the objects in a column does not tell the type of all.
                connection.execute("SET pandas_analyze_sample = 0")
                connection.register("frame", frame)
                copy_to_parquet(connection, "FROM frame", path)


@contextmanager
def _readable(frame: Any) -> Iterator[None]:
    """Turns whatever a frame's own library reports into one sentence."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"the {type(frame).__name__} cannot be read as a table: {first_line(error)}") from None


def _plain_pandas(frame: Any, ids: Collection[str]) -> Any:
    """A pandas frame without what DuckDB would change: ids that are objects, time zones."""
    plain = frame.copy(deep=False)
    for name, dtype in frame.dtypes.items():
        if str(dtype) == "object" and str(name) in ids:
            plain[name] = frame[name].map(_single_id)
        elif str(dtype).startswith("datetime64[ns, "):
            plain[name] = frame[name].dt.tz_convert(None)
    return plain


def _single_id(value: object) -> object:
    if isinstance(value, float | np.floating):
        return id_text(value)
    return None if isinstance(value, dict | list | tuple | set | np.ndarray) else value


def _tuple_length(rows: Sequence[Any]) -> int:
    if not rows:
        raise ValueError("the list of interactions is empty")
    first = rows[0]
    if not isinstance(first, list | tuple) or not 2 <= len(first) <= 4:
        raise ValueError(
            f"row 1 of the list is {first!r}: each row must be (user, item), (user, item, time) or "
            "(user, item, time, rating)"
        )
    return len(first)


def _write_tuples(rows: Sequence[Any], path: Path) -> None:
    n = _tuple_length(rows)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, list | tuple) or len(row) != n:
            raise ValueError(f"row {number} of the list is {row!r}: row 1 has {n} values")
    columns: dict[str, Any] = {}
    for at, name in enumerate(TUPLE_COLUMNS[:n]):
        as_text = id_text if at < 2 else _number_or_time
        columns[name] = [as_text(row[at]) for row in rows]
    write_parquet(path, columns)


def _number_or_time(value: object) -> str | None:
    if value is None:
        return None
    return value.isoformat() if isinstance(value, date) else str(value)
