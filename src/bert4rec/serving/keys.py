"""API keys: who may ask, and who may also write events, erase users and reload models."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path

log = logging.getLogger("bert4rec.serving")

MIN_LENGTH, MAX_LENGTH = 16, 512


class Role(IntEnum):
    """Each role may do all that the ones below it may."""

    READ = 1
    ADMIN = 2


VARIABLES = {"BERT4REC_READ_KEY": Role.READ, "BERT4REC_ADMIN_KEY": Role.ADMIN}


class Keys:
    """SHA-256 digests of keys with their roles; the keys themselves are not kept."""

    def __init__(self, roles: Mapping[bytes, Role]) -> None:
        self._roles = list(roles.items())

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> Keys:
        """From a file (a line each, `read KEY` or `admin KEY`) and from the environment."""
        roles: dict[bytes, Role] = {}
        if file is not None:
            _add(roles, _from_file(file))
        for name, role in VARIABLES.items():
            parts = [part.strip() for part in environment.get(name, "").split(",")]
            _add(roles, ((name, role, part) for part in parts if part))
        return cls(roles)

    def __bool__(self) -> bool:
        return bool(self._roles)

    def role_of(self, key: str | None) -> Role | None:
        """The highest role of `key`. All keys are compared, equal or not, in constant time."""
        digest = _digest(key or "")
        found = 0
        for known, role in self._roles:
            found = max(found, role * hmac.compare_digest(known, digest))
        return Role(found) if found else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _add(roles: dict[bytes, Role], found: Iterable[tuple[str, Role, str]]) -> None:
    for where, role, key in found:
        if not MIN_LENGTH <= len(key) <= MAX_LENGTH:
            raise ValueError(
                f"{where}: a key has {len(key)} characters; it needs {MIN_LENGTH} to {MAX_LENGTH}: "
                "make one with `openssl rand -hex 24`"
            )
        if not (key.isascii() and key.isprintable()) or set(key) & {" ", ","}:
            raise ValueError(
                f"{where}: a key has characters that do not fit in a header; use letters and "
                "digits, as `openssl rand -hex 24` gives them"
            )
        if roles.setdefault(_digest(key), role) != role:
            raise ValueError(f"{where}: the same key is there for read and for admin; use two keys")


def _from_file(file: Path) -> list[tuple[str, Role, str]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        is_open_to_all = bool(file.stat().st_mode & stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"keys: cannot read {file} ({reason})") from None
    if is_open_to_all:  # secrets of containers are often mounted so: no reason to refuse
        log.warning("every user of this machine can read the file of keys: chmod 600 it")
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(words) != 2 or words[0] not in ("read", "admin"):
            raise ValueError(f"{where}: a line should be `read KEY` or `admin KEY`")
        found.append((where, Role[words[0].upper()], words[1]))
    if not found:
        raise ValueError(f"keys: {file} has no key; add a line `read KEY` or `admin KEY`")
    return found
