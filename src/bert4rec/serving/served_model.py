"""One version of a model as it is served: loaded, checked, named by what is on disk."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert4rec.durable import MANIFEST
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.learned import Learned
from bert4rec.recommender import Recommender, Retrieval
from bert4rec.retrieval.exact import products_of
from bert4rec.serving.catalogue import Catalogue

N_CHECKED = 8  # histories that a model has to answer before it is let in front of people


@dataclass(frozen=True, eq=False)
class ServedModel:
    name: str
    version: str
    recommender: Recommender
    catalogue: Catalogue

    @property
    def kind(self) -> str:
        return self.recommender.config.model.name

    @property
    def has_attention(self) -> bool:
        return isinstance(self.recommender.model, BERT4Rec)

    @property
    def has_vectors(self) -> bool:
        model = self.recommender.model
        if products_of(model) is not None:  # asked first: compressed ones are not decoded for it
            return True
        return isinstance(model, Learned) and model.item_vectors() is not None


def version_on_disk(directory: Path) -> str | None:
    """Twelve digits of the manifest's SHA-256, which vouches for every file; None without one."""
    try:
        return hashlib.sha256((directory / MANIFEST).read_bytes()).hexdigest()[:12]
    except OSError:
        return None


def files_on_disk(directory: Path) -> frozenset[tuple[str, int, int]]:
    """(path, bytes, time of change) of what is there now, to see that a copy has gone on."""
    try:
        found = [(str(path), path.stat()) for path in directory.resolve().iterdir()]
    except OSError:  # gone, or going
        return frozenset()
    return frozenset((path, facts.st_size, facts.st_mtime_ns) for path, facts in found)


def load_served(directory: Path, name: str, retrieval: Retrieval = "auto") -> ServedModel:
    """Load and check; a ValueError says why a model cannot be served."""
    directory = directory.resolve()  # a link may be set to another directory meanwhile
    version = version_on_disk(directory)
    try:
        recommender = Recommender.load(directory, retrieval)
        if not all(type(item) is str for item in recommender.vocabulary.ids):
            raise ValueError(f"{directory} has items without an id: train it again")
        if version is None or version != version_on_disk(directory):
            raise ValueError(f"{directory} was being written while it was read: load it again")
        check(recommender, directory)
        catalogue = Catalogue(recommender.vocabulary)
    except ValueError:
        raise
    except Exception as error:  # a manifest can vouch for files that were never a model
        kind = type(error).__name__
        raise ValueError(f"{directory} is not a whole model: {kind}: {error}") from None
    return ServedModel(name, version, recommender, catalogue)


def popularity_of(served: ServedModel) -> ServedModel:
    """The most popular items of the same catalogue: the rival that is always at hand."""
    recommender = served.recommender.by_popularity()
    return ServedModel("popularity", served.version, recommender, served.catalogue)


def check(recommender: Recommender, directory: Path) -> None:
    """Ask a few questions; the answers must be whole and finite."""
    n_items = len(recommender.vocabulary)
    if n_items == 0:
        raise ValueError(f"{directory} has no items: train it on some data")
    if recommender.model.needs_known_user:
        raise ValueError(
            f"{directory} cannot be served: {recommender.config.model.name} knows only the users "
            "that it was trained on; serve a model that reads histories, such as bert4rec"
        )
    popular = np.argsort(-recommender.vocabulary.counts, kind="stable")[: N_CHECKED * 4]
    ids = [recommender.vocabulary.raw(int(token)) for token in popular]
    histories = [ids[i::N_CHECKED] for i in range(N_CHECKED)]
    asked = [recommender.question(h, k=3, exclude_seen=False) for h in (*histories, [])]
    has_index = recommender.index is not None  # which knows no probabilities
    for answer in recommender.answer(asked):
        numbers = [found.score for found in answer]
        numbers += [] if has_index else [found.probability for found in answer]
        if len(answer) != min(3, n_items) or not all(map(math.isfinite, numbers)):
            raise ValueError(f"{directory} gives scores that are not numbers: train it again")
