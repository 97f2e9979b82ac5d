"""Raw ids in; raw ids, scores, titles and reasons out, by the same scores that were evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Tensor

from bert4rec import model_directory
from bert4rec.config import RunConfig, override_config
from bert4rec.data.sequences import Vocabulary
from bert4rec.data.splits import Spans
from bert4rec.explanation import Explanation, explain_items
from bert4rec.model_directory import SavedModel
from bert4rec.models import FittedModel, Model
from bert4rec.models.popularity import Popularity
from bert4rec.models.sequence_model import SequenceModel
from bert4rec.retrieval.index_builder import LARGE, RECALL, build_index, described, encode_sample
from bert4rec.retrieval.item_index import IndexQuality, ItemIndex
from bert4rec.scoring import (
    HISTORIES_AT_ONCE,
    MOST_ITEMS,
    Ranking,
    Request,
    answer_requests,
    dot_product_of,
    part_read,
    rank_histories,
)

RawId = str | int
Retrieval = Literal["auto", "exact"]  # by the index if the model has one, or never by it


class Recommendation(NamedTuple):
    item: RawId
    score: float
    probability: float  # softmax of the scores over the catalogue, before any filter: the model's
    # own for one trained by cross-entropy, of others a way to compare scores; NaN where an index
    # found the item, as the scores of all items would be needed for it
    title: str | None


@dataclass(frozen=True)
class Recommendations:
    items: list[Recommendation]
    unknown: list[object]  # ids of the history that the model has never seen; they were skipped
    is_fallback: bool  # nothing known to go by: these are the most popular items

    def __iter__(self) -> Iterator[Recommendation]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class RecommendationRequest:
    """A history of raw ids, oldest first, and what may be recommended."""

    history: Iterable[object]
    k: int = 10
    exclude_seen: bool = True
    allow: Iterable[object] | None = None
    block: Iterable[object] | None = None


class Recommender:
    """A trained model together with the names of its items."""

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        config: RunConfig,
        about: dict[str, Any],
        index: ItemIndex | None = None,
    ) -> None:
        assert model.n_items == len(vocabulary)
        self.model, self.vocabulary, self.config, self.about = model, vocabulary, config, about
        self.index = index
        self._popularity: FittedModel = Popularity(torch.from_numpy(vocabulary.counts))

    def recommend(
        self,
        history: Iterable[object],
        k: int = 10,
        exclude_seen: bool = True,
        allow: Iterable[object] | None = None,
        block: Iterable[object] | None = None,
    ) -> Recommendations:
        """The `k` best next items for one history of raw ids, oldest first."""
        return self.answer_requests([RecommendationRequest(history, k, exclude_seen, allow, block)])[0]

    def answer_requests(self, requests: Sequence[RecommendationRequest]) -> list[Recommendations]:
        """An answer to every request, all scored together, on the calling thread."""
        encoded = [self._encode(request) for request in requests]
        rankings = answer_requests(self.model, self._popularity, [request for request, _ in encoded], self.index)
        return [
            self._named(ranking, 0, unknown, is_fallback=not request.history)
            for ranking, (request, unknown) in zip(rankings, encoded, strict=True)
        ]

    def _encode(self, request: RecommendationRequest) -> tuple[Request, list[object]]:
        """The request in tokens, checked, and the unknown ids of its history."""
        self._check_reads_histories()
        if isinstance(request.history, str | bytes):
            raise ValueError(f"history is {request.history!r}: pass a list of item ids, oldest first")
        _check_k(request.k)
        encode = self.vocabulary.encode
        known, unknown = encode(request.history)
        allowed = None if request.allow is None else encode(request.allow)[0]
        blocked = [] if request.block is None else encode(request.block)[0]
        return Request(known, request.k, request.exclude_seen, allowed, blocked), unknown

    def recommend_many(
        self,
        histories: Iterable[Iterable[object]],
        k: int = 10,
        exclude_seen: bool = True,
        allow: Iterable[object] | None = None,
        block: Iterable[object] | None = None,
    ) -> Iterator[Recommendations]:
        """One answer per history, in order; some thousand are read and answered at a time."""
        _check_k(k)
        self._check_reads_histories()
        excluded = self.excluded(allow, block)
        source = iter(histories)
        while batch := [self.vocabulary.encode(each) for each in islice(source, HISTORIES_AT_ONCE)]:
            spans = Spans.of_lists([known for known, _ in batch])
            [ranking] = self.top_k(spans, k, exclude_seen=exclude_seen, excluded=excluded)
            for row, (known, unknown) in enumerate(batch):
                yield self._named(ranking, row, unknown, is_fallback=not known)

    def top_k(
        self, histories: Spans, k: int = 10, *, exclude_seen: bool = True, excluded: Tensor | None = None
    ) -> Iterator[Ranking]:
        """The same for histories of tokens, as arrays: the fastest way to answer for many.

        `histories.users` are rows of the training data, and -1 for unknown users.
        """
        _check_k(k)
        if (histories.users < 0).any():
            self._check_reads_histories()
        return rank_histories(
            self.model, self._popularity, histories, k, exclude_seen=exclude_seen, excluded=excluded, index=self.index
        )

    def similar(self, item: object, k: int = 10) -> list[Recommendation]:
        """Items whose embeddings point the same way; the score is the cosine."""
        _check_k(k)
        token = self._token_or_error(item)
        vector = self._vectors(token, token + 1)[0]
        products = torch.cat([vectors @ vector for vectors in self._vector_blocks()])
        cosines = products / (self._lengths * self._lengths[token])
        cosines[token] = -torch.inf
        best = cosines.topk(min(k, len(self.vocabulary) - 1))
        return [
            Recommendation(self.vocabulary.raw(t), s, float("nan"), self.vocabulary.title(t))
            for t, s in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def explain(self, history: Iterable[object], item: object) -> Explanation:
        """What each history item adds to `item`, by leaving it out, and where attention went."""
        return self.explain_items(history, [item])[0]

    def explain_items(
        self, history: Iterable[object], items: Iterable[object], *, with_attention: bool = True
    ) -> list[Explanation]:
        """The same for several items at the price of one: the scores are of all items anyway."""
        self._check_reads_histories()
        tokens = [self._token_or_error(item) for item in items]
        known, _ = self.vocabulary.encode(history)
        if not known:
            raise ValueError("history holds no known item: there is nothing to explain")
        if not part_read(known, self.model):
            raise ValueError(f"{self.config.model.name} reads no history: nothing to explain")
        return explain_items(
            self.model, self._popularity, self.vocabulary, known, tokens, with_attention=with_attention
        )

    def excluded(self, allow: Iterable[object] | None, block: Iterable[object] | None) -> Tensor | None:
        """(V,) true for items that are not allowed or are blocked; None when all may be shown."""
        if allow is None and block is None:
            return None
        excluded = torch.full((len(self.vocabulary),), allow is not None)
        for ids, is_excluded in ((allow, False), (block, True)):
            if ids is not None:
                excluded[self.vocabulary.encode(ids)[0]] = is_excluded
        return excluded

    def by_popularity(self) -> Recommender:
        """The most popular items of the same catalogue, for comparison."""
        config = override_config(self.config, ["model.name=popularity"])
        return Recommender(self._popularity, self.vocabulary, config, self.about)

    def _named(self, ranking: Ranking, row: int, unknown: list[object], *, is_fallback: bool) -> Recommendations:
        n = int(ranking.n_found[row])
        columns = (column[row, :n].tolist() for column in ranking[:3])
        found = [
            Recommendation(self.vocabulary.raw(t), s, p, self.vocabulary.title(t))
            for t, s, p in zip(*columns, strict=True)
        ]
        return Recommendations(found, unknown, is_fallback)

    def _token_or_error(self, item: object) -> int:
        token = self.vocabulary.token(item)
        if token is None:
            raise ValueError(f"item {item!r} is not in the model's catalogue")
        return token

    def _vectors(self, first: int, last: int) -> Tensor:
        """(n, D) of successive items; quantized ones are decoded: a block at a time."""
        output = dot_product_of(self.model)
        if output is not None:
            return output.block(first, last)[0].detach()
        vectors = self.model.item_vectors() if isinstance(self.model, SequenceModel) else None
        if vectors is None:
            raise ValueError(f"similar needs item embeddings, and {self.config.model.name} has none")
        return vectors[first:last]

    def _vector_blocks(self) -> Iterator[Tensor]:
        n = len(self.vocabulary)
        for first in range(0, n, MOST_ITEMS):
            yield self._vectors(first, min(first + MOST_ITEMS, n))

    @cached_property
    def _lengths(self) -> Tensor:
        """(V,) of the item vectors."""
        lengths = [torch.linalg.vector_norm(vectors, dim=1) for vectors in self._vector_blocks()]
        return torch.cat(lengths).clamp(min=1e-12)

    def _check_reads_histories(self) -> None:
        if self.model.needs_known_user:
            raise ValueError(
                f"{self.config.model.name} knows only the users that it was trained on, and can "
                "make nothing of a history: recommend for those with `--users all` (or "
                "`recommend_users`), or train a model that reads histories, such as bert4rec"
            )

    def save(self, directory: str | Path) -> None:
        """Write a model directory; one that is there is replaced."""
        saved = SavedModel(self.model, self.vocabulary, self.config, self.about, self.index)
        model_directory.save_model(Path(directory), saved)

    def save_index(self, directory: str | Path) -> None:
        """Write the index, or take it away, of a model that is in this directory already."""
        model_directory.save_index(Path(directory), self.index)

    def build_index(self, queries: Spans, *, recall: float = RECALL) -> IndexQuality | None:
        """An index of the items, for quick answers from a large catalogue; `save` writes it, too.

        It is tuned and measured on `queries`, real histories that the model was not trained on.
        None if no index has this `recall`@10 and is quicker than exact search: then answers are
        searched for exactly.
        """
        self.index = None
        output = dot_product_of(self.model)
        if output is None:
            raise ValueError(
                f"{self.config.model.name} cannot have an index: its scores are no products of "
                "embeddings; it is searched exactly"
            )
        self.index = build_index(output, encode_sample(self.model, queries), recall)
        return None if self.index is None else self.index.quality

    def index_if_large(self, queries: Spans, *, at_least: int = LARGE) -> str | None:
        """After a training: an index where one pays; a sentence about it, if there is any."""
        if len(self.vocabulary) < at_least or dot_product_of(self.model) is None:
            return None
        try:
            return described(self.build_index(queries))
        except ValueError as error:  # no faiss, or too few histories: no training is lost for it
            n_items = len(self.vocabulary)
            return f"{n_items:,} items and no index: {error}. Until `bert4rec index` builds one, every search is exact"

    @classmethod
    def load(cls, directory: str | Path, retrieval: Retrieval = "auto") -> Self:
        """A saved model; a ValueError says what is wrong with one that cannot be trusted.

        `retrieval="exact"` leaves an index aside, if there is one: every answer is the best that
        there is, and has its probability.
        """
        if retrieval not in get_args(Retrieval):
            raise ValueError(f"retrieval is {retrieval!r}: choose `auto` or `exact`")
        return cls(*model_directory.load_model(Path(directory), with_index=retrieval == "auto"))


def _check_k(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}: ask for one item or more")
