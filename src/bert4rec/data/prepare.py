"""From interactions to `Sequences` on disk, out of core: memory stays at about `memory_limit`.

The working database lies in a temporary folder next to the result, which appears by a rename when
it is complete. A result is found again by the hash of everything that went into it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from bert4rec.data.database import connect, quoted
from bert4rec.data.filters import Filters, describe_step, totals
from bert4rec.data.interactions import Interactions
from bert4rec.data.item_table import copy_to_parquet, write_items
from bert4rec.data.sequences import FORMAT_VERSION, IdType, Sequences, fingerprint_of
from bert4rec.data.staging import stage
from bert4rec.environment import Environment

SLICE = 1 << 20  # rows fetched at a time
FILES = {"meta.json", "tokens.npy", "offsets.npy", "times.npy", "items.parquet", "users.parquet"}

Progress = Callable[[str], None]


def prepare(
    interactions: Interactions,
    filters: Filters = Filters(),  # noqa: B008 (frozen)
    *,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    memory_limit: str = "512MB",
    threads: int | None = None,
    for_training: bool = True,
    progress: Progress | None = None,
) -> Sequences:
    """Sequences in the directory `out`, or in a folder of `cache` named by what they come from.

    Prepared before from the same bytes with the same settings, and intact: reused.
    Unless it is `for_training`, single actions and single items are enough.
    `meta["dropped"]` of the result lists what each step left out.
    """
    say: Progress = progress or (lambda message: None)
    out = None if out is None else Path(out)
    parent = out.parent if out else Path(cache or Environment().prepared)
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".preparing-") as name:
        folder = Path(name)
        interactions = interactions.as_files(folder)
        key = _content_key(interactions, filters, for_training)
        target = out or parent / key[:32]
        if (prepared := _intact(target, key)) is not None:
            say(f"reused {target}, prepared before from the same data")
            return prepared
        if out is not None:  # a folder of the cache is always ours
            _refuse_to_overwrite(out)
        connection = _database(folder, memory_limit, threads)
        try:
            finished = folder / "finished"
            finished.mkdir()
            _fill(connection, interactions, filters, folder, finished, key, for_training, say)
        except duckdb.OutOfMemoryException as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"memory_limit={memory_limit} is too small for this data: raise it ({reason})"
            ) from None
        finally:
            connection.close()
        if target.exists():  # prepared from other data, or damaged: out of the way, then gone
            target.rename(folder / "replaced")
        finished.rename(target)
    return Sequences.load(target)


def _content_key(interactions: Interactions, filters: Filters, for_training: bool) -> str:
    """A hash of all that decides the result, and whether it was found fit for training."""
    content = {
        "format": FORMAT_VERSION,
        "interactions": interactions.content(),
        "filters": filters.as_dict(),
        "for_training": for_training,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _intact(directory: Path, key: str) -> Sequences | None:
    """The prepared data in `directory` if it is the wanted one and undamaged."""
    try:
        sequences = Sequences.load(directory)
        if sequences.meta.get("content_key") != key:
            return None
        found = fingerprint_of(sequences.tokens, sequences.offsets, sequences.vocabulary.ids)
        n_times = sequences.n_interactions if sequences.times is None else len(sequences.times)
    except (ValueError, OSError, EOFError, LookupError, TypeError, AssertionError, duckdb.Error):
        return None
    is_whole = (directory / "users.parquet").is_file() and n_times == sequences.n_interactions
    return sequences if is_whole and found == sequences.meta["fingerprint"] else None


def _refuse_to_overwrite(target: Path) -> None:
    if target.is_file():
        raise ValueError(f"{target} is a file: name a directory for the prepared data")
    found = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if found and not (found <= FILES and _is_ours(target / "meta.json")):
        raise ValueError(
            f"{target} holds other files than prepared data: name an empty or a new directory"
        )


def _is_ours(meta: Path) -> bool:
    try:
        content = json.loads(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "content_key" in content


def _database(folder: Path, memory_limit: str, threads: int | None) -> duckdb.DuckDBPyConnection:
    connection = connect(str(folder / "work.duckdb"))
    try:
        connection.execute(f"SET temp_directory = {quoted(folder / 'spill')}")
        connection.execute(f"SET memory_limit = {quoted(memory_limit)}")
        if threads is not None:
            connection.execute(f"SET threads = {int(threads)}")
    except duckdb.Error as error:
        connection.close()
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"memory_limit={memory_limit!r}, threads={threads!r}: {reason}; write 512MB or 2GB"
        ) from None
    return connection


def _fill(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    filters: Filters,
    folder: Path,
    finished: Path,
    key: str,
    for_training: bool,
    say: Progress,
) -> None:
    """All files of the prepared data set, in the folder `finished`."""
    staged = stage(
        connection,
        interactions,
        folder,
        needs_rating=filters.min_rating is not None,
        progress=say,
    )
    for step in staged.dropped:
        say(describe_step(step))
    read = totals(connection)
    dropped = staged.dropped + filters.apply(connection, say)
    _check_enough_is_left(connection, interactions, read, dropped, for_training)

    say("sorting by user and time")
    user_type, item_type = _number_ids(connection)
    connection.execute(
        'CREATE TABLE sorted AS SELECT i.token, e."time" FROM events e '
        'JOIN rows_of_user u ON e."user" = u.code JOIN tokens i ON e.item = i.code '
        'ORDER BY u.row, e."time", e.row'
    )
    say("writing the sequences")
    offsets = _write_arrays(connection, finished, staged.time_unit)
    users = 'SELECT row, name AS "user" FROM rows_of_user ORDER BY row'
    copy_to_parquet(connection, users, finished / "users.parquet")
    write_items(connection, interactions.items, folder, finished / "items.parquet", say)
    ids = connection.execute("SELECT name FROM tokens ORDER BY token").fetchnumpy()["name"].tolist()
    tokens = np.load(finished / "tokens.npy", mmap_mode="r")
    first = interactions.tables[0]
    meta = {
        "format_version": FORMAT_VERSION,
        "n_users": len(offsets) - 1,
        "n_items": len(ids),
        "n_interactions": len(tokens),
        "item_id_type": item_type,
        "user_id_type": user_type,
        "fingerprint": fingerprint_of(tokens, offsets, ids),
        "content_key": key,
        "source": ", ".join(Path(table.name).name for table in interactions.tables),
        "columns": {role: first.columns[at] for role, at in first.roles.items()},
        "filters": filters.as_dict(),
        "dropped": dropped,
    }
    text = json.dumps(meta, indent=2, ensure_ascii=False)
    (finished / "meta.json").write_text(text, encoding="utf-8")


def _check_enough_is_left(
    connection: duckdb.DuckDBPyConnection,
    interactions: Interactions,
    read: dict[str, int],
    dropped: list[dict[str, Any]],
    for_training: bool,
) -> None:
    left = totals(connection)
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


def _number_ids(connection: duckdb.DuckDBPyConnection) -> tuple[IdType, IdType]:
    """Tokens by count, then id; rows by user id, as numbers if all are. DuckDB compares bytes."""
    connection.execute(
        "CREATE TABLE tokens AS SELECT code, name, n, "
        "(row_number() OVER (ORDER BY n DESC, name) - 1)::INTEGER AS token "
        "FROM (SELECT item AS code, count(*) AS n FROM events GROUP BY item) "
        "JOIN names_of_item USING (code)"
    )
    connection.execute(
        "CREATE TABLE users_left AS SELECT code, name, n "
        'FROM (SELECT "user" AS code, count(*) AS n FROM events GROUP BY "user") '
        "JOIN names_of_user USING (code)"
    )
    user_type, item_type = _id_type(connection, "users_left"), _id_type(connection, "tokens")
    by = "CAST(name AS BIGINT)" if user_type == "int" else "name"
    connection.execute(
        "CREATE TABLE rows_of_user AS SELECT code, name, n, "
        f"row_number() OVER (ORDER BY {by}) - 1 AS row FROM users_left"
    )
    return user_type, item_type


def _id_type(connection: duckdb.DuckDBPyConnection, table: str) -> IdType:
    """The same rule as `sequences.id_type_of`, without fetching the ids."""
    found = connection.execute(
        "SELECT bool_and(regexp_full_match(name, '-?[1-9][0-9]{0,18}|0') "
        f"AND TRY_CAST(name AS BIGINT) IS NOT NULL) FROM {table}"
    ).fetchone()
    return "int" if found and found[0] else "str"


def _write_arrays(
    connection: duckdb.DuckDBPyConnection, finished: Path, time_unit: str | None
) -> NDArray[np.int64]:
    """tokens.npy and times.npy slice by slice, then offsets.npy."""
    counts = connection.execute("SELECT n FROM rows_of_user ORDER BY row").fetchnumpy()["n"]
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
    np.save(finished / "offsets.npy", offsets)
    n_rows = int(offsets[-1])
    tokens = open_memmap(finished / "tokens.npy", "w+", np.int32, (n_rows,))
    times = None
    if time_unit is not None:
        times = open_memmap(finished / "times.npy", "w+", np.int64, (n_rows,))
    for start in range(0, n_rows, SLICE):
        columns = connection.execute(
            'SELECT token, "time" FROM sorted WHERE rowid >= ? AND rowid < ? ORDER BY rowid',
            [start, start + SLICE],
        ).fetchnumpy()
        tokens[start : start + SLICE] = columns["token"]
        if times is not None:
            per_microsecond = 1000 if time_unit == "ns" else 1
            times[start : start + SLICE] = columns["time"] // per_microsecond
    tokens.flush()
    return offsets
