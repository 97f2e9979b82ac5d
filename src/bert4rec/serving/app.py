"""The ASGI app of one worker: routes, behind the guard."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from bert4rec import __version__
from bert4rec.serving import problems, schemas
from bert4rec.serving.guard import Guard
from bert4rec.serving.hot_route import HotRoute, not_json
from bert4rec.serving.keys import Keys
from bert4rec.serving.operation_routes import operation_routes
from bert4rec.serving.page import page_routes, static_files
from bert4rec.serving.problems import Problem
from bert4rec.serving.routes import question_routes
from bert4rec.serving.service import Service
from bert4rec.serving.settings import ServeSettings
from bert4rec.serving.store import StoreUnavailable
from bert4rec.serving.strict_json import NotStrictJSON, parse
from bert4rec.serving.user_routes import user_routes

log = logging.getLogger("bert4rec.serving")

DESCRIPTION = "Recommend the next item from what a person did so far."
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ProblemAnswer}
    for status in (401, 403, 404, 408, 409, 413, 415, 422, 503)
}


class StrictRequest(Request):
    async def json(self) -> Any:
        try:
            return parse(await self.body())
        except NotStrictJSON as error:
            raise not_json(error) from None


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            response: Response = await handle(StrictRequest(request.scope, request.receive))
            return response

        return strictly


def make_app(settings: ServeSettings, main_pid: int | None = None) -> Guard:
    """`main_pid` is the process above the workers, to be told what concerns them all."""
    service = Service(settings, main_pid)
    keys = Keys.load(settings.keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await service.start()
        except (ValueError, OSError) as error:
            log.error("cannot start", extra={"reason": str(error)})
            os._exit(1)  # said already: no traceback, no second try
        service.tell_main(signal.SIGUSR1)  # ready
        yield
        await service.stop()
        facts = {"accepted": guard.n_accepted, "answered": guard.n_answered}
        log.info("ended", extra=facts)

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
    question_routes(service, router, needs_key=bool(keys))
    user_routes(service, router)
    operation_routes(service, router)
    app.include_router(router)
    pages = APIRouter()
    page_routes(pages)
    app.include_router(pages)
    app.mount("/web", static_files())
    problems.install(app)

    @app.exception_handler(StoreUnavailable)
    async def on_store_gone(request: Request, error: StoreUnavailable) -> Response:
        log.error("store unavailable", extra={"reason": str(error)})
        message = "The store of histories cannot answer now. Try again."
        return Problem(503, "store_unavailable", message, headers={"retry-after": "1"}).response()

    guard = Guard(HotRoute(app, service), settings, keys, service)
    return guard
