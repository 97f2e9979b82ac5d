"""Tables of interactions: where they are, and which of their columns say who did what, and when.

`Interactions.read` looks at the columns and the first rows only; `prepare` reads all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import duckdb

from bert4rec.data.columns import NAMES, Role, find_column, normalized, positions_without_header, require_column
from bert4rec.data.database import connect
from bert4rec.data.frames import frame_columns, write_frame
from bert4rec.data.remote import fetch, is_remote, remote_tables
from bert4rec.data.table_file import (
    OnBadRows,
    Reading,
    SourceTable,
    has_pattern,
    inspect_file,
    parquet_columns,
    readable,
    unpacked,
)
from bert4rec.durable import sha256

OnProgress = Callable[[str], None]
MapTasks = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]

MANY = 5  # files that are still named one by one
REPORT_BYTES = 1 << 30  # hashing this much takes about two seconds


def names_of(tables: Sequence[SourceTable], *, are_short: bool = False) -> str:
    """The tables' names; of many, the first and the last."""
    names = [Path(table.name).name if are_short else table.name for table in tables]
    if len(names) > MANY:
        return f"{names[0]}, …, {names[-1]} ({len(names):,} files)"
    return ", ".join(names)


@dataclass(frozen=True)
class Interactions:
    """Rows of (user, item[, time][, rating]), and optionally a table that describes the items."""

    tables: tuple[SourceTable, ...]
    items: SourceTable | None = None
    on_bad_rows: OnBadRows = "error"

    @property
    def name(self) -> str:
        return names_of(self.tables)

    @classmethod
    def read(cls, source: Any, reading: Reading = Reading()) -> Self:  # noqa: B008 (frozen)
        """Interactions from a file, several files, a frame or a list of tuples.

        `source`: a path or pattern (CSV, TSV, Parquet, JSON Lines, `.dat` with `::`, headerless
        `user item` lines; any of them gzipped), a folder of Parquet files, a list of paths, a
        pandas or polars frame, or a list of (user, item), (user, item, time) or (user, item, time,
        rating) tuples. With `reading.allow_remote`, also Parquet files at `s3://…`, `gs://…` or
        `https://…`.
        """
        with connect() as connection:
            tables = [
                _with_roles(table, reading.columns)
                for table in _tables_of(source, ("user", "item"), reading, connection)
            ]
            items = None if reading.items is None else _item_table(reading.items, tables[0], connection)
        _check_same_roles(tables)
        return cls(tuple(tables), items, reading.on_bad_rows)

    def as_files(self, folder: Path, progress: OnProgress, map_tasks: MapTasks | None = None) -> Interactions:
        """All tables as local files, frames written to `folder`, remote ones fetched into it.

        With `map_tasks`, workers fetch the remote ones.
        """
        is_any_remote = any(table.kind == "remote parquet" for table in self.tables)
        if is_any_remote:
            progress(f"fetching {self.name}")
        paths = [(table, folder / f"frame_{n}.parquet") for n, table in enumerate(self.tables)]
        if map_tasks is not None and is_any_remote:
            tables = map_tasks(_as_file, paths)
        else:
            tables = [_as_file(table, path) for table, path in paths]
        items = None if self.items is None else _as_file(self.items, folder / "items_frame.parquet")
        return replace(self, tables=tuple(tables), items=items)

    def content(self, progress: OnProgress, map_tasks: MapTasks | None = None) -> dict[str, Any]:
        """What a prepared data set depends on. With `map_tasks`, workers hash the tables."""
        if map_tasks is not None:
            progress(f"hashing {self.name}")
            tables = map_tasks(_content, [(table,) for table in self.tables])
        else:
            tables = list(self._hashed(progress))
        return {
            "tables": tables,
            "items": None if self.items is None else _content(self.items),
            "on_bad_rows": self.on_bad_rows,
        }

    def _hashed(self, progress: OnProgress) -> Iterator[dict[str, Any]]:
        sizes = [table.path.stat().st_size for table in self.tables]
        n_done, n_reported = 0, -REPORT_BYTES
        for table, size in zip(self.tables, sizes, strict=True):
            if sum(sizes) >= REPORT_BYTES and n_done - n_reported >= REPORT_BYTES:
                progress(f"hashing: {n_done / 1e9:.1f} of {sum(sizes) / 1e9:.1f} GB")
                n_reported = n_done
            yield _content(table)
            n_done += size


def _tables_of(
    source: Any, roles: Sequence[Role], reading: Reading, connection: duckdb.DuckDBPyConnection
) -> list[SourceTable]:
    """Single tables: the files of a pattern or a folder, the paths of a list, a frame."""
    if is_remote(source):
        return remote_tables(source, is_allowed=reading.allow_remote)
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        paths = [path]
        if path.is_dir():
            paths = _parquet_files(path) or [path]
        elif not path.exists() and has_pattern(path):
            paths = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not paths:
                raise ValueError(f"no file matches {source}")
        return [inspect_file(each, roles, reading, connection) for each in paths]
    if isinstance(source, list | tuple) and source and isinstance(source[0], str | Path):
        return [table for one in source for table in _tables_of(one, roles, reading, connection)]
    return [SourceTable(f"the {type(source).__name__}", source, "frame", frame_columns(source))]


