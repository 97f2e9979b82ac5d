"""The API's routes: recommend, explain, items, users, operations.

Responses are written by orjson straight from results: nothing is validated twice.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from bert4rec import __version__
from bert4rec.data.sequences import id_text
from bert4rec.recommender import RecommendationRequest, Recommendations
from bert4rec.serving import serve_settings
from bert4rec.serving.http import schemas
from bert4rec.serving.http.problems import Problem
from bert4rec.serving.model_registry import ModelRefused, ServedModel
from bert4rec.serving.service import Service
from bert4rec.serving.store import Event, EventConflict

K = Annotated[int, Query(ge=1, le=serve_settings.MAX_K)]
Limit = Annotated[int, Query(ge=1, le=serve_settings.MAX_FOUND)]
ModelName = Annotated[str | None, Query(max_length=200, description="a name from /v1/model")]
Search = Annotated[str, Query(max_length=200)]
Id = Annotated[str, Query(max_length=serve_settings.MAX_ID)]
Ids = Annotated[list[Id] | None, Query(max_length=serve_settings.MAX_BATCH)]

MANY_ITEMS = 50


def add_api_routes(service: Service, app: FastAPI, *, needs_key: bool) -> None:
    _add_recommend_routes(service, app)
    _add_item_routes(service, app)
    _add_user_routes(service, app)
    _add_operation_routes(service, app, needs_key)


def _add_recommend_routes(service: Service, app: FastAPI) -> None:
    @app.post("/v1/recommend", response_model=schemas.RecommendResponse, tags=["recommend"])
    async def recommend(body: schemas.RecommendRequest) -> Response:
        """The next items for a history of item ids, oldest first."""
        served = service.model(body.model)
        [result] = await service.recommend(served, [model_request(body, body.history)])
        return json_response(recommended_fields(result), served)

    @app.post("/v1/recommend/batch", response_model=schemas.RecommendBatchResponse, tags=["recommend"])
    async def recommend_batch(body: schemas.RecommendBatchRequest) -> ASGIApp:
        """The same for many histories, all by the same model version."""
        served = service.model(body.model)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            with service.budget.share(len(body.histories) * min(body.k, len(served.recommender.vocabulary))):
                requests = [model_request(body, history) for history in body.histories]
                results = []
                for result in await service.recommend(served, requests):
                    results.append(orjson.Fragment(dump_json(recommended_fields(result))))
                    if len(result) > MANY_ITEMS:  # up to 256,000 in all: let others run in between
                        await asyncio.sleep(0)
                await json_response({"results": results}, served)(scope, receive, send)

        return respond

    @app.post("/v1/explain", response_model=schemas.ExplainResponse, tags=["recommend"])
    async def explain(body: schemas.ExplainRequest) -> Response:
        """How much each item of the history adds to the log-probability of the given items."""
        served = service.model(body.model)
        recommender = served.recommender
        for place, item in enumerate(body.items):
            token_or_404(served, item, f"body.items[{place}]")
        ignored = recommender.vocabulary.encode(body.history)[1]
        try:
            found = await service.explaining.run(
                lambda: recommender.explain_items(body.history, body.items, with_attention=body.attention)
            )
        except ValueError as error:  # the messages name the model, nothing of the request
            raise Problem(422, "nothing_to_explain", str(error), "body.history") from None
        attention = found[0].attention
        content = {
            "explanations": [
                {"item": each.item, "title": each.title, "probability": each.probability}
                | {"influences": [influence.influence for influence in each.influences]}
                for each in found
            ],
            "read": [{"item": each.item, "title": each.title} for each in found[0].influences],
            "ignored": ignored,
            "attention": None if attention is None else attention.contiguous().numpy(),
        }
        return json_response(content, served)


def _add_item_routes(service: Service, app: FastAPI) -> None:
    @app.get("/v1/items", response_model=schemas.ItemsResponse, tags=["items"])
    async def items(query: Search = "", limit: Limit = 20, model: ModelName = None) -> Response:
        """Items whose title (or id) matches the query; without a query, the most popular."""
        served = service.model(model)
        vocabulary = served.recommender.vocabulary
        tokens = await service.searching.run(lambda: served.titles.find(query, limit))
        found = [
            {"item": vocabulary.raw(token), "title": vocabulary.title(token), "count": int(vocabulary.counts[token])}
            for token in tokens
        ]
        return json_response({"items": found})

    @app.get("/v1/items/{item:path}/similar", response_model=schemas.SimilarResponse, tags=["items"])
    async def similar(item: str, k: K = 10, model: ModelName = None) -> Response:
        """The items with the most similar vectors; the score is the cosine."""
        served = service.model(model)
        token = token_or_404(served, item, "path.item")
        if not served.has_vectors:
            message = f"{served.kind} has no item vectors; choose another model."
            raise Problem(422, "no_vectors", message, "query.model")
        found = await service.searching.run(lambda: served.recommender.similar(item, k))
        vocabulary = served.recommender.vocabulary
        content = {
            "item": vocabulary.raw(token),
            "title": vocabulary.title(token),
            "items": [{"item": each.item, "title": each.title, "score": each.score} for each in found],
        }
        return json_response(content, served)


def _add_user_routes(service: Service, app: FastAPI) -> None:
    @app.post("/v1/events", response_model=schemas.EventsResponse, tags=["users"])
    async def add_events(body: schemas.EventsRequest) -> Response:
        """Append to users' histories: all events of a request or none, each event id once."""
        events = [Event(id_text(each.user) or "", each.item, each.time, each.id) for each in body.events]
        try:
            added = await service.store.add(events)
        except EventConflict as error:
            raise Problem(409, "event_conflict", f"{error}; nothing was stored.") from None
        token = service.model(None).recommender.vocabulary.token
        n_unknown = sum(token(each.item) is None for each in body.events)
        return json_response({"stored": added.stored, "duplicates": added.duplicates, "unknown_items": n_unknown})

    @app.get("/v1/users", response_model=schemas.UsersResponse, tags=["users"])
    async def users(query: Search = "", limit: Limit = 20) -> Response:
        """Users whose id begins with the query, the last active first."""
        return json_response({"users": await service.store.users(query, limit)})

    @app.get("/v1/users/{user:path}/recommendations", response_model=schemas.UserRecommendResponse, tags=["users"])
    async def recommend_user(
        user: str, k: K = 10, exclude_seen: bool = True, allow: Ids = None, block: Ids = None, model: ModelName = None
    ) -> Response:
        """The next items for a stored history, including every acknowledged event."""
        served = service.model(model)
        history = [event.item for event in await service.store.history(user)]
        request = RecommendationRequest(history, k, exclude_seen, allow, block)
        [result] = await service.recommend(served, [request])
        return json_response(recommended_fields(result) | {"user": user, "n_events": len(history)}, served)

    @app.get("/v1/users/{user:path}", response_model=schemas.HistoryResponse, tags=["users"])
    async def stored_history(user: str) -> Response:
        """What is stored about a user, oldest first."""
        events = await service.store.history(user)
        if not events:
            raise Problem(404, "unknown_user", "Nothing is stored about this user.", "path.user")
        vocabulary = service.model(None).recommender.vocabulary
        content = []
        for event in events:
            token = vocabulary.token(event.item)
            known = {"title": token if token is None else vocabulary.title(token), "known": token is not None}
            content.append({"item": event.item, **known, "time": event.time, "id": event.id})
        return json_response({"user": user, "events": content})

    @app.delete("/v1/users/{user:path}", response_model=schemas.EraseResponse, tags=["users"])
    async def erase(user: str) -> Response:
        """Forget everything that is stored about a user."""
        return json_response({"user": user, "erased": await service.store.erase(user)})


