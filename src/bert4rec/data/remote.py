"""Parquet files in object storage or on the web, read by DuckDB's httpfs if the user allows it.

Only the needed columns are fetched, once, into the working folder. The cache then goes by the bytes
that arrived: names, sizes and dates of remote files can stay the same while the content changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from bert4rec.data.database import connect, copy_to_parquet, first_line, identifier, limit_memory, parquet, quoted
from bert4rec.data.table_file import SourceTable, has_pattern, parquet_columns, readable
from bert4rec.environment import Environment

BUCKETS = ("s3", "gs", "gcs", "r2")  # can be listed, so patterns work
SCHEMES = (*BUCKETS, "https")
ADVICE = "; see docs/how-to/data.md about credentials and endpoints"


def is_remote(source: object) -> bool:
    return isinstance(source, str) and "://" in source and not Path(source).exists()


def remote_tables(pattern: str, *, is_allowed: bool) -> list[SourceTable]:
    """The Parquet files at an address; those that match it by name if it is a pattern."""
    scheme = pattern.split("://")[0].casefold()
    if scheme not in SCHEMES:
        raise ValueError(
            f"{pattern}: addresses that can be read begin with {', '.join(f'{each}://' for each in SCHEMES)}"
        )
    if not (is_allowed or Environment().allow_remote):
        raise ValueError(
            f"{pattern} is not on this machine: allow it with --allow-remote, allow_remote=True or "
            "BERT4REC_ALLOW_REMOTE=1"
        )
    with _connect() as connection:
        urls = [pattern]
        if scheme in BUCKETS and has_pattern(pattern):
            with readable(pattern, ADVICE):
                found = connection.execute(f"SELECT file FROM glob({quoted(pattern)})").fetchall()
            urls = sorted(row[0] for row in found)
            if not urls:
                raise ValueError(f"no file matches {pattern}")
        tables = []
        for url in urls:
            with readable(url, ADVICE):
                columns = parquet_columns(connection, url)
            tables.append(SourceTable(url, url, "remote parquet", tuple(columns), tuple(columns.values())))
        return tables


def fetch(url: str, columns: Sequence[str], path: Path) -> None:
    """Copy these columns of a remote file to a Parquet file here, in the same row order."""
    chosen = ", ".join(map(identifier, columns))
    with _connect() as connection, readable(url, ADVICE):
        limit_memory(connection, path.parent, "512MB", None)
        copy_to_parquet(connection, f"SELECT {chosen} FROM {parquet(url)}", path)


def install_httpfs() -> None:
    """Download DuckDB's extension from its publisher into DuckDB's own folder."""
    with connect() as connection:
        try:
            connection.execute("INSTALL httpfs")
        except duckdb.Error as error:
            raise ValueError(f"httpfs cannot be installed: {first_line(error)}") from None


def _connect() -> duckdb.DuckDBPyConnection:
    """DuckDB with httpfs, which must be installed; credentials are read, never stored."""
    connection = connect()
    try:
        connection.execute("LOAD httpfs")
    except duckdb.Error:
        raise ValueError(
            f"DuckDB {duckdb.__version__} has no httpfs extension on this machine, which reads "
            "remote files: `bert4rec data install-httpfs` downloads it from DuckDB's site; or copy the files here"
        ) from None
    secret = s3_settings()
    if secret:
        with readable("S3 with the settings in the environment", ADVICE):
            settings = ", ".join(f"{name} {value}" for name, value in secret.items())
            connection.execute(f"CREATE SECRET (TYPE s3, {settings})")
    return connection


def s3_settings() -> dict[str, str]:
    """The usual environment variables of S3 as settings of a DuckDB secret."""
    names = {
        "KEY_ID": "AWS_ACCESS_KEY_ID",
        "SECRET": "AWS_SECRET_ACCESS_KEY",
        "SESSION_TOKEN": "AWS_SESSION_TOKEN",
        "REGION": "AWS_REGION" if "AWS_REGION" in os.environ else "AWS_DEFAULT_REGION",
    }
    secret = {name: quoted(os.environ[of]) for name, of in names.items() if os.environ.get(of)}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:  # MinIO, Ceph and the like: their buckets are seldom host names
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        secret |= {"ENDPOINT": quoted(parts.netloc + parts.path.rstrip("/"))}
        secret |= {"URL_STYLE": "'path'", "USE_SSL": str(parts.scheme != "http").lower()}
    return secret
