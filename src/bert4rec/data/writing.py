"""From counted events to the files of a prepared data set, the same wherever they were counted.

Expects the tables `user_counts(code, n)`, `item_counts(code, n)` and the names of the codes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from bert4rec.data.arrays import create_array, write_range
from bert4rec.data.filters import Filters, describe_step
from bert4rec.data.interactions import Interactions
from bert4rec.data.item_table import copy_to_parquet, write_items
from bert4rec.data.sequences import FORMAT_VERSION, IdType, fingerprint_of
from bert4rec.data.table import names_of
from bert4rec.data.times import TimeUnit

SLICE = 1 << 20  # rows fetched at a time
SORTED = (
    'SELECT i.token, e."time" FROM events e '
    'JOIN rows_of_user u ON e."user" = u.code JOIN tokens i ON e.item = i.code '
    'ORDER BY u.row, e."time", e.row'
)


def check_enough_is_left(
    interactions: Interactions,
    read: dict[str, int],
    left: dict[str, int],
    dropped: list[dict[str, Any]],
    for_training: bool,
) -> None:
    steps = "; ".join(describe_step(step) for step in dropped) or "no filter is on"
    n_needed = 2 if for_training else 1
    if left["items"] < n_needed:
        raise ValueError(
            f"too little is left of {interactions.name}: items {left['items']}, at least "
            f"{n_needed} needed; rows {left['rows']:,} of {read['rows']:,} usable ones: {steps}"
        )
    if for_training and left["rows"] == left["users"]:
        raise ValueError(
            f"each of the {left['users']:,} users of {interactions.name} has one action only, so "
            f"there is no next item to learn: check that the user column is right ({steps})"
        )


def number_ids(connection: duckdb.DuckDBPyConnection) -> tuple[IdType, IdType]:
    """Tokens by count, then id; rows by user id, as numbers if all are. DuckDB compares bytes."""
    connection.execute(
        "CREATE TABLE tokens AS SELECT code, name, n, "
        "(row_number() OVER (ORDER BY n DESC, name) - 1)::INTEGER AS token "
        "FROM item_counts JOIN names_of_item USING (code)"
    )
    user_type = id_type(connection, "user_counts JOIN names_of_user USING (code)")
    connection.execute(
        "CREATE TABLE rows_of_user AS SELECT code, name, n, "
        f"row_number() OVER (ORDER BY {id_order(user_type)}) - 1 AS row "
        "FROM user_counts JOIN names_of_user USING (code)"
    )
    return user_type, id_type(connection, "tokens")


def id_order(of_type: IdType) -> str:
    return "CAST(name AS BIGINT)" if of_type == "int" else "name"


def id_type(connection: duckdb.DuckDBPyConnection, relation: str) -> IdType:
    """The same rule as `sequences.id_type_of`, without fetching the ids."""
    found = connection.execute(
        "SELECT bool_and(regexp_full_match(name, '-?[1-9][0-9]{0,18}|0') "
        f"AND TRY_CAST(name AS BIGINT) IS NOT NULL) FROM {relation}"
    ).fetchone()
    return "int" if found and found[0] else "str"


def create_arrays(
    connection: duckdb.DuckDBPyConnection, finished: Path, time_unit: TimeUnit | None
) -> NDArray[np.int64]:
    """offsets.npy, and tokens.npy and times.npy to be filled."""
    counts = connection.execute("SELECT n FROM rows_of_user ORDER BY row").fetchnumpy()["n"]
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    np.save(finished / "offsets.npy", offsets)
    create_array(finished / "tokens.npy", np.int32, int(offsets[-1]))
    if time_unit is not None:
        create_array(finished / "times.npy", np.int64, int(offsets[-1]))
    return offsets


def write_sorted(
    connection: duckdb.DuckDBPyConnection,
    finished: Path,
    time_unit: TimeUnit | None,
    first_row: int = 0,
    n_rows: int | None = None,
    to: int = 0,
) -> None:
    """Rows of the table `sorted` into tokens.npy and times.npy, from place `to`, by slices."""
    if n_rows is None:
        found = connection.execute("SELECT count(*) FROM sorted").fetchone()
        assert found is not None
        n_rows = int(found[0])
    per_microsecond = 1000 if time_unit == "ns" else 1
    for start in range(first_row, first_row + n_rows, SLICE):
        end = min(start + SLICE, first_row + n_rows)
        columns = connection.execute(
            'SELECT token, "time" FROM sorted WHERE rowid >= ? AND rowid < ? ORDER BY rowid',
            [start, end],
        ).fetchnumpy()
        place = to + start - first_row
        write_range(finished / "tokens.npy", place, columns["token"])
        if time_unit is not None:
            write_range(finished / "times.npy", place, columns["time"] // per_microsecond)


def write_names_and_meta(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    filters: Filters,
    id_types: tuple[IdType, IdType],
    dropped: list[dict[str, Any]],
    key: str,
    folder: Path,
    finished: Path,
    say: Callable[[str], None],
) -> None:
    """users.parquet, items.parquet, and meta.json once the arrays are full."""
    # One thread: with more, where the row groups of a Parquet file end is left to chance.
    threads = connection.execute("SELECT current_setting('threads')").fetchone()
    assert threads is not None
    connection.execute("SET threads = 1")
    users = 'SELECT row, name AS "user" FROM rows_of_user ORDER BY row'
    copy_to_parquet(connection, users, finished / "users.parquet")
    write_items(connection, interactions.items, folder, finished / "items.parquet", say)
    connection.execute(f"SET threads = {threads[0]}")
    ids = connection.execute("SELECT name FROM tokens ORDER BY token").fetchnumpy()["name"].tolist()
    tokens = np.load(finished / "tokens.npy", mmap_mode="r")
    offsets = np.load(finished / "offsets.npy")
    first = interactions.tables[0]
    meta = {
        "format_version": FORMAT_VERSION,
        "n_users": len(offsets) - 1,
        "n_items": len(ids),
        "n_interactions": len(tokens),
        "item_id_type": id_types[1],
        "user_id_type": id_types[0],
        "fingerprint": fingerprint_of(tokens, offsets, ids),
        "content_key": key,
        "source": names_of(interactions.tables, are_short=True),
        "columns": {role: first.columns[at] for role, at in first.roles.items()},
        "filters": filters.as_dict(),
        "dropped": dropped,
    }
    text = json.dumps(meta, indent=2, ensure_ascii=False)
    (finished / "meta.json").write_text(text, encoding="utf-8")
