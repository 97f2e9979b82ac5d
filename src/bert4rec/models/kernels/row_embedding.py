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
    has_gradient = weight.is_leaf and weight.grad is not None and not weight.grad.is_sparse
    if not has_gradient:
        return F.embedding(tokens, weight, sparse=is_sparse)
    vectors: Tensor = _AddRowsInPlace.apply(weight, tokens)  # type: ignore[no-untyped-call]
    return vectors


class _AddRowsInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.weight, ctx.tokens = weight, tokens
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.weight.grad.index_add_(0, ctx.tokens.flatten(), grad.flatten(0, -2))
        return None, None


def lookup(bias: Tensor, items: Tensor) -> Tensor:
    """The same of a vector: one of a million numbers must not cost a gradient of a million."""
    is_trained = torch.is_grad_enabled() and bias.requires_grad and bias.is_leaf
    if not is_trained or bias.grad is None:
        return bias[items]
    numbers: Tensor = _AddEntriesInPlace.apply(bias, items)  # type: ignore[no-untyped-call]
    return numbers


class _AddEntriesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, items: Tensor) -> Tensor:
        ctx.bias, ctx.items = bias, items
        return bias[items]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.bias.grad.index_add_(0, ctx.items.flatten(), grad.flatten())
        return None, None
