"""Everything between the network and the app: who may send a request, how large, how slowly.

The outermost layer, in plain ASGI because it runs for every request. What can be refused is refused
before the body is read. The app gets the whole body as one message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bert4rec.serving.http import access
from bert4rec.serving.http.problems import INTERNAL, Problem, problem_of
from bert4rec.serving.http.response_sending import (
    MINIMAL_HEADERS,
    ClientTooSlow,
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

    def __init__(self, app: ASGIApp, settings: ServeSettings, keys: access.ApiKeys, service: Service) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._service = service
        self._hosts = access.AllowedHosts(settings.allowed_host or ())
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
            self.n_accepted += 1
            route = access.route_of(scope["path"])
            problem = None
            if route in access.NEED_MODEL:
                problem = self._service.refusal(self._n_active + min(self._n_reading, self._max_reading) + 1)
            if problem is None:
                await self._answer(scope, receive, send, route)
            else:
                await self._turn_away(scope, receive, send, route, problem)
        else:  # no websockets here
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    async def _turn_away(self, scope: Scope, receive: Receive, send: Send, route: str, problem: Problem) -> None:
        """Before anything else is looked at: refusing must leave the time for answering."""
        request_id = b"%s%08x" % (self._prefix, self.n_accepted & 0xFFFFFFFF)
        sender = self._sender(send, MINIMAL_HEADERS, request_id)
        await problem.response(scope, receive, sender.send)
        self._note(scope, route, request_id, sender, None)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, route: str) -> None:
        began = time.perf_counter()
        if not self._has_unread_timeout:  # with the first request, the server surely listens
            self._has_unread_timeout = True
            set_unread_timeout(self._settings.send_within)
        headers = access.read_headers(scope["headers"])
        request_id = access.valid_request_id(headers) or os.urandom(8).hex().encode()
        sender = self._sender(send, security_headers(route), request_id)
        needs_model = route in access.NEED_MODEL
        try:
            problem = self._refusal(scope, route, headers)
            if problem is None and _has_body(scope, headers):
                self._n_reading += needs_model
                try:
                    body = await self._read(receive, headers)
                finally:
                    self._n_reading -= needs_model
                if isinstance(body, Problem):
                    problem = body
                else:
                    receive = _replay(body, receive)
            app = self._app if problem is None else problem.response
            self._n_active += needs_model
            try:
                await app(scope, receive, sender.send)
            finally:
                self._n_active -= needs_model
            if not sender.is_complete:
                raise RuntimeError("the app returned without a response")
        except Exception as error:
            await self._on_error(scope, receive, sender, request_id, error)
        finally:
            self._note(scope, route, request_id, sender, time.perf_counter() - began)

    def _sender(self, send: Send, headers: list[tuple[bytes, bytes]], request_id: bytes) -> ResponseSender:
        headers = [*headers, (b"x-request-id", request_id)]
        if self._service.is_draining:
            headers.append((b"connection", b"close"))
        return ResponseSender(send, headers, self._settings.send_within)

    def _note(self, scope: Scope, route: str, request_id: bytes, sender: ResponseSender, seconds: float | None) -> None:
        """Count and log a response; without a time, one that was refused."""
        self.n_answered += 1
        method = scope["method"]
        self._service.metrics.on_response(access.method_label(method), route, sender.status, seconds)
        if self._settings.access_log:
            client = scope["client"][0] if scope.get("client") else ""
            log_access(
                request_id.decode(), method, scope["path"], sender.status, seconds or 0.0, client, sender.n_bytes
            )

    def _refusal(self, scope: Scope, route: str, headers: access.Headers) -> Problem | None:
        """Why the rest of the request need not be read."""
        method = scope["method"]
        if not scope["path"].startswith("/"):  # CONNECT host:port, OPTIONS *
            return NO_PATH
        if self._keys:
            role = access.needed_role(method, route)
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
        return b"".join(chunks)

    async def _on_error(
        self, scope: Scope, receive: Receive, sender: ResponseSender, request_id: bytes, error: Exception
    ) -> None:
        facts = {"request_id": request_id.decode(), "method": scope["method"], "path": scope["path"][:200]}
        problem = problem_of(error)
        if isinstance(error, ClientTooSlow):
            log.info("the client reads its response too slowly", extra=facts)
        elif problem is None:
            log.error("request failed", exc_info=error, extra=facts)
        if not sender.has_started:
            await (problem or INTERNAL).response(scope, receive, sender.send)
        elif not sender.is_complete and scope.get("client"):  # half a response must not look like a whole one
            host, port = scope["client"]
            reset_connection(host, int(port))


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
