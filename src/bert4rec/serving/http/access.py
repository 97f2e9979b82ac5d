"""Who may send which request: API keys and roles, host names, and what the headers claim.

Header values are compared as bytes, so that no byte in them can make reading fail.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path

log = logging.getLogger("bert4rec.serving")

Headers = Mapping[bytes, bytes]


class Role(IntEnum):
    """Each role may do all that the ones below it may."""

    READ = 1
    ADMIN = 2


KEY_VARIABLES = {"BERT4REC_READ_KEY": Role.READ, "BERT4REC_ADMIN_KEY": Role.ADMIN}
MIN_KEY_LENGTH, MAX_KEY_LENGTH = 16, 512

_USED_HEADERS = frozenset(
    b"host origin authorization x-api-key x-request-id content-type content-length transfer-encoding".split()
)
_USER, _USERS_ITEMS = "/v1/users/{user}", "/v1/users/{user}/recommendations"
_OPEN = frozenset(("/", "/healthz", "/readyz", "/docs", "/openapi.json", "/web/*", "/docs/*"))
_READING_POSTS = frozenset(("/v1/recommend", "/v1/recommend/batch", "/v1/explain"))
_CHANGING_METHODS = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_METHODS = _CHANGING_METHODS | {"GET", "HEAD", "OPTIONS"}
_PATHS = _OPEN | _READING_POSTS | {"/metrics", "/v1/events", "/v1/users", "/v1/items", "/v1/model", "/v1/admin/reload"}
# These wait in the model's queue, so that a full queue can refuse them unread.
NEED_MODEL = frozenset(("/v1/recommend", "/v1/recommend/batch", _USERS_ITEMS))
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(rb":[0-9]{1,5}$")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_UTF8 = re.compile(rb'charset\s*=\s*"?utf-?8"?')


class ApiKeys:
    """SHA-256 digests of keys with their roles; the keys themselves are not kept."""

    def __init__(self, roles: Mapping[bytes, Role]) -> None:
        self._roles = list(roles.items())

    @classmethod
    def load(cls, file: Path | None, environment: Mapping[str, str] = os.environ) -> ApiKeys:
        """From a file (lines of `read KEY` or `admin KEY`) and from the environment."""
        found = [] if file is None else _read_key_file(file)
        for name, role in KEY_VARIABLES.items():
            keys = [key.strip() for key in environment.get(name, "").split(",")]
            found += [(name, role, key) for key in keys if key]
        roles: dict[bytes, Role] = {}
        for where, role, key in found:
            _check_key(where, key)
            if roles.setdefault(_digest(key), role) != role:
                raise ValueError(f"{where}: the same key has both roles, read and admin; use two keys")
        return cls(roles)

    def __bool__(self) -> bool:
        return bool(self._roles)

    def role_of(self, key: str | None) -> Role | None:
        """The highest role of `key`. It is compared with all keys, in constant time."""
        digest = _digest(key or "")
        found = 0
        for known, role in self._roles:
            found = max(found, role * hmac.compare_digest(known, digest))
        return Role(found) if found else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _check_key(where: str, key: str) -> None:
    is_sane = key.isascii() and key.isprintable() and not set(key) & {" ", ","}
    if not (is_sane and MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH):
        raise ValueError(
            f"{where}: a key needs {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} characters that fit in a header, as in "
            "the output of `openssl rand -hex 24`"
        )


def _read_key_file(file: Path) -> list[tuple[str, Role, str]]:
    """(where, role, key) for each line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        is_open_to_all = bool(file.stat().st_mode & stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"keys: cannot read {file} ({reason})") from None
    if is_open_to_all:  # no reason to refuse: secrets of containers are often mounted like this
        log.warning("every user of this machine can read the key file: chmod 600 it")
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


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The headers used here. A repeated one is joined, and so matches nothing below."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _USED_HEADERS:
            found[name] = found[name] + b"," + value if name in found else value
    return found


def needed_role(method: str, route: str) -> Role | None:
    """None: open to everyone. A changing method needs an admin, except for the listed routes."""
    if route in _OPEN:
        return None
    is_change = method in _CHANGING_METHODS and route not in _READING_POSTS
    return Role.ADMIN if is_change else Role.READ


def offered_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return key.strip().decode("latin-1") or None


class AllowedHosts:
    """Host names under which a service without keys answers.

    A web page can make its own name point to this machine (DNS rebinding), and could then read
    responses as its own. Its name in the Host header gives it away.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().encode("latin-1") for name in (*_THIS_MACHINE, *names))

    def __contains__(self, host: bytes) -> bool:
        return host in self._names or _PORT.sub(b"", host.lower()) in self._names


def is_cross_site_change(method: str, headers: Headers) -> bool:
    """Does a browser say that a page of another site wants to change something here?"""
    origin = headers.get(b"origin")
    if origin is None or method not in _CHANGING_METHODS:
        return False
    return origin.partition(b"://")[2] != headers.get(b"host")


def is_json(content_type: bytes) -> bool:
    kind, *parameters = content_type.lower().split(b";")
    return kind.strip() == b"application/json" and all(
        _UTF8.fullmatch(each.strip()) or not each.strip().startswith(b"charset") for each in parameters
    )


def valid_request_id(headers: Headers) -> bytes | None:
    given = headers.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else None


def route_of(path: str) -> str:
    """One of a few, however many ids there are."""
    if path in _PATHS:
        return path
    if path.startswith("/v1/users/"):
        return _USERS_ITEMS if path.endswith("/recommendations") else _USER
    if path.startswith("/v1/items/") and path.endswith("/similar"):
        return "/v1/items/{item}/similar"
    folder = path[: path.find("/", 1) + 1] + "*"
    return folder if folder in _OPEN else "other"


def method_label(method: str) -> str:
    return method if method in _METHODS else "other"