def _add_operation_routes(service: Service, app: FastAPI, needs_key: bool) -> None:
    @app.get("/v1/model", response_model=schemas.ModelsResponse, tags=["operations"])
    async def model() -> Response:
        """The models that are served, their versions, and the limits of a request."""
        content = {
            "default": service.registry.default,
            "models": [model_fields(served) for served in service.registry.models.values()],
            "limits": {
                "body": serve_settings.MAX_BODY,
                "history": serve_settings.MAX_HISTORY,
                "k": serve_settings.MAX_K,
                "batch": serve_settings.MAX_BATCH,
                "listed": serve_settings.MAX_LISTED,
                "explained": serve_settings.MAX_EXPLAINED,
            },
            "version": __version__,
            "needs_key": needs_key,
        }
        return json_response(content)

    @app.post("/v1/admin/reload", response_model=schemas.ReloadResponse, tags=["operations"])
    async def reload(body: schemas.RequestBody | None = None) -> Response:
        """Load the model that is on disk now; a broken one is refused and the old one stays."""
        try:
            models = await service.reload()
        except ModelRefused as error:
            message = f"The old model is still served: {error}"
            raise Problem(409, "model_refused", message) from None
        service.signal_main(signal.SIGHUP)  # for the other workers, if there are any
        content = [{"name": each.name, "version": each.version, "changed": is_new} for each, is_new in models]
        return json_response({"models": content})

    @app.get("/metrics", response_class=Response, tags=["operations"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", response_model=schemas.StatusResponse, tags=["operations"])
    async def health() -> Response:
        """The process responds."""
        return json_response({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", response_model=schemas.StatusResponse, tags=["operations"])
    async def ready() -> Response:
        """Model and store are available and the service is not shutting down: send requests."""
        if service.is_draining:
            raise Problem(503, "draining", "The service is shutting down.")
        await service.store.ping()
        return json_response({"status": "ready"})


def dump_json(content: object) -> bytes:
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def json_response(content: dict[str, Any], served: ServedModel | None = None) -> Response:
    """With the version of the model, if it is the result of one."""
    headers = None
    if served is not None:
        content |= {"model": served.name, "model_version": served.version}
        headers = {"x-model-version": served.version}
    return Response(dump_json(content), media_type="application/json", headers=headers)


def model_request(body: schemas.RequestFilters, history: list[str | int]) -> RecommendationRequest:
    return RecommendationRequest(history, body.k, body.exclude_seen, body.allow, body.block)


def recommended_fields(result: Recommendations) -> dict[str, Any]:
    items = [
        {"item": item, "score": score, "probability": probability, "title": title}
        for item, score, probability, title in result.items
    ]
    return {"items": items, "ignored": result.unknown, "fallback": result.is_fallback}


def model_fields(served: ServedModel) -> dict[str, object]:
    recommender = served.recommender
    trained = recommender.about.get("created")
    return {
        "name": served.name,
        "version": served.version,
        "kind": served.kind,
        "n_items": len(recommender.vocabulary),
        "n_read": recommender.model.max_history,
        "has_attention": served.has_attention,
        "has_vectors": served.has_vectors,
        "has_titles": recommender.vocabulary.titles is not None,
        "recall": None if recommender.index is None else recommender.index.quality.recall,
        "trained": trained if isinstance(trained, str) else None,
    }


def token_or_404(served: ServedModel, item: str | int, where: str) -> int:
    token = served.recommender.vocabulary.token(item)
    if token is None:
        message = "The model does not know this item; GET /v1/items finds items by title."
        raise Problem(404, "unknown_item", message, where)
    return token
