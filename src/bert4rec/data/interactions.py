"""Tables of interactions: where they are, and which of their columns say who did what, and when.

`Interactions.read` looks at the columns and the first rows only; `prepare` reads all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from bert4rec.data.columns import Role, find_column, normalized, positions_without_header, require_column
from bert4rec.data.database import connect
from bert4rec.data.frames import frame_columns, write_frame
from bert4rec.data.remote import RemoteFile, fetch, is_remote, remote_files
from bert4rec.data.table_file import (
    OnBadRows,
    Reading,
    TableFile,
    has_pattern,
    inspect_file,
    open_unpacked,
    parquet_columns,
    readable,
)

OnProgress = Callable[[str], None]
MapTasks = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]

MANY = 5  # files that are still named one by one
REPORT_BYTES = 1 << 30  # hashing this much takes about two seconds


@dataclass(frozen=True)
class SourceTable:
    """One file or frame, and the positions of the columns that have a role."""

    source: Any  # a TableFile or RemoteFile; or a frame or list, until `as_file` writes it
    name: str
    columns: tuple[str, ...]
    roles: dict[Role, int]
    is_time_guessed: bool = False  # from its position, where a rating would be possible too

    @property
    def id_positions(self) -> set[int]:
        return {at for role, at in self.roles.items() if role in ("user", "item")}

    def as_file(self, path: Path) -> SourceTable:
        """The same table as a local file; a frame or a remote file is written to `path`."""
        if isinstance(self.source, TableFile):
            return self
        columns, roles = self.columns, self.roles
        if isinstance(self.source, RemoteFile):  # only the columns with a role travel
            kept = sorted(roles.values())
            columns = tuple(columns[at] for at in kept)
            roles = {role: kept.index(at) for role, at in roles.items()}
            fetch(self.source, columns, path)
        else:
            write_frame(self.source, path, [columns[at] for at in self.id_positions])
        types = tuple(parquet_columns(path, path).values())
        source = TableFile(path, "parquet", columns, types=types)
        return replace(self, source=source, columns=columns, roles=roles)

    def content(self) -> dict[str, Any]:
        """What a prepared data set depends on: the bytes, and how they are read."""
        assert isinstance(self.source, TableFile)
        with readable(self.source.path), self.source.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        reading = (self.source.delimiter, self.source.quote, self.source.has_header)
        return {
            "sha256": digest.hexdigest(),
            "columns": {role: self.columns[at] for role, at in self.roles.items()},
            "positions": self.roles,
            "reading": [*reading, self.source.encoding],
        }


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
        tables = []
        sources = _single_sources(source, reading.allow_remote)
        with connect() if len(sources) > 1 else nullcontext() as connection:
            for one in sources:
                if isinstance(one, Path):
                    one = inspect_file(one, ("user", "item"), reading, connection)
                tables.append(_interaction_table(one, reading.columns))
        item_table = None if reading.items is None else _item_table(reading.items, tables[0])
        _check_same_roles(tables)
        return cls(tuple(tables), item_table, reading.on_bad_rows)

    def as_files(self, folder: Path, progress: OnProgress, map_tasks: MapTasks | None = None) -> Interactions:
        """All tables as local files, frames written to `folder`, remote ones fetched into it.

        With `map_tasks`, workers fetch the remote ones.
        """
        is_any_remote = any(isinstance(table.source, RemoteFile) for table in self.tables)
        if is_any_remote:
            progress(f"fetching {self.name}")
        paths = [(table, folder / f"frame_{n}.parquet") for n, table in enumerate(self.tables)]
        if map_tasks is not None and is_any_remote:
            tables = map_tasks(SourceTable.as_file, paths)
        else:
            tables = [table.as_file(path) for table, path in paths]
        items = None if self.items is None else self.items.as_file(folder / "items_frame.parquet")
        return replace(self, tables=tuple(tables), items=items)

    def content(self, progress: OnProgress, map_tasks: MapTasks | None = None) -> dict[str, Any]:
        """What a prepared data set depends on. With `map_tasks`, workers hash the tables."""
        if map_tasks is not None:
            progress(f"hashing {self.name}")
            tables = map_tasks(SourceTable.content, [(table,) for table in self.tables])
        else:
            tables = list(self._hashed(progress))
        return {
            "tables": tables,
            "items": None if self.items is None else self.items.content(),
            "on_bad_rows": self.on_bad_rows,
        }

    def _hashed(self, progress: OnProgress) -> Iterator[dict[str, Any]]:
        sizes = [table.source.path.stat().st_size for table in self.tables]
        n_done, n_reported = 0, -REPORT_BYTES
        for table, size in zip(self.tables, sizes, strict=True):
            if sum(sizes) >= REPORT_BYTES and n_done - n_reported >= REPORT_BYTES:
                progress(f"hashing: {n_done / 1e9:.1f} of {sum(sizes) / 1e9:.1f} GB")
                n_reported = n_done
            yield table.content()
            n_done += size


def _single_sources(source: Any, allow_remote: bool) -> Sequence[Any]:
    """Single tables: the files of a pattern or a folder, the paths of a list."""
    if is_remote(source):
        return remote_files(source, is_allowed=allow_remote)
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if path.is_dir():
            return _parquet_files(path) or [path]
        if not path.exists() and has_pattern(path):
            matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not matches:
                raise ValueError(f"no file matches {source}")
            return matches
        return [path]
    if isinstance(source, list | tuple) and source and isinstance(source[0], str | Path):
        return [path for one in source for path in _single_sources(one, allow_remote)]
    return [source]


def _parquet_files(folder: Path) -> list[Path]:
    """The Parquet files below a folder, by name.

    By convention, names that begin with a dot or an underscore belong to other programs.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    kept = [path for path in found if not any(part.startswith((".", "_")) for part in path.parts)]
    return [folder / path for path in sorted(kept) if (folder / path).is_file()]


