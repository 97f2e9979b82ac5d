"""Parquet files in object storage or on the web, read by DuckDB's httpfs if the user allows it.

Only the needed columns are fetched, once, into the working folder. The cache then goes by the bytes
that arrived: names, sizes and dates of remote files can stay the same while the content changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import duckdb

from bert4rec.data.database import connect, copy_to_parquet, first_line, identifier, limit_memory, parquet, quoted
from bert4rec.environment import Environment

BUCKETS = ("s3", "gs", "gcs", "r2")  # can be listed, so patterns work
SCHEMES = (*BUCKETS, "https")
ALLOW = "allow it with --allow-remote, allow_remote=True or BERT4REC_ALLOW_REMOTE=1"
INSTALL = "bert4rec data install-httpfs"


@dataclass(frozen=True)
class RemoteFile:
    url: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    kind: str = "parquet"
    has_header: bool = True

    @property
    def path(self) -> str:
        return self.url


def is_remote(source: object) -> bool:
    return isinstance(source, str) and "://" in source and not Path(source).exists()


def remote_files(pattern: str, *, is_allowed: bool) -> list[RemoteFile]:
    """The Parquet files at an address; those that match it by name if it is a pattern."""
    scheme = pattern.split("://")[0].casefold()
    if scheme not in SCHEMES:
        raise ValueError(
            f"{pattern}: addresses that can be read begin with {', '.join(f'{each}://' for each in SCHEMES)}"
        )
    if not (is_allowed or Environment().allow_remote):
        raise ValueError(f"{pattern} is not on this machine: {ALLOW}")
    with _connect() as connection, _in_one_sentence(pattern):
        urls = [pattern]
        if scheme in BUCKETS and any(letter in pattern for letter in "*?["):
            found = connection.execute(f"SELECT file FROM glob({quoted(pattern)})").fetchall()
            urls = sorted(row[0] for row in found)
            if not urls:
                raise ValueError(f"no file matches {pattern}")
        return [_described(connection, url) for url in urls]


def fetch(file: RemoteFile, columns: Sequence[str], path: Path) -> None:
    """Copy these columns of a remote file to a Parquet file here, in the same row order."""
    chosen = ", ".join(map(identifier, columns))
    with _connect() as connection, _in_one_sentence(file.url):
        limit_memory(connection, path.parent, "512MB", None)
        copy_to_parquet(connection, f"SELECT {chosen} FROM {parquet(file.url)}", path)


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
        connection.close()
        raise ValueError(
            f"DuckDB {duckdb.__version__} has no httpfs extension on this machine, which reads "
            f"remote files: `{INSTALL}` downloads it from DuckDB's site; or copy the files here"
        ) from None
    secret = s3_settings()
    if secret:
        with _in_one_sentence("the S3 settings in the environment"):
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


def _described(connection: duckdb.DuckDBPyConnection, url: str) -> RemoteFile:
    with _in_one_sentence(url):
        rows = connection.execute(f"DESCRIBE SELECT * FROM {parquet(url)}").fetchall()
    return RemoteFile(url, tuple(row[0] for row in rows), tuple(row[1] for row in rows))


@contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    """Turns whatever DuckDB reports about an address into one sentence that names it."""
    try:
        yield
    except duckdb.Error as error:
        raise ValueError(
            f"{what} cannot be read as Parquet: {first_line(error)}; see docs/how-to/data.md about "
            "credentials and endpoints"
        ) from None
