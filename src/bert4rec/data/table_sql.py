"""SQL that reads tables: any file as text, or Parquet files of one schema as one typed relation.

The rest of preparing works on `rows(user, item, time, rating, row)`. `row` counts in file order and
breaks ties in time. Parquet files of one schema are read where they are, as copying a hundred
million rows costs more than reading their columns twice. Everything else is copied as text,
which also finds malformed lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bert4rec.data.columns import Role
from bert4rec.data.database import identifier, parquet, quoted
from bert4rec.data.table_file import SourceTable, unpack

ColumnKind = Literal["text", "integer", "timestamp"]
INTEGERS = {"TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER"}
TIMESTAMPS = {"TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}  # both in microseconds
ROLES: tuple[Role, ...] = ("user", "item", "time", "rating")
FILE_BITS = 40  # a row of a Parquet file is (file << FILE_BITS) + its row in the file


def is_one_relation(tables: Sequence[SourceTable]) -> bool:
    """Are these plain Parquet files of one schema?"""

    def schema(table: SourceTable) -> object:
        used = sorted((role, table.columns[at], table.types[at]) for role, at in table.roles.items())
        return table.columns, used

    are_plain = all(table.kind == "parquet" and table.is_plain for table in tables)
    return are_plain and all(schema(table) == schema(tables[0]) for table in tables[1:])


def kinds_of(table: SourceTable) -> dict[Role, ColumnKind]:
    """The columns of a typed relation that are not text."""
    kinds: dict[Role, ColumnKind] = {}
    for role in ("user", "item", "time"):
        at = table.roles.get(role)
        if at is not None and table.types[at] in INTEGERS:
            kinds[role] = "integer"
        elif role == "time" and at is not None and table.types[at] in TIMESTAMPS:
            kinds[role] = "timestamp"
    return kinds


def parquet_rows(tables: Sequence[SourceTable], first_file: int = 0) -> str:
    """The query of `rows` over Parquet files of one schema, numbered from `first_file`."""
    table, kinds = tables[0], kinds_of(tables[0])
    cells = []
    for role in ROLES:
        at = table.roles.get(role)
        column = "NULL" if at is None else identifier(table.columns[at])
        if at is None or table.types[at] == "VARCHAR" or kinds.get(role) == "timestamp":
            cell = column
        elif kinds.get(role) == "integer":
            cell = f"CAST({column} AS BIGINT)"
        else:
            cell = _parquet_text(column, is_id=at in table.id_positions)
        cells.append(f"{cell} AS {identifier(role)}")
    files = parquet(*(each.path for each in tables), options=", file_row_number=true")
    return (
        f"SELECT {', '.join(cells)}, ((file_index::BIGINT + {first_file}) << {FILE_BITS}) "
        f"+ file_row_number AS row FROM {files}"
    )


def text_relation(table: SourceTable, positions: Sequence[int | None], folder: Path, rejects: str) -> str:
    """SQL that reads the columns at `positions` as text, in file order; NULL for None."""
    plain, names = unpack(table, folder), [identifier(name) for name in table.columns]
    path = quoted(plain)
    if table.kind == "text":
        cells = [f"c{i}" for i in range(len(table.columns))]
        types = ", ".join(f"'{cell}': 'VARCHAR'" for cell in cells)
        source = (
            f"read_csv({path}, auto_detect=false, columns={{{types}}}, header={table.has_header}, "
            f"skip={table.skip}, compression='none', "
            f"delim={quoted(table.delimiter)}, quote={quoted(table.quote)}, "
            f"escape={quoted(table.quote)}, store_rejects=true, rejects_limit=0, "
            f"rejects_table={quoted(rejects)}, rejects_scan={quoted(rejects + '_scan')})"
        )
    elif table.kind == "parquet":
        cells = [_parquet_text(name, is_id=at in table.id_positions) for at, name in enumerate(names)]
        source = parquet(plain)
    else:
        is_lines = table.kind == "json lines"
        types = ", ".join(
            f"{quoted(table.columns[at])}: '{'JSON' if at in table.id_positions else 'VARCHAR'}'"
            for at in positions
            if at is not None
        )
        # A line that is not JSON becomes a row of NULLs, and so a bad row with its number.
        source = (
            f"read_json({path}, format='{'newline_delimited' if is_lines else 'array'}', "
            f"records=true, columns={{{types}}}, ignore_errors={is_lines}, "
            "compression='none')"
        )
        cells = [_json_id(name) if at in table.id_positions else name for at, name in enumerate(names)]
    chosen = ["NULL" if at is None else cells[at] for at in positions]
    return f"SELECT {', '.join(chosen)} FROM {source}"


def _json_id(column: str) -> str:
    """2.0 is the id 2, as everywhere; objects and lists are not ids."""
    return (
        f"CASE json_type({column}) WHEN 'OBJECT' THEN NULL WHEN 'ARRAY' THEN NULL "
        f"WHEN 'DOUBLE' THEN regexp_replace({column} ->> '$', '\\.0+$', '') "
        f"ELSE {column} ->> '$' END"
    )


def _parquet_text(column: str, *, is_id: bool) -> str:
    """Integers with gaps arrive as floats: 3.0 is the id 3, and NaN is blank."""
    nested = f"WHEN regexp_matches(typeof({column}), '^(STRUCT|MAP|UNION)|\\]$') THEN NULL "
    return (
        f"CASE {nested if is_id else ''}"
        f"WHEN typeof({column}) NOT IN ('DOUBLE', 'FLOAT') THEN CAST({column} AS VARCHAR) "
        f"WHEN isnan(TRY_CAST({column} AS DOUBLE)) THEN NULL "
        f"WHEN TRY_CAST({column} AS DOUBLE) = trunc(TRY_CAST({column} AS DOUBLE)) "
        f"THEN coalesce(CAST(TRY_CAST({column} AS BIGINT) AS VARCHAR), CAST({column} AS VARCHAR)) "
        f"ELSE CAST({column} AS VARCHAR) END"
    )
