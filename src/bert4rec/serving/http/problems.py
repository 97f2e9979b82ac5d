"""Error responses: one small JSON body, the same everywhere.

`{"error": {"code": "invalid", "message": "…", "where": "body.k"}}`, under 4 KiB. Nothing of the
request is sent back: an id or a key may be private, and attacks on browsers and logs need an echo.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from bert4rec.serving.http.strict_json import NotStrictJSON
from bert4rec.serving.store import StoreUnavailable

log = logging.getLogger("bert4rec.serving")

MAX_MESSAGE, MAX_WHERE = 500, 100  # characters; at most six bytes each as JSON

_BY_STATUS = {
    400: ("bad_request", "The request cannot be understood."),
    404: ("not_found", "There is nothing at this path; /docs lists all paths."),
    405: ("method_not_allowed", "This path does not take this method; /docs lists the methods."),
}

# Pydantic's messages of these kinds name limits and types, never the value.
_SAFE = re.compile(
    r"(string|int|float|bool|list)_type|(int|float|bool)_parsing|int_from_float|finite_number|"
    r"(string_)?too_(long|short)|(less|greater)_than(_equal)?"
)
_MESSAGES = {
    "missing": "This is missing.",
    "extra_forbidden": "There is an unknown field here; /docs lists the fields.",
    "model_type": "This should be an object.",
    "model_attributes_type": "This should be an object.",
    "dict_type": "This should be an object.",
}
_FIELD = re.compile(r"[a-z][a-z_]{0,39}", re.ASCII)
_UNION_BRANCHES = frozenset(("str", "int", "float", "bool", "none"))  # not places in a body


class Problem(Exception):
    """An error response: raise it, or send its `response`."""

    def __init__(
        self, status: int, code: str, message: str, where: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status_code, self.headers = status, headers
        self._facts = {"code": code, "message": message[:MAX_MESSAGE], "where": where and where[:MAX_WHERE]}

    @cached_property
    def response(self) -> Response:
        body = json.dumps({"error": self._facts}).encode("ascii")
        return Response(body, self.status_code, self.headers, "application/json")


INTERNAL = Problem(500, "internal", "Something went wrong here; the log has details under the request id.")


def problem_of(error: Exception) -> Problem | None:
    """What to tell the client about an exception; None if it is a failure of ours."""
    match error:
        case Problem():
            return error
        case NotStrictJSON():
            return Problem(422, "invalid", f"The body is not JSON: {error}", "body")
        case RequestValidationError():
            return invalid(error.errors())
        case HTTPException(status_code=status):
            code, message = _BY_STATUS.get(status, (f"http_{status}", "The request was refused."))
            return Problem(status, code, message, headers=error.headers)
        case StoreUnavailable():
            log.error("store unavailable", extra={"reason": str(error)})
            message = "The history store does not respond. Try again."
            return Problem(503, "store_unavailable", message, headers={"retry-after": "1"})
    return None


def add_handlers(app: FastAPI) -> None:
    """Turn every exception of `app` into a problem. It raises our failures again, for the guard to log."""

    async def answer(request: Request, error: Exception) -> Response:
        return (problem_of(error) or INTERNAL).response

    for kind in (Problem, StoreUnavailable, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def invalid(errors: Sequence[Mapping[str, Any]]) -> Problem:
    """422 for the first of pydantic's errors, with the number of the others."""
    first = errors[0]
    where = place(first)
    same = [error for error in errors[:8] if place(error) == where]  # the branches of a union
    kinds = {str(error["type"]) for error in same}
    message = "This should be a string or an integer." if {"string_type", "int_type"} <= kinds else _message(first)
    n_more = len(errors) - len(same)
    if n_more:
        more = "is 1 more problem" if n_more == 1 else f"are {n_more} more problems"
        message += f" There {more}."
    return Problem(422, "invalid", message, where)


def place(error: Mapping[str, Any]) -> str:
    """`body.histories[3][0]`, without the name of an unknown field: it came from the client."""
    parts = list(error["loc"])
    if error["type"] == "extra_forbidden":
        parts.pop()
    where = ""
    for part in parts:
        if isinstance(part, int):
            where += f"[{part}]"
        elif _FIELD.fullmatch(part) and part not in _UNION_BRANCHES:
            where += f".{part}" if where else part
    return where


def _message(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind in _MESSAGES:
        return _MESSAGES[kind]
    if _SAFE.fullmatch(kind):
        return str(error["msg"]).replace("Input", "This", 1).rstrip(".") + "."
    return "This value is not valid."
