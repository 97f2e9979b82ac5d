"""The web page and the API's documentation (Swagger UI), all served from here."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from starlette.staticfiles import StaticFiles

from bert4rec.serving.http.problems import Problem

WEB = Path(__file__).parents[1] / "web"
SWAGGER = Path(str(files("fastapi_swagger.resources")))  # Swagger UI 5
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")


def add_pages(app: FastAPI) -> None:
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