def _interaction_table(source: Any, named: dict[Role, str | None]) -> SourceTable:
    is_file = isinstance(source, TableFile | RemoteFile)
    columns = source.columns if is_file else frame_columns(source)
    name = str(source.path) if is_file else f"the {type(source).__name__}"
    has_no_header = is_file and not source.has_header
    roles: dict[Role, int] = {}
    for role, wanted in sorted(named.items(), key=lambda pair: pair[1] is None):  # named ones first
        if has_no_header and wanted is None:
            continue
        is_required = role in ("user", "item")
        at = (require_column if is_required else find_column)(role, columns, wanted, name)
        other = next((other for other in roles if roles[other] == at), None)
        if other is not None and (wanted is not None or is_required):
            raise ValueError(
                f"{name}: the column {columns[roles[other]]!r} cannot be both the {other} and the "
                f"{role}: name another one with {role}=… (--{role} on the command line)"
            )
        if at is not None and other is None:
            roles[role] = at
    if has_no_header:  # positions decide what was not named
        for role, at in positions_without_header(len(columns)).items():
            if role not in roles and at not in roles.values():
                roles[role] = at
        for role in ("user", "item"):
            if role not in roles:
                require_column(role, columns, None, name)
    is_time_guessed = has_no_header and named["time"] is None and "rating" not in roles
    return SourceTable(source, name, columns, roles, is_time_guessed)


def _item_table(source: Any, interactions: SourceTable) -> SourceTable:
    if is_remote(source):
        raise ValueError(f"{source}: a table of items must be on this machine, so copy it here")
    if isinstance(source, str | Path):
        source = inspect_file(Path(source).expanduser(), ("item", "title"), Reading())
        source = replace(source, encoding=_utf8_or_latin1(source))
    is_file = isinstance(source, TableFile)
    columns = source.columns if is_file else frame_columns(source)
    name = str(source.path) if is_file else f"the {type(source).__name__} of items"
    if is_file and not source.has_header:  # MovieLens: u.item, movies.dat
        return SourceTable(source, name, columns, {"item": 0, "title": 1})
    # If two columns may hold the ids, the one with the name of the interactions' item column does.
    own_name = normalized(interactions.columns[interactions.roles["item"]])
    same = next((column for column in columns if normalized(column) == own_name), None)
    if same is None and find_column("item", columns, None, name) is None:
        same = next((column for column in columns if normalized(column) == "id"), None)
    roles: dict[Role, int] = {"item": require_column("item", columns, same, name)}
    title_at = find_column("title", columns, None, name)
    if title_at is not None and title_at != roles["item"]:
        roles["title"] = title_at
    return SourceTable(source, name, columns, roles)


def _utf8_or_latin1(file: TableFile) -> str:
    """Item tables are small and titles are only shown, so MovieLens' encoding is guessed."""
    if file.encoding != "utf-8" or file.kind == "parquet":
        return file.encoding
    with readable(file.path), open_unpacked(file.path, file.is_gzip) as stream:
        try:
            stream.read().decode("utf-8")
        except UnicodeDecodeError:
            return "latin-1"
    return "utf-8"


def _check_same_roles(tables: Sequence[SourceTable]) -> None:
    for table in tables[1:]:
        for role in ("time", "rating"):
            if (role in table.roles) != (role in tables[0].roles):
                with_it, without = (table, tables[0]) if role in table.roles else (tables[0], table)
                raise ValueError(
                    f"{with_it.name} has a {role} column and {without.name} has none: "
                    f"read them apart, or name the column with {role}=…"
                )
