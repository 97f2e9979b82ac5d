"""A table of interactions: where it is, and which of its columns say who did what, and when.

`Interactions.read` looks at the columns and the first rows only; `prepare` reads it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from bert4rec.data.columns import Role, find_column, plain, positions_without_header
from bert4rec.data.database import connect
from bert4rec.data.formats import inspect_file
from bert4rec.data.frames import frame_columns
from bert4rec.data.remote import RemoteFile, is_remote, remote_files
from bert4rec.data.table import Table, names_of
from bert4rec.data.table_file import TableFile, has_pattern, open_unpacked, readable

OnBadRows = Literal["error", "skip"]
TELL_BYTES = 1 << 30  # hashing this much takes about two seconds


@dataclass(frozen=True)
class Interactions:
    """Rows of (user, item[, time][, rating]), and optionally a table that describes the items."""

    tables: tuple[Table, ...]
    items: Table | None = None
    on_bad_rows: OnBadRows = "error"

    @property
    def name(self) -> str:
        return names_of(self.tables)

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
        allow_remote: bool = False,
    ) -> Self:
        """Interactions from a file, several files, a frame or a list of tuples.

        `source`: a path or pattern (CSV, TSV, Parquet, JSON Lines, `.dat` with `::`, headerless
        `user item` lines; any of them gzipped), a folder of Parquet files, a list of paths, a
        pandas or polars frame, or a list of (user, item), (user, item, time) or (user, item, time,
        rating) tuples.
        `user`, `item`, `time`, `rating`: column names, where the usual names do not find them;
        columns of files without a header are called column1, column2, …
        With `allow_remote`, Parquet files may be at `s3://…`, `gs://…` or `https://…`.
        `items`: a file or frame with one row an item: its id, a title, anything else.
        Without a time column the rows of a user are taken to be in order.
        """
        if on_bad_rows not in ("error", "skip"):
            raise ValueError(f"on_bad_rows is {on_bad_rows!r}: choose 'error' or 'skip'")
        named: dict[Role, str | None] = {"user": user, "item": item, "time": time, "rating": rating}
        tables = []
        with connect() as connection:
            for one in _sources(source, allow_remote):
                file = one
                if isinstance(one, Path):
                    file = inspect_file(
                        one,
                        ("user", "item"),
                        named=[name for name in named.values() if name],
                        delimiter=delimiter,
                        header=header,
                        encoding=encoding,
                        connection=connection,
                    )
                tables.append(_interaction_table(file, named))
        item_table = None if items is None else _item_table(items, tables[0])
        _check_same_roles(tables)
        return cls(tuple(tables), item_table, on_bad_rows)

    def as_files(
        self,
        folder: Path,
        progress: Callable[[str], None] = lambda message: None,
        on_all: Callable[..., list[Table]] | None = None,
    ) -> Interactions:
        """All tables as files, written to `folder` if they are none; remote ones by `on_all`."""
        is_any_remote = any(isinstance(table.source, RemoteFile) for table in self.tables)
        if is_any_remote:
            progress(f"fetching {self.name}")
        paths = [(table, folder / f"frame_{n}.parquet") for n, table in enumerate(self.tables)]
        if on_all is None or not is_any_remote:
            tables = [table.as_file(path) for table, path in paths]
        else:
            tables = on_all(Table.as_file, paths)
        items = None if self.items is None else self.items.as_file(folder / "items_frame.parquet")
        return replace(self, tables=tuple(tables), items=items)

    def content(
        self,
        progress: Callable[[str], None] = lambda message: None,
        of_tables: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """What a prepared data set depends on; `of_tables` if others have hashed the tables."""
        return {
            "tables": self._hashed(progress) if of_tables is None else of_tables,
            "items": None if self.items is None else self.items.content(),
            "on_bad_rows": self.on_bad_rows,
        }

    def _hashed(self, progress: Callable[[str], None]) -> list[dict[str, Any]]:
        sizes = [table.source.path.stat().st_size for table in self.tables]
        contents: list[dict[str, Any]] = []
        n_done, n_told = 0, -TELL_BYTES
        for table, size in zip(self.tables, sizes, strict=True):
            if sum(sizes) >= TELL_BYTES and n_done - n_told >= TELL_BYTES:
                progress(f"hashing: {n_done / 1e9:.1f} of {sum(sizes) / 1e9:.1f} GB")
                n_told = n_done
            contents.append(table.content())
            n_done += size
        return contents


def _sources(source: Any, allow_remote: bool) -> Sequence[Any]:
    """Single tables: a pattern or a folder becomes its files, a list of paths its paths."""
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
        return [path for one in source for path in _sources(one, allow_remote)]
    return [source]


def _parquet_files(folder: Path) -> list[Path]:
    """The Parquet files in a folder and the folders in it, by name.

    What begins with a dot or an underscore is another program's own, as everywhere.
    """
    found = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    kept = [path for path in found if not any(part.startswith((".", "_")) for part in path.parts)]
    return [folder / path for path in sorted(kept) if (folder / path).is_file()]


def _interaction_table(source: Any, named: dict[Role, str | None]) -> Table:
    is_file = isinstance(source, TableFile | RemoteFile)
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
    if is_remote(source):
        raise ValueError(f"{source}: a table of items must be on this machine, so copy it here")
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
