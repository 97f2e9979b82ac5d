"""What kind of table a file holds, told by its beginning.

Content decides over the file's name: gzip, Parquet and JSON are known by their first bytes; for
delimited text, the first rows tell the delimiter, the quoting and whether there is a header.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import duckdb

from bert4rec.data.columns import Role, is_known_name
from bert4rec.data.database import connect, quoted
from bert4rec.data.table_file import TableFile, open_unpacked, readable, unpack

HEAD_BYTES = 1 << 17  # enough of a file to see its shape
DELIMITERS = ("::", "\t", ",", ";", "|", " ")
USUAL_DELIMITER = {".csv": ",", ".tsv": "\t", ".dat": "::", ".inter": "\t"}
SPELLED_DELIMITER = {"tab": "\t", "\\t": "\t"}  # as typed on a command line


def inspect_file(
    path: Path,
    roles: tuple[Role, ...],
    *,
    named: Sequence[str] = (),
    delimiter: str | None = None,
    header: bool | None = None,
    encoding: str | None = None,
    connection: duckdb.DuckDBPyConnection | None = None,
) -> TableFile:
    """Look at the beginning of a file; `roles` are the columns whose names betray a header.

    Many files are quicker with one `connection` for all.
    """
    if path.is_dir():
        raise ValueError(
            f"{path} is a directory without Parquet files: name a file in it, or a pattern such as "
            "*.csv"
        )
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    with readable(path), path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with readable(path), open_unpacked(path, is_gzip) as file:
        head = file.read(HEAD_BYTES)
        is_whole = len(head) < HEAD_BYTES
    if head.startswith(b"PAR1"):
        with tempfile.TemporaryDirectory() as folder:
            plain_path = unpack(TableFile(path, "parquet", (), is_gzip), Path(folder))
            columns = parquet_columns(plain_path, path, connection)
            names, types = tuple(columns), tuple(columns.values())
            return TableFile(path, "parquet", names, is_gzip, types=types)
    if head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{path} is a zip archive: unpack it and name the file inside")
    encoding, text = _decode(path, head, encoding)
    if not text.strip():
        raise ValueError(f"{path} is empty")
    if text.lstrip()[0] in "{[" and (text.lstrip()[0] == "{" or path.suffix != ".csv"):
        return _inspect_json(path, text, is_whole, is_gzip, encoding)
    leading = re.match(r"(?:[ \t\r]*\n)*", text)
    assert leading
    sample = text[leading.end() :]
    if not is_whole:
        sample = sample[: sample.rfind("\n") + 1]
    if not sample:
        raise ValueError(
            f"{path} has a first line of more than {HEAD_BYTES >> 10} KB: "
            "a table has one interaction a line"
        )
    suffix = Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix
    return _inspect_text(
        TableFile(path, "text", (), is_gzip, encoding, skip=leading[0].count("\n")),
        sample,
        USUAL_DELIMITER.get(suffix.lower()),
        roles,
        set(named),
        SPELLED_DELIMITER.get(delimiter, delimiter) if delimiter else None,
        header,
    )


def _decode(path: Path, head: bytes, encoding: str | None) -> tuple[str, str]:
    if encoding is None:
        is_wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "utf-16" if is_wide else "utf-8"
    try:
        codec = codecs.lookup(encoding)
    except LookupError:
        raise ValueError(f"encoding {encoding!r} is unknown: try utf-8 or latin-1") from None
    # Errors are found when all rows are read, with the row's number; the shape is known without.
    text = codec.incrementaldecoder(errors="replace").decode(head)
    return codec.name, text.removeprefix("\ufeff")


def _inspect_json(path: Path, text: str, is_whole: bool, is_gzip: bool, encoding: str) -> TableFile:
    is_array = text.lstrip()[0] == "["
    if is_array:
        beginning = re.match(r"\s*\[\s*", text)
        assert beginning
        try:
            records = [json.JSONDecoder().raw_decode(text, beginning.end())[0]]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not a JSON list of objects: {error}") from None
    else:
        lines = text.splitlines() if is_whole else text.splitlines()[:-1]
        records = [record for line in lines[:200] if (record := _json_or_none(line)) is not None]
    columns = list(
        dict.fromkeys(key for record in records if isinstance(record, dict) for key in record)
    )
    if not columns:
        raise ValueError(f"{path} looks like JSON but its rows are not objects with named values")
    kind: Literal["json array", "json lines"] = "json array" if is_array else "json lines"
    return TableFile(path, kind, tuple(columns), is_gzip, encoding)


def _json_or_none(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None  # a bad row, which is reported when all rows are read


def _inspect_text(
    table: TableFile,
    sample: str,
    usual_delimiter: str | None,
    roles: tuple[Role, ...],
    named: set[str],
    delimiter: str | None,
    header: bool | None,
) -> TableFile:
    seen = _sniff_delimiter(sample, usual_delimiter)
    first_line = sample.strip("\r\n").splitlines()[0]
    chosen = delimiter or seen
    rows = split_rows(sample, chosen) if chosen else []
    if chosen is None or not rows or len(rows[0]) < 2:
        advice = (
            f"it looks separated by {seen!r}: pass delimiter={seen!r}"
            if seen
            else ("no usual delimiter is in it: pass delimiter=…")
        )
        by = f" when split by {delimiter!r}" if delimiter else ""
        raise ValueError(
            f"{table.path} has only one column{by}; its first line is {first_line[:80]!r}, {advice}"
        )
    if header is None:
        is_named = any(cell in named or is_known_name(cell, *roles) for cell in rows[0])
        header = is_named or not any(_looks_like_a_value(cell) for cell in rows[0])
    columns = rows[0] if header else [f"column{i + 1}" for i in range(len(rows[0]))]
    # Commas need quoting; elsewhere a quote is mostly a letter of a title, unless whole cells
    # stand in quotes.
    has_quotes = chosen in ",;" or any(
        len(cell) > 1 and cell[0] == cell[-1] == '"'
        for line in sample.splitlines()
        for cell in line.split(chosen)
    )
    return TableFile(
        table.path,
        "text",
        tuple(cell.strip().strip('"') for cell in columns),
        table.is_gzip,
        table.encoding,
        chosen,
        '"' if has_quotes else "",
        header,
        table.skip,
    )


def _sniff_delimiter(sample: str, usual: str | None) -> str | None:
    """The first delimiter that splits all sampled rows into equally many cells.

    A blank comes last: dates and titles hold blanks too.
    """
    order = ([usual] if usual else []) + [d for d in DELIMITERS if d != usual]
    splitting = []
    for delimiter in order:
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
        return [
            row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if row
        ]
    except csv.Error:
        return []


def _looks_like_a_value(cell: str) -> bool:
    return bool(re.fullmatch(r'"?[-+]?\d[\d.:TZeE+ -]*"?', cell.strip()))


def parquet_columns(
    path: Path, original: Path, connection: duckdb.DuckDBPyConnection | None = None
) -> dict[str, str]:
    """The names of the columns of a Parquet file, and DuckDB's types of them."""
    used = connection or connect()
    try:
        with readable(original):
            query = f"DESCRIBE SELECT * FROM read_parquet({quoted(path)}, hive_partitioning=false)"
            rows = used.execute(query).fetchall()
    finally:
        if connection is None:
            used.close()
    return {row[0]: row[1] for row in rows}
