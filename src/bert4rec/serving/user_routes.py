"""Stored histories: events come in, recommendations and erasure go out."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from bert4rec.data.sequences import id_text
from bert4rec.serving import schemas
from bert4rec.serving.answers import json_response, named, recommended
from bert4rec.serving.problems import Problem
from bert4rec.serving.routes import K, Limit, ModelName, Search
from bert4rec.serving.service import Service, Wanted
from bert4rec.serving.settings import MAX_BATCH, MAX_ID
from bert4rec.serving.store import Event, EventConflict

Ids = Annotated[list[Annotated[str, Query(max_length=MAX_ID)]] | None, Query(max_length=MAX_BATCH)]


def user_routes(service: Service, router: APIRouter) -> None:
    @router.post("/v1/events", response_model=schemas.EventsAnswer, tags=["users"])
    async def add_events(body: schemas.EventsBody) -> Response:
        """Append to users' histories: all events of a request or none, each event id once."""
        events = [
            Event(id_text(each.user) or "", each.item, each.time, each.id) for each in body.events
        ]
        try:
            added = await service.store.add(events)
        except EventConflict as error:
            raise Problem(409, "event_conflict", f"{error}; nothing was stored.") from None
        token = service.model(None).recommender.vocabulary.token
        n_unknown = sum(token(each.item) is None for each in body.events)
        return json_response(
            {"stored": added.stored, "duplicates": added.duplicates, "unknown_items": n_unknown}
        )

    @router.get("/v1/users", response_model=schemas.Users, tags=["users"])
    async def users(query: Search = "", limit: Limit = 20) -> Response:
        """Users whose id begins with the query, the last active first."""
        found = await service.store.users(query, limit)
        content = [
            {"user": each.user, "n_events": each.n_events, "last_time": each.last_time}
            for each in found
        ]
        return json_response({"users": content})

    @router.get(
        "/v1/users/{user:path}/recommendations", response_model=schemas.UserAnswer, tags=["users"]
    )
    async def recommend_user(
        user: str,
        k: K = 10,
        exclude_seen: bool = True,
        allow: Ids = None,
        block: Ids = None,
        model: ModelName = None,
    ) -> Response:
        """The next items for a stored history, every event that was acknowledged included."""
        served = service.model(model)
        history = [event.item for event in await service.store.history(user)]
        question = Wanted(served, history, k, exclude_seen, allow, block)
        [answer] = await service.recommend([question])
        content = recommended(answer) | named(served) | {"user": user, "n_events": len(history)}
        return json_response(content, served)

    @router.get("/v1/users/{user:path}", response_model=schemas.StoredHistory, tags=["users"])
    async def stored_history(user: str) -> Response:
        """What is stored about a user, oldest first."""
        events = await service.store.history(user)
        if not events:
            raise Problem(404, "unknown_user", "Nothing is stored about this user.", "path.user")
        vocabulary = service.model(None).recommender.vocabulary
        content = []
        for event in events:
            token = vocabulary.token(event.item)
            content.append(
                {
                    "item": event.item,
                    "title": None if token is None else vocabulary.title(token),
                    "known": token is not None,
                    "time": event.time,
                    "id": event.id,
                }
            )
        return json_response({"user": user, "events": content})

    @router.delete("/v1/users/{user:path}", response_model=schemas.Erased, tags=["users"])
    async def erase(user: str) -> Response:
        """Forget everything that is stored about a user."""
        return json_response({"user": user, "erased": await service.store.erase(user)})
