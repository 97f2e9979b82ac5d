"""POST /v1/recommend without the framework's detours.

The same body model, the same handler and the same problems as the route that FastAPI has of it
(and describes at /docs). It gives 1.4 times the answers a second at 64 connections, measured by
`benchmarks/serving/load.py --compare-routes`.
"""

from __future__ import annotations

from pydantic import ValidationError

from bert4rec.serving.guard import App, Receive, Scope, Send
from bert4rec.serving.problems import Problem, invalid
from bert4rec.serving.routes import recommend_one
from bert4rec.serving.schemas import RecommendBody
from bert4rec.serving.service import Service
from bert4rec.serving.strict_json import NotStrictJSON, parse

PATH = "/v1/recommend"


class HotRoute:
    def __init__(self, app: App, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            message = await receive()  # the guard has read it whole
            body = RecommendBody.model_validate(parse(message.get("body", b"")))
            response = await recommend_one(self._service, body)
        except NotStrictJSON as error:
            response = not_json(error).response()
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            response = invalid(
                [{**each, "loc": ("body", *each["loc"])} for each in found]
            ).response()
        except Problem as problem:
            response = problem.response()
        await response(scope, receive, send)


def not_json(error: NotStrictJSON) -> Problem:
    return Problem(422, "invalid", f"The body is not JSON: {error}", "body")
