"""Everything between the network and the app: who may send a request, how large, how slowly.

The outermost layer, in plain ASGI because it runs for every request. What can be refused is refused
before the body is read. The app gets the whole body as one message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from bert4rec.serving.http import access
from bert4rec.serving.http.problems import INTERNAL, Problem, log_failure
from bert4rec.serving.http.response_sending import (
    MINIMAL_HEADERS,
    ResponseSender,
    reset_connection,
    security_headers,
    set_unread_timeout,
)
from bert4rec.serving.json_logs import log_access
from bert4rec.serving.serve_settings import MAX_BODY, ServeSettings

if TYPE_CHECKING:
    from bert4rec.serving.service import Service

log = logging.getLogger("bert4rec.serving")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_BEARER = {"www-authenticate": "Bearer"}
_CLOSE = {"connection": "close"}
KEY_MISSING = Problem(401, "key_missing", "This needs a key: Authorization: Bearer KEY.", headers=_BEARER)
KEY_WRONG = Problem(401, "key_wrong", "This key is not known here.", headers=_BEARER)
ROLE_MISSING = Problem(403, "role_missing", "This needs an admin's key.")
HOST_NOT_ALLOWED = Problem(
    403,
    "host_not_allowed",
    "Without keys, only requests to localhost or 127.0.0.1 are answered; --allowed-host adds a host name.",
)
OTHER_SITE = Problem(403, "host_not_allowed", "Without keys, pages of other sites cannot change anything here.")
NOT_JSON = Problem(415, "not_json", "A body must be JSON in UTF-8, with content-type: application/json.")
TOO_LARGE = Problem(413, "body_too_large", f"A body may have at most {MAX_BODY} bytes.", "body", headers=_CLOSE)
TOO_SLOW = Problem(408, "body_too_slow", "The body did not arrive in time.", "body", headers=_CLOSE)
NO_PATH = Problem(400, "bad_request", "The path must begin with a slash.")
CUT_OFF = Problem(400, "bad_request", "The body ended too early.", "body", headers=_CLOSE)


class Guard:
    """`n_accepted - n_answered` requests are in progress: 0 when everything is drained."""

    def __init__(self, app: App, settings: ServeSettings, keys: access.ApiKeys, service: Service) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._service = service
        self._hosts = access.AllowedHosts(settings.allowed_hosts)
        self._headers: dict[str, list[tuple[bytes, bytes]]] = {}
        self._has_unread_timeout = False
        self._prefix = os.urandom(4).hex().encode()
        self._n_active = 0  # requests to the model that were read and are not answered yet
        self._n_reading = 0  # their bodies are being read: they will be active soon. But slow
        self._max_reading = settings.max_waiting // 2  # clients must not keep everybody else out
        self.n_accepted = 0
        self.n_answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            problem = None
            if access.needs_model(scope["path"]):
                n_reading = min(self._n_reading, self._max_reading)
                problem = self._service.refusal(self._n_active + n_reading + 1)
            if problem is None:
                await self._answer(scope, receive, send)
            else:
                await self._turn_away(scope, send, problem)
        else:  # no websockets here
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _turn_away(self, scope: Scope, send: Send, problem: Problem) -> None:
        """Before anything else is looked at: refusing must leave the time for answering."""
        self.n_accepted += 1
        request_id = b"%s%08x" % (self._prefix, self.n_accepted & 0xFFFFFFFF)
        headers = [*problem.raw_headers, *MINIMAL_HEADERS, *self._own_headers(request_id)]
        status = problem.status_code
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": problem.body})
        self.n_answered += 1
        method, route = access.method_label(scope["method"]), access.route_label(scope["path"])
        self._service.metrics.on_refusal(method, route, status)
        self._log_access(scope, request_id, status, 0.0, len(problem.body))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        self.n_accepted += 1
        if not self._has_unread_timeout:  # with the first request, the server surely listens
            self._has_unread_timeout = True
            set_unread_timeout(self._settings.send_within)
        path = scope["path"]
        headers = access.read_headers(scope["headers"])
        route = access.route_label(path)
        request_id = access.valid_request_id(headers) or os.urandom(8).hex().encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        if route not in self._headers:
            self._headers[route] = security_headers(route)
        response_headers = [*self._headers[route], *self._own_headers(request_id)]
        sender = ResponseSender(send, response_headers, self._settings.send_within)
        needs_model = access.needs_model(path)
        try:
            problem = self._refusal(scope["method"], path, headers)
            if problem is None and _has_body(scope, headers):
                self._n_reading += needs_model
                try:
                    body = await self._read(receive, headers)
                finally:
                    self._n_reading -= needs_model
                if isinstance(body, bytes):
                    receive = _replay(body, receive)
                else:
                    problem = body
            if problem is not None:
                await sender.send_problem(problem)
            else:
                self._n_active += needs_model
                try:
                    await self._app(scope, receive, sender.send)
                finally:
                    self._n_active -= needs_model
                if not sender.is_complete:
                    raise RuntimeError("the app returned without a response")
        except Exception as error:
            await self._on_failure(scope, sender, error)
        finally:
            self.n_answered += 1
            seconds = time.perf_counter() - began
            method = access.method_label(scope["method"])
            self._service.metrics.on_response(method, route, sender.status, seconds)
            self._log_access(scope, request_id, sender.status, seconds, sender.n_bytes)

    def _own_headers(self, request_id: bytes) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-request-id", request_id)]
        if self._service.is_draining:
            headers.append((b"connection", b"close"))
        return headers

    def _log_access(self, scope: Scope, request_id: bytes, status: int, seconds: float, n_bytes: int) -> None:
        if self._settings.access_log:
            client = scope["client"][0] if scope.get("client") else ""
            method, path = scope["method"], scope["path"]
            log_access(request_id.decode(), method, path, status, seconds, client, n_bytes)

    def _refusal(self, method: str, path: str, headers: access.Headers) -> Problem | None:
        """Why the rest of the request need not be read."""
        if not path.startswith("/"):  # CONNECT host:port, OPTIONS *
            return NO_PATH
        if self._keys:
            role = access.needed_role(method, path)
            if role is not None:
                key = access.offered_key(headers)
                found = self._keys.role_of(key)
                if found is None:
                    return KEY_MISSING if key is None else KEY_WRONG
                if found < role:
                    return ROLE_MISSING
        elif headers.get(b"host", b"") not in self._hosts:
            return HOST_NOT_ALLOWED
        elif access.is_cross_site_change(method, headers):
            return OTHER_SITE
        return None

    async def _read(self, receive: Receive, headers: access.Headers) -> bytes | Problem:
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or int(length) > MAX_BODY):
            return TOO_LARGE if length.isdigit() else CUT_OFF
        if not access.is_json(headers.get(b"content-type", b"")):
            return NOT_JSON
        chunks: list[bytes] = []
        n_read, n_expected = 0, int(length) if length is not None else -1
        try:
            async with asyncio.timeout(self._settings.body_within):
                while n_read != n_expected:
                    message = await receive()
                    if message["type"] != "http.request":
                        return CUT_OFF
                    chunk = message.get("body", b"")
                    n_read += len(chunk)
                    if n_read > MAX_BODY:
                        return TOO_LARGE
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            return TOO_SLOW
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _on_failure(self, scope: Scope, sender: ResponseSender, error: Exception) -> None:
        if sender.is_complete:  # the app's own handler has answered and logged it
            return
        if sender.is_too_slow:
            facts = {"request_id": scope["state"]["request_id"]}
            log.info("the client reads its response too slowly", extra=facts)
        else:
            log_failure(scope, error)
        if not sender.has_started:
            await sender.send_problem(INTERNAL)
        elif scope.get("client"):  # half a response must not look like a whole one
            host, port = scope["client"]
            reset_connection((host, int(port)))


def _has_body(scope: Scope, headers: access.Headers) -> bool:
    if b"transfer-encoding" in headers or scope.get("http_version", "1.1").startswith("2"):
        return True
    return headers.get(b"content-length", b"0") != b"0"


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then what the server says next: that the client has gone."""
    is_sent = False

    async def replayed() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the empty end of the body is skipped
                return message

    return replayed
