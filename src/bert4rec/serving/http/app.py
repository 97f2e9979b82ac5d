"""The ASGI app of one worker: the guard, then the routes with a body, then FastAPI."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import TypeAdapter, ValidationError
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from bert4rec import __version__
from bert4rec.serving.http import problems, schemas
from bert4rec.serving.http.access import ApiKeys
from bert4rec.serving.http.api_routes import add_api_routes
from bert4rec.serving.http.guard import Guard
from bert4rec.serving.http.strict_json import parse
from bert4rec.serving.serve_settings import ServeSettings
from bert4rec.serving.service import Service

log = logging.getLogger("bert4rec.serving")

WEB = Path(__file__).parents[1] / "web"
SWAGGER = Path(str(files("fastapi_swagger.resources")))  # Swagger UI 5
PAGES = {
    "/": WEB / "index.html",
    "/docs": WEB / "docs.html",
    "/docs/start.js": WEB / "docs.js",
    "/docs/swagger-ui-bundle.js": SWAGGER / "swagger-ui-bundle.js",
    "/docs/swagger-ui.css": SWAGGER / "swagger-ui.css",
    "/docs/favicon-32x32.png": SWAGGER / "favicon-32x32.png",
}
DESCRIPTION = "Recommend the next item from what a person did so far."
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ProblemResponse} for status in (401, 403, 404, 408, 409, 413, 415, 422, 503)
}


class BodyRoutes:
    """Calls the routes with a body directly; FastAPI only describes them.

    Its own way takes JSON that is not strict, and longer. An empty body is an empty object. The guard
    turns exceptions into responses.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        routes = [route for route in app.routes if isinstance(route, APIRoute) and route.body_field]
        self._endpoints = {
            route.path: (route.endpoint, TypeAdapter(get_type_hints(route.endpoint)["body"])) for route in routes
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("\n"):  # FastAPI takes it for the path without
            raise HTTPException(404)
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._endpoints:
            await self._app(scope, receive, send)
            return
        endpoint, schema = self._endpoints[scope["path"]]
        message = await receive()  # the guard has read the whole body
        try:
            body = schema.validate_python(parse(message.get("body") or b"{}"))
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            raise problems.invalid([{**each, "loc": ("body", *each["loc"])} for each in errors]) from None
        response = await endpoint(body)
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
        responses=PROBLEMS,
        dependencies=[Depends(HTTPBearer(auto_error=False, description="an API key"))] if keys else [],
    )
    add_api_routes(service, app, needs_key=bool(keys))
    add_pages(app)
    problems.add_handlers(app)
    guard = Guard(BodyRoutes(app), settings, keys, service)
    return guard


def add_pages(app: FastAPI) -> None:
    """The web page and the API's documentation (Swagger UI), all served from here."""
    for path, file in PAGES.items():

        async def page(request: Request, file: Path = file) -> Response:
            return FileResponse(file)

        app.add_route(path, page, include_in_schema=False)
    app.mount("/web", StaticFiles(directory=WEB))
