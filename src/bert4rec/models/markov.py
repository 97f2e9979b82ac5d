"""First-order Markov chain: what usually follows the last item.

Shapes: `B` histories, `L` positions, `V` items, `N` distinct transitions seen in training.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bert4rec.data.splits import Spans
from bert4rec.models import FittedModel, sparse_entries
from bert4rec.models.sequence_model import ModelSettings

# Weight of the popularity prior, in transitions. Below 1, an item never seen after the last one
# (at most PRIOR * 1) always scores less than one seen after it just once (at least 1).
PRIOR = 0.5


class MarkovSettings(ModelSettings):
    name: str = "markov"


class MarkovChain(FittedModel):
    """log p(j | i), where p(j | i) = (n(i -> j) + PRIOR * popularity(j)) / (n(i) + PRIOR).

    Transitions are kept as a sparse matrix by rows (CSR): those out of item `i` are
    `columns[offsets[i]:offsets[i + 1]]`. Row `V` is PAD's and is empty, so an empty history needs
    no special case: it gets the popularity itself.
    """

    settings_class = MarkovSettings
    tensor_names = ("offsets", "columns", "counts", "popularity")
    max_history = 1

    def __init__(self, offsets: Tensor, columns: Tensor, counts: Tensor, popularity: Tensor) -> None:
        self.n_items = len(popularity)
        assert len(offsets) == self.n_items + 2
        assert len(columns) == len(counts) == int(offsets[-1])
        self.offsets = offsets  # (V + 2,) int64
        self.columns = columns  # (N,) int64
        self.counts = counts  # (N,) int64
        self.popularity = popularity  # (V,) int64: how often each item occurs in training
        seen = popularity.double().clamp(min=0.5)  # an item that never occurs counts half
        self._share = seen / seen.sum()
        running = pad(counts.cumsum(0), (1, 0))
        self._n_out = running[offsets[1:]] - running[offsets[:-1]]  # (V + 1,)

    @classmethod
    def fit(cls, train: Spans, n_items: int, settings: MarkovSettings, seed: int = 0) -> Self:
        items = train.items().astype(np.int64)
        follows = np.ones(len(items) + 1, dtype=np.bool_)
        follows[np.cumsum(train.lengths)] = False  # the first item of a span follows nothing
        follows = follows[1:-1]
        pairs = items[:-1][follows] * n_items + items[1:][follows]
        distinct, counts = np.unique(pairs, return_counts=True)
        before, after = np.divmod(distinct, n_items)
        offsets = np.searchsorted(before, np.arange(n_items + 2))
        popularity = np.bincount(items, minlength=n_items)
        return cls(*(torch.from_numpy(x.astype(np.int64)) for x in (offsets, after, counts, popularity)))

    def encode(self, users: Tensor, histories: Tensor) -> Tensor:
        last = self._last_items(histories.to(self.offsets.device))
        total = self._n_out[last].double() + PRIOR
        scores = PRIOR * self._share / total[:, None]
        row, entry = sparse_entries(self.offsets, last)
        scores[row, self.columns[entry]] += self.counts[entry] / total[row]
        return scores.log().float().to(histories.device)

    def _last_items(self, histories: Tensor) -> Tensor:
        """(B,) last item before the padding; PAD where there is none."""
        lengths = (histories < self.n_items).sum(1, keepdim=True)
        return pad(histories, (1, 0), value=self.n_items).gather(1, lengths)[:, 0]
