"""The models that are served now: loaded, checked, and replaced while requests run."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from bert4rec.data.sequences import Vocabulary
from bert4rec.durable import MANIFEST
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.recommender import RecommendationRequest, Recommender, Retrieval
from bert4rec.scoring import dot_product_of

MAX_MATCHES = 2_000  # considered per search, the most popular first
SEPARATOR = "\n"


class TitleSearch:
    """All titles in one string, the most popular first: a search is a scan at memory speed."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._by_popularity = np.argsort(-vocabulary.counts, kind="stable")
        names = [plain(vocabulary.title(token) or vocabulary.ids[token]) for token in map(int, self._by_popularity)]
        self._text = SEPARATOR + SEPARATOR.join(names) + SEPARATOR
        self._starts = np.cumsum([0, *(len(name) + 1 for name in names)])  # of the separators

    def find(self, query: str, limit: int) -> list[int]:
        """Tokens of items whose title contains `query`: first at its start, then at a word's."""
        wanted = plain(query)
        if not wanted:
            return [int(token) for token in self._by_popularity[:limit]]
        by_id = self._vocabulary.token(query.strip())
        found = {} if by_id is None else {by_id: -1}
        for rank, place in islice(self._matches(wanted), MAX_MATCHES):
            before = self._text[place - 1]
            quality = 0 if before == SEPARATOR else 1 if not before.isalnum() else 2
            token = int(self._by_popularity[rank])
            found[token] = min(quality, found.get(token, quality))
        return sorted(found, key=lambda token: found[token])[:limit]  # stable: popular first

    def _matches(self, wanted: str) -> Iterator[tuple[int, int]]:
        """(rank by popularity, place in the string) of each match, in order."""
        place = self._text.find(wanted, 1)
        while place != -1:
            yield int(np.searchsorted(self._starts, place, side="right")) - 1, place
            place = self._text.find(wanted, place + 1)


def plain(text: str) -> str:
    """Without case, accents and line breaks: "amelie" finds "Amélie"."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    letters = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return " ".join(letters.split())


log = logging.getLogger("bert4rec.serving")

N_CHECKED = 8  # histories that a new model must answer before it is served


class ModelRefused(Exception):
    """A new model cannot be served; the old one still is."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One version of a model."""

    name: str
    version: str
    recommender: Recommender
    titles: TitleSearch

    @property
    def kind(self) -> str:
        return self.recommender.config.model.name

    @property
    def has_attention(self) -> bool:
        return isinstance(self.recommender.model, BERT4Rec)

    @property
    def has_vectors(self) -> bool:
        model = self.recommender.model
        if dot_product_of(model) is not None:  # first: it does not decode quantized embeddings
            return True
        return isinstance(model, SequenceModel) and model.item_vectors() is not None

    def popularity(self) -> ServedModel:
        """The most popular items of the same catalogue: the baseline that is always served."""
        recommender = self.recommender.by_popularity()
        return ServedModel("popularity", self.version, recommender, self.titles)


class ModelRegistry:
    """Readers take `models` once and use what they got: it is replaced as a whole, never changed."""

    def __init__(self, directories: Sequence[Path], retrieval: Retrieval = "auto") -> None:
        self.directories, self._retrieval = name_models(directories), retrieval
        self.default = next(iter(self.directories))
        self._loading = asyncio.Lock()
        self._refused: object = None  # what was on disk when a model was refused
        self.models: dict[str, ServedModel] = {}

    def load(self) -> None:
        """The first load; a ValueError says what is wrong."""
        found = self.directories.items()
        self._replace({name: load_model(path, name, self._retrieval) for name, path in found})

    async def reload(self) -> list[tuple[ServedModel, bool]]:
        """Load and check new models beside the old, then switch: each model, and is it new?"""
        async with self._loading:
            return await asyncio.to_thread(self._reload)

    def has_news(self) -> bool:
        """Is anything on disk that is neither served nor refused already?"""
        found = self._on_disk()
        is_new = any(v not in (None, self.models[name].version) for name, (v, _) in found.items())
        return is_new and found != self._refused

    def _on_disk(self) -> dict[str, tuple[str | None, frozenset[tuple[str, int, int]]]]:
        """With the files: those that arrive after their manifest complete a refused model."""
        return {name: (version_on_disk(path), files_on_disk(path)) for name, path in self.directories.items()}

    def _reload(self) -> list[tuple[ServedModel, bool]]:
        found, loaded = self._on_disk(), {}
        for name, path in self.directories.items():
            if found[name][0] == self.models[name].version:
                loaded[name] = self.models[name]
                continue
            try:
                loaded[name] = load_model(path, name, self._retrieval)
            except ValueError as error:
                self._refused = found
                log.error("model refused", extra={"model": name, "reason": str(error)})
                raise ModelRefused(str(error)) from None
        new = [model for name, model in loaded.items() if model is not self.models[name]]
        if new:
            self._replace(loaded)
            for model in new:
                log.info("model loaded", extra={"model": model.name, "to": model.version})
        return [(model, model in new) for model in loaded.values()]

    def _replace(self, loaded: dict[str, ServedModel]) -> None:
        self.models = {"popularity": loaded[self.default].popularity()} | loaded


