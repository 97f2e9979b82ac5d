"""Requests whose right responses are known for every version of a model, and checking them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import N_ITEMS, save_model
from under_load.client import Answer, request

from bert4rec.recommender import Recommendations, Recommender
from bert4rec.serving.model_registry import version_on_disk

TOLERANCE = 1e-5  # of a score
K = 10
LONGEST = 50
BATCH = 3


@dataclass(frozen=True)
class KnownRequest:
    payload: bytes
    rows: tuple[int, ...]  # of its histories
    is_batch: bool

    def closing(self) -> KnownRequest:
        """The same on a connection of its own."""
        line, rest = self.payload.split(b"\r\n", 1)
        payload = line + b"\r\nconnection: close\r\n" + rest
        return KnownRequest(payload, self.rows, self.is_batch)


@dataclass(frozen=True)
class Version:
    version: str
    recommender: Recommender
    expected: list[Recommendations]  # one for each history


class KnownRequests:
    """The same histories alone and in batches, and versions of the model."""

    def __init__(self, n_histories: int = 200, seeds: Sequence[int] = (1, 2, 3)) -> None:
        choice = random.Random(0)
        names = [*(f"item-{token}" for token in range(N_ITEMS)), "unknown"]
        self.histories = [choice.choices(names, k=length % (LONGEST + 1)) for length in range(n_histories)]
        self.requests = [
            KnownRequest(request("/v1/recommend", {"history": history, "k": K}), (row,), False)
            for row, history in enumerate(self.histories)
        ]
        for first in range(0, n_histories - BATCH, 20):
            rows = tuple(range(first, first + BATCH))
            content = {"histories": [self.histories[row] for row in rows], "k": K}
            self.requests.append(KnownRequest(request("/v1/recommend/batch", content), rows, True))
        self.versions = [self._version(seed) for seed in seeds]
        self.by_name = {each.version: each for each in self.versions}

    def _version(self, seed: int) -> Version:
        with tempfile.TemporaryDirectory() as folder:
            recommender = save_model(Path(folder), seed=seed)
            version = version_on_disk(Path(folder))
        assert version is not None
        expected = list(recommender.recommend_many(self.histories, K))
        return Version(version, recommender, expected)

    def fault(self, sent: KnownRequest, answer: Answer) -> tuple[str | None, str | None]:
        """(what is wrong with a response, or None; the version that it names)."""
        if answer.status != 200:
            return f"status {answer.status}: {answer.body[:300]!r}", None
        content = answer.json
        name = content["model_version"]
        version = self.by_name.get(name)
        if version is None or answer.header("x-model-version") != name:
            return f"names the version {name}, which is none of these", None
        results = content["results"] if sent.is_batch else [content]
        if len(results) != len(sent.rows):
            return f"{len(results)} results of {len(sent.rows)}", name
        for row, result in zip(sent.rows, results, strict=True):
            if fault := _difference(result, version.expected[row]):
                return f"history {row} by version {name}: {fault}", name
        return None, name


def _difference(result: Any, expected: Recommendations) -> str | None:
    items = [each["item"] for each in result["items"]]
    if items != [each.item for each in expected]:
        return f"items {items}, not {[each.item for each in expected]}"
    worst = max(abs(found["score"] - each.score) for found, each in zip(result["items"], expected, strict=True))
    if worst > TOLERANCE:
        return f"a score is off by {worst}"
    if result["ignored"] != expected.unknown or result["fallback"] != expected.is_fallback:
        return f"ignored {result['ignored']}, fallback {result['fallback']}"
    return None
