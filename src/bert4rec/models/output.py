"""How a vector of the model becomes scores of items; all that a loss may ask of an output layer.

Shapes: M vectors, K items each, D width, V items.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from bert4rec.models.coded_table import CodedTable
from bert4rec.models.table import Table, entries_of, rows_of


class Output(Protocol):
    @property
    def n_items(self) -> int: ...

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        """(M, D), (M, K) or (1, K) for the same items everywhere → (M, K)."""
        ...

    def all_scores(self, h: Tensor) -> Tensor:
        """(M, D) → (M, V)"""
        ...


class Products(NamedTuple):
    """h·W_i + b_i: the only output that a softmax over all items can be computed of quickly.

    `weight` is a whole parameter, so that a loss can add to its gradient; its rows beyond those of
    `bias` are no items.
    """

    weight: Tensor  # (≥V, D)
    bias: Tensor  # (V,), zeros that are no parameter where a model has none

    @property
    def n_items(self) -> int:
        return len(self.bias)

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        vectors = rows_of(self.weight, items, is_sparse=True)  # (1 or M, K, D)
        is_shared = len(items) == 1 and len(h) > 1
        products = h @ vectors[0].T if is_shared else (vectors @ h[:, :, None])[:, :, 0]
        return products + entries_of(self.bias, items)

    def all_scores(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight[: len(self.bias)], self.bias)

    def block(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """(n, D) vectors and (n,) biases of successive items."""
        return self.weight[first:last], self.bias[first:last]

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        """(M, D) → (M, n), what `block` gives the scores of."""
        return F.linear(h, self.weight[first:last], self.bias[first:last])


class CodedProducts(NamedTuple):
    """The same of vectors that are kept as codes; for scores only, since codes have no gradient."""

    table: CodedTable
    bias: Tensor  # (V,)

    @property
    def n_items(self) -> int:
        return len(self.bias)

    def scores(self, h: Tensor, items: Tensor) -> Tensor:
        vectors: Tensor = self.table(items)  # (1 or M, K, D)
        is_shared = len(items) == 1 and len(h) > 1
        products = h @ vectors[0].T if is_shared else (vectors @ h[:, :, None])[:, :, 0]
        return products + self.bias[items]

    def all_scores(self, h: Tensor) -> Tensor:
        return self.block_scores(h, 0, self.n_items)

    def block(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The same as of `Products`: decoded for the caller, who keeps no more than a block."""
        return self.table.block(first, last), self.bias[first:last]

    def block_scores(self, h: Tensor, first: int, last: int) -> Tensor:
        return self.table.products(h, first, last).add_(self.bias[first:last])


InBlocks = Products | CodedProducts  # outputs that can be searched a block of items at a time


def products(table: Table | CodedTable, bias: Tensor) -> InBlocks:
    """The output of a model whose item vectors may have been compressed after the training."""
    if isinstance(table, CodedTable):
        return CodedProducts(table, bias)
    return Products(table.weight, bias)