def name_models(directories: Sequence[Path]) -> dict[str, Path]:
    """The name of a directory, numbered where two have the same."""
    names: dict[str, Path] = {}
    for path in directories:
        plain = name = path.absolute().name or "model"
        n = 1
        while name in names or name == "popularity":  # the baseline's own name
            n += 1
            name = f"{plain}-{n}"
        names[name] = path
    return names


def version_on_disk(directory: Path) -> str | None:
    """Twelve digits of the manifest's SHA-256, which covers every file; None without a manifest."""
    try:
        return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def files_on_disk(directory: Path) -> frozenset[tuple[str, int, int]]:
    """(path, bytes, modification time) of each file, to notice that a copy has made progress."""
    try:
        found = [(str(path), path.stat()) for path in directory.resolve().iterdir()]
    except OSError:  # deleted, or being deleted
        return frozenset()
    return frozenset((path, facts.st_size, facts.st_mtime_ns) for path, facts in found)


def load_model(directory: Path, name: str, retrieval: Retrieval = "auto") -> ServedModel:
    """Load and check a model; a ValueError says why it cannot be served."""
    directory = directory.resolve()  # a link may be changed meanwhile
    version = version_on_disk(directory)
    try:
        recommender = Recommender.load(directory, retrieval)
        if not all(type(item) is str for item in recommender.vocabulary.ids):
            raise ValueError(f"{directory} has items without an id: train it again")
        if version is None or version != version_on_disk(directory):
            raise ValueError(f"{directory} was being written while it was read: load it again")
        served = ServedModel(name, version, recommender, TitleSearch(recommender.vocabulary))
        _check_model(served, directory)
        return served
    except ValueError:
        raise
    except Exception as error:  # a manifest can cover files that were never a model
        kind = type(error).__name__
        raise ValueError(f"{directory} is not a whole model: {kind}: {error}") from None


def _check_model(served: ServedModel, directory: Path) -> None:
    """Recommend for a few histories; the results must be complete and finite."""
    recommender = served.recommender
    n_items = len(recommender.vocabulary)
    if n_items == 0:
        raise ValueError(f"{directory} has no items: train it on some data")
    if recommender.model.needs_known_user:
        raise ValueError(
            f"{directory} cannot be served: {served.kind} knows only the users "
            "that it was trained on; serve a model that reads histories, such as bert4rec"
        )
    popular = np.argsort(-recommender.vocabulary.counts, kind="stable")[: N_CHECKED * 4]
    ids = [recommender.vocabulary.raw(int(token)) for token in popular]
    histories = [*(ids[i::N_CHECKED] for i in range(N_CHECKED)), []]
    requests = [RecommendationRequest(history, k=3, exclude_seen=False) for history in histories]
    has_index = recommender.index is not None  # an index gives no probabilities
    for result in served.recommender.answer_requests(requests):
        numbers = [found.score for found in result]
        numbers += [] if has_index else [found.probability for found in result]
        if len(result) != min(3, n_items) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{directory} gives scores that are not numbers: train it again")
