"""A table of interactions: where it is, and which of its columns say who did what, and when.

`Interactions.read` looks at the columns and the first rows only; `prepare` reads it all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from bert4rec.data.columns import Role, find_column, plain, positions_without_header
from bert4rec.data.formats import inspect_file
from bert4rec.data.frames import frame_columns, write_frame
from bert4rec.data.table_file import TableFile, open_unpacked, readable

OnBadRows = Literal["error", "skip"]


@dataclass(frozen=True)
class Table:
    """One file or frame and the positions of the columns that are wanted from it."""

    source: Any  # a TableFile, or a frame or list until `as_file` writes it down
    name: str
    columns: tuple[str, ...]
    roles: dict[Role, int]
    is_time_guessed: bool = False  # by its place, where a rating could be as well

    def as_file(self, path: Path) -> Table:
        """The same table as a file: itself, or a frame written to `path`."""
        if isinstance(self.source, TableFile):
            return self
        write_frame(self.source, path, [self.columns[at] for at in self.id_positions])
        return replace(self, source=TableFile(path, "parquet", self.columns))

    @property
    def id_positions(self) -> set[int]:
        return {at for role, at in self.roles.items() if role in ("user", "item")}

    def content(self) -> dict[str, Any]:
        """What a prepared data set depends on: the bytes, and how they are read."""
        assert isinstance(self.source, TableFile)
        digest = hashlib.sha256()
        with readable(self.source.path), self.source.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        reading = (self.source.delimiter, self.source.quote, self.source.has_header)
        return {
            "sha256": digest.hexdigest(),
            "columns": {role: self.columns[at] for role, at in self.roles.items()},
            "positions": self.roles,
            "reading": [*reading, self.source.encoding],
        }


@dataclass(frozen=True)
class Interactions:
    """Rows of (user, item[, time][, rating]), and optionally a table that describes the items."""

    tables: tuple[Table, ...]
    items: Table | None = None
    on_bad_rows: OnBadRows = "error"

    @property
    def name(self) -> str:
        return ", ".join(table.name for table in self.tables)

    @classmethod
    def read(
        cls,
        source: Any,
        *,
        user: str | None = None,
        item: str | None = None,
        time: str | None = None,
        rating: str | None = None,
        delimiter: str | None = None,
        header: bool | None = None,
        on_bad_rows: OnBadRows = "error",
        items: Any = None,
        encoding: str | None = None,
    ) -> Self:
        """Interactions from a file, several files, a frame or a list of tuples.

        `source`: a path or pattern (CSV, TSV, Parquet, JSON Lines, `.dat` with `::`, headerless
        `user item` lines; any of them gzipped), a list of paths, a pandas or polars frame, or a
        list of (user, item), (user, item, time) or (user, item, time, rating) tuples.
        `user`, `item`, `time`, `rating`: column names, where the usual names do not find them;
        columns of files without a header are called column1, column2, …
        `items`: a file or frame with one row an item: its id, a title, anything else.
        Without a time column the rows of a user are taken to be in order.
        """
        if on_bad_rows not in ("error", "skip"):
            raise ValueError(f"on_bad_rows is {on_bad_rows!r}: choose 'error' or 'skip'")
        named: dict[Role, str | None] = {"user": user, "item": item, "time": time, "rating": rating}
        tables = []
        for one in _sources(source):
            file = one
            if isinstance(one, Path):
                file = inspect_file(
                    one,
                    ("user", "item"),
                    named=[name for name in named.values() if name],
                    delimiter=delimiter,
                    header=header,
                    encoding=encoding,
                )
            tables.append(_interaction_table(file, named))
        item_table = None if items is None else _item_table(items, tables[0])
        _check_same_roles(tables)
        return cls(tuple(tables), item_table, on_bad_rows)

    def as_files(self, folder: Path) -> Interactions:
        tables = [t.as_file(folder / f"frame_{n}.parquet") for n, t in enumerate(self.tables)]
        items = None if self.items is None else self.items.as_file(folder / "items_frame.parquet")
        return replace(self, tables=tuple(tables), items=items)

    def content(self) -> dict[str, Any]:
        return {
            "tables": [table.content() for table in self.tables],
            "items": None if self.items is None else self.items.content(),
            "on_bad_rows": self.on_bad_rows,
        }


def _sources(source: Any) -> Sequence[Any]:
    """Single tables: a pattern becomes the files that match it, a list of paths its paths."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if not path.exists() and any(letter in str(path) for letter in "*?["):
            matches = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not matches:
                raise ValueError(f"no file matches {source}")
            return matches
        return [path]
    if isinstance(source, list | tuple) and source and isinstance(source[0], str | Path):
        return [path for one in source for path in _sources(one)]
    return [source]


def _interaction_table(source: Any, named: dict[Role, str | None]) -> Table:
    is_file = isinstance(source, TableFile)
    columns = source.columns if is_file else frame_columns(source)
    name = str(source.path) if is_file else f"the {type(source).__name__}"
    is_guessed = is_file and not source.has_header
    roles: dict[Role, int] = {}
    for role, wanted in sorted(named.items(), key=lambda pair: pair[1] is None):  # named ones first
        if is_guessed and wanted is None:
            continue
        is_required = role in ("user", "item")
        at = find_column(role, columns, wanted, name, is_required=is_required)
        other = next((other for other in roles if roles[other] == at), None)
        if other is not None and (wanted is not None or is_required):
            raise ValueError(
                f"{name}: the column {columns[roles[other]]!r} cannot be both the {other} and the "
                f"{role}: name another one with {role}=… (--{role} on the command line)"
            )
        if at is not None and other is None:
            roles[role] = at
    if is_guessed:  # positions fill in what was not named
        for role, at in positions_without_header(len(columns)).items():
            if role not in roles and at not in roles.values():
                roles[role] = at
        for role in ("user", "item"):
            if role not in roles:
                find_column(role, columns, None, name, is_required=True)
    is_time_guessed = is_guessed and named["time"] is None and "rating" not in roles
    return Table(source, name, columns, roles, is_time_guessed)


def _item_table(source: Any, interactions: Table) -> Table:
    if isinstance(source, str | Path):
        source = inspect_file(Path(source).expanduser(), ("item", "title"), encoding=None)
        source = replace(source, encoding=_utf8_or_latin1(source))
    is_file = isinstance(source, TableFile)
    columns = source.columns if is_file else frame_columns(source)
    name = str(source.path) if is_file else f"the {type(source).__name__} of items"
    if is_file and not source.has_header:  # MovieLens: u.item, movies.dat
        return Table(source, name, columns, {"item": 0, "title": 1})
    # The column that is called as in the interactions holds the same ids, when there are two.
    own_name = plain(interactions.columns[interactions.roles["item"]])
    same = next((column for column in columns if plain(column) == own_name), None)
    if same is None and find_column("item", columns, None, name, is_required=False) is None:
        same = next((column for column in columns if plain(column) == "id"), None)
    item_at = find_column("item", columns, same, name, is_required=True)
    title_at = find_column("title", columns, None, name, is_required=False)
    assert item_at is not None
    roles: dict[Role, int] = {"item": item_at}
    if title_at is not None and title_at != item_at:
        roles["title"] = title_at
    return Table(source, name, columns, roles)


def _utf8_or_latin1(file: TableFile) -> str:
    """Item tables are small and titles are only shown, so the encoding of MovieLens is guessed."""
    if file.encoding != "utf-8" or file.kind == "parquet":
        return file.encoding
    with readable(file.path), open_unpacked(file.path, file.is_gzip) as stream:
        try:
            stream.read().decode("utf-8")
        except UnicodeDecodeError:
            return "latin-1"
    return "utf-8"


def _check_same_roles(tables: Sequence[Table]) -> None:
    for table in tables[1:]:
        for role in ("time", "rating"):
            if (role in table.roles) != (role in tables[0].roles):
                with_it, without = (table, tables[0]) if role in table.roles else (tables[0], table)
                raise ValueError(
                    f"{with_it.name} has a {role} column and {without.name} has none: "
                    f"read them apart, or name the column with {role}=…"
                )
