"""Output layers: how the vector of a query becomes scores of items.

That is all that losses and scoring know of a model's output. Shapes: M vectors, K items each, D
width, V items.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from bert4rec.models.kernels.row_embedding import RowEmbedding, embed, lookup
from bert4rec.models.quantized_embedding import QuantizedEmbedding


class Output(Protocol):
    @property
    def n_items(self) -> int: ...

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        """(M, D), (M, K), or (1, K) for the same items in every row → (M, K)."""
        ...

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        """(M, D) → (M, last - first): the scores of successive items, in memory of their own."""
        ...


class DotProduct(NamedTuple):
    """h·W_i + b_i: the only output whose softmax over all items can be computed quickly.

    `weight` is a whole parameter, so that a loss can add to its gradient; rows beyond those of
    `bias` belong to PAD and MASK.
    """

    weight: Tensor  # (≥V, D)
    bias: Tensor  # (V,), zeros that are no parameter where a model has none

    @property
    def n_items(self) -> int:
        return len(self.bias)

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        vectors = embed(self.weight, items, is_sparse=True)  # (1 or M, K, D)
        is_shared = len(items) == 1 and len(h) > 1
        products = h @ vectors[0].T if is_shared else (vectors @ h[:, :, None])[:, :, 0]
        return products + lookup(self.bias, items)

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        return F.linear(h, self.weight[first:last], self.bias[first:last])

    def block(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(n, D) embeddings and (n,) biases of successive items."""
        return self.weight[first:last], self.bias[first:last]


class QuantizedDotProduct(NamedTuple):
    """The same with quantized item embeddings; for scoring only, since codes have no gradient."""

    embedding: QuantizedEmbedding
    bias: Tensor  # (V,)

    @property
    def n_items(self) -> int:
        return len(self.bias)

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        vectors: Tensor = self.embedding(items)  # (1 or M, K, D)
        is_shared = len(items) == 1 and len(h) > 1
        products = h @ vectors[0].T if is_shared else (vectors @ h[:, :, None])[:, :, 0]
        return products + self.bias[items]

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        return self.embedding.products(h, first, last).add_(self.bias[first:last])

    def block(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """As of `DotProduct`: decoded for the caller, who keeps no more than a block."""
        return self.embedding.block(first, last), self.bias[first:last]


class ScoreRows(NamedTuple):
    """Of models that compute the scores of all items at once: the vector is the row of scores."""

    n_items: int

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        return h.gather(1, items.expand(len(h), -1))

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        return h[:, first:last].clone()


DotProductOutput = DotProduct | QuantizedDotProduct  # outputs with an embedding and a bias per item


def dot_product_output(embedding: RowEmbedding | QuantizedEmbedding, bias: Tensor) -> DotProductOutput:
    """The output of a model whose item embeddings may have been quantized after training."""
    if isinstance(embedding, QuantizedEmbedding):
        return QuantizedDotProduct(embedding, bias)
    return DotProduct(embedding.weight, bias)
