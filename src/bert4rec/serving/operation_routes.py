"""Is it alive, is it ready, how is it doing, and take the new model."""

from __future__ import annotations

import signal

from fastapi import APIRouter, Response

from bert4rec.serving import schemas
from bert4rec.serving.answers import json_response
from bert4rec.serving.metrics import CONTENT_TYPE
from bert4rec.serving.problems import Problem
from bert4rec.serving.service import Service
from bert4rec.serving.shelf import ModelRefused


def operation_routes(service: Service, router: APIRouter) -> None:
    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", response_model=schemas.Status, tags=["operations"])
    async def health() -> Response:
        """The process answers."""
        return json_response({"status": "ok"})

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", response_model=schemas.Status, tags=["operations"])
    async def ready() -> Response:
        """A model and the store are there, and no end is near: send requests here."""
        if service.is_draining:
            raise Problem(503, "draining", "The service is about to end.")
        await service.store.ping()
        return json_response({"status": "ready"})

    @router.get("/metrics", response_class=Response, tags=["operations"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @router.post("/v1/admin/reload", response_model=schemas.ReloadAnswer, tags=["operations"])
    async def reload(body: schemas.ReloadBody | None = None) -> Response:
        """Take the model that is on disk now; a broken one is refused and the old one stays."""
        try:
            changes = await service.reload()
        except ModelRefused as error:
            raise Problem(409, "model_refused", f"The old model keeps serving: {error}") from None
        service.tell_main(signal.SIGHUP)  # the other workers, if there are any
        models = [
            {"name": each.name, "version": each.version, "changed": each.is_new} for each in changes
        ]
        return json_response({"models": models})
