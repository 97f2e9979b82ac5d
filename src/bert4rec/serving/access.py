"""What the head of a request says: where it goes, who sends it, what its body claims to be.

Header values are compared as bytes, so that no byte in them can make reading fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from bert4rec.serving.keys import Role

PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCS_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    b"img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
NO_PAGE_POLICY = b"default-src 'none'; frame-ancestors 'none'"

Head = Mapping[bytes, bytes]

_WANTED = frozenset(
    b"host origin authorization x-api-key x-request-id content-type content-length "
    b"transfer-encoding".split()
)
_OPEN = frozenset(("/", "/healthz", "/readyz", "/docs", "/openapi.json"))
_OPEN_FOLDERS = ("/web/", "/docs/")
_QUESTIONS = frozenset(("/v1/recommend", "/v1/recommend/batch", "/v1/explain"))  # POST, yet reading
_CHANGES = frozenset(("POST", "PUT", "PATCH", "DELETE"))
_METHODS = _CHANGES | {"GET", "HEAD", "OPTIONS"}
_ROUTES = (
    _OPEN
    | _QUESTIONS
    | {"/metrics", "/v1/events", "/v1/users", "/v1/items", "/v1/model", "/v1/admin/reload"}
)
_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_PORT = re.compile(rb":[0-9]{1,5}$")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_UTF8 = re.compile(rb'charset\s*=\s*"?utf-?8"?')


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> Head:
    """The headers that matter here. One that came twice is joined, and so fits nothing below."""
    head: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _WANTED:
            head[name] = head[name] + b"," + value if name in head else value
    return head


def needed_role(method: str, path: str) -> Role | None:
    """None is open to everyone. A change needs an admin unless it is listed as a question."""
    if path in _OPEN or path.startswith(_OPEN_FOLDERS):
        return None
    return Role.ADMIN if method in _CHANGES and path not in _QUESTIONS else Role.READ


def offered_key(head: Head) -> str | None:
    scheme, _, key = head.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = head.get(b"x-api-key", b"")
    return key.strip().decode("latin-1") or None


class AllowedHosts:
    """Names under which a service without keys answers.

    A page of another site can make its own name point to this machine (DNS rebinding), and then
    reads answers as if they were its own; its name in the Host header gives it away.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(name.lower().encode("latin-1") for name in (*_THIS_MACHINE, *names))

    def __contains__(self, host: bytes) -> bool:
        return host in self._names or _PORT.sub(b"", host.lower()) in self._names


def comes_from_elsewhere(method: str, head: Head) -> bool:
    """Does a browser say that a page of another site wants to change something here?"""
    origin = head.get(b"origin")
    if origin is None or method not in _CHANGES:
        return False
    return origin.partition(b"://")[2] != head.get(b"host")


def is_json(content_type: bytes) -> bool:
    kind, *parameters = content_type.lower().split(b";")
    return kind.strip() == b"application/json" and all(
        _UTF8.fullmatch(each.strip()) or not each.strip().startswith(b"charset")
        for each in parameters
    )


def kept_request_id(head: Head) -> bytes | None:
    given = head.get(b"x-request-id", b"")
    return given if _REQUEST_ID.fullmatch(given) else None


def asks_the_model(path: str) -> bool:
    """Is this answered from the queue, so that a full queue can refuse it unread?"""
    return path in ("/v1/recommend", "/v1/recommend/batch") or (
        path.startswith("/v1/users/") and path.endswith("/recommendations")
    )


def route_of(path: str) -> str:
    """One of few names, however many ids there are: a label for metrics."""
    if path in _ROUTES:
        return path
    if path.startswith("/v1/users/"):
        is_question = path.endswith("/recommendations")
        return "/v1/users/{user}/recommendations" if is_question else "/v1/users/{user}"
    if path.startswith("/v1/items/") and path.endswith("/similar"):
        return "/v1/items/{item}/similar"
    folder = next((folder for folder in _OPEN_FOLDERS if path.startswith(folder)), None)
    return "other" if folder is None else f"{folder}*"


def method_of(method: str) -> str:
    return method if method in _METHODS else "other"


# The little that an answer needs which holds nothing: refusing has to be cheap.
SEALED = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


def answer_headers(route: str) -> list[tuple[bytes, bytes]]:
    """What every answer of a route carries; a page may be kept, but is asked for again first."""
    is_page = route in ("/", "/web/*")
    is_docs = route in ("/docs", "/docs/*")
    policy = PAGE_POLICY if is_page else DOCS_POLICY if is_docs else NO_PAGE_POLICY
    return [
        (b"content-security-policy", policy),
        (b"cache-control", b"no-cache" if is_page or is_docs else b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
    ]
