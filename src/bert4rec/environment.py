"""Environment variables: `BERT4REC_CACHE`, `BERT4REC_DATA`, `BERT4REC_ALLOW_REMOTE`, …"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _platform_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bert4rec"


class Environment(BaseSettings):
    """Where things are on this machine; nothing that changes a result."""

    model_config = SettingsConfigDict(env_prefix="BERT4REC_", env_ignore_empty=True)

    cache: Path = Field(default_factory=_platform_cache, description="prepared data")
    data: Path | None = Field(None, description="downloads; defaults to a folder of the cache")
    allow_remote: bool = Field(False, description="tables may be in object storage")
    debug: bool = Field(False, description="show tracebacks instead of one line")

    @property
    def prepared(self) -> Path:
        return self.cache.expanduser() / "prepared"

    @property
    def downloads(self) -> Path:
        return self.data.expanduser() if self.data else self.cache.expanduser() / "data"
