"""The service's settings, the same for every worker, and the limits of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_BODY = 2**20  # bytes, chunked bodies too
MAX_HISTORY = 1_000
MAX_K = 1_000
MAX_BATCH = 256  # histories or events per request
MAX_LISTED = 10_000  # ids in `allow` or `block`
MAX_EXPLAINED = 100
MAX_FOUND = 100  # items or users per search
MAX_ID = 1_000  # characters

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServeSettings(BaseModel):
    """Times are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    compare: tuple[Path, ...] = ()
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    workers: int = Field(1, ge=1)
    store: str
    keys: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    watch: bool = False
    watch_every: float = Field(1.0, gt=0)
    max_batch: int = Field(16, ge=1, description="histories per batch of the model")
    max_waiting: int = Field(128, ge=1, description="histories in the queue; beyond it, 503")
    answer_within: float = Field(2.0, gt=0, description="a request that would take longer gets 503")
    header_within: float = Field(10.0, gt=0)
    body_within: float = Field(10.0, gt=0)
    send_within: float = Field(20.0, gt=0)
    drain: float = Field(0.5, ge=0, description="keep answering this long after SIGTERM")
    threads: int = Field(1, ge=1, description="cores per batch of the model")
    retrieval: Literal["auto", "exact"] = Field("auto", description="exact: never use an index")
    access_log: bool = True

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK
