"""One table: where it is, and the positions of the columns that are wanted from it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bert4rec.data.columns import Role
from bert4rec.data.formats import parquet_columns
from bert4rec.data.frames import write_frame
from bert4rec.data.remote import RemoteFile, fetch
from bert4rec.data.table_file import TableFile, readable

MANY = 5  # files that are named one by one


def names_of(tables: Sequence[Table], *, are_short: bool = False) -> str:
    """The tables' names; of many, the first and the last."""
    names = [Path(table.name).name if are_short else table.name for table in tables]
    if len(names) > MANY:
        return f"{names[0]}, …, {names[-1]} ({len(names):,} files)"
    return ", ".join(names)


@dataclass(frozen=True)
class Table:
    """One file or frame and the positions of the columns that are wanted from it."""

    source: Any  # a TableFile, or a frame or list until `as_file` writes it down
    name: str
    columns: tuple[str, ...]
    roles: dict[Role, int]
    is_time_guessed: bool = False  # by its place, where a rating could be as well

    def as_file(self, path: Path) -> Table:
        """The same table as a file: itself, or a frame or remote file written to `path`."""
        if isinstance(self.source, TableFile):
            return self
        if isinstance(self.source, RemoteFile):
            return self._fetched(path)
        write_frame(self.source, path, [self.columns[at] for at in self.id_positions])
        types = tuple(parquet_columns(path, path).values())
        return replace(self, source=TableFile(path, "parquet", self.columns, types=types))

    def _fetched(self, path: Path) -> Table:
        """Only the columns that have a role travel."""
        kept = sorted(self.roles.values())
        fetch(self.source, [self.columns[at] for at in kept], path)
        columns, types = zip(
            *((self.columns[at], self.source.types[at]) for at in kept), strict=True
        )
        return replace(
            self,
            source=TableFile(path, "parquet", columns, types=types),
            columns=columns,
            roles={role: kept.index(at) for role, at in self.roles.items()},
        )

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
