"""The guard around a small app, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from bert4rec.serving.http import problems
from bert4rec.serving.http.access import ApiKeys
from bert4rec.serving.http.guard import Guard
from bert4rec.serving.http.problems import Problem
from bert4rec.serving.serve_settings import ServeSettings

READ, ADMIN = "r" * 20, "a" * 20


class Event(BaseModel):
    model_config = ConfigDict(extra="forbid")
    user: Annotated[StrictStr | StrictInt, Field(union_mode="left_to_right")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")
    k: Annotated[StrictInt, Field(le=1000)] = 10
    histories: list[list[StrictStr | StrictInt]] = []
    events: list[Event] = []


def make_app() -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    problems.add_handlers(app)

    @app.post("/v1/recommend")
    async def recommend(body: Body) -> dict[str, int]:
        return {"k": body.k}

    @app.get("/v1/items")
    async def items(limit: Annotated[int, Query(ge=1)] = 1) -> str:
        return "x" * limit

    @app.get("/v1/model")
    async def model() -> None:
        raise RuntimeError("SECRET")

    @app.get("/v1/users")
    async def users() -> None:
        raise Problem(503, "overloaded", "é\n" * 10_000, "w" * 1000, {"Retry-After": "2"})

    return app


async def always_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class Service:
    """Only what the guard needs of a service."""

    def __init__(self) -> None:
        self.is_draining = False
        self.metrics = self
        self.refused: Problem | None = None
        self.answers: list[tuple[str, str, int, float | None]] = []

    def refusal(self, n_active: int) -> Problem | None:
        return self.refused

    def on_response(self, method: str, route: str, status: int, seconds: float | None) -> None:
        self.answers.append((method, route, status, seconds))


Headers = Iterable[tuple[bytes, bytes]]
Message = dict[str, Any]


class Answer:
    def __init__(self, sent: list[Message]) -> None:
        self.messages = sent
        self.status: int = sent[0]["status"]
        self.headers = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
        self.body = b"".join(each.get("body", b"") for each in sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        assert len(self.body) < 4096
        found: dict[str, Any] = json.loads(self.body)
        assert list(found) == ["error"]
        assert list(found["error"]) == ["code", "message", "where"]
        return found["error"]  # type: ignore[no-any-return]

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)


class Site:
    """The guard around a small app, called as a server would call it."""

    def __init__(self, *, with_keys: bool = False, app: Any = None, **options: Any) -> None:
        variables = {"BERT4REC_READ_KEY": READ, "BERT4REC_ADMIN_KEY": ADMIN}
        self.service = Service()
        serve = ServeSettings(model=Path("m"), store="none", access_log=False, **options)
        keys = ApiKeys.load(None, variables if with_keys else {})
        self.guard = Guard(app or make_app(), serve, keys, self.service)

    def ask(
        self,
        method: str,
        path: str,
        pieces: Iterable[bytes] = (),
        headers: Headers = (),
        *,
        host: bytes = b"127.0.0.1:8000",
        is_cut_off: bool = False,
        receive: Callable[[], Awaitable[Message]] | None = None,
        send: Callable[[Message], Awaitable[None]] | None = None,
    ) -> Answer:
        sent: list[Message] = []
        waiting = list(pieces)
        path, _, query = path.partition("?")

        async def next_piece() -> Message:
            if not waiting and is_cut_off:
                return {"type": "http.disconnect"}
            body = waiting.pop(0) if waiting else b""
            return {"type": "http.request", "body": body, "more_body": bool(waiting) or is_cut_off}

        async def keep(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"host", host), *headers],
            "client": ("192.0.2.1", "1"),
        }
        asyncio.run(self.guard(scope, receive or next_piece, send or keep))
        assert self.guard.n_accepted == self.guard.n_answered == len(self.service.answers)
        return Answer(sent)

    def post(self, path: str, *pieces: bytes, kind: bytes = b"application/json", **more: Any) -> Answer:
        length = str(sum(map(len, pieces))).encode()
        headers = [(b"content-type", kind), (b"content-length", length), *more.pop("headers", ())]
        return self.ask("POST", path, pieces, headers, **more)


CHUNKED = (b"transfer-encoding", b"chunked")
JSON = (b"content-type", b"application/json")
