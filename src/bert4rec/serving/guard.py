"""Everything between the network and the app: who may ask, how much, how slowly.

The outermost layer and a plain ASGI one, because it runs for every request. What can be refused is
refused before the body is read. The app behind gets the whole body as one message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from bert4rec.serving import access
from bert4rec.serving.exchange import Exchange
from bert4rec.serving.keys import Keys
from bert4rec.serving.logs import log_access
from bert4rec.serving.problems import INTERNAL, Problem, log_failure
from bert4rec.serving.settings import MAX_BODY, ServeSettings
from bert4rec.serving.slow_readers import give_up_on_unread_after, reset_connection

log = logging.getLogger("bert4rec.serving")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BEARER = {"www-authenticate": "Bearer"}
_CLOSE = {"connection": "close"}
KEY_MISSING = Problem(
    401, "key_missing", "This needs a key: Authorization: Bearer KEY.", headers=_BEARER
)
KEY_WRONG = Problem(401, "key_wrong", "This key is not known here.", headers=_BEARER)
ROLE_MISSING = Problem(403, "role_missing", "This needs the key of an admin.")
HOST_NOT_ALLOWED = Problem(
    403,
    "host_not_allowed",
    "Without keys only this machine is answered, under the names localhost and 127.0.0.1; "
    "--allowed-host adds a name.",
)
OTHER_SITE = Problem(
    403, "host_not_allowed", "Without keys, pages of other sites cannot change anything here."
)
NOT_JSON = Problem(
    415, "not_json", "A body has to be JSON in UTF-8, with content-type: application/json."
)
TOO_LARGE = Problem(
    413, "body_too_large", f"A body may have at most {MAX_BODY} bytes.", "body", headers=_CLOSE
)
TOO_SLOW = Problem(408, "body_too_slow", "The body did not arrive in time.", "body", headers=_CLOSE)
NO_PATH = Problem(400, "bad_request", "The address has to begin with a slash.")
CUT_OFF = Problem(400, "bad_request", "The body ended too early.", "body", headers=_CLOSE)


class Counts(Protocol):
    def on_answer(self, method: str, route: str, status: int, seconds: float) -> None: ...

    def on_refusal(self, method: str, route: str, status: int) -> None: ...


class Guarded(Protocol):
    """What the guard asks of the service behind it."""

    is_draining: bool

    @property
    def metrics(self) -> Counts: ...

    def refusal(self, n_asking: int) -> Problem | None: ...


class Guard:
    """`n_accepted - n_answered` requests are under way: none, and all is drained."""

    def __init__(self, app: App, settings: ServeSettings, keys: Keys, service: Guarded) -> None:
        self._app = app
        self._keys = keys
        self._service = service
        self._hosts = access.AllowedHosts(settings.allowed_hosts)
        self._body_within = settings.body_within
        self._send_within = settings.send_within
        self._logs_access = settings.access_log
        self._headers: dict[str, list[tuple[bytes, bytes]]] = {}
        self._gives_up_on_unread = False
        self._prefix = os.urandom(4).hex().encode()
        self._n_asking = 0  # requests to the model that were read whole and are not answered
        self._n_reading = 0  # those still being read will ask soon, unless their clients are slow,
        self._most_reading = settings.max_waiting // 2  # who must not keep everybody out
        self.n_accepted = 0
        self.n_answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            problem = None
            if access.asks_the_model(scope["path"]):
                n_reading = min(self._n_reading, self._most_reading)
                problem = self._service.refusal(self._n_asking + n_reading + 1)
            if problem is None:
                await self._answer(scope, receive, send)
            else:
                await self._turn_away(scope, send, problem)
        else:  # there is nothing here for websockets
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _turn_away(self, scope: Scope, send: Send, problem: Problem) -> None:
        """Before anything else is looked at: refusing must leave its time to answering."""
        self.n_accepted += 1
        request_id = b"%s%08x" % (self._prefix, self.n_accepted & 0xFFFFFFFF)
        headers = [*problem.raw_headers, *access.SEALED, (b"x-request-id", request_id)]
        if self._service.is_draining:
            headers.append((b"connection", b"close"))
        status, path = problem.status_code, scope["path"]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": problem.body})
        self.n_answered += 1
        self._service.metrics.on_refusal(
            access.method_of(scope["method"]), access.route_of(path), status
        )
        if self._logs_access:
            client = scope["client"][0] if scope.get("client") else ""
            facts = scope["method"], path, status, 0.0, client, len(problem.body)
            log_access(request_id.decode(), *facts)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        self.n_accepted += 1
        if not self._gives_up_on_unread:  # now that there is a request, somebody listens
            self._gives_up_on_unread = True
            give_up_on_unread_after(self._send_within)
        method, path = scope["method"], scope["path"]
        head = access.read_head(scope["headers"])
        route = access.route_of(path)
        request_id = access.kept_request_id(head) or os.urandom(8).hex().encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        exchange = Exchange(send, self._answer_headers(route, request_id), self._send_within)
        asks_the_model = access.asks_the_model(path)
        try:
            problem = self._refusal(method, path, head)
            if problem is None and _has_body(scope, head):
                self._n_reading += asks_the_model
                try:
                    read = await self._read(receive, head)
                finally:
                    self._n_reading -= asks_the_model
                if isinstance(read, bytes):
                    receive = _replay(read, receive)
                else:
                    problem = read
            if problem is not None:
                await exchange.refuse(problem)
            else:
                self._n_asking += asks_the_model
                try:
                    await self._app(scope, receive, exchange.send)
                finally:
                    self._n_asking -= asks_the_model
                if not exchange.is_complete:
                    raise RuntimeError("the app returned without an answer")
        except Exception as error:
            await self._on_failure(scope, exchange, error)
        finally:
            self.n_answered += 1
            seconds = time.perf_counter() - began
            self._service.metrics.on_answer(
                access.method_of(method), route, exchange.status, seconds
            )
            if self._logs_access:
                client = scope["client"][0] if scope.get("client") else ""
                log_access(
                    request_id.decode(),
                    method,
                    path,
                    exchange.status,
                    seconds,
                    client,
                    exchange.n_bytes,
                )

    def _answer_headers(self, route: str, request_id: bytes) -> list[tuple[bytes, bytes]]:
        fixed = self._headers.get(route)
        if fixed is None:
            fixed = self._headers[route] = access.answer_headers(route)
        headers = [*fixed, (b"x-request-id", request_id)]
        if self._service.is_draining:
            headers.append((b"connection", b"close"))
        return headers

    def _refusal(self, method: str, path: str, head: access.Head) -> Problem | None:
        """Why the rest of the request need not be read."""
        if not path.startswith("/"):  # CONNECT host:port, OPTIONS *
            return NO_PATH
        if self._keys:
            role = access.needed_role(method, path)
            if role is not None:
                key = access.offered_key(head)
                found = self._keys.role_of(key)
                if found is None:
                    return KEY_MISSING if key is None else KEY_WRONG
                if found < role:
                    return ROLE_MISSING
        elif head.get(b"host", b"") not in self._hosts:
            return HOST_NOT_ALLOWED
        elif access.comes_from_elsewhere(method, head):
            return OTHER_SITE
        return None

    async def _read(self, receive: Receive, head: access.Head) -> bytes | Problem:
        length = head.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > MAX_BODY):
            return TOO_LARGE if length.isdigit() else CUT_OFF
        if not access.is_json(head.get(b"content-type", b"")):
            return NOT_JSON
        pieces: list[bytes] = []
        n_read, n_wanted = 0, int(length) if length is not None else -1
        try:
            async with asyncio.timeout(self._body_within):
                while n_read != n_wanted:
                    message = await receive()
                    if message["type"] != "http.request":
                        return CUT_OFF
                    piece = message.get("body", b"")
                    n_read += len(piece)
                    if n_read > MAX_BODY:
                        return TOO_LARGE
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            return TOO_SLOW
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _on_failure(self, scope: Scope, exchange: Exchange, error: Exception) -> None:
        if exchange.is_complete:  # said and logged by the app's own handler
            return
        if exchange.is_too_slow:
            facts = {"request_id": scope["state"]["request_id"]}
            log.info("the client takes its answer too slowly", extra=facts)
        else:
            log_failure(scope, error)
        if not exchange.has_started:
            await exchange.refuse(INTERNAL)
        elif scope.get("client"):  # half an answer must not look like a whole one
            host, port = scope["client"]
            reset_connection((host, int(port)))


def _has_body(scope: Scope, head: access.Head) -> bool:
    if b"transfer-encoding" in head or scope.get("http_version", "1.1").startswith("2"):
        return True
    return head.get(b"content-length", b"0") != b"0"


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then what the server says next: that the client went away."""
    is_told = False

    async def replayed() -> Message:
        nonlocal is_told
        if not is_told:
            is_told = True
            return {"type": "http.request", "body": body, "more_body": False}
        while True:
            message = await receive()
            if message["type"] != "http.request":  # such would be the empty end of the body
                return message

    return replayed
