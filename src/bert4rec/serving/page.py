"""The web page and the API's own documentation, all from this machine."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse, HTMLResponse
from starlette.staticfiles import StaticFiles

from bert4rec.serving.problems import Problem

WEB = Path(__file__).parent / "web"
SWAGGER = Path(str(files("fastapi_swagger.resources")))  # Swagger UI 5, as a package's files
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")

DOCS = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bert4rec API</title>
<link rel="icon" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"""
START = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null
});
"""


def static_files() -> StaticFiles:
    return StaticFiles(directory=WEB)


def page_routes(router: APIRouter) -> None:
    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(WEB / "index.html", media_type="text/html; charset=utf-8")

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(DOCS)

    @router.get("/docs/start.js", include_in_schema=False)
    async def start() -> Response:
        return Response(START, media_type="text/javascript")

    @router.get("/docs/{name}", include_in_schema=False)
    async def docs_file(name: str) -> Response:
        if name not in SWAGGER_FILES:
            raise Problem(404, "not_found", "There is nothing here.")
        return FileResponse(SWAGGER / name)
