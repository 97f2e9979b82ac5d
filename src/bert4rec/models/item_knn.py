"""Item-kNN: items that the same people have are alike; recommend what is like the history.

Only fitting needs `implicit` and scipy, so they are imported inside the functions: a fitted model is
saved, loaded and asked without them.

Shapes: `B` histories, `L` positions, `V` items, `N` pairs of an item and one of its neighbours.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from bert4rec.data.splits import Spans
from bert4rec.models import FittedModel, sparse_entries
from bert4rec.models.sequence_model import ModelSettings
from bert4rec.settings import Positive

PAIRS_AT_ONCE = 1 << 20  # bounds the memory of a call: long histories have many neighbours


class ItemKNNSettings(ModelSettings):
    name: str = "item-knn"
    neighbours: Positive = Field(20, description="how many similar items an item has")
    similarity: Literal["cosine", "tfidf", "bm25"] = Field(
        "tfidf", description="similarity of two items: cosine, tfidf or bm25"
    )


class ItemKNN(FittedModel):
    """The score of item i is the sum of sim(j, i) over the distinct items j of the history.

    sim(j, i) is 0 unless i is one of the `neighbours` items that are most like j; an item is not
    its own neighbour. The order of a history changes nothing, not even the last bit. Neighbours
    are kept as a sparse matrix by rows (CSR): those of item `j` are
    `columns[offsets[j]:offsets[j + 1]]`. Row `V` is PAD's and is empty.
    """

    settings_class = ItemKNNSettings
    tensor_names = ("offsets", "columns", "values")

    def __init__(self, offsets: Tensor, columns: Tensor, values: Tensor) -> None:
        self.n_items = len(offsets) - 2
        assert len(columns) == len(values) == int(offsets[-1])
        self.offsets = offsets  # (V + 2,) int64
        self.columns = columns  # (N,) int64
        self.values = values  # (N,) float32
        self._most_neighbours = int(offsets.diff().max())

    @classmethod
    def fit(cls, train: Spans, n_items: int, settings: ItemKNNSettings, seed: int = 0) -> Self:
        require_implicit("item-knn")
        from implicit.nearest_neighbours import ItemItemRecommender

        weighted = _weighted(user_item_matrix(train, n_items), settings.similarity)
        # One more than we keep: the list of an item holds the item itself.
        neighbourhood = ItemItemRecommender(K=settings.neighbours + 1)
        neighbourhood.fit(weighted, show_progress=False)
        found = neighbourhood.similarity.tocoo()
        is_pair = (found.row != found.col) & (found.data != 0)
        item, other, value = (x[is_pair] for x in (found.row, found.col, found.data))
        nearest_first = np.lexsort((other, -value, item))
        item, other, value = (x[nearest_first] for x in (item, other, value))
        # Under BM25 an item may be less like itself than like others, and so not be in its list.
        place = np.arange(len(item)) - np.searchsorted(item, item)
        is_kept = place < settings.neighbours
        item, other, value = (x[is_kept] for x in (item, other, value))
        offsets = np.searchsorted(item, np.arange(n_items + 2))
        return cls(
            torch.from_numpy(offsets.astype(np.int64)),
            torch.from_numpy(other.astype(np.int64)),
            torch.from_numpy(value.astype(np.float32)),
        )

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        distinct = self._distinct(histories.to(self.offsets.device))
        scores = torch.zeros(len(distinct), self.n_items, dtype=torch.float64, device=distinct.device)
        n_rows = max(1, PAIRS_AT_ONCE // max(1, distinct.shape[1] * self._most_neighbours))
        for first in range(0, len(distinct), n_rows):
            self._add_neighbours(scores[first : first + n_rows], distinct[first : first + n_rows])
        return scores.float().to(histories.device)

    def _distinct(self, history: Tensor) -> Tensor:
        """(B, L) each item of a history once, in the order of tokens; PAD in all other places.

        Sums are taken in this order, so a permuted history gives the same bits.
        """
        ordered = history.sort(dim=1).values
        is_repeat = pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))[:, : ordered.shape[1]]
        return ordered.masked_fill(is_repeat, self.n_items)

    def _add_neighbours(self, scores: Tensor, distinct: Tensor) -> None:
        """Add sim(j, ·) to a row of `scores` for every item j in that row of `distinct`."""
        items = distinct.flatten()
        source, pair = sparse_entries(self.offsets, items)
        row = source // max(1, distinct.shape[1])
        cell = row * self.n_items + self.columns[pair]
        scores.view(-1).index_add_(0, cell, self.values[pair].double())


def _weighted(user_items: Any, similarity: Literal["cosine", "tfidf", "bm25"]) -> Any:
    """(user rows, V) such that the similarity of two items is the product of their columns.

    These are the weights of `implicit`'s own Cosine-, TFIDF- and BM25Recommender.
    """
    from implicit.nearest_neighbours import bm25_weight, normalize, tfidf_weight

    item_users = user_items.T
    with np.errstate(invalid="ignore"):  # 0/0 where all users of an item have no weight
        match similarity:
            case "cosine":
                weighted = normalize(item_users)
            case "tfidf":
                weighted = normalize(tfidf_weight(item_users))
            case "bm25":
                weighted = bm25_weight(item_users, K1=1.2, B=0.75)
    weighted.data = np.nan_to_num(weighted.data)
    return weighted.T.tocsr()


def require_implicit(model: str) -> None:
    """A sentence that helps instead of a ModuleNotFoundError."""
    missing = [name for name in ("implicit", "scipy") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"model.name is {model!r}: fitting it needs {' and '.join(missing)}; run pip install 'bert4rec[lab]'"
        )


def user_item_matrix(train: Spans, n_items: int) -> Any:
    """(user rows, V) CSR of ones, float32: an item that a user had twice still counts once.

    A user row without a span is an empty row.
    """
    from scipy.sparse import csr_matrix

    items = train.items()
    users = np.repeat(train.users, train.lengths)
    shape = (int(train.users.max()) + 1, n_items)
    matrix = csr_matrix((np.ones(len(items), dtype=np.float32), (users, items)), shape=shape)
    matrix.sum_duplicates()  # also sorts the columns of a row, which `implicit` relies on
    matrix.data[:] = 1
    return matrix
