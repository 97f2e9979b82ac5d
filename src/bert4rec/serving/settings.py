"""What the service was told when it was started; the same for every worker."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_BODY = 2**20  # bytes, chunked bodies too
MAX_HISTORY = 1_000
MAX_K = 1_000
MAX_BATCH = 256  # histories or events of one request
MAX_LISTED = 10_000  # ids of `allow` or `block`
MAX_EXPLAINED = 100
MAX_FOUND = 100  # items or users of one search
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
    max_batch: int = Field(16, ge=1, description="histories that the model reads at once")
    max_waiting: int = Field(
        128, ge=1, description="histories that may wait; a request more gets 503"
    )
    answer_within: float = Field(2.0, gt=0, description="a request that cannot be is refused")
    header_within: float = Field(10.0, gt=0)
    body_within: float = Field(10.0, gt=0)
    send_within: float = Field(20.0, gt=0)
    drain: float = Field(0.5, ge=0, description="answering on after SIGTERM, before closing")
    threads: int = Field(1, ge=1, description="cores that one batch is computed on")
    retrieval: Literal["auto", "exact"] = Field("auto", description="exact: never by an index")
    access_log: bool = True

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK
