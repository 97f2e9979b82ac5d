"""Raw ids in; raw ids, scores, titles and reasons out, by the same `score` that was evaluated.

A model on disk is a directory: `config.json`, `model.safetensors`, `items.parquet`, `about.json`,
the index of a large catalogue, and `manifest.json`, written last, which vouches for them. Its
evaluation lies beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from bert4rec.config import Config, parse_config
from bert4rec.data.sequences import Vocabulary
from bert4rec.data.splits import Spans
from bert4rec.durable import MANIFEST, new_file, verify_manifest, write_file, write_manifest
from bert4rec.models import MODELS, Model
from bert4rec.models.bert4rec import BERT4Rec
from bert4rec.models.learned import Learned
from bert4rec.models.popularity import Popularity
from bert4rec.parallel import Workers
from bert4rec.ranking import (
    Question,
    Ranking,
    log_probabilities_of,
    rank_histories,
    rank_questions,
)
from bert4rec.retrieval.build import LARGE, RECALL, build_index, described, queries_of, too_few
from bert4rec.retrieval.exact import MOST_ITEMS, products_of
from bert4rec.retrieval.index import ItemIndex, Measured, has_faiss, note_missing_faiss
from bert4rec.retrieval.store import delete_other_indexes, index_name, read_index, write_index

FORMAT_VERSION = 1
FILES = ("about.json", "config.json", "model.safetensors", "items.parquet")  # a whole model
FINITE_AT_ONCE = 2**24  # numbers that are looked at together, so that checking takes no memory
AT_ONCE = 4096  # histories that `recommend_many` reads before it answers
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
class Asked:
    question: Question
    unknown: list[object]


@dataclass(frozen=True)
class Influence:
    item: RawId
    title: str | None
    influence: float  # log-probability of the explained item with this one, minus without it


@dataclass(frozen=True)
class Explanation:
    item: RawId
    title: str | None
    probability: float
    influences: list[Influence]  # in the order of the history
    attention: Tensor | None  # (layers, heads, n, n) over the influences' items and [MASK], if any


class Recommender:
    """A trained model together with the names of its items."""

    def __init__(
        self,
        model: Model,
        vocabulary: Vocabulary,
        config: Config,
        about: dict[str, Any],
        index: ItemIndex | None = None,
    ) -> None:
        assert model.n_items == len(vocabulary)
        self.model, self.vocabulary, self.config, self.about = model, vocabulary, config, about
        self.index = index
        self._popularity = Popularity(torch.from_numpy(vocabulary.counts))

    def recommend(
        self,
        history: Iterable[object],
        k: int = 10,
        exclude_seen: bool = True,
        allow: Iterable[object] | None = None,
        block: Iterable[object] | None = None,
    ) -> Recommendations:
        """The `k` best next items for one history of raw ids, oldest first."""
        question = self.question(history, k, exclude_seen, allow, block)
        return self.answer([question])[0]

    def question(
        self,
        history: Iterable[object],
        k: int = 10,
        exclude_seen: bool = True,
        allow: Iterable[object] | None = None,
        block: Iterable[object] | None = None,
    ) -> Asked:
        """A checked question in the model's own tokens, to be answered with others at once."""
        self._check_knows_strangers()
        if isinstance(history, str | bytes):
            raise ValueError(f"history is {history!r}: pass a list of item ids, oldest first")
        _check_k(k)
        encode = self.vocabulary.encode
        known, unknown = encode(history)
        allowed = None if allow is None else encode(allow)[0]
        blocked = [] if block is None else encode(block)[0]
        return Asked(Question(known, k, exclude_seen, allowed, blocked), unknown)

    def answer(self, asked: Sequence[Asked]) -> list[Recommendations]:
        """An answer to every question, all scored together, on the calling thread."""
        questions = [each.question for each in asked]
        rankings = rank_questions(self.model, self._popularity, questions, self.index)
        return [
            self._answer(ranking, 0, each.unknown, is_fallback=not each.question.history)
            for ranking, each in zip(rankings, asked, strict=True)
        ]

    def recommend_many(
        self,
        histories: Iterable[Iterable[object]],
        k: int = 10,
        exclude_seen: bool = True,
        allow: Iterable[object] | None = None,
        block: Iterable[object] | None = None,
    ) -> Iterator[Recommendations]:
        """One answer a history, in order; some thousand are read and answered at a time."""
        _check_k(k)
        self._check_knows_strangers()
        excluded = self.excluded(allow, block)
        source = iter(histories)
        while batch := [self.vocabulary.encode(each) for each in islice(source, AT_ONCE)]:
            spans = _spans([known for known, _ in batch])
            rankings = self.rank(spans, k, exclude_seen=exclude_seen, excluded=excluded)
            for ranking in rankings:
                for row, (known, unknown) in enumerate(batch):
                    yield self._answer(ranking, row, unknown, is_fallback=not known)

    def rank(
        self,
        histories: Spans,
        k: int = 10,
        *,
        exclude_seen: bool = True,
        excluded: Tensor | None = None,
    ) -> Iterator[Ranking]:
        """The same for histories of tokens, as arrays: the fastest way to answer for many.

        `histories.users` are rows of the training data, and -1 for strangers.
        """
        _check_k(k)
        if (histories.users < 0).any():
            self._check_knows_strangers()
        return self._rank(histories, k, exclude_seen, excluded)

    def _rank(
        self, histories: Spans, k: int, exclude_seen: bool, excluded: Tensor | None
    ) -> Iterator[Ranking]:
        with Workers() as workers:
            yield from rank_histories(
                self.model,
                self._popularity,
                histories,
                k,
                exclude_seen=exclude_seen,
                excluded=excluded,
                index=self.index,
                workers=workers,
            )

    def similar(self, item: object, k: int = 10) -> list[Recommendation]:
        """Items whose vectors point the same way; the score is the cosine."""
        _check_k(k)
        token = self._token_or_error(item)
        lengths, vector = self._lengths, self._vectors(token, token + 1)[0]
        products = torch.cat([self._vectors(*block) @ vector for block in self._blocks()])
        cosines = products / (lengths * lengths[token])
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
        self._check_knows_strangers()
        tokens = [self._token_or_error(item) for item in items]
        known, _ = self.vocabulary.encode(history)
        n_read = self.model.n_read
        read = known if n_read is None else known[max(0, len(known) - n_read) :]
        if not known:
            raise ValueError("history holds no known item: there is nothing to explain")
        if not read:
            raise ValueError(f"{self.config.model.name} reads no history: nothing to explain")
        without_each = [read[:i] + read[i + 1 :] for i in range(len(read))]
        log_p = log_probabilities_of(self.model, self._popularity, [read, *without_each], tokens)
        gained = (log_p[:1] - log_p[1:]).T.tolist()  # (tokens, read)
        attention = None
        if with_attention and isinstance(self.model, BERT4Rec):
            attention = self.model.attention(torch.tensor(read))
        named = [(self.vocabulary.raw(t), self.vocabulary.title(t)) for t in read]
        return [
            Explanation(
                self.vocabulary.raw(token),
                self.vocabulary.title(token),
                math.exp(log_probability),
                [Influence(*name, gain) for name, gain in zip(named, gains, strict=True)],
                attention,
            )
            for token, log_probability, gains in zip(tokens, log_p[0].tolist(), gained, strict=True)
        ]

    def excluded(
        self, allow: Iterable[object] | None, block: Iterable[object] | None
    ) -> Tensor | None:
        """(V,) true for items that are not allowed or are blocked; None when all may be shown."""
        if allow is None and block is None:
            return None
        excluded = torch.zeros(len(self.vocabulary), dtype=torch.bool)
        if allow is not None:
            allowed, _ = self.vocabulary.encode(allow)
            excluded[:] = True
            excluded[allowed] = False
        if block is not None:
            excluded[self.vocabulary.encode(block)[0]] = True
        return excluded

    def by_popularity(self) -> Recommender:
        """The most popular items of the same catalogue, for comparison."""
        config = self.config.of_model("popularity")
        return Recommender(self._popularity, self.vocabulary, config, self.about)

    def _answer(
        self, ranking: Ranking, row: int, unknown: list[object], *, is_fallback: bool
    ) -> Recommendations:
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
        """(n, D) of successive items; compressed ones are decoded, so never ask for all at once."""
        output = products_of(self.model)
        if output is not None:
            return output.block(first, last)[0].detach()
        vectors = self.model.item_vectors() if isinstance(self.model, Learned) else None
        if vectors is None:
            raise ValueError(f"similar needs item vectors, and {self.config.model.name} has none")
        return vectors[first:last]

    def _blocks(self) -> list[tuple[int, int]]:
        n = len(self.vocabulary)
        return [(first, min(first + MOST_ITEMS, n)) for first in range(0, n, MOST_ITEMS)]

    @cached_property
    def _lengths(self) -> Tensor:
        """(V,) of the item vectors."""
        norm = torch.linalg.vector_norm
        found = [norm(self._vectors(*block), dim=1) for block in self._blocks()]
        return torch.cat(found).clamp(min=1e-12)

    def _check_knows_strangers(self) -> None:
        if self.model.needs_known_user:
            raise ValueError(
                f"{self.config.model.name} knows only the users that it was trained on, and can "
                "make nothing of a history: recommend for those with `--users all` (or "
                "`recommend_users`), or train a model that reads histories, such as bert4rec"
            )

    def save(self, directory: str | Path) -> None:
        """Write the model's files; the manifest comes last, so that half a model is refused."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MANIFEST).unlink(missing_ok=True)
        about = self.about | {
            "format_version": FORMAT_VERSION,
            "n_items": len(self.vocabulary),
            "item_id_type": self.vocabulary.id_type,
        }
        write_file(directory / "about.json", json.dumps(about, indent=2))
        write_file(directory / "config.json", self.config.model_dump_json(indent=2))
        tensors = {name: tensor.contiguous() for name, tensor in self.model.state().items()}
        with new_file(directory / "model.safetensors") as path:
            save_file(tensors, path)
        with new_file(directory / "items.parquet") as path:
            self.vocabulary.save(path)
        self.save_index(directory)

    def save_index(self, directory: str | Path) -> None:
        """Write the index, or take it away, of a model that is in this directory already."""
        directory = Path(directory)
        names = () if self.index is None else write_index(directory, self.index)
        write_manifest(directory, (*FILES, *names))
        delete_other_indexes(directory, names)

    def build_index(self, queries: Spans, *, recall: float = RECALL) -> Measured | None:
        """An index of the items, for quick answers from a large catalogue; `save` writes it, too.

        It is tuned and measured on `queries`, real histories that the model was not trained on.
        None if no index has this `recall`@10 and is quicker than exact search: then answers are
        searched for exactly.
        """
        self.index = None
        output = products_of(self.model)
        if output is None:
            raise ValueError(
                f"{self.config.model.name} cannot have an index: its scores are no products of "
                "vectors; it is searched exactly"
            )
        self.index = build_index(output, queries_of(self.model, queries), recall)
        return None if self.index is None else self.index.measured

    def index_if_large(self, queries: Spans, *, at_least: int = LARGE) -> str | None:
        """After a training: an index where one pays; a sentence about it, if there is any."""
        if len(self.vocabulary) < at_least or products_of(self.model) is None:
            return None
        if not has_faiss():
            return (
                f"{len(self.vocabulary):,} items and no index, as faiss is not installed: answers "
                "are searched for exactly. pip install 'bert4rec[scale]' and `bert4rec index` "
                "make them faster"
            )
        if (reason := too_few(queries)) is not None:
            return f"{len(self.vocabulary):,} items and no index: {reason}"
        return described(self.build_index(queries))

    @classmethod
    def load(cls, directory: str | Path, retrieval: Retrieval = "auto") -> Self:
        """A saved model; a ValueError says what is wrong with one that cannot be trusted.

        `retrieval="exact"` leaves an index aside, if there is one: every answer is the best that
        there is, and has its probability.
        """
        try:
            return cls._load(Path(directory), retrieval)
        except FileNotFoundError as error:
            raise ValueError(
                f"{directory} was being replaced: load it again ({error.filename} is gone)"
            ) from None

    @classmethod
    def _load(cls, directory: Path, retrieval: Retrieval) -> Self:
        if retrieval not in get_args(Retrieval):
            raise ValueError(f"retrieval is {retrieval!r}: choose `auto` or `exact`")
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory: train a model there first")
        if not (directory / MANIFEST).exists() and (directory / "checkpoints").is_dir():
            raise ValueError(
                f"{directory} holds a training that is not finished: "
                "run the same `bert4rec train` command again with --resume"
            )
        verify_manifest(directory)
        about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
        if about["format_version"] != FORMAT_VERSION:
            raise ValueError(
                f"{directory} has model format {about['format_version']}, this program reads "
                f"{FORMAT_VERSION}: install the bert4rec version that wrote it, or train again"
            )
        settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = parse_config(settings, str(directory / "config.json"))
        vocabulary = Vocabulary.load(directory / "items.parquet", about["item_id_type"])
        tensors = _read_tensors(directory / "model.safetensors")
        model = MODELS[config.model.name].restore(tensors, config.model, len(vocabulary))
        index, name = None, index_name(directory)
        if name is not None and retrieval == "auto":
            output = products_of(model)
            if output is None:
                raise ValueError(f"{directory / name} is the index of another model: save it again")
            if has_faiss():
                index = read_index(directory, name, output)
            else:
                note_missing_faiss()
        return cls(model, vocabulary, config, about, index)


def _spans(histories: list[list[int]]) -> Spans:
    ends = np.cumsum([len(history) for history in histories])
    tokens = np.array([token for history in histories for token in history], dtype=np.int32)
    starts = np.concatenate([[0], ends[:-1]])
    return Spans(tokens, starts, ends, np.full(len(histories), -1))


def _check_k(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k is {k!r}: ask for one item or more")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: it is not a safetensors file ({error})") from None
    for name, tensor in tensors.items():
        parts = torch.split(tensor.flatten(), FINITE_AT_ONCE)
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ValueError(f"{path} is damaged: {name} holds values that are not numbers")
    return tensors
