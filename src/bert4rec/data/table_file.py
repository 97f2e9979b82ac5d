"""One table in a file: opening it, unpacking it, and saying in one sentence what is wrong with it.

Compressed or differently encoded files are unpacked next to the output first: that finds every
damage, and DuckDB then reads in parallel.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import duckdb


@dataclass(frozen=True)
class TableFile:
    path: Path
    kind: Literal["text", "json lines", "json array", "parquet"]
    columns: tuple[str, ...]
    is_gzip: bool = False
    encoding: str = "utf-8"
    delimiter: str = ""
    quote: str = ""
    has_header: bool = True
    skip: int = 0  # blank lines before the first row
    types: tuple[str, ...] = ()  # DuckDB's, of the columns of a Parquet file


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Whatever goes wrong with a file becomes one sentence that names it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path} is a damaged or truncated gzip file: fetch it again") from None
    except UnicodeError as error:
        raise ValueError(f"{path} is not {getattr(error, 'encoding', 'text')}: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except duckdb.OutOfMemoryException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"memory_limit is too small for {path}: raise it ({reason})") from None
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        if "state machine" in reason:  # DuckDB's words for a line that ends unlike the others
            reason = "its lines end in different ways (some in CR LF): save it with one kind"
        if "UTF-8" in reason:
            reason = f"{reason.rstrip(' .')}; name its encoding, as in encoding='latin-1'"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def open_unpacked(path: Path, is_gzip: bool) -> IO[bytes]:
    return gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[return-value]


def has_pattern(path: Path) -> bool:
    """Is there a letter in the path that DuckDB would expand?"""
    return any(letter in str(path) for letter in "*?[")


def unpack(table: TableFile, folder: Path) -> Path:
    """A plain UTF-8 or Parquet file with the table's content: itself, or a copy in `folder`."""
    is_plain = not table.is_gzip and (table.kind == "parquet" or table.encoding == "utf-8")
    if is_plain and not has_pattern(table.path):
        return table.path
    copy = folder / f"unpacked_{len(list(folder.iterdir()))}"
    with readable(table.path), open_unpacked(table.path, table.is_gzip) as source:
        if table.kind == "parquet" or table.encoding == "utf-8":
            with copy.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        else:
            text = io.TextIOWrapper(source, encoding=table.encoding, newline="")
            with copy.open("w", encoding="utf-8", newline="") as utf8:
                shutil.copyfileobj(text, utf8, 1 << 20)
    return copy


def line_of_row(table: TableFile, row: int) -> int:
    """The line in the file on which row `row` (from 0) ends; blank lines are no rows.

    For error messages only: it reads the file again up to there. Parquet has rows instead of lines.
    """
    record = row + (table.kind == "text" and table.has_header)
    if table.kind not in ("text", "json lines"):
        return record + 1
    with readable(table.path), open_unpacked(table.path, table.is_gzip) as stream:
        text = io.TextIOWrapper(stream, table.encoding, errors="replace", newline="")
        lines = itertools.islice(text, table.skip, None)
        if table.quote:
            reader = csv.reader(lines, delimiter=table.delimiter[0], quotechar=table.quote)
            records = (table.skip + reader.line_num for cells in reader if cells)
        else:
            numbered = enumerate(lines, table.skip + 1)
            records = (number for number, line in numbered if line.strip("\r\n"))
        try:
            return next(itertools.islice(records, record, None), record + 1)
        except csv.Error:
            return record + 1
