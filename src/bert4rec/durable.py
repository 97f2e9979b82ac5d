"""Files and directories that are complete or absent, and whose damage is detected.

A directory is written under a temporary name, flushed to disk and renamed. Its `manifest.json`
holds the SHA-256 and the size of every file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

MANIFEST = "manifest.json"
LOCK = ".lock"


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[int]:
    """An exclusive lock on a directory, as a file descriptor that child processes may inherit.

    It is released when the last process that holds it ends, however it ends. POSIX only.
    """
    import fcntl

    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is at work in {directory}: wait for it, or give another --out") from None
        yield file.fileno()


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; on success the file atomically becomes `path`."""
    # A process on another machine that writes here may have the same number.
    name = f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    temporary = path.with_name(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _flush_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file atomically: after a crash it has the new content or the old one."""
    with new_file(path) as temporary:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory to fill; on success it gets a manifest and its final name."""
    assert not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had our number
    temporary.mkdir()
    try:
        yield temporary
        write_manifest(temporary)
        temporary.rename(path)
        _flush_directory(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_manifest(directory: Path, names: Iterable[str] | None = None) -> None:
    """Write the sums of these files, or of all files in the directory; do it last."""
    files = {}
    for name in sorted(names or (path.name for path in directory.iterdir())):
        with (directory / name).open("rb+") as file:
            os.fsync(file.fileno())
        files[name] = {"sha256": sha256(directory / name), "bytes": (directory / name).stat().st_size}
    write_file(directory / MANIFEST, json.dumps({"files": files}, indent=2))


def verify_manifest(directory: Path) -> None:
    """Raise a ValueError that names the first file that is missing, truncated or changed."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in manifest["files"].items()}
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {MANIFEST}: it is not complete") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{directory / MANIFEST} is damaged: copy the directory again") from None
    for name, (n_bytes, digest) in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: copy the whole directory again")
        if path.stat().st_size != n_bytes:
            raise ValueError(
                f"{path} is damaged: it has {path.stat().st_size:,} bytes instead of "
                f"{n_bytes:,}; copy the directory again"
            )
        if sha256(path) != digest:
            raise ValueError(f"{path} is damaged: its SHA-256 differs; copy the directory again")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_directory(directory: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
