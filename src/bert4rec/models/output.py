"""How a vector of the model becomes scores of items; all that a loss may ask of an output layer.

Shapes: M vectors, K items each, D width, V items.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from bert4rec.models.table import rows_of


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
        return products + self.bias[items]

    def all_scores(self, h: Tensor) -> Tensor:
        return F.linear(h, self.weight[: len(self.bias)], self.bias)
