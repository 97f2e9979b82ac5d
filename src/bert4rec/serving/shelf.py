"""The models that are served now, by name, and how newer ones take their place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bert4rec.recommender import Retrieval
from bert4rec.serving.served_model import (
    ServedModel,
    files_on_disk,
    load_served,
    popularity_of,
    version_on_disk,
)

log = logging.getLogger("bert4rec.serving")


class ModelRefused(Exception):
    """A new model cannot be served; the old one still is."""


@dataclass(frozen=True)
class Change:
    name: str
    version: str
    is_new: bool


class Shelf:
    """Readers take `now` once and use what they got; it is replaced as a whole, never changed."""

    def __init__(
        self,
        directories: list[Path],
        on_change: Callable[[Shelf], None],
        retrieval: Retrieval = "auto",
    ) -> None:
        self.directories, self._retrieval = named(directories), retrieval
        self.default = next(iter(self.directories))
        self._on_change = on_change
        self._loading = asyncio.Lock()
        self._refused: object = None  # what was on disk then
        self.now: dict[str, ServedModel] = {}

    def load(self) -> None:
        """The first time; a ValueError says what is wrong."""
        found = self.directories.items()
        self._put({name: load_served(path, name, self._retrieval) for name, path in found})

    def get(self, name: str | None) -> ServedModel | None:
        return self.now.get(self.default if name is None else name)

    async def reload(self) -> list[Change]:
        """Load what is new on disk beside the old, check it, and only then let it answer."""
        async with self._loading:
            return await asyncio.to_thread(self._reload)

    def has_news(self) -> bool:
        """Is something else on disk than is served, and than was refused already?"""
        found = self._on_disk()
        is_new = any(v not in (None, self.now[name].version) for name, (v, _) in found.items())
        return is_new and found != self._refused

    def _on_disk(self) -> dict[str, tuple[str | None, frozenset[tuple[str, int, int]]]]:
        """Files too: those that arrive after their manifest make a refused model whole."""
        return {
            name: (version_on_disk(path), files_on_disk(path))
            for name, path in self.directories.items()
        }

    def _reload(self) -> list[Change]:
        found, loaded = self._on_disk(), {}
        for name, path in self.directories.items():
            if found[name][0] == self.now[name].version:
                loaded[name] = self.now[name]
                continue
            try:
                loaded[name] = load_served(path, name, self._retrieval)
            except ValueError as error:
                self._refused = found
                log.error("model refused", extra={"model": name, "reason": str(error)})
                raise ModelRefused(str(error)) from None
        changes = [
            Change(name, model.version, model is not self.now[name])
            for name, model in loaded.items()
        ]
        if any(change.is_new for change in changes):
            self._put(loaded)
            for change in changes:
                if change.is_new:
                    log.info("model loaded", extra={"model": change.name, "to": change.version})
        return changes

    def _put(self, loaded: dict[str, ServedModel]) -> None:
        self.now = {"popularity": popularity_of(loaded[self.default])} | loaded
        self._on_change(self)


def named(directories: list[Path]) -> dict[str, Path]:
    """A directory's own name, counted on where two have the same."""
    names: dict[str, Path] = {}
    for path in directories:
        plain = name = path.absolute().name or "model"
        n = 1
        while name in names or name == "popularity":  # which is there for every catalogue
            n += 1
            name = f"{plain}-{n}"
        names[name] = path
    return names
