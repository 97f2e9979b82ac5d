"""items.parquet: the vocabulary, with the titles and all other columns of the user's item table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb

from bert4rec.data.bad_rows import n_malformed_lines
from bert4rec.data.database import identifier, quoted
from bert4rec.data.relations import text_relation
from bert4rec.data.table import Table
from bert4rec.data.table_file import readable

OWN_COLUMNS = ("token", "item", "count", "title")


def write_items(
    connection: duckdb.DuckDBPyConnection,
    items: Table | None,
    folder: Path,
    path: Path,
    progress: Callable[[str], None],
) -> None:
    """Write the table `tokens(token, name, n)`, described as far as `items` knows its ids."""
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
        relation = text_relation(items, positions, folder, "rejects_items")
        connection.execute(f"INSERT INTO described {relation}")
    no_id = connection.execute("DELETE FROM described WHERE coalesce(id, '') = ''").fetchone()
    assert no_id is not None
    n_unusable = no_id[0] + n_malformed_lines(connection, items, "rejects_items")
    if n_unusable:
        progress(f"left out {n_unusable:,} rows of {items.name}: malformed, or without an id")
    # Ids that are described twice keep their first description.
    first = "SELECT * FROM described QUALIFY row_number() OVER (PARTITION BY id ORDER BY rowid) = 1"
    found = connection.execute(
        "SELECT count(*), count(*) FILTER (name IN (SELECT id FROM described)) FROM tokens"
    ).fetchone()
    assert found is not None
    n_items, n_described = found
    if n_described == 0:
        raise ValueError(
            f"none of the {n_items:,} items is in {items.name}: its column "
            f"{items.columns[items.roles['item']]!r} holds other ids than the interactions"
        )
    progress(f"{items.name} describes {n_described:,} of {n_items:,} items")
    extra = "".join(
        f", d.other{n} AS {identifier(name)}"
        for n, name in enumerate(_distinct([items.columns[at] for at in others]))
    )
    copy_to_parquet(
        connection,
        f"SELECT {known}, nullif(d.title, '') AS title{extra} FROM tokens t "
        f"LEFT JOIN ({first}) d ON t.name = d.id ORDER BY t.token",
        path,
    )


def _distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that are taken; SQL does not tell case apart."""
    taken = set(OWN_COLUMNS)
    distinct = []
    for name in names:
        free, n = name or "column", 2
        while free.casefold() in taken:
            free, n = f"{name}_{n}", n + 1
        taken.add(free.casefold())
        distinct.append(free)
    return distinct


def copy_to_parquet(connection: duckdb.DuckDBPyConnection, query: str, path: Path) -> None:
    connection.execute(f"COPY ({query}) TO {quoted(path)} (FORMAT parquet)")
