"""What comes in and what goes out, as JSON. Nothing is converted: a wrong type is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    field_validator,
)

from bert4rec.serving.settings import (
    MAX_BATCH,
    MAX_EXPLAINED,
    MAX_HISTORY,
    MAX_ID,
    MAX_K,
    MAX_LISTED,
)

Text = Annotated[StrictStr, Field(max_length=MAX_ID)]
Integer = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
RawId = Annotated[Text | Integer, Field(union_mode="left_to_right")]
History = Annotated[list[RawId], Field(max_length=MAX_HISTORY, fail_fast=True)]
Listed = Annotated[list[RawId], Field(max_length=MAX_LISTED, fail_fast=True)]
K = Annotated[StrictInt, Field(ge=1, le=MAX_K)]
ModelName = Annotated[StrictStr, Field(max_length=200)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Filters(Body):
    k: Annotated[K, Field(description="how many items")] = 10
    exclude_seen: Annotated[StrictBool, Field(description="leave out the items of the history")] = (
        True
    )
    allow: Annotated[Listed | None, Field(description="only these items")] = None
    block: Annotated[Listed | None, Field(description="never these items")] = None
    model: Annotated[ModelName | None, Field(description="a name from /v1/model")] = None


class RecommendBody(Filters):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"history": ["item-1", "item-2"], "k": 5}]}
    )
    history: Annotated[History, Field(description="item ids, oldest first")]


class BatchBody(Filters):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"histories": [["item-1"], ["item-2", "item-3"]]}]}
    )
    histories: Annotated[list[History], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]


class EventBody(Body):
    user: RawId
    item: RawId
    time: Annotated[
        StrictFloat | None,
        Field(ge=0, le=1e11, allow_inf_nan=False, description="seconds since 1970; now if absent"),
    ] = None
    id: Annotated[
        StrictStr | None,
        Field(min_length=1, max_length=200, description="sent twice, an event counts once"),
    ] = None

    @field_validator("user")
    @classmethod
    def _has_an_address(cls, user: str | int) -> str | int:
        if str(user).endswith("/recommendations"):
            raise ValueError("GET /v1/users/{user} would be another user's recommendations")
        return user


class EventsBody(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"events": [{"user": "anna", "item": "item-1", "id": "click-1"}]}]
        }
    )
    events: Annotated[list[EventBody], Field(min_length=1, max_length=MAX_BATCH, fail_fast=True)]


class ExplainBody(Body):
    history: History
    items: Annotated[list[RawId], Field(min_length=1, max_length=MAX_EXPLAINED, fail_fast=True)]
    attention: StrictBool = False
    model: ModelName | None = None


class ReloadBody(Body):
    pass


class Item(BaseModel):
    item: str | int
    title: str | None


class ScoredItem(Item):
    score: float


class RecommendedItem(ScoredItem):
    probability: Annotated[
        float | None,
        Field(description="softmax over the whole catalogue; null where an index was asked"),
    ]


class CatalogueItem(Item):
    count: int


class Versioned(BaseModel):
    model: str
    model_version: str


class Answer(BaseModel):
    items: list[RecommendedItem]
    ignored: Annotated[list[str | int], Field(description="ids that the model does not know")]
    fallback: Annotated[bool, Field(description="nothing known: these are the most popular")]


class RecommendAnswer(Answer, Versioned):
    pass


class BatchAnswer(Versioned):
    results: list[Answer]


class UserAnswer(RecommendAnswer):
    user: str
    n_events: int


class EventsAnswer(BaseModel):
    stored: int
    duplicates: int
    unknown_items: int


class StoredEvent(Item):
    known: bool
    time: float
    id: str | None


class StoredHistory(BaseModel):
    user: str
    events: list[StoredEvent]


class KnownUser(BaseModel):
    user: str
    n_events: int
    last_time: float


class Users(BaseModel):
    users: list[KnownUser]


class Erased(BaseModel):
    user: str
    erased: int


class Items(BaseModel):
    items: list[CatalogueItem]


class SimilarAnswer(Item, Versioned):
    items: list[ScoredItem]


class Explained(Item):
    probability: float
    influences: list[float]


class ExplainAnswer(Versioned):
    explanations: list[Explained]
    read: list[Item]
    ignored: list[str | int]
    attention: list[list[list[list[float]]]] | None


class ModelFacts(BaseModel):
    name: str
    version: str
    kind: str
    n_items: int
    n_read: int | None
    has_attention: bool
    has_vectors: bool
    has_titles: bool
    recall: Annotated[
        float | None, Field(description="recall@10 of the index that is asked; null: exact search")
    ]
    trained: str | None


class ModelsAnswer(BaseModel):
    default: str
    models: list[ModelFacts]
    limits: dict[str, int]
    version: str
    needs_key: bool


class Reloaded(BaseModel):
    name: str
    version: str
    changed: bool


class ReloadAnswer(BaseModel):
    models: list[Reloaded]


class Status(BaseModel):
    status: Literal["ok", "ready"]


class ProblemFacts(BaseModel):
    code: str
    message: str
    where: str | None


class ProblemAnswer(BaseModel):
    error: ProblemFacts
