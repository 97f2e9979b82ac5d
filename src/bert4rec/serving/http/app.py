"""The ASGI app of one worker: the guard, then a fast path for /v1/recommend, then FastAPI."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from starlette.staticfiles import StaticFiles

from bert4rec import __version__
from bert4rec.serving.http import problems, schemas
from bert4rec.serving.http.access import ApiKeys
from bert4rec.serving.http.api_routes import add_api_routes, recommend_one
from bert4rec.serving.http.guard import App, Guard, Receive, Scope, Send
from bert4rec.serving.http.problems import Problem
from bert4rec.serving.http.strict_json import NotStrictJSON, parse
from bert4rec.serving.serve_settings import ServeSettings
from bert4rec.serving.service import Service
from bert4rec.serving.store import StoreUnavailable

log = logging.getLogger("bert4rec.serving")

WEB = Path(__file__).parents[1] / "web"
SWAGGER = Path(str(files("fastapi_swagger.resources")))  # Swagger UI 5
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
DESCRIPTION = "Recommend the next item from what a person did so far."
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ProblemResponse} for status in (401, 403, 404, 408, 409, 413, 415, 422, 503)
}


class StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return parse(await self.body())
        except NotStrictJSON as error:
            raise problems.invalid_json(error) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            response: Response = await handle(StrictRequest(request.scope, request.receive))
            return response

        return handle_strictly


class FastRecommend:
    """POST /v1/recommend without FastAPI's overhead: 1.4 times the requests at 64 connections.

    The same schema, handler and problems as FastAPI's own route, which /docs describes. Measured by
    `benchmarks/serving/load.py --compare-routes`.
    """

    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/recommend" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            message = await receive()  # the guard has read the whole body
            body = schemas.RecommendRequest.model_validate(parse(message.get("body", b"")))
            response = await recommend_one(self._service, body)
        except NotStrictJSON as error:
            response = problems.invalid_json(error).response()
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            in_body = [{**each, "loc": ("body", *each["loc"])} for each in found]
            response = problems.invalid(in_body).response()
        except Problem as problem:
            response = problem.response()
        await response(scope, receive, send)


def make_app(settings: ServeSettings, main_pid: int | None = None) -> Guard:
    """`main_pid` is the main process, which is told what concerns all workers."""
    service = Service(settings, main_pid)
    keys = ApiKeys.load(settings.keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
        except (ValueError, OSError) as error:
            log.error("cannot start", extra={"reason": str(error)})
            os._exit(1)  # the reason is logged: no traceback, no second try
        service.signal_main(signal.SIGUSR1)  # ready
        yield
        await service.stop()
        log.info("ended", extra={"accepted": guard.n_accepted, "answered": guard.n_answered})

    app = FastAPI(
        title="bert4rec",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    described = [Depends(HTTPBearer(auto_error=False, description="an API key"))] if keys else []
    router = APIRouter(route_class=StrictRoute, responses=PROBLEMS, dependencies=described)
    add_api_routes(service, router, needs_key=bool(keys))
    app.include_router(router)
    add_pages(app)
    problems.add_handlers(app)

    @app.exception_handler(StoreUnavailable)
    async def on_store_unavailable(request: Request, error: StoreUnavailable) -> Response:
        log.error("store unavailable", extra={"reason": str(error)})
        message = "The history store does not respond. Try again."
        return Problem(503, "store_unavailable", message, headers={"retry-after": "1"}).response()

    guard = Guard(FastRecommend(app, service), settings, keys, service)
    return guard


def add_pages(app: FastAPI) -> None:
    """The web page and the API's documentation (Swagger UI), all served from here."""

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(WEB / "index.html", media_type="text/html; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return FileResponse(WEB / "docs.html", media_type="text/html; charset=utf-8")

    @app.get("/docs/start.js", include_in_schema=False)
    async def start() -> Response:
        return FileResponse(WEB / "docs.js", media_type="text/javascript")

    @app.get("/docs/{name}", include_in_schema=False)
    async def docs_file(name: str) -> Response:
        if name not in SWAGGER_FILES:
            raise Problem(404, "not_found", "There is nothing here.")
        return FileResponse(SWAGGER / name)

    app.mount("/web", StaticFiles(directory=WEB))
