"""Embeddings of items or users; training does not pay for rows that a batch leaves alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowEmbedding(nn.Embedding):
    """An embedding whose gradient is added in place.

    torch's own makes a matrix of zeros as large as the table for every batch, and adds it. Where
    the table already has a gradient, here only the rows of the batch are touched. With `sparse`
    the gradient is a sparse tensor: for losses that leave most rows alone.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        return embed(self.weight, tokens, is_sparse=self.sparse)


def embed(weight: Tensor, tokens: Tensor, *, is_sparse: bool) -> Tensor:
    """The rows `tokens` of a parameter; their gradient is added in place where there is one."""
    if not torch.is_grad_enabled():
        return torch.embedding(weight, tokens)
    return _rows(weight, tokens) if _has_gradient(weight) else F.embedding(tokens, weight, sparse=is_sparse)


def lookup(bias: Tensor, items: Tensor) -> Tensor:
    """The same of a vector: one of a million numbers must not cost a gradient of a million."""
    return _rows(bias, items) if torch.is_grad_enabled() and _has_gradient(bias) else bias[items]


def _has_gradient(weight: Tensor) -> bool:
    return weight.is_leaf and weight.grad is not None and not weight.grad.is_sparse


def _rows(weight: Tensor, rows: Tensor) -> Tensor:
    found: Tensor = _AddInPlace.apply(weight, rows)  # type: ignore[no-untyped-call]
    return found


class _AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.weight, ctx.rows = weight, rows
        return weight[rows] if weight.ndim == 1 else F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.weight.grad.index_add_(0, ctx.rows.flatten(), grad.flatten(0, ctx.rows.ndim - 1))
        return None, None