def _parquet_files(folder: Path) -> list[Path]:
    """The Parquet files below a folder, by name.

    By convention, names that begin with a dot or an underscore belong to other programs.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    kept = [path for path in found if not any(part.startswith((".", "_")) for part in path.parts)]
    return [folder / path for path in sorted(kept) if (folder / path).is_file()]


def _with_roles(table: SourceTable, named: dict[Role, str | None]) -> SourceTable:
    """The table with the roles of its columns: those that are named, then those with a usual name or position."""
    columns, roles = table.columns, dict[Role, int]()
    for role, wanted in sorted(named.items(), key=lambda pair: pair[1] is None):
        is_required = role in ("user", "item")
        if wanted is None and not table.has_header:
            at = positions_without_header(len(columns)).get(role)
        else:
            at = (require_column if is_required else find_column)(role, columns, wanted, table.name)
        other = next((other for other in roles if roles[other] == at), None)
        if other is not None and (wanted is not None or is_required):
            raise ValueError(
                f"{table.name}: the column {columns[roles[other]]!r} cannot be both the {other} and the "
                f"{role}: name another one with {role}=… (--{role} on the command line)"
            )
        if at is not None and other is None:
            roles[role] = at
    is_time_guessed = not table.has_header and named["time"] is None and "rating" not in roles
    return replace(table, roles=roles, is_time_guessed=is_time_guessed)


def _item_table(source: Any, interactions: SourceTable, connection: duckdb.DuckDBPyConnection) -> SourceTable:
    if is_remote(source):
        raise ValueError(f"{source}: a table of items must be on this machine, so copy it here")
    table, *more = _tables_of(source, ("item", "title"), Reading(), connection)
    if more:
        raise ValueError(f"{source}: a table of items must be one file, and these are {1 + len(more)}")
    if table.kind == "frame":
        table = replace(table, name=f"{table.name} of items")
    table = replace(table, encoding=_utf8_or_latin1(table))
    if not table.has_header:  # MovieLens: u.item, movies.dat
        return replace(table, roles={"item": 0, "title": 1})
    # If two columns may hold the ids, the one with the name of the interactions' item column does.
    own_name = normalized(interactions.columns[interactions.roles["item"]])
    column_of = {normalized(column): column for column in reversed(table.columns)}
    named = next((column_of[name] for name in (own_name, *NAMES["item"], "id") if name in column_of), None)
    roles: dict[Role, int] = {"item": require_column("item", table.columns, named, table.name)}
    title_at = find_column("title", table.columns, None, table.name)
    if title_at is not None and title_at != roles["item"]:
        roles["title"] = title_at
    return replace(table, roles=roles)


def _utf8_or_latin1(table: SourceTable) -> str:
    """Item tables are small and titles are only shown, so MovieLens' encoding is guessed."""
    if table.encoding != "utf-8" or table.kind in ("parquet", "frame"):
        return table.encoding
    with unpacked(table) as stream:
        try:
            stream.read().decode("utf-8")
        except UnicodeDecodeError:
            return "latin-1"
    return "utf-8"


def _check_same_roles(tables: Sequence[SourceTable]) -> None:
    for role in ("time", "rating"):
        with_it = [table.name for table in tables if role in table.roles]
        without = [table.name for table in tables if role not in table.roles]
        if with_it and without:
            raise ValueError(
                f"{with_it[0]} has a {role} column and {without[0]} has none: "
                f"read them apart, or name the column with {role}=…"
            )


def _as_file(table: SourceTable, path: Path) -> SourceTable:
    """The same table as a local file; a frame or a remote file is written to `path`."""
    columns, roles = table.columns, table.roles
    if table.kind == "frame":
        write_frame(table.source, path, [columns[at] for at in table.id_positions])
    elif table.kind == "remote parquet":  # only the columns with a role travel
        kept = sorted(roles.values())
        columns = tuple(columns[at] for at in kept)
        roles = {role: kept.index(at) for role, at in roles.items()}
        fetch(table.source, columns, path)
    else:
        return table
    with connect() as connection:
        types = tuple(parquet_columns(connection, path).values())
    return replace(table, source=path, kind="parquet", columns=columns, types=types, roles=roles)


def _content(table: SourceTable) -> dict[str, Any]:
    """What a prepared data set depends on: the bytes, and how they are read."""
    with readable(table.path):
        digest = sha256(table.path)
    return {
        "sha256": digest,
        "columns": {role: table.columns[at] for role, at in table.roles.items()},
        "positions": table.roles,
        "reading": [table.delimiter, table.quote, table.has_header, table.encoding],
    }
