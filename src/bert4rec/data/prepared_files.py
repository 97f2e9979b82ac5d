"""From counted events to the files of a prepared data set, the same wherever they were counted.

Needs the tables `user_counts(code, n)`, `item_counts(code, n)` and the names of the codes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from bert4rec.data.database import copy_to_parquet, fetch_row, identifier
from bert4rec.data.filters import Dropped, describe_step
from bert4rec.data.interactions import names_of
from bert4rec.data.sequences import FORMAT_VERSION, IdType, fingerprint_of
from bert4rec.data.staging import PrepareJob, n_malformed_lines
from bert4rec.data.table_file import readable
from bert4rec.data.table_sql import text_relation
from bert4rec.data.times import TimeUnit

FETCHED_ROWS = 1 << 20  # rows fetched at a time
ITEM_COLUMNS = ("token", "item", "count", "title")


def check_enough_is_left(job: PrepareJob, read: dict[str, int], left: dict[str, int], dropped: list[Dropped]) -> None:
    steps = "; ".join(describe_step(step) for step in dropped) or "no filter is on"
    n_needed, name = 2 if job.for_training else 1, job.interactions.name
    if left["items"] < n_needed:
        raise ValueError(
            f"too little is left of {name}: items {left['items']}, at least "
            f"{n_needed} needed; rows {left['rows']:,} of {read['rows']:,} usable ones: {steps}"
        )
    if job.for_training and left["rows"] == left["users"]:
        raise ValueError(
            f"each of the {left['users']:,} users of {name} has one action only, so "
            f"there is no next item to learn: check that the user column is right ({steps})"
        )


def number_ids(connection: duckdb.DuckDBPyConnection) -> tuple[IdType, IdType]:
    """Tokens by count, then id; rows by user id, as numbers if all are. DuckDB compares bytes."""
    connection.execute(
        "CREATE TABLE tokens AS SELECT code, name, n, "
        "(row_number() OVER (ORDER BY n DESC, name) - 1)::INTEGER AS token "
        "FROM item_counts JOIN names_of_item USING (code)"
    )
    user_type = _id_type(connection, "user_counts JOIN names_of_user USING (code)")
    user_order = "CAST(name AS BIGINT)" if user_type == "int" else "name"
    connection.execute(
        "CREATE TABLE rows_of_user AS SELECT code, name, n, "
        f"row_number() OVER (ORDER BY {user_order}) - 1 AS row "
        "FROM user_counts JOIN names_of_user USING (code)"
    )
    return user_type, _id_type(connection, "tokens")


def _id_type(connection: duckdb.DuckDBPyConnection, relation: str) -> IdType:
    """`int` if every id is an integer in its canonical form; "007" is not, and stays text."""
    (are_integers,) = fetch_row(
        connection,
        "SELECT bool_and(regexp_full_match(name, '-?[1-9][0-9]{0,18}|0') "
        f"AND TRY_CAST(name AS BIGINT) IS NOT NULL) FROM {relation}",
    )
    return "int" if are_integers else "str"


def create_arrays(job: PrepareJob, time_unit: TimeUnit | None) -> None:
    """Write offsets.npy, and create tokens.npy and times.npy to be filled."""
    query = "SELECT n FROM rows_of_user ORDER BY row"
    counts = job.connection.execute(query).fetchnumpy()["n"]
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    np.save(job.finished / "offsets.npy", offsets)
    shape = (int(offsets[-1]),)
    npy.open_memmap(job.finished / "tokens.npy", "w+", np.int32, shape)
    if time_unit is not None:
        npy.open_memmap(job.finished / "times.npy", "w+", np.int64, shape)


def write_range(path: Path, start: int, values: NDArray[Any]) -> None:
    """Write values from place `start`. Several processes may write ranges that do not overlap.

    Plain file operations write them: of a memory map, every touched page would count as memory in use.
    """
    with path.open("r+b") as file:
        assert npy.read_magic(file) == (1, 0)
        (n,), _, dtype = npy.read_array_header_1_0(file)
        assert 0 <= start <= start + len(values) <= n
        file.seek(start * dtype.itemsize, 1)
        file.write(np.ascontiguousarray(values, dtype).data)


def write_sorted(
    connection: duckdb.DuckDBPyConnection, finished: Path, time_unit: TimeUnit | None, rows: range, to: int
) -> None:
    """Write rows of the table `sorted` into tokens.npy and times.npy, from place `to`."""
    per_microsecond = 1000 if time_unit == "ns" else 1
    for start in range(rows.start, rows.stop, FETCHED_ROWS):
        columns = connection.execute(
            'SELECT token, "time" FROM sorted WHERE rowid >= ? AND rowid < ? ORDER BY rowid',
            [start, min(start + FETCHED_ROWS, rows.stop)],
        ).fetchnumpy()
        place = to + start - rows.start
        write_range(finished / "tokens.npy", place, columns["token"])
        if time_unit is not None:
            write_range(finished / "times.npy", place, columns["time"] // per_microsecond)


def write_names_and_meta(job: PrepareJob, id_types: tuple[IdType, IdType], dropped: list[Dropped]) -> None:
    """Write users.parquet, items.parquet, and meta.json once the arrays are full."""
    connection, finished = job.connection, job.finished
    # With several threads, chance decides where the row groups of a Parquet file end.
    connection.execute("SET threads = 1")
    users = 'SELECT row, name AS "user" FROM rows_of_user ORDER BY row'
    copy_to_parquet(connection, users, finished / "users.parquet")
    _write_items(job)
    ids = connection.execute("SELECT name FROM tokens ORDER BY token").fetchnumpy()["name"].tolist()
    tokens = np.load(finished / "tokens.npy", mmap_mode="r")
    offsets = np.load(finished / "offsets.npy")
    tables = job.interactions.tables
    meta = {
        "format_version": FORMAT_VERSION,
        "n_users": len(offsets) - 1,
        "n_items": len(ids),
        "n_interactions": len(tokens),
        "item_id_type": id_types[1],
        "user_id_type": id_types[0],
        "fingerprint": fingerprint_of(tokens, offsets, ids),
        "content_key": job.key,
        "source": names_of(tables, are_short=True),
        "columns": {role: tables[0].columns[at] for role, at in tables[0].roles.items()},
        "filters": job.filters.as_dict(),
        "dropped": dropped,
    }
    text = json.dumps(meta, indent=2, ensure_ascii=False)
    (finished / "meta.json").write_text(text, encoding="utf-8")


def _write_items(job: PrepareJob) -> None:
    """Write items.parquet: the vocabulary, with titles and all other columns of the item table."""
    connection, items, path = job.connection, job.interactions.items, job.finished / "items.parquet"
    known = "t.token, t.name AS item, t.n AS count"
    if items is None:
        query = f"SELECT {known}, NULL::VARCHAR AS title FROM tokens t ORDER BY token"
        copy_to_parquet(connection, query, path)
        return
    others = [at for at in range(len(items.columns)) if at not in items.roles.values()]
    names = ["id", "title", *(f"other{n}" for n in range(len(others)))]
    connection.execute(f"CREATE TABLE described ({', '.join(f'{n} VARCHAR' for n in names)})")
    with readable(Path(items.name)):
        positions = [items.roles["item"], items.roles.get("title"), *others]
        relation = text_relation(items, positions, job.space.folder, "rejects_items")
        connection.execute(f"INSERT INTO described {relation}")
    (n_blank,) = fetch_row(connection, "DELETE FROM described WHERE coalesce(id, '') = ''")
    n_unusable = n_blank + n_malformed_lines(connection, items, "rejects_items")
    if n_unusable:
        job.say(f"left out {n_unusable:,} rows of {items.name}: malformed, or without an id")
    n_items, n_described = fetch_row(
        connection, "SELECT count(*), count(*) FILTER (name IN (SELECT id FROM described)) FROM tokens"
    )
    if n_described == 0:
        raise ValueError(
            f"none of the {n_items:,} items is in {items.name}: its column "
            f"{items.columns[items.roles['item']]!r} holds other ids than the interactions"
        )
    job.say(f"{items.name} describes {n_described:,} of {n_items:,} items")
    extra = "".join(
        f", d.other{n} AS {identifier(name)}" for n, name in enumerate(_distinct([items.columns[at] for at in others]))
    )
    # An id that is described twice keeps its first description.
    first = "SELECT * FROM described QUALIFY row_number() OVER (PARTITION BY id ORDER BY rowid) = 1"
    query = (
        f"SELECT {known}, nullif(d.title, '') AS title{extra} FROM tokens t "
        f"LEFT JOIN ({first}) d ON t.name = d.id ORDER BY t.token"
    )
    copy_to_parquet(connection, query, path)


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number appended to those that are taken; SQL ignores case."""
    taken = set(ITEM_COLUMNS)
    distinct = []
    for name in names:
        free, n = name or "column", 2
        while free.casefold() in taken:
            free, n = f"{name}_{n}", n + 1
        taken.add(free.casefold())
        distinct.append(free)
    return distinct
