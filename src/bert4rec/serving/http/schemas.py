"""The JSON of requests and responses. Nothing is converted: a wrong type is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from bert4rec.serving.serve_settings import MAX_BATCH, MAX_EXPLAINED, MAX_HISTORY, MAX_ID, MAX_K, MAX_LISTED
from bert4rec.serving.store import StoredUser

Text = Annotated[str, Field(max_length=MAX_ID)]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
RawId = Annotated[Text | Integer, Field(union_mode="left_to_right")]
HistoryIds = Annotated[list[RawId], Field(max_length=MAX_HISTORY, fail_fast=True)]
FilterIds = Annotated[list[RawId], Field(max_length=MAX_LISTED, fail_fast=True)]
K = Annotated[int, Field(ge=1, le=MAX_K)]
ModelName = Annotated[str, Field(max_length=200)]


def _example(body: dict[str, JsonValue]) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [body]})


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RequestFilters(RequestBody):
    k: Annotated[K, Field(description="how many items")] = 10
    exclude_seen: Annotated[bool, Field(description="leave out the history's items")] = True
    allow: Annotated[FilterIds | None, Field(description="only these items")] = None
    block: Annotated[FilterIds | None, Field(description="never these items")] = None
    model: Annotated[ModelName | None, Field(description="a name from /v1/model")] = None


class RecommendRequest(RequestFilters):
    model_config = _example({"history": ["item-1", "item-2"], "k": 5})
    history: Annotated[HistoryIds, Field(description="item ids, oldest first")]


class RecommendBatchRequest(RequestFilters):
    model_config = _example({"histories": [["item-1"], ["item-2", "item-3"]]})
    histories: Annotated[list[HistoryIds], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]


class EventFields(RequestBody):
    user: RawId
    item: RawId
    time: Annotated[
        float | None, Field(ge=0, le=1e11, allow_inf_nan=False, description="seconds since 1970; default: now")
    ] = None
    id: Annotated[str | None, Field(min_length=1, max_length=200, description="an event sent twice counts once")] = None

    @field_validator("user")
    @classmethod
    def _has_its_own_path(cls, user: str | int) -> str | int:
        if str(user).endswith("/recommendations"):
            raise ValueError("GET /v1/users/{user} would be another user's recommendations")
        return user


class EventsRequest(RequestBody):
    model_config = _example({"events": [{"user": "anna", "item": "item-1", "id": "click-1"}]})
    events: Annotated[list[EventFields], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]


class ExplainRequest(RequestBody):
    history: HistoryIds
    items: Annotated[list[RawId], Field(min_length=1, max_length=MAX_EXPLAINED, fail_fast=True)]
    attention: bool = False
    model: ModelName | None = None


class ItemFields(BaseModel):
    item: str | int
    title: str | None


class ScoredItem(ItemFields):
    score: float


class RecommendedItem(ScoredItem):
    probability: Annotated[
        float | None, Field(description="softmax over the whole catalogue; null where an index was used")
    ]


class CountedItem(ItemFields):
    count: int


class ModelVersion(BaseModel):
    model: str
    model_version: str


class RecommendedItems(BaseModel):
    items: list[RecommendedItem]
    ignored: Annotated[list[str | int], Field(description="ids that the model does not know")]
    fallback: Annotated[bool, Field(description="no known item in the history: the most popular")]


class RecommendResponse(RecommendedItems, ModelVersion):
    pass


class RecommendBatchResponse(ModelVersion):
    results: list[RecommendedItems]


class UserRecommendResponse(RecommendResponse):
    user: str
    n_events: int


class EventsResponse(BaseModel):
    stored: int
    duplicates: int
    unknown_items: int


class StoredEvent(ItemFields):
    known: bool
    time: float
    id: str | None


class HistoryResponse(BaseModel):
    user: str
    events: list[StoredEvent]


class UsersResponse(BaseModel):
    users: list[StoredUser]


class EraseResponse(BaseModel):
    user: str
    erased: int


class ItemsResponse(BaseModel):
    items: list[CountedItem]


class SimilarResponse(ItemFields, ModelVersion):
    items: list[ScoredItem]


class ItemExplanation(ItemFields):
    probability: float
    influences: list[float]


class ExplainResponse(ModelVersion):
    explanations: list[ItemExplanation]
    read: list[ItemFields]
    ignored: list[str | int]
    attention: list[list[list[list[float]]]] | None


class ModelFields(BaseModel):
    name: str
    version: str
    kind: str
    n_items: int
    n_read: int | None
    has_attention: bool
    has_vectors: bool
    has_titles: bool
    recall: Annotated[float | None, Field(description="recall@10 of the index; null: exact search")]
    trained: str | None


class ModelsResponse(BaseModel):
    default: str
    models: list[ModelFields]
    limits: dict[str, int]
    version: str
    needs_key: bool


class ReloadedModel(BaseModel):
    name: str
    version: str
    changed: bool


class ReloadResponse(BaseModel):
    models: list[ReloadedModel]


class StatusResponse(BaseModel):
    status: Literal["ok", "ready"]


class ProblemFields(BaseModel):
    code: str
    message: str
    where: str | None


class ProblemResponse(BaseModel):
    error: ProblemFields
