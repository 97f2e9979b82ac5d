"""One table: its format, found from the beginning of its file, and plain access to its rows.

Content decides over the file's name: gzip, Parquet and JSON are known by their first bytes. For
delimited text, the first rows tell the delimiter, the quoting and whether there is a header.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import duckdb

from bert4rec.data.columns import NAMES, Role, normalized
from bert4rec.data.database import first_line, parquet

OnBadRows = Literal["error", "skip"]

HEAD_BYTES = 1 << 17  # enough of a file to recognize its format
DELIMITERS = ("::", "\t", ",", ";", "|", " ")  # a blank last: dates and titles hold blanks too
USUAL_DELIMITER = {".csv": ",", ".tsv": "\t", ".dat": "::", ".inter": "\t"}
SPELLED_DELIMITER = {"tab": "\t", "\\t": "\t"}  # as typed on a command line
VALUE = re.compile(r'"?[-+]?\d[\d.:TZeE+ -]*"?')  # a number or a date: no name of a column


@dataclass(frozen=True)
class Reading:
    """How to read a table, where its column names and its format do not tell; None: find out.

    `user`, `item`, `time`, `rating`: names of columns. Without a header they are column1, column2,
    … Without a time column, the rows of a user are in time order.
    """

    user: str | None = None
    item: str | None = None
    time: str | None = None
    rating: str | None = None
    delimiter: str | None = None
    header: bool | None = None
    encoding: str | None = None
    on_bad_rows: OnBadRows = "error"
    items: Any = None  # a file or frame with a row per item: its id, a title, anything else
    allow_remote: bool = False  # may the table be in object storage?

    def __post_init__(self) -> None:
        if self.on_bad_rows not in ("error", "skip"):
            raise ValueError(f"on_bad_rows is {self.on_bad_rows!r}: choose 'error' or 'skip'")

    @property
    def columns(self) -> dict[Role, str | None]:
        return {"user": self.user, "item": self.item, "time": self.time, "rating": self.rating}


@dataclass(frozen=True)
class SourceTable:
    """One table: where it is, its format, and the positions of the columns that have a role."""

    name: str  # as in messages
    source: Any  # a path; the address of a remote file; or a frame or list
    kind: Literal["text", "json lines", "json array", "parquet", "remote parquet", "frame"]
    columns: tuple[str, ...] = ()
    types: tuple[str, ...] = ()  # DuckDB's, of the columns of a Parquet file
    is_gzip: bool = False
    encoding: str = "utf-8"
    delimiter: str = ""
    quote: str = ""
    has_header: bool = True
    skip: int = 0  # blank lines before the first row
    roles: dict[Role, int] = field(default_factory=dict)
    is_time_guessed: bool = False  # from its position, where a rating would be possible too

    @property
    def path(self) -> Path:
        assert isinstance(self.source, Path)
        return self.source

    @property
    def id_positions(self) -> set[int]:
        return {at for role, at in self.roles.items() if role in ("user", "item")}

    @property
    def is_utf8(self) -> bool:
        """Is it binary or UTF-8 text?"""
        return self.kind == "parquet" or self.encoding == "utf-8"

    @property
    def is_plain(self) -> bool:
        """Can DuckDB read the file where it is? It would expand a pattern in its name."""
        return self.is_utf8 and not self.is_gzip and not has_pattern(self.path)


@contextmanager
def readable(path: Path | str, advice: str = "") -> Iterator[None]:
    """Turns whatever goes wrong with a file into one sentence that names it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path} is a damaged or truncated gzip file: fetch it again") from None
    except UnicodeError as error:
        raise ValueError(f"{path} is not {getattr(error, 'encoding', 'text')}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except duckdb.OutOfMemoryException as error:
        raise ValueError(f"memory_limit is too small for {path}: raise it ({first_line(error)})") from None
    except duckdb.Error as error:
        reason = first_line(error)
        if "state machine" in reason:  # what DuckDB says of a line that ends unlike the others
            reason = "its lines end in different ways (some in CR LF): save it with one kind"
        if "UTF-8" in reason:
            reason = f"{reason.rstrip(' .')}; name its encoding, as in encoding='latin-1'"
        raise ValueError(f"{path} cannot be read: {reason}{advice}") from None


def inspect_file(
    path: Path, roles: Sequence[Role], reading: Reading, connection: duckdb.DuckDBPyConnection
) -> SourceTable:
    """Look at the beginning of a file; a first line with names of `roles` is a header."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory without Parquet files: name a file in it, or a pattern such as *.csv")
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    with readable(path), path.open("rb") as packed:
        is_gzip = packed.read(2) == b"\x1f\x8b"
    table = SourceTable(str(path), path, "text", is_gzip=is_gzip)
    with unpacked(table) as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(b"PAR1"):
        table = replace(table, kind="parquet")
        with tempfile.TemporaryDirectory() as folder, readable(path):
            columns = parquet_columns(connection, unpack(table, Path(folder)))
        return replace(table, columns=tuple(columns), types=tuple(columns.values()))
    if head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{path} is a zip archive: unpack it and name the file inside")
    encoding, text = _decode(head, reading.encoding)
    table = replace(table, encoding=encoding)
    if not text.strip():
        raise ValueError(f"{path} is empty")
    first = text.lstrip()[0]
    if first == "{":
        return replace(table, kind="json lines", columns=_json_columns(path, text.splitlines()[:200]))
    if first == "[" and path.suffix != ".csv":
        return replace(table, kind="json array", columns=_json_columns(path, [text.lstrip()[1:]]))
    begin = text.rfind("\n", 0, len(text) - len(text.lstrip(" \t\r\n"))) + 1  # after blank lines
    end = len(text) if len(head) < HEAD_BYTES else text.rfind("\n") + 1
    if end <= begin:
        raise ValueError(
            f"{path} has a first line of more than {HEAD_BYTES >> 10} KB: a table has one interaction per line"
        )
    return _inspect_text(replace(table, skip=text.count("\n", 0, begin)), text[begin:end], roles, reading)


def _decode(head: bytes, encoding: str | None) -> tuple[str, str]:
    if encoding is None:
        is_wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "utf-16" if is_wide else "utf-8"
    try:
        codec = codecs.lookup(encoding)
    except LookupError:
        raise ValueError(f"encoding {encoding!r} is unknown: try utf-8 or latin-1") from None
    # Errors are found when all rows are read, with the row's number; the format shows without.
    text = codec.incrementaldecoder(errors="replace").decode(head)
    return codec.name, text.removeprefix("\ufeff")


def _json_columns(path: Path, texts: Sequence[str]) -> tuple[str, ...]:
    """The names of the values of the records with which the texts begin."""
    columns: dict[str, None] = {}
    reason = ""
    for text in texts:
        try:
            record, _ = json.JSONDecoder().raw_decode(text.lstrip())
        except json.JSONDecodeError as error:  # a bad row, which is reported when all rows are read
            reason = reason or f" ({error})"
        else:
            columns |= dict.fromkeys(record if isinstance(record, dict) else ())
    if not columns:
        raise ValueError(f"{path} looks like JSON but its first rows are not objects with named values{reason}")
    return tuple(columns)


def _inspect_text(table: SourceTable, sample: str, roles: Sequence[Role], reading: Reading) -> SourceTable:
    path = table.path
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    sniffed = _sniff_delimiter(sample, USUAL_DELIMITER.get(suffix.lower()))
    given = SPELLED_DELIMITER.get(reading.delimiter or "", reading.delimiter)
    delimiter = given or sniffed
    rows = split_rows(sample, delimiter) if delimiter else []
    if delimiter is None or not rows or len(rows[0]) < 2:
        advice = "no usual delimiter is in it: pass delimiter=…"
        if sniffed:
            advice = f"it looks separated by {sniffed!r}: pass delimiter={sniffed!r}"
        by = f" when split by {given!r}" if given else ""
        line = sample.strip("\r\n").splitlines()[0]
        raise ValueError(f"{path} has only one column{by}; its first line is {line[:80]!r}, {advice}")
    header, first = reading.header, rows[0]
    if header is None:
        named, usual = set(reading.columns.values()), {name for role in roles for name in NAMES[role]}
        is_named = any(cell in named or normalized(cell) in usual for cell in first)
        header = is_named or not any(VALUE.fullmatch(cell.strip()) for cell in first)
    columns = first if header else [f"column{at + 1}" for at in range(len(first))]
    # Commas need quoting. With other delimiters a quote is mostly part of a title, unless it
    # encloses whole cells.
    has_quotes = delimiter in ",;" or any(
        len(cell) > 1 and cell[0] == cell[-1] == '"' for line in sample.splitlines() for cell in line.split(delimiter)
    )
    return replace(
        table,
        columns=tuple(cell.strip().strip('"') for cell in columns),
        delimiter=delimiter,
        quote='"' if has_quotes else "",
        has_header=header,
    )


def _sniff_delimiter(sample: str, usual: str | None) -> str | None:
    """The first delimiter that splits the sampled rows into the same number of cells."""
    splitting = []
    for delimiter in sorted(DELIMITERS, key=lambda each: each != usual):
        rows = split_rows(sample, delimiter)[:50]
        if rows and len(rows[0]) > 1:
            splitting.append(delimiter)
            if sum(len(row) == len(rows[0]) for row in rows) > 0.9 * len(rows):
                return delimiter
    return splitting[0] if splitting else None


def split_rows(sample: str, delimiter: str) -> list[list[str]]:
    if len(delimiter) > 1 or delimiter not in ",;\t":
        return [line.split(delimiter) for line in sample.splitlines() if line]
    try:
        reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
        return [row for row in reader if row]
    except csv.Error:
        return []


def parquet_columns(connection: duckdb.DuckDBPyConnection, path: Path | str) -> dict[str, str]:
    """The names of the columns of a Parquet file, and their types in DuckDB."""
    rows = connection.execute(f"DESCRIBE SELECT * FROM {parquet(path)}").fetchall()
    return {row[0]: row[1] for row in rows}


@contextmanager
def unpacked(table: SourceTable) -> Iterator[IO[bytes]]:
    """The bytes of a file without its gzip; an error names the file."""
    with readable(table.path), gzip.open(table.path) if table.is_gzip else table.path.open("rb") as file:
        yield file  # type: ignore[misc]


def has_pattern(path: Path | str) -> bool:
    """Does the path contain a character that DuckDB would expand?"""
    return any(character in str(path) for character in "*?[")


def unpack(table: SourceTable, folder: Path) -> Path:
    """A plain UTF-8 or Parquet file with the table's content: itself, or a copy in `folder`.

    Unpacking a file first finds every damage, and lets DuckDB read it in parallel.
    """
    if table.is_plain:
        return table.path
    copy = folder / f"unpacked_{len(list(folder.iterdir()))}"
    with unpacked(table) as source:
        if table.is_utf8:
            with copy.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        else:
            text = io.TextIOWrapper(source, encoding=table.encoding, newline="")
            with copy.open("w", encoding="utf-8", newline="") as utf8:
                shutil.copyfileobj(text, utf8, 1 << 20)
    return copy


def line_of_row(table: SourceTable, row: int) -> int:
    """The line in the file on which row `row` (from 0) ends; blank lines are not rows.

    For error messages only: it reads the file again up to there. Parquet has rows instead of lines.
    """
    record = row + (table.kind == "text" and table.has_header)
    if table.kind not in ("text", "json lines"):
        return record + 1
    with unpacked(table) as stream:
        text = io.TextIOWrapper(stream, table.encoding, errors="replace", newline="")
        reader = csv.reader(
            itertools.islice(text, table.skip, None),
            delimiter=(table.delimiter or ",")[0],
            quotechar=table.quote or None,
            quoting=csv.QUOTE_MINIMAL if table.quote else csv.QUOTE_NONE,
        )
        records = (table.skip + reader.line_num for cells in reader if cells)
        try:
            return next(itertools.islice(records, record, None), record + 1)
        except csv.Error:
            return record + 1
