"""Results as the JSON that goes out. Written by orjson at once: nothing is validated twice."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Response

from bert4rec.recommender import Recommendations
from bert4rec.serving.served_model import ServedModel

NUMPY = orjson.OPT_SERIALIZE_NUMPY


def as_bytes(content: object) -> bytes:
    return orjson.dumps(content, option=NUMPY)


def as_json(content: object) -> orjson.Fragment:
    """A part that is written already, to be put into a whole."""
    return orjson.Fragment(as_bytes(content))


def version_header(served: ServedModel) -> dict[str, str]:
    return {"x-model-version": served.version}


def json_response(content: object, served: ServedModel | None = None) -> Response:
    headers = None if served is None else version_header(served)
    return Response(as_bytes(content), media_type="application/json", headers=headers)


def named(served: ServedModel) -> dict[str, Any]:
    return {"model": served.name, "model_version": served.version}


def recommended(answer: Recommendations) -> dict[str, Any]:
    return {
        "items": [
            {
                "item": found.item,
                "score": found.score,
                "probability": found.probability,
                "title": found.title,
            }
            for found in answer.items
        ],
        "ignored": answer.unknown,
        "fallback": answer.is_fallback,
    }
