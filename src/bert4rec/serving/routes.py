"""The questions: recommend, explain, items, models."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response

from bert4rec import __version__
from bert4rec.serving import schemas, settings
from bert4rec.serving.answers import (
    as_bytes,
    as_json,
    json_response,
    named,
    recommended,
    version_header,
)
from bert4rec.serving.problems import Problem
from bert4rec.serving.room import HeldResponse
from bert4rec.serving.served_model import ServedModel
from bert4rec.serving.service import Service, Wanted

Limit = Annotated[int, Query(ge=1, le=settings.MAX_FOUND)]
K = Annotated[int, Query(ge=1, le=settings.MAX_K)]
ModelName = Annotated[str | None, Query(max_length=200, description="a name from /v1/model")]
MANY_ITEMS = 50
Search = Annotated[str, Query(max_length=200)]


def wanted(body: schemas.Filters, served: ServedModel, history: list[str | int]) -> Wanted:
    return Wanted(served, history, body.k, body.exclude_seen, body.allow, body.block)


async def recommend_one(service: Service, body: schemas.RecommendBody) -> Response:
    served = service.model(body.model)
    [answer] = await service.recommend([wanted(body, served, body.history)])
    return json_response(recommended(answer) | named(served), served)


def question_routes(service: Service, router: APIRouter, *, needs_key: bool) -> None:
    @router.post("/v1/recommend", response_model=schemas.RecommendAnswer, tags=["recommend"])
    async def recommend(body: schemas.RecommendBody) -> Response:
        """The next items for a history of item ids, oldest first."""
        return await recommend_one(service, body)

    @router.post("/v1/recommend/batch", response_model=schemas.BatchAnswer, tags=["recommend"])
    async def recommend_batch(body: schemas.BatchBody) -> Response:
        """The same for many histories at once, all by the same model version."""
        served = service.model(body.model)
        n_items = len(body.histories) * min(body.k, len(served.recommender.vocabulary))
        service.take_room(n_items)
        try:
            asked = [wanted(body, served, history) for history in body.histories]
            results = []
            for answer in await service.recommend(asked):
                results.append(as_json(recommended(answer)))
                if len(answer) > MANY_ITEMS:  # up to a quarter of a million: others go between
                    await asyncio.sleep(0)
            content = as_bytes({"results": results} | named(served))
        except BaseException:
            service.room.give_back(n_items)
            raise
        return HeldResponse(content, version_header(served), service.room, n_items)

    @router.post("/v1/explain", response_model=schemas.ExplainAnswer, tags=["recommend"])
    async def explain(body: schemas.ExplainBody) -> Response:
        """What each item of the history adds to the log-probability of the items asked about."""
        served = service.model(body.model)
        recommender = served.recommender
        for place, item in enumerate(body.items):
            token_of(served, item, f"body.items[{place}]")
        ignored = recommender.vocabulary.encode(body.history)[1]
        try:
            found = await service.explain(
                lambda: recommender.explain_items(
                    body.history, body.items, with_attention=body.attention
                )
            )
        except ValueError as error:  # the messages name the model, not what came in
            raise Problem(422, "nothing_to_explain", str(error), "body.history") from None
        explanations = [
            {
                "item": each.item,
                "title": each.title,
                "probability": each.probability,
                "influences": [influence.influence for influence in each.influences],
            }
            for each in found
        ]
        read = [{"item": each.item, "title": each.title} for each in found[0].influences]
        attention = found[0].attention
        content = {
            "explanations": explanations,
            "read": read,
            "ignored": ignored,
            "attention": None if attention is None else attention.contiguous().numpy(),
        }
        return json_response(content | named(served), served)

    @router.get("/v1/items", response_model=schemas.Items, tags=["items"])
    async def items(query: Search = "", limit: Limit = 20, model: ModelName = None) -> Response:
        """Items whose title (or id) fits the query; without a query the most popular ones."""
        served = service.model(model)
        vocabulary = served.recommender.vocabulary
        tokens = await service.search(lambda: served.catalogue.find(query, limit))
        found = [
            {
                "item": vocabulary.raw(token),
                "title": vocabulary.title(token),
                "count": int(vocabulary.counts[token]),
            }
            for token in tokens
        ]
        return json_response({"items": found})

    @router.get(
        "/v1/items/{item:path}/similar", response_model=schemas.SimilarAnswer, tags=["items"]
    )
    async def similar(item: str, k: K = 10, model: ModelName = None) -> Response:
        """Items whose vectors point the same way; the score is the cosine."""
        served = service.model(model)
        token = token_of(served, item, "path.item")
        if not served.has_vectors:
            message = f"{served.kind} has no item vectors; ask another model."
            raise Problem(422, "no_vectors", message, "query.model")
        found = await service.search(lambda: served.recommender.similar(item, k))
        vocabulary = served.recommender.vocabulary
        alike = [{"item": each.item, "title": each.title, "score": each.score} for each in found]
        content = {
            "item": vocabulary.raw(token),
            "title": vocabulary.title(token),
            "items": alike,
        }
        return json_response(content | named(served), served)

    @router.get("/v1/model", response_model=schemas.ModelsAnswer, tags=["operations"])
    async def model() -> Response:
        """The models that answer now, their versions, and the limits of a request."""
        limits = {
            "body": settings.MAX_BODY,
            "history": settings.MAX_HISTORY,
            "k": settings.MAX_K,
            "batch": settings.MAX_BATCH,
            "listed": settings.MAX_LISTED,
            "explained": settings.MAX_EXPLAINED,
        }
        content = {
            "default": service.shelf.default,
            "models": [facts(served) for served in service.shelf.now.values()],
            "limits": limits,
            "version": __version__,
            "needs_key": needs_key,
        }
        return json_response(content)


def facts(served: ServedModel) -> dict[str, object]:
    recommender = served.recommender
    trained = recommender.about.get("created")
    return {
        "name": served.name,
        "version": served.version,
        "kind": served.kind,
        "n_items": len(recommender.vocabulary),
        "n_read": recommender.model.n_read,
        "has_attention": served.has_attention,
        "has_vectors": served.has_vectors,
        "has_titles": recommender.vocabulary.titles is not None,
        "recall": None if recommender.index is None else recommender.index.measured.recall,
        "trained": trained if isinstance(trained, str) else None,
    }


def token_of(served: ServedModel, item: str | int, where: str) -> int:
    token = served.recommender.vocabulary.token(item)
    if token is None:
        message = "The model does not know this item; GET /v1/items finds items by title."
        raise Problem(404, "unknown_item", message, where)
    return token
